"""Tracking: ByteTrack of the package `edgefirst-tracker` gives the detections of one object one number over frames.

Zhang et al. 2022, "ByteTrack: Multi-Object Tracking by Associating Every Detection Box".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    """The tunables of tracking, chosen on labelled footage."""

    lost_s: float = 1.5
    """An object unseen for so long is gone; the footage hides cars behind others for up to about a second."""
    lost_frames: int = 3
    """At a low rate an object is gone after it is missing in so many frames."""
    min_iou: float = 0.1
    """Least overlap with where an object was expected; ByteTrack's own value."""
    gain: float = 0.5
    """How far the Kalman filter follows a new box; the package's 0.25 changes identities twice as often."""

    def lost_after_s(self, fps: float) -> float:
        """When an object is gone, at this rate."""
        return max(self.lost_s, self.lost_frames / fps)


DEFAULT_TRACKING = TrackingConfig()


class ObjectTracker:
    """The tracks of one query; numbers begin at 1 and never repeat, also after `reset`.

    `certain_score` is that from which a detection may begin a track.
    """

    def __init__(self, fps: float, certain_score: float = 0.0, config: TrackingConfig = DEFAULT_TRACKING) -> None:
        self._fps, self._certain, self._config = fps, certain_score, config
        self._next = 1
        self.reset()

    def update(self, detections: Sequence[Mapping[str, Any]], now: float) -> list[int | None]:
        """The number of each detection of a frame at `now` (seconds, rising); None in the first frame of an object."""
        at = round(1e9 * now)
        found = self._tracker.update(
            np.array([one["box"] for one in detections], np.float32).reshape(-1, 4),
            np.array([one["score"] for one in detections], np.float32),
            np.zeros(len(detections), np.uintp),
            at,
        )
        known = {one.info.uuid for one in self._tracker.get_active_tracks()}
        self._numbers = {uuid: number for uuid, number in self._numbers.items() if uuid in known}
        return [None if track is None or track.created == at else self._number(track.uuid) for track in found]

    def reset(self) -> None:
        """Forget all tracks."""
        from edgefirst.tracker import ByteTrack

        self._numbers: dict[str, int] = {}
        lifespan = round(1e9 * self._config.lost_after_s(self._fps))
        self._tracker = ByteTrack(self._certain, self._config.min_iou, self._config.gain, lifespan)

    def _number(self, uuid: str) -> int:
        if uuid not in self._numbers:
            self._numbers[uuid], self._next = self._next, self._next + 1
        return self._numbers[uuid]
