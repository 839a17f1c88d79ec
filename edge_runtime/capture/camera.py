"""Cameras: each is connected, watched and connected again as `reconnection` says, and leaves frames in mailboxes."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edge_runtime.capture.reader import FramePool, Handover, RateGate, RecentRate, SourceReader, TimedShot
from edge_runtime.capture.reconnect import (
    CameraPhase,
    FrameCame,
    LinkEvent,
    LinkRules,
    LinkState,
    Lost,
    SourceEnded,
    Stopped,
    TimePassed,
    initial_link,
    next_link,
)
from edge_runtime.capture.sources import CameraConfig, FrameRequest, Source, open_source, region_problem
from edge_runtime.queues import Frame

if TYPE_CHECKING:
    import numpy as np


POLL_INTERVAL_S = 0.5
"""A camera looks after its decoder at least so often."""
STOOD_STILL_S = 1.0
"""Waking so much later than asked for means that the whole process stood still."""
MAX_LEFT = 2
"""Decoders that never return, each with a thread, before no further one is begun."""

log = logging.getLogger("gemel.run")


class Camera:
    """One camera. `queries` says what each of its queries wants of it.

    Files and folders play at their own rate in real time (a folder, which has none, at the camera's, or 10 a second).
    A frame goes to the queries whose turn it is by their own and the camera's rate: `put` receives (query, frame).
    Frames are numbered from 0, those that nobody wants included, on through loops and lost connections. A source that
    is neither live nor looped ends the camera; any other is tried again until `stop`. A query whose region lies
    outside the picture gets no frame. `ended` is told of the end.
    """

    def __init__(
        self,
        config: CameraConfig,
        queries: Mapping[str, FrameRequest],
        put: Callable[[str, Frame], object],
        ended: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        opened: Callable[[CameraConfig], Source] = open_source,
    ) -> None:
        self.id = config.id
        self.delivered = self._undecodable = self._frames = 0
        self._config, self._queries, self._put, self._ended, self._clock = config, dict(queries), put, ended, clock
        self._opened = opened
        self._rules = LinkRules(config.timeout_s, config.forever)
        self._link = initial_link(clock())
        self._changed = threading.Condition()
        self._stopping = False
        self._reading: SourceReader | None = None
        self._handover = Handover(self._changed)
        self._left: list[SourceReader] = []
        self._gates: dict[str, RateGate] = {}
        self._size: tuple[int, int] | None = None
        self._outside: dict[str, str] = {}
        self._rate, self._last_at = RecentRate(), None
        self._offset, self._anew = 0, (self._queries, 0)
        self._memory = FramePool()
        self._thread = threading.Thread(target=self.play, name=f"camera-{config.id}", daemon=True)

    def start(self) -> None:
        """Begin to play in a thread."""
        self._thread.start()

    def serve(self, queries: Mapping[str, FrameRequest], first: int) -> None:
        """Go on for these queries, the connection as it is; frames are numbered from `first` on at least."""
        self._anew = dict(queries), max(first, self._anew[1])

    def stop(self) -> None:
        """End soon; returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for its threads; False if one is still busy, as a decoder waiting for a dead stream can be."""
        until = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        for reading in self._left:
            reading.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive() and not any(reading.alive for reading in self._left)

    @property
    def alive(self) -> bool:
        """Whether frames may still come."""
        return self._thread.is_alive()

    @property
    def error(self) -> str | None:
        """What is wrong with it at present, or ended it."""
        return self._link.fault or next(iter(self._outside.values()), None)

    def play(self) -> None:
        """Play until the end of the source, or until `stop`; `start` does so in a thread."""
        try:
            self._connect()
            while self._link.phase is not CameraPhase.ENDED:
                self._turn()
        except Exception as error:  # whatever takes the frames failed
            self._go(Lost(f"{type(error).__name__}: {error}"), LinkRules(self._rules.timeout_s, forever=False))
        finally:
            self._go(Stopped())
            self._ended()

    def to_json(self) -> dict[str, Any]:
        """What it is at, and what it did.

        `state`, frames a second lately (`fps`), the age of the newest (`frame_age_s`), how often it came back
        (`reconnects`), frames read and delivered, frames that did not decode, and what is wrong (`error`), if anything.
        """
        now, last = self._clock(), self._last_at
        streaming = self._link.phase is CameraPhase.STREAMING
        return {
            "id": self.id, "state": str(self._link.state),
            "fps": round(self._rate.per_second(now), 2) if streaming else 0.0,
            "frame_age_s": None if last is None else round(now - last, 3), "reconnects": self._link.reconnects,
            "frames": self._frames_read(), "delivered": self.delivered, "undecodable": self._damaged(),
            "error": self.error,
        }  # fmt: skip

    def _turn(self) -> None:
        """Wait for something to happen, and act on it."""
        stood_still = self._await(self._patience_s())
        now, picked, reading = self._clock(), self._handover.take(), self._reading
        if reading is not None and stood_still:
            reading.excuse(now)
        if self._stopping:
            self._go(Stopped())
        elif picked is not None:
            self._take(picked)
        elif reading is not None and reading.over:
            self._go(SourceEnded() if reading.fault is None else Lost(reading.fault))
        else:
            self._go(TimePassed(None if reading is None else reading.busy_since))

    def _await(self, patience_s: float) -> bool:
        """Sleep until there is news, at most so long; True if it was much longer."""
        before = self._clock()
        with self._changed:
            self._changed.wait_for(self._has_news, patience_s)
        return self._clock() - before > patience_s + STOOD_STILL_S

    def _has_news(self) -> bool:
        reading = self._reading
        return self._stopping or self._handover.waits or (reading is not None and reading.over)

    def _patience_s(self) -> float:
        """How long nothing can be due."""
        link, reading, now = self._link, self._reading, self._clock()
        due = link.retry_at
        if reading is not None and reading.busy_since is not None:
            due = reading.busy_since + self._rules.timeout_s
        return POLL_INTERVAL_S if due is None else min(POLL_INTERVAL_S, max(0.0, due - now))

    def _go(self, event: LinkEvent, rules: LinkRules | None = None) -> None:
        """Take the step that the event asks for, say what has changed, and carry it out."""
        before, now = self._link, self._clock()
        self._link = next_link(before, event, now, rules or self._rules, random.random())
        self._tell(before, self._link, now)
        if self._link.phase is before.phase:
            return
        if self._link.phase is CameraPhase.CONNECTING:
            self._connect()
        elif self._link.phase is not CameraPhase.STREAMING:
            self._drop()

    def _tell(self, before: LinkState, after: LinkState, now: float) -> None:
        """One line for each change of state."""
        if after.state is before.state:
            return
        if after.phase is CameraPhase.STREAMING and before.fault is not None:
            log.info("camera %s is back after %.1f s", self.id, now - (before.away_since or now))
        elif after.phase is CameraPhase.AWAY:
            log.warning("camera %s is away: %s; it is tried again", self.id, after.fault)
        elif after.phase is CameraPhase.ENDED and after.fault is not None and not self._stopping:
            log.error("camera %s ended: %s", self.id, after.fault)

    def _connect(self) -> None:
        self._left = [reading for reading in self._left if reading.alive]
        if len(self._left) >= MAX_LEFT:
            self._go(Lost("its decoder does not return"))
            return
        self._handover = handover = Handover(self._changed)
        self._gates = {query: RateGate(wanted.fps) for query, wanted in self._queries.items()}
        self._rate = RecentRate()
        self._reading = SourceReader(
            self._config, self._frames, handover.put, self._nudge, self._clock, opened=self._opened
        )
        self._reading.start()

    def _drop(self) -> None:
        """Let the connection go; its thread ends when its decoder returns, and what it brings then is not taken."""
        reading, self._reading = self._reading, None
        self._handover.close()
        if reading is not None:
            reading.stop()
            self._frames, self._undecodable = reading.index, self._undecodable + reading.damaged
            self._left.append(reading)

    def _nudge(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _frames_read(self) -> int:
        reading = self._reading
        return self._frames if reading is None else reading.index

    def _damaged(self) -> int:
        reading = self._reading
        return self._undecodable + (0 if reading is None else reading.damaged)

    def _take(self, picked: TimedShot) -> None:
        """A frame came, if a picture can be made of it."""
        image = self._memory.decode_shot(picked.shot)
        if image is None:
            self._undecodable += 1
            return
        self._go(FrameCame())
        self._deliver(picked, image)

    def _deliver(self, picked: TimedShot, image: np.ndarray) -> None:
        self._last_at = picked.captured_at
        self._take_on(picked.index)
        self._look_at(image.shape[1], image.shape[0])
        self._rate.came(picked.captured_at)
        self.delivered += 1
        frame = Frame(picked.index + self._offset, picked.captured_at, picked.captured_unix, image)
        for query, gate in self._gates.items():
            if gate.passes(picked.media_s) and query not in self._outside:
                self._put(query, frame)

    def _take_on(self, index: int) -> None:
        """Serve other queries from this frame on, where that was asked for; those that stay keep their turn."""
        queries, first = self._anew
        if queries is self._queries:
            return
        self._offset = max(self._offset, first - index)
        self._gates = {
            query: self._gates[query] if self._queries.get(query) == wanted else RateGate(wanted.fps)
            for query, wanted in queries.items()
        }
        self._queries, self._size = queries, None

    def _look_at(self, width: int, height: int) -> None:
        """Where the picture has another size than before, find the queries that look outside of it."""
        if self._size == (width, height):
            return
        if self._size is not None:
            log.info("camera %s: frames of %dx%d pixels now, %dx%d before", self.id, width, height, *self._size)
        self._size = (width, height)
        found = {query: region_problem(query, wanted, width, height) for query, wanted in self._queries.items()}
        self._outside = {query: fault for query, fault in found.items() if fault is not None}
        for fault in self._outside.values():
            log.error("camera %s: %s; it gets none", self.id, fault)
