"""Which frames of a source go through, and when a frame of a file is due: pure arithmetic on times.

Pictures in memory of their own, apart from the heap.

One connection to a camera: a thread that decodes every frame and hands over those that are wanted.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_runtime.capture.sources import CameraConfig, Shot, Source, decode_shot, failure_reason, open_source

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


SPARE = 1
"""Pieces of memory that a camera keeps for its next frames: where none wait, one is shown while the next is made."""
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class FramePool:
    """Memory for the frames of one camera: a piece for each, taken from the system and used again.

    Frames are the largest things that a box holds for longer than a call, some tens of megabytes for a moment when they
    wait. In the heap small things that stay come to lie between them, so that what they leave never goes back whole,
    and the process grows with every such moment (docs/results.md, "A box at work"). Here a piece is free again once the
    last array, view or tensor over it is gone, in whatever thread that is; `SPARE` of them are kept, the others go back
    to the system at once. Pictures, uint8, are taken by one thread.
    """

    def __init__(self) -> None:
        self._fit(0)

    def _fit(self, nbytes: int) -> None:
        """Take frames of another size; memory that is still in use for one of the former size is not kept."""
        self._nbytes, self._pixels = nbytes, ctypes.c_ubyte * nbytes
        self._spare: deque[mmap.mmap] = deque(maxlen=SPARE)

    def decode_shot(self, shot: Shot) -> np.ndarray | None:
        """The picture of a decoded frame; None where it does not decode, or there is no memory for it."""
        made = decode_shot(shot)
        try:
            return None if made is None else self._copy(made)
        except (OSError, ValueError):
            return None

    def _copy(self, picture: np.ndarray) -> np.ndarray:
        if picture.nbytes != self._nbytes:
            self._fit(picture.nbytes)
        piece = self._spare.pop() if self._spare else mmap.mmap(-1, self._nbytes, **PRIVATE)
        # Whatever shares the bytes keeps this object: it is made anew for each picture, and its end is the picture's.
        pixels: Any = self._pixels.from_buffer(piece)
        weakref.finalize(pixels, self._spare.append, piece).atexit = False
        copy = np.frombuffer(pixels, np.uint8).reshape(picture.shape)
        copy[...] = picture
        return copy


UNKNOWN_FPS = 10.0
"""How fast a source plays that has no rate of its own, as a folder, where the config names none."""


@dataclass(frozen=True, slots=True, eq=False)
class TimedShot:
    """A decoded frame that is wanted: its number, seconds into this connection, and when it was decoded, on the
    schedule's clock and in Unix seconds. `shot` makes the picture of it."""

    index: int
    media_s: float
    captured_at: float
    captured_unix: float
    shot: Shot


class Handover:
    """One place between the thread that decodes and the one that makes pictures.

    A live frame replaces the one that waits there: who is slow gets the newest, never a queue. A frame of a file waits
    for its place. `changed` is notified of all that happens.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._picked: TimedShot | None = None
        self._closed = False

    def put(self, picked: TimedShot, live: bool) -> None:
        """Leave a frame; once closed, it is let go."""
        with self._changed:
            if not live:
                self._changed.wait_for(lambda: self._picked is None or self._closed)
            if not self._closed:
                self._picked = picked
                self._changed.notify_all()

    def take(self) -> TimedShot | None:
        """The frame that waits, if any."""
        with self._changed:
            picked, self._picked = self._picked, None
            self._changed.notify_all()
            return picked

    @property
    def waits(self) -> bool:
        """Whether a frame is there."""
        return self._picked is not None

    def close(self) -> None:
        """No frame is wanted any more."""
        with self._changed:
            self._closed, self._picked = True, None
            self._changed.notify_all()


class SourceReader:
    """A connection from its opening to its end; with `loop` a file begins again, lap after lap.

    `index` is the number of the next frame, `damaged` counts what did not decode. `busy_since` is when the source was
    asked for what it has not given yet, None while the frame's time is waited for. Once `over`, `fault` says what went
    wrong, if anything. `hand` takes each frame that is wanted and whether it is live, `ended` is told of the end.
    """

    def __init__(
        self,
        config: CameraConfig,
        first: int,
        hand: Callable[[TimedShot, bool], object],
        ended: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
        opened: Callable[[CameraConfig], Source] = open_source,
    ) -> None:
        self.index, self.damaged = first, 0
        self.busy_since: float | None = clock()
        self.over, self.fault = False, None
        self._config, self._hand, self._ended, self._clock, self._opened = config, hand, ended, clock, opened
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        self._gate = RateGate(config.fps)
        self._first = first
        self._playback: Playback | None = None
        self._began = 0.0
        self._thread = threading.Thread(target=self.play, name=f"reading-{config.id}", daemon=True)

    def start(self) -> None:
        """Begin in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End at the next frame; returns at once."""
        self._stopping.set()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs, as one does that waits for a dead stream."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, at most so long."""
        self._thread.join(timeout_s)

    def excuse(self, now: float) -> None:
        """Time in which the whole process stood still does not count."""
        if self.busy_since is not None:
            self.busy_since = now

    def play(self) -> None:
        """Read until the end, a fault or `stop`."""
        try:
            while self._lap() and self._config.loop and not self._config.live and not self._stopping.is_set():
                pass
        except Exception as error:
            self.fault = failure_reason(error)
        finally:
            self.over = True
            self._ended()

    def _lap(self) -> bool:
        """Open the source and play it through; False if it has no frame."""
        self.busy_since = self._clock()
        source = self._opened(self._config)
        first, damaged = self.index, self.damaged
        try:
            if self._playback is None:
                self._began = self._clock()
                self._playback = Playback(self._began, source.fps or self._config.fps or UNKNOWN_FPS)
            while self._advanced(source):
                self.damaged = damaged + source.damaged
                number, self.index = self.index, self.index + 1  # before it is handed over: no number comes twice
                if self._config.live:
                    self._pick_live(source, number)
                elif not self._pick_due(source, self._playback, number):
                    return False
        finally:
            self.damaged = damaged + source.damaged
            source.close()
        lap = self.index - first
        self.index += (
            lap * self._playback.missed_laps(self.index - self._first, lap, self._clock()) if self._config.loop else 0
        )
        return lap > 0

    def _advanced(self, source: Source) -> bool:
        self.busy_since = self._clock()
        came = not self._stopping.is_set() and source.advance()
        self.busy_since = None
        return came and not self._stopping.is_set()

    def _pick_live(self, source: Source, number: int) -> None:
        now = self._clock()
        if self._gate.passes(now - self._began):
            self._hand(TimedShot(number, now - self._began, now, time.time(), source.shot()), True)

    def _pick_due(self, source: Source, playback: Playback, number: int) -> bool:
        """Wait until a file's frame is due, and hand it over if it is wanted; False when asked to stop meanwhile."""
        played = number - self._first
        if self._wait(playback.wait_s(played, self._clock())):
            return False
        now, media_s = self._clock(), played / playback.pace
        if playback.passes(played, now) and self._gate.passes(media_s):
            self._hand(TimedShot(number, media_s, now, time.time(), source.shot()), False)
        return True
