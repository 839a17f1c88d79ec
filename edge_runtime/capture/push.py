"""Cameras whose frames come by HTTP: each frame is a request that waits for the answers of its queries."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemel.edge_runtime.capture.camera import Camera
from gemel.edge_runtime.capture.reader import FramePool, RecentRate
from gemel.edge_runtime.capture.reconnect import CameraPhase
from gemel.edge_runtime.capture.sources import CameraConfig, FrameRequest
from gemel.edge_runtime.frames.queues import DEPTH, OVERLOAD, Frame
from gemel.models.bundle import BundleQuery
from gemel.models.labels.data_notes import note_clipped_roi

STOPPED = "stopped"
"""The reason for which a frame is declined while the box stops."""
MIN_STEP_S = 1e-6
"""Least time between the captures of two frames, by which mailboxes tell them apart."""

log = logging.getLogger("gemel.run")

Records = Mapping[str, Mapping[str, Any]]
"""The result record of each query of a frame."""


class PushDeclined(Exception):
    """A pushed frame gets no answer: `query` dropped it for this `reason`, or failed on it."""

    def __init__(self, query: str, reason: str) -> None:
        super().__init__(f"query '{query}': {reason}")
        self.query, self.reason = query, reason


class UnfitFrame(Exception):
    """A pushed frame that a query cannot take, in one line."""


class _Reply:
    """Collects the answers of a frame's queries; the first that declines ends the wait."""

    def __init__(self, queries: Sequence[str], settled: Callable[[str], object]) -> None:
        self.future: Future[Records] = Future()
        self.future.set_running_or_notify_cancel()  # from now on the waiting side cannot cancel it
        self._records: dict[str, Mapping[str, Any]] = {}
        self._open, self._settled, self._lock = set(queries), settled, threading.Lock()

    def answer(self, query: str, record: Mapping[str, Any]) -> None:
        if self._settle(query):
            self._records[query] = record
            if not self._open and not self.future.done():
                self.future.set_result(self._records)

    def decline(self, query: str, reason: str) -> None:
        if self._settle(query):
            self.fail(PushDeclined(query, reason))

    def fail(self, error: Exception) -> None:
        """End the wait; the frame of each query is settled later."""
        with self._lock:
            if not self.future.done():
                self.future.set_exception(error)

    def abandon(self, error: Exception) -> None:
        """The frame reaches no query any more."""
        for query in list(self._open):
            self._settle(query)
        self.fail(error)

    def _settle(self, query: str) -> bool:
        with self._lock:
            was_open = query in self._open
            self._open.discard(query)
        if was_open:
            self._settled(query)
        return was_open


