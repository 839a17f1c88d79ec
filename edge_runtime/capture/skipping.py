"""Which frames of a stream are not decoded, since queries need fewer than come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

B_PICTURE = 3
"""AVPictureType of frames that others seldom build on."""


class Skip(str, Enum):
    """What is decoded: all frames, those that others build on, or those that build on no other."""

    __str__ = str.__str__

    NONE = "none"
    NONREF = "nonref"
    NONKEY = "nonkey"


@dataclass(frozen=True, slots=True)
class SkipLimits:
    """When skipping is safe."""

    gap_share: float = 0.9
    """Of the period of the frames that queries need; the rest is for frames that come late."""
    key_gaps: int = 3
    """Of so many the longest counts: a camera may vary them."""
    late_periods: float = 2.0
    """Periods without a frame, after which too much is skipped."""
    reference_gaps: int = 25
    """The same for frames that others build on; fewer than a third of these say nothing."""


DEFAULT_LIMITS = SkipLimits()


def choose_skip(
    needed_fps: float | None,
    key_gap_s: float | None,
    reference_gap_s: float | None,
    limits: SkipLimits = DEFAULT_LIMITS,
) -> Skip:
    """The most that may be skipped so that `needed_fps` frames a second (None: all) still come.

    The gaps are the longest between two key frames and between two frames that others build on, None where unknown.
    """
    if needed_fps is None:
        return Skip.NONE
    if needed_fps == 0:
        return Skip.NONKEY
    longest_s = limits.gap_share / needed_fps
    if key_gap_s is not None and key_gap_s <= longest_s:
        return Skip.NONKEY
    return Skip.NONREF if reference_gap_s is not None and reference_gap_s <= longest_s else Skip.NONE


class FrameSkipper:
    """Follows the packets and frames of one connection; `mode` is what applies at present, and `leaves_out` says
    whether even the key frame of the last packet need not be decoded, since the next one comes soon enough.

    With `fixed` the mode is always that. `needed_fps` gives the frames a second that queries need, None for all.
    """

    def __init__(
        self, fixed: Skip | None, needed_fps: Callable[[], float | None], limits: SkipLimits = DEFAULT_LIMITS
    ) -> None:
        self.mode = fixed or Skip.NONE
        self._fixed, self._needed_fps, self._limits = fixed, needed_fps, limits
        self._key_at: float | None = None
        self._reference_at: float | None = None
        self._key_gaps: deque[float] = deque(maxlen=limits.key_gaps)
        self._reference_gaps: deque[float] = deque(maxlen=limits.reference_gaps)
        self._has_b = self._keeps_nonref = self.leaves_out = False
        self._decoded_at: float | None = None

    def choose(self, packet: Any) -> Skip:
        """The mode for PyAV's next packet of the stream."""
        if self._fixed is not None:
            return self._fixed
        is_key, at = packet.is_keyframe, _seconds(packet)
        if is_key and at is not None:
            if self._key_at is not None and at > self._key_at:
                self._key_gaps.append(at - self._key_at)
            self._key_at = at
        self.leaves_out = False
        if self.mode is Skip.NONKEY and not is_key:
            return self.mode  # frames between two key frames build on those before
        needed_fps = self._needed_fps()
        if self.mode is Skip.NONREF and self._is_late(at, needed_fps):
            self._keeps_nonref = True
        key_gap_s = max(self._key_gaps, default=None)
        mode = choose_skip(needed_fps, key_gap_s, self._reference_gap_s, self._limits)
        if mode is not self.mode and Skip.NONKEY in (mode, self.mode):
            self._reference_at = None
        self.mode = mode
        if needed_fps and key_gap_s and mode is Skip.NONKEY and at is not None and self._decoded_at is not None:
            next_s = at + key_gap_s - self._decoded_at
            self.leaves_out = 0 < next_s <= self._limits.gap_share / needed_fps
        if is_key and not self.leaves_out:
            self._decoded_at = at
        return mode

    def _is_late(self, at: float | None, needed_fps: float | None) -> bool:
        """Whether fewer frames come than were foreseen."""
        if at is None or self._reference_at is None or not needed_fps:
            return False
        return at - self._reference_at > self._limits.late_periods / needed_fps

    def see(self, frames: Iterable[Any]) -> None:
        """Frames that were decoded."""
        for frame in frames:
            at = frame.time
            if int(frame.pict_type) == B_PICTURE:
                self._has_b = True
            elif at is not None:
                if self._reference_at is not None and at > self._reference_at and self.mode is not Skip.NONKEY:
                    self._reference_gaps.append(at - self._reference_at)
                self._reference_at = at

    @property
    def _reference_gap_s(self) -> float | None:
        is_known = self._has_b and len(self._reference_gaps) >= self._limits.reference_gaps / 3
        return max(self._reference_gaps) if is_known and not self._keeps_nonref else None


def _seconds(packet: Any) -> float | None:
    stamp = packet.dts if packet.dts is not None else packet.pts
    return None if stamp is None else float(stamp * packet.time_base)
