"""The sink `jsonl`: each result one line of JSON, in a file or on stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from edge_runtime.frames.sinks.base import SinkKeys
from models.errors import InputError

STDOUT = "-"


class JsonLinesKeys(SinkKeys):
    """`path` is the file that lines are appended to, `-` for stdout."""

    path: str = STDOUT

    def settled(self, root: Path) -> JsonLinesConfig:
        return JsonLinesConfig(None if self.path == STDOUT else root / self.path)


@dataclass(frozen=True, slots=True)
class JsonLinesConfig:
    """The absolute path that lines are appended to, None for stdout."""

    path: Path | None

    def open(self) -> JsonLines:
        return JsonLines(self.path)


class JsonLines:
    """Appends each record as one line of JSON to a file, or to stdout where the path is None."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        try:
            self._file: TextIO = sys.stdout if path is None else open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            remedy = "give a path in a directory that exists and can be written"
            raise InputError(str(path), f"cannot be written: {error.strerror}", remedy) from error

    def write(self, record: dict[str, Any]) -> None:
        """Write one line and hand it to the operating system. OSError when that fails, as on a full disk."""
        self._file.write(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; stdout stays open."""
        if self._path is not None:
            self._file.close()
