"""YAML files people write, read against a schema; the first fault becomes one line naming file and key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from models.errors import InputError

Keys = TypeVar("Keys", bound=BaseModel)


def read_yaml(path: Path, schema: type[Keys], kind: str, start: str) -> Keys:
    """The file as an instance of `schema`; `kind` names such files and `start` the keys one begins with.

    Raises InputError for a file that cannot be read, is not YAML or no mapping, or does not fit the schema.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}", f"give an existing {kind}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(path, f"is not YAML: {_said(error)}", "mend the file") from error
    if not isinstance(document, dict):
        raise InputError(path, "is not a mapping", f"start with {start}")
    return checked(path, document, schema)


def checked(path: Path, value: Any, schema: type[Keys], at: str = "") -> Keys:
    """A value of the file as an instance of `schema`; `at` is the key that it stands under, if any.

    Raises InputError where it does not fit.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _first_fault(path, error, value, schema, f"{at}." if at else "") from error


def _said(error: Exception) -> str:
    """What is wrong and where in the file, counted from 1; PyYAML calls the file `<unicode string>`."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    what = ", ".join(part for part in parts if part)
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}"


def _first_fault(path: Path, error: ValidationError, document: Any, schema: type[BaseModel], prefix: str) -> InputError:
    """The first fault pydantic found, as one line with a remedy."""
    # A misspelt key is both unknown and missing; name the misspelling.
    fault = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    key = prefix + _key_of(fault["loc"], document)
    if fault["type"] == "extra_forbidden":
        return InputError(path, "unknown key", _nearest(str(fault["loc"][-1]), _keys_at(schema, fault["loc"])), key)
    if fault["type"] == "missing":
        return InputError(path, "this key is missing", "add it", key)
    given = "" if isinstance(fault["input"], dict | list) else f" (given: {fault['input']!r})"
    said = fault["msg"].removeprefix("Value error, ")
    return InputError(path, f"{said[0].lower()}{said[1:]}{given}", "correct the value", key)


def _nearest(key: str, known: Sequence[str]) -> str:
    """The remedy for a key that is none."""
    near = difflib.get_close_matches(key.lower(), known, n=1)
    return f"did you mean {near[0]}?" if near else f"remove it; the keys here are {', '.join(known)}"


def _keys_at(schema: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys that may stand where the last step of a location does."""
    for step in location[:-1]:
        if isinstance(step, str) and step in schema.model_fields:
            schema = next(_models_in(schema.model_fields[step].annotation), schema)
    return list(schema.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The schemas in a type such as dict[str, Camera] or list[Query] | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _key_of(location: Sequence[int | str], document: Any) -> str:
    """`queries[2].roi (bridge-cars)`: where the fault is, and which query that is."""
    text, node, owner = "", document, ""
    for step in location:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
        try:
            node = node[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            node = None
        if isinstance(node, dict) and isinstance(node.get("id"), str):
            owner = f" ({node['id']})"
    return text + owner
