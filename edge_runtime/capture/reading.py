"""One connection to a camera: a thread that decodes every frame and hands over those that are wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from edge_runtime.capture.pacing import Playback, RateGate
from edge_runtime.capture.settings import CameraConfig
from edge_runtime.capture.sources.base import Shot, Source, reason_of
from edge_runtime.capture.sources.opening import open_source

UNKNOWN_FPS = 10.0
"""How fast a source plays that has no rate of its own, as a folder, where the config names none."""


@dataclass(frozen=True, slots=True, eq=False)
class Picked:
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
        self._picked: Picked | None = None
        self._closed = False

    def put(self, picked: Picked, live: bool) -> None:
        """Leave a frame; once closed, it is let go."""
        with self._changed:
            if not live:
                self._changed.wait_for(lambda: self._picked is None or self._closed)
            if not self._closed:
                self._picked = picked
                self._changed.notify_all()

    def take(self) -> Picked | None:
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


class Reading:
    """A connection from its opening to its end; with `loop` a file begins again, lap after lap.

    `index` is the number of the next frame, `damaged` counts what did not decode. `busy_since` is when the source was
    asked for what it has not given yet, None while the frame's time is waited for. Once `over`, `fault` says what went
    wrong, if anything. `hand` takes each frame that is wanted and whether it is live, `ended` is told of the end.
    """

    def __init__(
        self,
        config: CameraConfig,
        first: int,
        hand: Callable[[Picked, bool], object],
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
            self.fault = reason_of(error)
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
            self._hand(Picked(number, now - self._began, now, time.time(), source.shot()), True)

    def _pick_due(self, source: Source, playback: Playback, number: int) -> bool:
        """Wait until a file's frame is due, and hand it over if it is wanted; False when asked to stop meanwhile."""
        played = number - self._first
        if self._wait(playback.wait_s(played, self._clock())):
            return False
        now, media_s = self._clock(), played / playback.pace
        if playback.passes(played, now) and self._gate.passes(media_s):
            self._hand(Picked(number, media_s, now, time.time(), source.shot()), False)
        return True
