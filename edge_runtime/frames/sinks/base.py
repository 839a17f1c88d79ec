"""What a kind of sink is: the keys that a config may give it, and what takes results once it is open."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict


class Sink(Protocol):
    """Takes results, one record (`edge_runtime.frames.results.record_of`) after another."""

    def write(self, record: dict[str, Any]) -> None:
        """Take a record; OSError when it cannot, as on a full disk."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


class SinkConfig(Protocol):
    """One sink of a box config, its paths absolute; where it writes a file, its attribute `path` says which."""

    def open(self) -> Sink:
        """The sink, ready for records; InputError, in one line, when it cannot be."""
        ...


class SinkKeys(BaseModel):
    """The keys of one sink in a box config; each kind adds its own."""

    model_config = ConfigDict(extra="forbid")

    kind: str

    @abstractmethod
    def settled(self, root: Path) -> SinkConfig:
        """What they say as plain values, paths relative to `root`."""
