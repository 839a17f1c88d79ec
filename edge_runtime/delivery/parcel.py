"""A parcel: one result on its way, with the frame that it was found in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# What a record and one detection of it take in Python, about.
RECORD_BYTES, DETECTION_BYTES = 2000, 600


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A record (`edge_runtime.frames.results.record_of`) and, for sinks that carry pictures, its RGB frame (H, W, 3).

    Both are shared between sinks and never changed.
    """

    record: Mapping[str, Any]
    image: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        found = DETECTION_BYTES * len(self.record.get("detections", ()))
        return RECORD_BYTES + found + (0 if self.image is None else self.image.nbytes)

    def lighter(self) -> Parcel:
        """The record alone."""
        return self if self.image is None else Parcel(self.record)

    def text(self) -> str:
        """The record as one line of JSON; ValueError for a number that JSON cannot say."""
        return json.dumps(self.record, allow_nan=False, separators=(",", ":"))
