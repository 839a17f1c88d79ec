"""JSON files that programs write, one document or one in each line, read within bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.errors import InputError
from models.files.bounded import Fault, lines_bounded, read_bounded
from models.files.bounded_json import MAX_VALUES, parsed

MAX_BYTES = 32 * 2**20
MAX_LINES_BYTES = 2**30
"""Of a file with a document in each line: one is held at a time."""


def read_json(path: Path, remedy: str, most_bytes: int = MAX_BYTES, most_values: int = MAX_VALUES) -> dict[str, Any]:
    """The mapping that a file holds; InputError for one that cannot be read, is no JSON within bounds or no mapping."""
    return _mapping(path, "", read_bounded(path, most_bytes, remedy), remedy, most_values)


def read_json_lines(
    path: Path, remedy: str, most_bytes: int = MAX_LINES_BYTES, most_line_bytes: int = MAX_BYTES, torn: bool = True
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The mappings that the lines of a file hold, each with its number from 1; InputError as `read_json`.

    What whoever wrote it did not end, a last line without a newline that is no JSON, is left out; without `torn`, of a
    file that appears whole or not at all, it is a fault like any other.
    """
    for number, line in enumerate(lines_bounded(path, most_bytes, most_line_bytes, remedy), 1):
        try:
            row = _mapping(path, f"line {number} ", line, remedy, MAX_VALUES)
        except InputError:
            if line.endswith(b"\n") or not torn:
                raise
            return
        yield number, row


def finite(value: Any) -> Any:
    """`value` with what JSON cannot say (NaN, infinities) turned into null, tuples and sets into lists."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [finite(item) for item in sorted(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _mapping(path: Path, where: str, data: bytes, remedy: str, most_values: int) -> dict[str, Any]:
    try:
        document = parsed(data, most_values)
    except Fault as fault:
        said = fault.text.removeprefix("line 1, ") if where else fault.text
        raise InputError(path, f"{where}is not JSON: {said}", remedy) from fault
    if not isinstance(document, dict):
        raise InputError(path, f"{where}is not a mapping", remedy)
    return document
