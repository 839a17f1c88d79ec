"""Cameras: each connects, watches its connection and reconnects by the rules of `reconnect`, and delivers frames."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gemel.edge_runtime.capture.reader import FramePool, PacketReceiver, RecentRate, SourceReader, TimedShot
from gemel.edge_runtime.capture.reconnect import PAUSES, CameraPhase, LinkState
from gemel.edge_runtime.capture.sources import NO_PICTURE, CameraConfig, FrameRequest, Source, open_source
from gemel.edge_runtime.frames.part_times import PART_TIMES, Part
from gemel.edge_runtime.frames.queues import Frame
from gemel.models.files.video import OPENING_SHARE, RateGate
from gemel.models.labels.data_notes import note_clipped_roi
from gemel.models.preprocess import ASPECT_TOLERANCE

POLL_INTERVAL_S = 0.25
"""Interval at which a camera without a new frame checks its decoder, and whether a retry is due."""
MAX_ABANDONED = 2
"""Decoders that never return, each with a thread, before no further one is started."""

log = logging.getLogger("gemel.run")


class Camera:
    """One camera, and the frames that each of its `queries` takes.

    Files and folders play at their own rate in real time. `put` receives (query, frame) for the queries that are due by
    their own and the camera's rate. Frames are numbered from 0, skipped ones included, on through loops and
    reconnections. A source that is neither live nor looped ends the camera; any other is retried until `stop`. A query
    whose region lies outside the picture gets no frame, one that `is_on` says is off frames without a picture. `ended`
    is called at the end. `packets` gets what is decoded. `main` is the main stream beside this smaller one: both
    begin and end together.
    """

    def __init__(
        self,
        config: CameraConfig,
        queries: Mapping[str, FrameRequest],
        put: Callable[[str, Frame], object],
        ended: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        open_source: Callable[[CameraConfig], Source] = open_source,
        packets: PacketReceiver | None = None,
        is_on: Callable[[str], bool] = lambda query: True,
        main: Camera | None = None,
    ) -> None:
        self._packets, self._is_on, self._main = packets, is_on, main
        self._compared: object = None
        self.answered_fps: Mapping[str, float] = {}
        """Of an overloaded box the frames a second of each query that it can answer: no more need be decoded."""
        self.id = config.id
        self.delivered = self._damaged_before = self._frames_before = self._decoded_before = 0
        self._config, self._queries, self._put, self._ended, self._clock = config, dict(queries), put, ended, clock
        self._open_source = open_source
        self._link = LinkState(CameraPhase.CONNECTING, clock())
        self._changed = threading.Condition()
        self._stopping = False
        self._reader: SourceReader | None = None
        self._shot: TimedShot | None = None
        self._memory = FramePool()
        self._abandoned: list[SourceReader] = []
        self._gates: dict[str, RateGate] = {}
        self._size: tuple[int, int] | None = None
        self._outside: dict[str, str] = {}
        self._rate, self._last_at, self._whole_at = RecentRate(), None, clock()
        self._offset, self._next_queries = 0, (self._queries, 0)
        self._thread = threading.Thread(target=self.play, name=f"camera-{config.id}", daemon=True)

    def start(self) -> None:
        """Begin to play in a thread."""
        self._thread.start()
        if self._main is not None:
            self._main.start()

    def serve(self, queries: Mapping[str, FrameRequest], first: int) -> None:
        """Serve these queries from the next frame on, over the same connection, with frame numbers from `first` up."""
        self._next_queries = dict(queries), max(first, self._next_queries[1])

    def stop(self) -> None:
        """End soon; returns at once."""
        self._stopping = True
        self._wake()
        if self._main is not None:
            self._main.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for its threads; False if one is still busy, as a decoder waiting for a dead stream can be."""
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        for reader in self._abandoned:
            reader.thread.join(max(0.0, deadline - time.monotonic()))
        if self._main is not None and not self._main.join(max(0.0, deadline - time.monotonic())):
            return False
        return not self._thread.is_alive() and not any(reader.thread.is_alive() for reader in self._abandoned)

    @property
    def alive(self) -> bool:
        """Whether frames may still come."""
        return self._thread.is_alive()

    @property
    def state(self) -> CameraPhase:
        """What it does at present."""
        return self._link.state

    @property
    def error(self) -> str | None:
        """The present problem, or the one that ended it."""
        beside = None if self._main is None or self._main.error is None else f"its main stream: {self._main.error}"
        return self._link.problem or next(iter(self._outside.values()), beside)

    @property
    def stream_size(self) -> tuple[int, int] | None:
        """Width and height that the stream names; None without one."""
        decoder = None if self._reader is None else self._reader.decoder
        return None if decoder is None else decoder.size

    def play(self) -> None:
        """Play until the end of the source, or until `stop`; `start` does so in a thread."""
        try:
            self._connect()
            while self._link.phase is not CameraPhase.ENDED:
                self._step()
        except Exception as error:  # the receiver of the frames failed
            self._change(self._link.lose(f"{type(error).__name__}: {error}", self._clock(), forever=False))
        finally:
            self._ended()

    def to_json(self) -> dict[str, Any]:
        """State, recent frames a second, age of the newest frame, reconnections, frames read, delivered and
        undecodable, the present `error`, what decodes and which frames it skips."""
        now, last, reader = self._clock(), self._last_at, self._reader
        decoder = None if reader is None else reader.decoder
        is_streaming = self._link.phase is CameraPhase.STREAMING
        return {
            "id": self.id, "state": str(self._link.state),
            "fps": round(self._rate.per_second(now), 2) if is_streaming else 0.0,
            "frame_age_s": None if last is None else round(now - last, 3), "reconnects": self._link.reconnects,
            "frames": self._frames_before if reader is None else reader.index, "delivered": self.delivered,
            "away_s": None if self._link.away_since is None else round(now - self._link.away_since, 3),
            "undecodable": self._damaged_before + (0 if reader is None else reader.damaged), "error": self.error,
            "decoded": self._decoded_before + (0 if reader is None else reader.decoded),
            "decoder": None if decoder is None else decoder.name,
            "skip": None if decoder is None else str(decoder.skipper.mode),
        }  # fmt: skip

    def _step(self) -> None:
        """Wait for an event, and act on it."""
        with self._changed:
            self._changed.wait_for(self._has_event, POLL_INTERVAL_S)
            is_over = self._reader is not None and self._reader.over  # first: a last frame may come just before
            shot, self._shot = self._shot, None
            self._changed.notify_all()
        reader, link, now = self._reader, self._link, self._clock()
        if self._stopping:
            self._change(link.end())
        elif shot is not None:
            self._receive(shot)
        elif reader is None:
            if link.retry_at is None or now >= link.retry_at:
                self._change(link.retry())
        elif is_over:
            if reader.problem is None and link.phase is CameraPhase.STREAMING and not self._config.forever:
                self._change(link.end())
            else:
                self._lose(reader.problem or NO_PICTURE, reader.permanent)
        elif (busy_since := reader.busy_since) is not None and now - busy_since >= self._patience_s(link):
            self._lose(f"no frame came for {self._patience_s(link):g} s")

    def _patience_s(self, link: LinkState) -> float:
        """How long a frame may take, the first one with the opening."""
        return self._config.timeout_s * (1.0 if link.phase is CameraPhase.STREAMING else OPENING_SHARE)

    def _has_event(self) -> bool:
        return self._stopping or self._shot is not None or (self._reader is not None and self._reader.over)

    def _lose(self, problem: str, permanent: bool = False) -> None:
        self._change(self._link.lose(problem, self._clock(), self._config.forever, random.random(), permanent))

    def _change(self, after: LinkState) -> None:
        """Take the link to another state, log the change and carry it out."""
        before, self._link = self._link, after
        self._log_change(before, after, self._clock())
        if after.phase is CameraPhase.CONNECTING:
            self._connect()
        elif after.phase is not CameraPhase.STREAMING:
            self._disconnect()

    def _log_change(self, before: LinkState, after: LinkState, now: float) -> None:
        if after.state is before.state and not (after.permanent and after.problem != before.problem):
            return
        if after.phase is CameraPhase.STREAMING and before.problem is not None:
            log.info("camera %s is back after %.1f s", self.id, now - (before.away_since or now))
        elif after.phase is CameraPhase.STREAMING:
            log.info("camera %s streams", self.id)
        elif after.phase is CameraPhase.AWAY:
            often = f"retrying every {PAUSES.permanent_s:g} s" if after.permanent else "retrying"
            log.warning("camera %s is away: %s; %s", self.id, after.problem, often)
        elif after.phase is CameraPhase.ENDED and after.problem is not None and not self._stopping:
            log.error("camera %s ended: %s", self.id, after.problem)

    def _connect(self) -> None:
        self._abandoned = [reader for reader in self._abandoned if reader.thread.is_alive()]
        if len(self._abandoned) >= MAX_ABANDONED:
            self._lose("its decoder does not return")
            return
        self._gates = {query: RateGate(request.fps) for query, request in self._queries.items()}
        self._rate, self._whole_at = RecentRate(), self._clock()
        self._reader = SourceReader(
            self._config, self._frames_before, self._offer_shot, self._wake, self._clock,
            open_source=self._open_source, packets=self._packets, needed_fps=self._needed_fps,
        )  # fmt: skip
        self._reader.thread.start()

    def _disconnect(self) -> None:
        """Abandon the connection: its thread ends when its decoder returns, and later frames are dropped."""
        with self._changed:
            reader, self._reader, self._shot = self._reader, None, None
            self._changed.notify_all()
        if reader is not None:
            reader.stop()
            self._frames_before, self._damaged_before = reader.index, self._damaged_before + reader.damaged
            self._decoded_before += reader.decoded
            self._abandoned.append(reader)

    def _offer_shot(self, reader: SourceReader, shot: TimedShot) -> None:
        """Take a frame from the thread of a reader. A live frame replaces the one that waits, so that slow queries get
        the newest; a frame of a file waits until the one before is taken."""
        with self._changed:
            if not self._config.live:
                self._changed.wait_for(lambda: self._shot is None or reader is not self._reader)
            if reader is self._reader:
                self._shot = shot
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _needed_fps(self) -> float | None:
        """The frames a second that any query asks for; None for all that come."""
        rates = [
            min(fps, self.answered_fps.get(query, fps))
            for query, request in self._queries.items()
            if self._is_on(query)
            for fps in [min(rate for rate in (request.fps, self._config.fps, math.inf) if rate)]
        ]
        fastest = max(rates, default=0.0)
        return None if fastest == math.inf else fastest

    def _receive(self, shot: TimedShot) -> None:
        """Hand a frame to the queries that are due; where none is, it is not converted."""
        self._switch_queries(shot.index)
        due = [query for query, gate in self._gates.items() if gate.passes(shot.media_s)]
        asking = {query for query in due if self._is_on(query)}
        with PART_TIMES.count(Part.CONVERT):
            image = self._memory.decode(shot.shot) if asking else None
        if asking and image is None:
            self._damaged_before += 1
            if self._clock() - self._whole_at >= self._patience_s(self._link):
                self._lose(NO_PICTURE)
            return
        self._whole_at = self._clock()
        if self._link.phase is not CameraPhase.STREAMING:
            self._change(self._link.stream())
        self._last_at = shot.captured_at
        if image is not None:
            self._check_size(image.shape[1], image.shape[0])
            self._compare_aspects()
        self._rate.add(shot.captured_at)
        self.delivered += 1
        frame = Frame(shot.index + self._offset, shot.captured_at, shot.captured_unix, image)
        for query in due:
            if query not in self._outside:
                self._put(query, frame if query in asking else replace(frame, image=None))

    def _compare_aspects(self) -> None:
        """Say, once, that the smaller stream shows another view than the main one."""
        main, small = None if self._main is None else self._main.stream_size, self._size
        if main is None or small is None or self._compared == (main, small):
            return
        self._compared = main, small
        if abs(small[0] * main[1] / (small[1] * main[0]) - 1) > ASPECT_TOLERANCE:
            log.warning(
                "camera %s: its smaller stream has %dx%d pixels, its main one %dx%d, another aspect: zones and lines "
                "are fractions of the smaller one, and lie elsewhere in clips",
                self.id, *small, *main,
            )  # fmt: skip

    def _switch_queries(self, index: int) -> None:
        """Begin with the queries of the last `serve`; unchanged queries keep their place in time."""
        queries, first = self._next_queries
        if queries is self._queries:
            return
        self._offset = max(self._offset, first - index)
        self._gates = {
            query: self._gates[query] if self._queries.get(query) == request else RateGate(request.fps)
            for query, request in queries.items()
        }
        self._queries, self._size = queries, None

    def _check_size(self, width: int, height: int) -> None:
        """On a new picture size, find the queries whose region lies outside."""
        if self._size == (width, height):
            return
        if self._size is not None:
            log.info("camera %s: frames of %dx%d pixels now, %dx%d before", self.id, width, height, *self._size)
        self._size = (width, height)
        found = {query: request.region_problem(query, width, height) for query, request in self._queries.items()}
        self._outside = {query: problem for query, problem in found.items() if problem is not None}
        for query in self._queries.keys() - self._outside.keys():
            note_clipped_roi(query, self._queries[query].region, self._size)
        for problem in self._outside.values():
            log.error("camera %s: %s; it gets no frames", self.id, problem)
