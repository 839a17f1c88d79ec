"""The inference: the one thread that warms up and runs the queries, apart from whoever oversees it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from edge_runtime.box import ReadyBox, format_engines
from edge_runtime.capture.camera import Camera
from edge_runtime.executor import Executor, PolicyFailed
from edge_runtime.memory.transfer import on_compute_stream
from edge_runtime.runtime import Runtime
from models.errors import GemelError, one_line

if TYPE_CHECKING:
    import numpy as np


CAMERAS_ENDED, STOP_REQUESTED, TIME_OVER = "cameras ended", "asked to stop", "its time was over"
NO_READER = "nobody reads its results"

log = logging.getLogger("gemel.run")


class InferenceThread:
    """Warms up, lets the cameras begin, and works until they have ended and nothing waits, until it is asked to stop,
    its time is over, or nobody is left to read results (`is_unheard`). `between` is called between two frames.

    `over` is set then; `ended_by` says why, `fault` what went wrong, if that was the reason. `warmed` holds the bytes
    and the swaps of the warm-up, `overflowed` what runs had copied by then.
    """

    def __init__(
        self,
        workplace: Runtime,
        stopping: threading.Event,
        is_unheard: Callable[[], bool],
        between: Callable[[InferenceThread], object] = lambda _: None,
    ) -> None:
        self.workplace, self._between = workplace, between
        self.over = threading.Event()
        self.ended_by = "it could not go on"
        self.fault: str | None = None
        self.began: float | None = None
        self.warmed = {"bytes_moved": 0, "swaps": 0}
        self.overflowed = 0
        self._stopping, self._is_unheard = stopping, is_unheard
        self._thread: threading.Thread | None = None

    @property
    def executor(self) -> Executor:
        """That of what is at work."""
        return self.workplace.now.executor

    @property
    def cameras(self) -> Sequence[Camera]:
        """Those of what is at work."""
        return self.workplace.now.cameras

    def follow(self, before: ReadyBox) -> None:
        """Another box than `before` is at work from now on; call it between two frames."""
        self.overflowed -= overflowed(before)

    def start(self, frames: Mapping[str, np.ndarray], seconds: float) -> None:
        """Begin, with a frame for the warm-up of each query (RGB uint8, H, W, 3), to serve for so many seconds."""
        self._thread = threading.Thread(target=self._work, args=(frames, seconds), name="inference", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False where a step does not end."""
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))
        return self._thread is None or not self._thread.is_alive()

    def _work(self, frames: Mapping[str, np.ndarray], seconds: float) -> None:
        try:
            with on_compute_stream(self.executor.device.arena.device):
                self._warm_up(frames)
                self.began = time.monotonic()
                self.ended_by = self._loop(self.began + seconds)
        except (GemelError, PolicyFailed) as error:
            self.fault = one_line(error)
        except BaseException as error:  # whatever it is, the ledger must still be written
            log.exception("the inference failed")
            self.fault = one_line(f"{type(error).__name__}: {error}")
        finally:
            self.over.set()

    def _warm_up(self, frames: Mapping[str, np.ndarray]) -> None:
        self.executor.warm_up(frames)
        arena, box = self.executor.device.arena, self.workplace.now.box
        self.warmed = {"bytes_moved": arena.bytes_moved, "swaps": arena.swaps}
        self.overflowed = overflowed(box)
        if self._stopping.is_set():
            return
        log.info(
            "running %s, %d cameras, policy %s, order of turns: %s",
            format_engines(box.names()),
            len(self.cameras),
            self.executor.parts.policy.name,
            self.executor.order,
        )
        for camera in self.cameras:
            camera.start()

    def _loop(self, ends: float) -> str:
        mailboxes = self.workplace.mailboxes
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= ends:
                return TIME_OVER
            if self._is_unheard():
                return NO_READER
            self._between(self)
            over = not any(camera.alive for camera in self.cameras)
            warmed = self.executor.warm()
            if self.executor.step() or warmed:
                continue
            if over and not mailboxes.pending():
                return CAMERAS_ENDED
            mailboxes.wait(min(self.executor.sleep_s(), ends - now))
        return STOP_REQUESTED


def overflowed(box: ReadyBox) -> int:
    """The bytes that runs of a box have copied so far."""
    return sum(engine.overflow_bytes for engine in box.engines.values())
