"""What is registered by name, as entry points: engines, policies, methods, sinks, decoders, tasks and objectives.

Those of this project stand in `entry_points.ini`, from which its distribution has them; they are read there, since
metadata that are installed may be of another checkout. Those of others are in the metadata of what is installed. Only
what somebody names is imported. A file can name what is registered here, and nothing else.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from configparser import ConfigParser
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from gemel.models.errors import InputError, join_names, message_of
from gemel.models.notes import add_note

BUILT_IN = Path(__file__).with_name("entry_points.ini")
PROJECT = "gemel"
Kind = TypeVar("Kind")


class Registry(Mapping[str, Kind], Generic[Kind]):
    """The entry points of a group by name: subclasses of `base`, or instances of it where it `makes` them.

    An instance has options, the fields of its dataclass, after a colon: "NAME:key=value,key=value". `added` are those
    of this process alone.
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
    from pydantic import ConfigDict, create_model

    from gemel.models.files.io import validate

    hints = get_type_hints(kind)
    types: dict[str, Any] = {
        name: (hints[name], None) for name in inspect.signature(kind).parameters
    }
    schema = create_model(kind.__name__, __config__=ConfigDict(extra="forbid"), **types)
    options = {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
    return kind(**validate(where, options, schema, key).model_dump(exclude_unset=True))


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
