"""Tracking: ByteTrack of the package `trackers` gives the detections of one object one number over frames.

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
    min_frames: int = 2
    """Frames in a row before an object has a number, so that a false detection of one frame has none."""
    min_iou: float = 0.1
    """Least overlap with where an object was expected; ByteTrack's own value."""

    def lost_after_s(self, fps: float) -> float:
        """When an object is gone, at this rate."""
        return max(self.lost_s, self.lost_frames / fps)


DEFAULT_TRACKING = TrackingConfig()


class ObjectTracker:
    """The tracks of one query; numbers begin at 1 and never repeat, also after `reset`.

    `certain_score` is that from which a detection may begin a track.
    """

    def __init__(self, fps: float, certain_score: float = 0.0, config: TrackingConfig = DEFAULT_TRACKING) -> None:
        from trackers import ByteTrackTracker  # pyright: ignore[reportMissingImports]

        self._tracker = ByteTrackTracker(
            lost_track_buffer=round(30 * config.lost_after_s(fps)),
            frame_rate=fps,
            track_activation_threshold=certain_score,
            high_conf_det_threshold=certain_score,
            minimum_consecutive_frames=config.min_frames,
            minimum_iou_threshold=config.min_iou,
        )
        self._first = self._next = 1

    def update(self, detections: Sequence[Mapping[str, Any]], now: float) -> list[int | None]:
        """The number of each detection of a frame at `now` (seconds, rising); None before it has one."""
        import supervision  # pyright: ignore[reportMissingImports]

        boxes = np.array([one["box"] for one in detections], np.float32).reshape(-1, 4)
        scores = np.array([one["score"] for one in detections], np.float32)
        rows = supervision.Detections(boxes, confidence=scores, class_id=np.arange(len(detections)))
        found = self._tracker.update(rows, timestamp=now)
        numbers: list[int | None] = [None] * len(detections)
        if found.class_id is not None and found.tracker_id is not None:
            for row, number in zip(found.class_id.tolist(), found.tracker_id.tolist(), strict=True):
                if number >= 0:
                    numbers[row] = self._first + number
                    self._next = max(self._next, self._first + number + 1)
        return numbers

    def reset(self) -> None:
        """Forget all tracks."""
        self._tracker.reset()
        self._first = self._next