class PushCamera:
    """A camera without a connection, with the interface of `Camera`: `push` takes a frame and gives its answers.

    At most DEPTH frames of a query are decoded, wait or run; a further one is declined and counted as dropped by
    `skip` before it is decoded. Frames are decoded one after the other in a thread of the camera.
    """

    def __init__(
        self,
        config: CameraConfig,
        queries: Mapping[str, FrameRequest],
        put: Callable[[str, Frame], str | None],
        skip: Callable[[str, str], object],
        ended: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id, self.timeout_s = config.id, config.timeout_s
        self._queries, self._put, self._skip, self._ended, self._clock = dict(queries), put, skip, ended, clock
        self._lock, self._open, self._replies = threading.Lock(), Counter[str](), set[_Reply]()
        self._index = self._delivered = self._undecodable = 0
        self._phase, self._rate, self._memory = CameraPhase.CONNECTING, RecentRate(), FramePool()
        self._captured_at: float | None = None
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix=f"push-{config.id}")

    def start(self) -> None:
        """Take frames from now on."""
        self._phase = CameraPhase.STREAMING

    def serve(self, queries: Mapping[str, FrameRequest], first: int) -> None:
        """Serve these queries from the next frame on, with frame numbers from `first` up."""
        with self._lock:
            self._queries, self._index = dict(queries), max(first, self._index)

    def stop(self) -> None:
        """Decline all frames from now on, also those that wait."""
        with self._lock:
            self._phase, replies = CameraPhase.ENDED, list(self._replies)
        for reply in replies:
            reply.fail(PushDeclined(self.id, STOPPED))
        self._decoder.shutdown(wait=False)
        self._ended()

    def join(self, timeout_s: float) -> bool:
        """True: its thread ends with the frame that it decodes."""
        return True

    @property
    def alive(self) -> bool:
        """Whether frames may still come."""
        return self._phase is not CameraPhase.ENDED

    @property
    def state(self) -> CameraPhase:
        """Streaming from the start to the end."""
        return self._phase

    @property
    def error(self) -> str | None:
        """None: a frame that does not fit is an error of its request."""
        return None

    def push(self, queries: Sequence[str], decode: Callable[[], np.ndarray]) -> Future[Records]:
        """Give a frame to these queries; the records of all, once each has answered.

        `decode` gives RGB uint8 (H, W, 3) and runs in the camera's thread. The future raises PushDeclined, UnfitFrame
        for a frame outside of which a query's region lies, or what `decode` raises.
        """
        reply = _Reply(queries, self._release)
        with self._lock:
            overloaded = next((query for query in queries if self._open[query] >= DEPTH), None)
            if self.alive and overloaded is None:
                self._open.update(queries)
                self._replies.add(reply)
                last = self._captured_at
                captured_at = self._clock() if last is None else max(self._clock(), last + MIN_STEP_S)
                self._captured_at, captured_unix = captured_at, time.time()
                self._decoder.submit(self._deliver, reply, queries, decode, (captured_at, captured_unix))
        if overloaded is not None and self.alive:
            for query in queries:
                self._skip(query, OVERLOAD)
            reply.fail(PushDeclined(overloaded, OVERLOAD))
        elif not self.alive:
            reply.fail(PushDeclined(self.id, STOPPED))
        reply.future.add_done_callback(lambda _: self._replies.discard(reply))
        return reply.future

    def to_json(self) -> dict[str, Any]:
        """As of `Camera`."""
        now, last = self._clock(), self._captured_at
        return {
            "id": self.id, "state": str(self._phase), "fps": round(self._rate.per_second(now), 2),
            "frame_age_s": None if last is None else round(now - last, 3), "reconnects": 0, "frames": self._index,
            "delivered": self._delivered, "undecodable": self._undecodable, "error": self.error,
        }  # fmt: skip

    def _release(self, query: str) -> None:
        with self._lock:
            self._open[query] -= 1

    def _deliver(
        self, reply: _Reply, queries: Sequence[str], decode: Callable[[], np.ndarray], captured: tuple[float, float]
    ) -> None:
        """Decode a frame and give it to its queries."""
        try:
            image = self._memory.copy(decode())
            requests = self._queries
            self._check_regions({query: requests[query] for query in queries if query in requests}, image)
        except Exception as error:
            self._undecodable += 1
            reply.abandon(error)
            return
        with self._lock:
            index, self._index = self._index, self._index + 1
            self._delivered += 1
        self._rate.add(captured[0])
        frame = Frame(index, *captured, image, reply)
        for query in queries:
            if (reason := self._put(query, frame)) is not None:
                reply.decline(query, reason)

    def _check_regions(self, requests: Mapping[str, FrameRequest], image: np.ndarray) -> None:
        height, width = image.shape[:2]
        for query, request in requests.items():
            if problem := request.region_problem(query, width, height):
                raise UnfitFrame(problem)
            note_clipped_roi(query, request.region, (width, height))


AnyCamera = Camera | PushCamera


@dataclass(frozen=True, eq=False)
class PushQuery:
    """A query, the camera that takes its frames, and the first digits of the bundle's SHA-256."""

    query: BundleQuery
    camera: PushCamera
    bundle: str
