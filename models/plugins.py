"""What is registered by name, as entry points: engines, policies, methods, sinks, decoders, tasks and objectives.

Those of this project stand in `entry_points.ini`, from which its distribution has them; they are read there, since
metadata that are installed may be of another checkout. Those of others are in the metadata of what is installed. Only
what somebody names is imported. A file can name what is registered here, and nothing else.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from configparser import ConfigParser
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from gemel.models.errors import InputError, join_names, message_of, one_line
from gemel.models.notes import add_note

BUILT_IN = Path(__file__).with_name("entry_points.ini")
PROJECT = "gemel"
GROUPS = {
    "gemel.engines": "engine", "gemel.policies": "policy", "gemel.methods": "method", "gemel.sinks": "sink",
    "gemel.decoders": "decoder", "gemel.tasks": "task", "gemel.objectives": "objective",
}  # fmt: skip
"""The groups of entry points, each with what one of it is."""
Kind = TypeVar("Kind")


class Registry(Mapping[str, Kind], Generic[Kind]):
    """The entry points of a group by name: subclasses of `base`, or instances of it where it `makes` them.

    Options stand after a colon: "NAME:key=value,key=value". Those of an instance are the fields of its dataclass; a
    class names its own with their types in `options`. `added` are those of this process alone.
    """

    def __init__(self, group: str, noun: str, base: type, makes: bool = False) -> None:
        self.group = group
        self.noun = noun
        self.base = base
        self.makes = makes
        self.added: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        """All names, those of this project first."""
        return [*find_entries(self.group), *self.added]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, text: str) -> Kind:
        return self.find(text)

    def check(self, text: str, where: str | Path, key: str = "", also: Sequence[str] = ()) -> str:
        """The text itself, which names one entry or is one of `also`; InputError otherwise. Nothing is imported."""
        name = text.partition(":")[0]
        points = find_entries(self.group).get(name, ())
        if not points and name not in (*also, *self.added):
            hint = f"choose one of: {join_names([*also, *self.names], 20)}"
            raise InputError(where, f"there is no {self.noun} '{name:.40}'", hint, key)
        if len(points) > 1:
            problem = f"the {self.noun} '{name}' is registered by {' and by '.join(map(_describe, points))}"
            raise InputError(where, problem, "uninstall one of them", key)
        return text

    def find(self, text: str, where: str | Path = "", key: str = "") -> Kind:
        """What a text names; InputError where it names nothing, or what cannot be imported."""
        where = where or self.noun
        name, _, options = self.check(text, where, key).partition(":")
        value: Any = self.added[name] if name in self.added else self._import(name, where, key)
        is_kind = inspect.isclass(value)
        if self.makes and is_kind:
            value = _make(value, options, where, key) if options else value()
            is_kind = isinstance(value, self.base)
        elif is_kind:
            is_kind = issubclass(value, self.base)
        if not is_kind:
            raise InputError(
                where,
                f"the {self.noun} '{name}' is no {self.base.__name__}",
                "mend its package",
                key,
            )
        return value

    def usable(self) -> Iterator[Kind]:
        """All that can be imported; a note says of each other one why it cannot."""
        for name in self.names:
            try:
                yield self.find(name)
            except InputError as error:
                add_note(error.where, error.problem, error.hint)

    def _import(self, name: str, where: str | Path, key: str) -> Any:
        (point,) = find_entries(self.group)[name]
        try:
            return _load(point)
        except Exception as error:  # the code of a stranger raises anything
            problem = f"cannot be imported: {message_of(error)}"
            hint = f"mend or uninstall {_owner(point)}"
            if isinstance(error, ModuleNotFoundError):
                problem = f"needs {error.name}, which is not installed"
                hint = f"pip install {error.name}"
            if point.extras:
                hint = f"pip install {_owner(point)}[{','.join(point.extras)}]"
            raise InputError(
                where, f"the {self.noun} '{name}' of {_describe(point)} {problem}", hint, key
            ) from error


def _make(kind: Any, text: str, where: str | Path, key: str) -> Any:
    """An instance with the options of a text, which the types of the fields check."""
    hints = get_type_hints(kind)
    types = {name: hints[name] for name in inspect.signature(kind).parameters}
    return kind(**read_options(kind.__name__, types, split_options(text), where, key))


def split_options(text: str) -> dict[str, str]:
    """The values of "key=value,key=value" by key."""
    return {
        name: value for name, _, value in (part.partition("=") for part in text.split(",") if part)
    }


def read_options(
    name: str, types: Mapping[str, Any], given: Mapping[str, str], where: str | Path, key: str = ""
) -> dict[str, Any]:
    """Values of these types; InputError for an unknown key or a wrong value."""
    from pydantic import ConfigDict, create_model

    from gemel.models.files.io import validate

    fields: dict[str, Any] = {option: (kind, None) for option, kind in types.items()}
    schema = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    return validate(where, given, schema, key).model_dump(exclude_unset=True)


def entry_check(group: str, *also: str) -> Callable[[str], str]:
    """What checks that a key of a file names an entry of a group, or one of `also`; ValueError otherwise."""

    def check(name: str) -> str:
        names = [*also, *find_entries(group)]
        if name not in names:
            raise ValueError(
                f"there is no such {GROUPS[group]}: choose one of {join_names(names, 20)}"
            )
        return name

    return check


def describe_entries(group: str) -> Iterator[tuple[str, str]]:
    """Each name of a group with the first sentence of what it stands for, which is read and not imported."""
    for name, points in find_entries(group).items():
        yield name, _first_sentence(points[0])


def find_foreign() -> Iterator[tuple[str, EntryPoint]]:
    """What other packages have registered, each with its group's noun."""
    for group, noun in GROUPS.items():
        for points in find_entries(group).values():
            yield from ((noun, point) for point in points if point.dist is not None)


