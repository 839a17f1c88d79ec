"""The log of a merge as it is read again: rows of every kind that is shown, checked; others are passed over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from models.errors import InputError
from models.io import Exact, read_json_lines, validate

OUTCOMES = ("kept", "repaired", "partly", "refused", "untried")
"""In the order in which they are shown."""
MAX_BYTES, MAX_LINES, MAX_LINE_BYTES = 2**26, 50_000, 2**23

_Bytes = Annotated[int, Field(ge=0, le=2**50)]
_Saved = Annotated[int, Field(ge=-(2**50), le=2**50)]
_Work = Annotated[float, Field(ge=0, le=1e30)]
_Ratio = Annotated[float, Field(ge=-1e9, le=1e9)] | None
_Member = Annotated[tuple[str, str], Field(strict=False)]


class _Row(Exact, extra="allow"):
    """Other keys are for whoever reads the log, not for us."""


class _Why(_Row):
    after: str
    ratio: _Ratio
    required: _Ratio


class _Set(_Row):
    set: Annotated[list[_Member], Field(min_length=1)]
    bytes: _Bytes
    outcome: Literal["kept", "repaired", "partly", "refused", "untried"]
    kept: list[_Member]
    in_the_way: dict[str, _Why]
    residual_bytes: _Bytes
    saved_bytes: _Saved
    work: _Work
    together: Annotated[int, Field(ge=1)]


class _Repaired(_Row):
    repair: str
    query: str
    required: _Ratio
    ratio: _Ratio = None


class _Waiting(_Row):
    waits: str
    after: str
    required: _Ratio
    ratio: _Ratio = None


class _Alone(_Row):
    alone: str
    required: _Ratio
    ratio: _Ratio = None


class _Widths(_Row):
    width: str
    widened: list[str]
    in_the_way: list[str]


_KINDS = {"set": _Set, "alone": _Alone, "waits": _Waiting, "repair": _Repaired, "width": _Widths}
"""By the key that only rows of this kind have."""


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a log, as they stand there; InputError, which names the line, for what no merge can have written."""
    for number, row in read_json_lines(path, "", MAX_BYTES, MAX_LINE_BYTES, torn=False):
        if number > MAX_LINES:
            raise InputError(path, f"has more than {MAX_LINES} lines")
        for key, kind in _KINDS.items():
            if key in row:
                validate(f"{path}: line {number}", row, kind)
        yield row
