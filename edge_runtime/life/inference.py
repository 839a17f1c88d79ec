"""The inference thread: warms up, runs the queries, and applies reloads between two frames."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import numpy as np

from gemel.edge_runtime.capture.push import AnyCamera
from gemel.edge_runtime.life.executor import Executor, PolicyFailed
from gemel.edge_runtime.life.runtime import Runtime
from gemel.models.errors import GemelError, one_line
from gemel.models.process import trim_heap

log = logging.getLogger("gemel.run")


class StopReason(str, Enum):
    """Why a box stopped, beside the name of a signal."""

    __str__ = str.__str__

    CAMERAS_ENDED = "cameras ended"
    STOP_REQUESTED = "asked to stop"
    TIME_OVER = "time limit reached"
    NO_READER = "nobody reads its results"
    FAILURE = "a fault"


class InferenceThread:
    """Runs until the cameras have ended and nothing waits, the time is over, a stop is requested, or no reader of
    results is left (`has_no_reader`). `between` is called between two frames.

    `over` is set then, with the reason in `stopped_by`, or a line in `failure`. `warm_up` holds the bytes and the swaps
    of the warm-up.
    """

    def __init__(
        self,
        runtime: Runtime,
        stopping: threading.Event,
        has_no_reader: Callable[[], bool],
        between: Callable[[], object] = lambda: None,
    ) -> None:
        self.runtime, self._between = runtime, between
        self.over = threading.Event()
        self.stopped_by = StopReason.FAILURE
        self.failure: str | None = None
        self.started: float | None = None
        """When the warm-up was over, by the monotonic clock."""
        self.warm_up = {"bytes_moved": 0, "swaps": 0}
        self._overflow_before = 0
        self._stopping, self._has_no_reader = stopping, has_no_reader
        self.thread: threading.Thread | None = None

    @property
    def executor(self) -> Executor:
        """The active executor."""
        return self.runtime.active.executor

    @property
    def cameras(self) -> Sequence[AnyCamera]:
        """The active cameras."""
        return self.runtime.active.cameras

    @property
    def loads(self) -> dict[str, int]:
        """The bytes that loads moved, and their number, since the warm-up; none before its end."""
        arena = self.executor.device.arena
        if self.started is None:
            return {"bytes_moved": 0, "swaps": 0}
        moved_bytes, swaps = self.warm_up["bytes_moved"], self.warm_up["swaps"]
        return {"bytes_moved": arena.bytes_moved - moved_bytes, "swaps": arena.swaps - swaps}

    @property
    def overflow_bytes(self) -> int:
        """The bytes that runs have copied since the warm-up."""
        return 0 if self.started is None else self.runtime.overflow_bytes - self._overflow_before

    def start(self, frames: Mapping[str, np.ndarray], seconds: float) -> None:
        """Begin to serve for `seconds`, with a frame for the warm-up of each query (RGB uint8, H, W, 3)."""
        self.thread = threading.Thread(target=self._work, args=(frames, seconds), name="inference", daemon=True)
        self.thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False where a step hangs."""
        if self.thread is not None:
            self.thread.join(max(0.0, timeout_s))
        return self.thread is None or not self.thread.is_alive()

    def _work(self, frames: Mapping[str, np.ndarray], seconds: float) -> None:
        try:
            with self.executor.device.arena.computing():
                self._warm_up(frames)
                self.started = time.monotonic()
                self.stopped_by = self._loop(self.started + seconds)
        except (GemelError, PolicyFailed) as error:
            self.failure = one_line(error)
        except BaseException as error:  # the ledger must be written in any case
            log.exception("the inference failed")
            self.failure = one_line(f"{type(error).__name__}: {error}")
        finally:
            self.over.set()

    def _warm_up(self, frames: Mapping[str, np.ndarray]) -> None:
        self.executor.warm_up(frames)
        arena, box = self.executor.device.arena, self.runtime.active.box
        self.warm_up = {"bytes_moved": arena.bytes_moved, "swaps": arena.swaps}
        self._overflow_before = self.runtime.overflow_bytes
        if self._stopping.is_set():
            return
        engines = ", ".join(f"{query} by {engine}" for query, engine in box.engine_names.items())
        gc.freeze()  # a collection of all objects would stop the runs for 0.2 s
        trim_heap()  # imports and warm-up leave five megabytes free
        order = ", ".join(self.executor.order)
        text = "serving: %s; %d cameras, policy %s, order of turns: %s"
        log.info(text, engines, len(self.cameras), self.executor.policy.name, order)
        for camera in self.cameras:
            camera.start()

    def _loop(self, deadline: float) -> StopReason:
        mailboxes = self.runtime.mailboxes
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= deadline:
                return StopReason.TIME_OVER
            if self._has_no_reader():
                return StopReason.NO_READER
            self._between()
            have_ended = not any(camera.alive for camera in self.cameras)
            has_warmed_up = self.executor.warm_up_step()
            if self.executor.step() or has_warmed_up:
                continue
            if have_ended and not mailboxes.pending():
                return StopReason.CAMERAS_ENDED
            mailboxes.wait(min(self.executor.sleep_s(), deadline - now))
        return StopReason.STOP_REQUESTED