def _first_sentence(point: EntryPoint) -> str:
    """Of the docstring of the class that an entry point names; "" where its source cannot be read."""
    top, *names = point.module.split(".")
    try:
        spec = find_spec(top)
        assert spec is not None
        path = (
            Path(spec.origin or "")
            if not names
            else Path((spec.submodule_search_locations or [""])[0], *names)
        )
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kind = next(
            node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == point.attr
        )
    except Exception:  # the code of a stranger may be anything
        return ""
    text = " ".join((ast.get_docstring(kind) or "").split())
    return one_line(re.split(r"\.(?= |$)", text, maxsplit=1)[0])


def find_entries(group: str) -> Mapping[str, Sequence[EntryPoint]]:
    """The entry points of a group by name, those of this project first; nothing is imported."""
    return _find_entries(group, tuple(sys.path))


@cache
def _find_entries(group: str, folders: tuple[str, ...]) -> Mapping[str, Sequence[EntryPoint]]:
    """As `find_entries`, with what lies in these folders."""
    parser = ConfigParser(delimiters="=")
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read(BUILT_IN, encoding="utf-8")
    points = [EntryPoint(name, value, group) for name, value in parser[group].items()]
    try:
        points += [
            point
            for point in _read_installed(folders).select(group=group)
            if _owner(point) != PROJECT
        ]
    except Exception as error:  # metadata of a package that may have nothing to do with this one
        add_note("installed packages", f"their metadata cannot be read: {message_of(error)}")
    entries: dict[str, list[EntryPoint]] = {}
    for point in points:
        entries.setdefault(point.name, []).append(point)
    return entries


@cache
def _read_installed(_: tuple[str, ...]) -> Any:
    """The entry points of all groups that lie in these folders, which are read once."""
    return entry_points()


@cache
def _load(point: EntryPoint) -> Any:
    """What an entry point names, imported once: each frame asks for its task."""
    return point.load()


def _owner(point: EntryPoint) -> str:
    """The distribution that has an entry point."""
    return PROJECT if point.dist is None else point.dist.name


def _describe(point: EntryPoint) -> str:
    return (
        PROJECT if point.dist is None else f"{_owner(point)} {point.dist.version} ({point.value})"
    )
