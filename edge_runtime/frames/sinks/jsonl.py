"""The sink `jsonl`: each result one line of JSON, in a file or on stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from edge_runtime.frames.sinks.base import SinkKeys
from models.errors import InputError
from models.files.atomic import cannot_be_written
from models.files.lines import Lines

STDOUT = "-"


class JsonLinesKeys(SinkKeys):
    """`path` is the file that lines are appended to, `-` for stdout."""

    path: Annotated[str, Field(min_length=1)] = STDOUT

    def settled(self, root: Path) -> JsonLinesConfig:
        return JsonLinesConfig(None if self.path == STDOUT else root / self.path)


@dataclass(frozen=True, slots=True)
class JsonLinesConfig:
    """The absolute path that lines are appended to, None for stdout."""

    path: Path | None

    def open(self) -> JsonLines:
        return JsonLines(_Stdout() if self.path is None else Lines(self.path))


class JsonLines:
    """Adds each record as one line of JSON to a file or to stdout."""

    def __init__(self, lines: Lines | _Stdout) -> None:
        self._lines = lines

    def write(self, record: dict[str, Any]) -> None:
        """Write one line and hand it to the operating system. InputError when that fails, as on a full disk."""
        self._lines.add(json.dumps(record, allow_nan=False, separators=(",", ":")))

    def close(self) -> None:
        """Close the file; stdout stays open."""
        self._lines.close()


class _Stdout:
    """Lines for whoever reads what this process writes."""

    def __init__(self) -> None:
        if sys.stdout is None:
            raise InputError("standard output", "is closed", "give the sink a `path`")
        self._out = sys.stdout

    def add(self, line: str) -> None:
        try:
            self._out.write(line + "\n")
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise cannot_be_written("standard output", error) from error

    def close(self) -> None: ...
