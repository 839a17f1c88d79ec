"""A value that came from a file against a schema; the first fault becomes one line naming file and key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from models.errors import InputError

MAX_TOLD = 80
"""Characters of a value or a key that a fault repeats."""
Keys = TypeVar("Keys", bound=BaseModel)


class Exact(BaseModel):
    """Of a file that a program writes: no key that it does not know, no value taken for another kind, finite numbers.

    Lists stand for tuples, as JSON has none.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def checked(path: str | Path, value: Any, schema: type[Keys], at: str = "", remedy: str = "") -> Keys:
    """A value of a file as an instance of `schema`; `path` may name a line too, `at` is the key that it stands under.

    Raises InputError where it does not fit; `remedy` is what to do then, for a file that nobody writes by hand.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        fault = _first_fault(path, error, value, schema, f"{at}." if at else "")
        raise InputError(path, fault.fault, remedy or fault.remedy, fault.key) from error


def _first_fault(
    path: str | Path, error: ValidationError, document: Any, schema: type[BaseModel], prefix: str
) -> InputError:
    """The first fault pydantic found, as one line with a remedy."""
    # A misspelt key is both unknown and missing; name the misspelling.
    fault = min(error.errors(), key=lambda found: found["type"] not in ("extra_forbidden", "invalid_key"))
    key = (prefix + _key_of(fault["loc"], document)).removesuffix(".")
    if fault["type"] == "extra_forbidden":
        nearest = _nearest(_clipped(str(fault["loc"][-1])), _keys_at(schema, fault["loc"]))
        return InputError(path, "unknown key", nearest, key)
    if fault["type"] == "missing":
        return InputError(path, "this key is missing", "add it", key)
    given = "" if isinstance(fault["input"], dict | list) else f" (given: {_clipped(repr(fault['input']))})"
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
        if not isinstance(node, dict | list):  # one of the kinds that a value may be of
            break
        name = _clipped(str(step))
        text += f"[{name}]" if isinstance(step, int) else f".{name}" if text else name
        try:
            node = node[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            node = None
        if isinstance(node, dict) and isinstance(node.get("id"), str):
            owner = f" ({_clipped(node['id'])})"
    return text + owner


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_TOLD else f"{text[:MAX_TOLD]}..."
