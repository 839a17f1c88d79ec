"""Cameras: each reads its source in a thread of its own, in real time, and leaves frames in its queries' mailboxes."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edge_runtime.frames.mailbox import Frame
from edge_runtime.frames.sources import Source, open_source

FOLDER_FPS = 10.0
# A frame's due time is a multiple of 1/fps that floats miss by a hair.
_TICK_SLACK = 1e-6

log = logging.getLogger("gemel.run")


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


@dataclass(frozen=True, slots=True)
class CameraConfig:
    """One camera: `source` is an absolute path, a URL or a device index; `fps` None means the source's own."""

    id: str
    source: str
    fps: float | None = None
    loop: bool = False


class Camera:
    """One camera. `queries` maps each of its queries to its frame rate (None: the camera's).

    Files and folders play at their own rate in real time (a folder, which has none, at the camera's, or 10 a second);
    a decoder slower than that falls behind. `fps` below the source's rate skips frames, decoding none of them to an
    image. `put` receives (query, frame); frames are numbered from 0, skipped ones included, and on through a loop.
    The camera ends at the end of its source unless `loop`; a lost stream is not yet connected again. `clock` is the
    schedule's clock, `wait` sleeps (seconds) and returns True when the camera must stop.
    """

    def __init__(
        self,
        config: CameraConfig,
        queries: Mapping[str, float | None],
        put: Callable[[str, Frame], object],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self.id, self.fps, self.loop = config.id, config.fps, config.loop
        self.delivered = self.skipped = self.laps = 0
        self.error: str | None = None
        self._source, self._put, self._clock, self._ended = config.source, put, clock, ended
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        self._gate = RateGate(config.fps)
        self._gates = {query: RateGate(rate) for query, rate in queries.items()}
        self._index = 0
        self._thread = threading.Thread(target=self.play, name=f"camera-{config.id}", daemon=True)

    def start(self) -> None:
        """Begin to play in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End soon; returns at once."""
        self._stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False if it is still busy, as a decoder waiting for a dead stream can be."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether frames may still come."""
        return self._thread.is_alive()

    def play(self) -> None:
        """Play until the end or `stop`; whatever goes wrong ends this camera and is told in `error`."""
        try:
            start = self._clock()
            while not self._stopping.is_set():
                before = self._index
                self._lap(start)
                self.laps += 1
                if not self.loop or self._index == before:
                    break
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            log.error("camera %s ended: %s", self.id, self.error)
        finally:
            self._ended()

    def to_json(self) -> dict[str, Any]:
        """What the camera did: frames read and delivered, frames that did not decode, the error that ended it."""
        return {
            "id": self.id,
            "frames": self._index,
            "delivered": self.delivered,
            "undecodable": self.skipped,
            "error": self.error,
        }

    def _lap(self, start: float) -> None:
        source = open_source(self._source, f"camera {self.id}")
        undecodable = self.skipped
        try:
            pace = source.fps or self.fps or FOLDER_FPS
            while source.advance():
                if self._wait(0 if source.live else max(0.0, start + self._index / pace - self._clock())):
                    return
                media_s = self._clock() - start if source.live else self._index / pace
                if self._gate.passes(media_s):
                    self._deliver(source, media_s)
                    self.skipped = undecodable + source.skipped
                self._index += 1
        finally:
            source.close()

    def _deliver(self, source: Source, media_s: float) -> None:
        image = source.image()
        if image is None:
            return
        frame = Frame(self._index, self._clock(), time.time(), image)
        self.delivered += 1
        for query, gate in self._gates.items():
            if gate.passes(media_s):
                self._put(query, frame)
