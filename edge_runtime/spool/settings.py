"""What a box config says of its spool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_BYTES, INTERVAL_S = "256MiB", 60.0
SAMPLES = "samples"
FOLDER_MODE, FILE_MODE = 0o700, 0o600


@dataclass(frozen=True, slots=True)
class SpoolConfig:
    """The folder `path`, absolute; samples in it take `max_bytes` together, and each query leaves one every `every_s`
    seconds.
    """

    path: Path
    max_bytes: int
    every_s: float

    @property
    def samples(self) -> Path:
        """The folder of the samples."""
        return self.path / SAMPLES
