"""What the last drift check found, as it leaves it in the spool for the box to show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from edge_runtime.spool.sample import Digits, Fraction
from models.io import MAX_QUERIES, Exact, Name, open_atomic, read_json, validate

FILE = "drift.json"
MAX_FILE_BYTES = 1 << 20

Ratio = Annotated[float, Field(ge=0, le=1e6)]


class CheckedQuery(Exact):
    """One query, as `models.evaluation.Agreement` says, by its `target`; whether it was reverted."""

    id: Name
    frames: Annotated[int, Field(ge=0, le=1 << 40)]
    ratio: Ratio | None
    ci95: Annotated[list[Ratio], Field(min_length=2, max_length=2)] | None
    target: Fraction
    verdict: Literal["kept", "below", "unsure", "too few"]
    reverted: bool


class Checked(Exact):
    """A drift check: when (Unix seconds), of which bundle (the first digits of its SHA-256), and what of each query."""

    format: Literal[1] = 1
    checked_at: Annotated[float, Field(ge=0, le=1e11)]
    bundle: Digits
    queries: Annotated[list[CheckedQuery], Field(max_length=MAX_QUERIES)]


def write_checked(spool: Path, found: Checked) -> None:
    """Leave in the spool what was found; InputError where that cannot be."""
    with open_atomic(spool / FILE, overwrite=True) as file:
        file.write(json.dumps(found.model_dump(), allow_nan=False).encode())


def read_checked(spool: Path) -> Checked:
    """What the last check left, whoever wrote it; InputError where that is nothing, or damaged."""
    path, remedy = spool / FILE, "run `gemel drift check` again"
    return validate(path, read_json(path, remedy, MAX_FILE_BYTES), Checked, hint=remedy)
