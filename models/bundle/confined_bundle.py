"""Verifies a stranger's bundle in a confined child."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gemel.models.bundle.verify import list_unchecked, verify_bundle
from gemel.models.errors import InputError
from gemel.models.files.confined import run_confined
from gemel.models.files.confined_server import ConfinedResult

_LINES = TypeAdapter(tuple[list[str], list[str]])


def verify_confined(
    path: str | Path, factories: Collection[str] = (), folder: Path | None = None
) -> tuple[list[str], list[str]]:
    """What `verify_bundle` and `list_unchecked` say of a bundle, from a child that can read nothing else.

    With factories, whose code is trusted and may read what it likes, in this process. InputError as `verify_bundle`,
    and where the child passes a limit.
    """
    if factories:
        return verify_bundle(path, factories, folder), list_unchecked(path, factories)
    answer = run_confined(f"{__name__}:list_problems", [str(path)], Path(path))
    try:
        return _LINES.validate_python(answer.value)
    except ValidationError as error:
        raise InputError(
            path, "its reader gave no answer that can be read", "do not use this file"
        ) from error


def list_problems(path: str) -> ConfinedResult:
    """In the child: the problems, and the models that are not checked."""
    return ConfinedResult([verify_bundle(path), list_unchecked(path)], {})
