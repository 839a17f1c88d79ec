"""YAML files people write, read against a schema; the first fault becomes one line naming file and key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

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
        raise InputError(path, f"is not YAML: {' '.join(str(error).split())}", "mend the file") from error
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
        raise _first_fault(path, error, value, f"{at}." if at else "") from error


def _first_fault(path: Path, error: ValidationError, document: Any, prefix: str) -> InputError:
    """The first fault pydantic found, as one line with a remedy."""
    # A misspelt key is both unknown and missing; name the misspelling.
    fault = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    key = prefix + _key_of(fault["loc"], document)
    if fault["type"] == "extra_forbidden":
        return InputError(path, "unknown key", "remove it, or check its spelling against the documentation", key)
    if fault["type"] == "missing":
        return InputError(path, "this key is missing", "add it", key)
    given = "" if isinstance(fault["input"], dict | list) else f" (given: {fault['input']!r})"
    said = fault["msg"].removeprefix("Value error, ")
    return InputError(path, f"{said[0].lower()}{said[1:]}{given}", "correct the value", key)


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
