"""Which frames of a source go through, and when a frame of a file is due: pure arithmetic on times."""

from __future__ import annotations

import math
from collections import deque

# A frame's due time is a multiple of 1/fps that floats miss by a hair.
_TICK_SLACK = 1e-6
BEHIND_S = 1.0
"""A file that is this late plays on at its rate, without the frames that it missed."""
RATE_FRAMES = 32
RATE_S = 10.0


class RateGate:
    """Lets through at most `fps` frames a second of media time: the first frame of each period; None means all."""

    def __init__(self, fps: float | None) -> None:
        self._fps = fps
        self._tick = -1

    def passes(self, media_s: float) -> bool:
        """Whether the frame at this time into the stream goes through; times must not fall."""
        if self._fps is None:
            return True
        tick = math.floor(media_s * self._fps + _TICK_SLACK)
        due = tick > self._tick
        self._tick = max(tick, self._tick)
        return due


class Playback:
    """A file played in real time at `pace` frames a second from `start` on, in seconds of any clock.

    After a pause (of the process, of the disk) it does not make up for what it missed: until it has caught up, frames
    go through no faster than they would have, and whole laps of a loop are left out.
    """

    def __init__(self, start: float, pace: float) -> None:
        self._start, self.pace = start, pace
        self._clock_gate = RateGate(pace)
        self._catching_up = False

    def wait_s(self, played: int, now: float) -> float:
        """Seconds until frame `played` (from 0) is due; 0 if it is late."""
        return max(0.0, -self._late_s(played, now))

    def passes(self, played: int, now: float) -> bool:
        """Whether frame `played`, read now, is worth delivering; times must not fall."""
        late_s, first_of_its_time = self._late_s(played, now), self._clock_gate.passes(now - self._start)
        self._catching_up = late_s > (1 / self.pace if self._catching_up else BEHIND_S)
        return first_of_its_time or not self._catching_up

    def missed_laps(self, played: int, lap: int, now: float) -> int:
        """How many whole laps of `lap` frames a loop that is about to play frame `played` has missed."""
        late_s = self._late_s(played, now)
        return int(late_s * self.pace) // lap if lap and late_s > BEHIND_S else 0

    def _late_s(self, played: int, now: float) -> float:
        return now - self._start - played / self.pace


class RecentRate:
    """How many frames a second came lately."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=RATE_FRAMES)

    def came(self, now: float) -> None:
        """A frame came; times must not fall."""
        self._times.append(now)

    def per_second(self, now: float) -> float:
        """Frames a second over the newest frames of the last ten seconds; 0 if fewer than two came then."""
        times = [time for time in list(self._times) if now - time <= RATE_S]
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0
