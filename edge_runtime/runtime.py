"""What differs between the box that serves and the one that is to: pure functions of configs and bundles.

What stays in a box as long as its process runs, and what is at work there: made anew for each config and bundle.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from edge_runtime.box import ReadyBox, frame_request
from edge_runtime.capture.camera import Camera
from edge_runtime.capture.sources import FrameRequest
from edge_runtime.config import BoxConfig
from edge_runtime.device import Device, arena_bytes
from edge_runtime.engines.setup import bindable_engines
from edge_runtime.executor import Executor, ExecutorParts, TurnTiming
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.transfer import StagedBuffer
from edge_runtime.queues import Frame, FrameRouter, Ledger, Mailboxes, SceneChange
from edge_runtime.results import Publisher, RunIdentity
from edge_runtime.samples import Spool
from edge_runtime.simulation.trace import TraceWriter
from edge_runtime.sinks.base import ResultMessage
from edge_runtime.sinks.worker import SinkChange, SinkManager
from models.bundle import Bundle, BundleQuery
from models.device import is_out_of_memory
from models.errors import InputError, exact_text

KEPT: dict[str, Callable[[BoxConfig], Any]] = {
    "device": lambda config: config.device,
    "spool": lambda config: config.spool,
    "trace": lambda config: config.trace,
    "http.bind": lambda config: None if config.http is None else (config.http.host, config.http.port),
}
"""What a running box keeps."""


def check_change(before: BoxConfig, after: BoxConfig) -> None:
    """Raise InputError where a running box cannot go over to the other config."""
    for key, value in KEPT.items():
        if value(before) != value(after):
            raise InputError(after.path, "cannot be changed while the box runs", "start the box again", key)
    if after.trace is not None:
        fault = "a trace holds one box, so that one which writes it cannot be changed"
        raise InputError(after.path, fault, "leave `trace` out and start the box again", "trace")


def runs_alike(before: BundleQuery, after: BundleQuery) -> bool:
    """Whether runs of the two take equally long: one architecture, whatever its weights."""
    return _build(before) == _build(after)


def looks_alike(before: BundleQuery, after: BundleQuery) -> bool:
    """Whether a frame that waits for the one may be answered by the other."""
    return (before.camera, before.roi) == (after.camera, after.roi)


def changes_text(before: Mapping[str, BundleQuery], after: Mapping[str, BundleQuery]) -> str:
    """What becomes of the queries, in words: `2 queries as they were, 1 changed, 1 new, 1 gone`."""
    both = before.keys() & after.keys()
    same = sum(before[query] == after[query] for query in both)
    counts = {"changed": len(both) - same, "new": len(after.keys() - both), "gone": len(before.keys() - both)}
    queries = f"{same} {'query' if same == 1 else 'queries'} as before"
    return ", ".join([queries, *(f"{count} {what}" for what, count in counts.items() if count)])


def _build(query: BundleQuery) -> tuple[Any, ...]:
    stored = {key: one.dtype for key, one in query.stored.items()}
    return query.model, query.model_args, query.input_size, len(query.classes), query.preprocess, stored


log = logging.getLogger("gemel.run")


class Observing(Protocol):
    """Who watches a box at work (`edge_runtime.http.status.Observer`)."""

    def saw(self, query: str, frame: Frame) -> None: ...
    def answered(self, parcel: ResultMessage) -> None: ...
    def took(self, query: str, turn: TurnTiming) -> None: ...
    def change(self, bundle: Bundle) -> None: ...


@dataclass(frozen=True, eq=False)
class ActiveConfig:
    """What is at work for one config and bundle."""

    box: ReadyBox
    identity: RunIdentity
    executor: Executor
    cameras: tuple[Camera, ...]

    @property
    def bundle_problem(self) -> str | None:
        """One line when the bundle's file was changed in place after it was opened: nothing more is loaded from it."""
        file, path = self.box.fitted.box.bundle.file, self.box.fitted.box.bundle.path
        if file.stamp() == file.opened_as:
            return None
        return f"{path} was changed in place: nothing is loaded from it; rename a new bundle into place, and reload"

    @cached_property
    def queries(self) -> dict[str, BundleQuery]:
        """Its queries by id."""
        return {query.id: query for query in self.box.fitted.box.bundle.queries}

    @cached_property
    def bytes(self) -> dict[str, tuple[int, int]]:
        """By query the bytes of its tensors, and of those that are its alone."""
        bundle = self.box.fitted.box.bundle
        names = {query: set(bundle.names_in_order(query)) for query in self.queries}
        having = Counter(name for given in names.values() for name in given)
        return {
            query: (sum(map(bundle.nbytes, given)), sum(bundle.nbytes(name) for name in given if having[name] == 1))
            for query, given in names.items()
        }


@dataclass(frozen=True, eq=False)
class PendingConfig:
    """What is ready to be at work next: none of its threads runs. `cold` are queries that are to be warmed up."""

    work: ActiveConfig
    memory: StagedBuffer
    rounds: SinkChange
    fresh_cameras: tuple[Camera, ...]
    cold: frozenset[str]


class Runtime:
    """Memory, mailboxes, ledger and who hears of results; `now` is at work there.

    Raises InputError where the device lacks the memory.
    """

    def __init__(self, box: ReadyBox, post: SinkManager, observer: Observing | None, spool: Spool | None) -> None:
        self.post, self._observer, self._spool = post, observer, spool
        config, demands = box.fitted.box.config, box.fitted.box.demands()
        self.arena = _allocated(box)
        self.trace = TraceWriter(config.trace) if config.trace else None
        self.ledger = Ledger(box.costs.queries)
        self.mailboxes = Mailboxes(box.costs.queries, self.ledger, heard=_teller(self.trace))
        self._scene = SceneChange({query: demand.urgency for query, demand in demands.items()})
        self._intake = FrameRouter(self.mailboxes, self._saw)
        self._identity = RunIdentity(box.fitted.box.bundle.digest)
        self.now = self._made(box, self._identity, {})
        self._intake.change(_sources(self.now))

    def prepare(self, box: ReadyBox) -> PendingConfig:
        """Make ready to go over to another box, beside what is at work; InputError where the device lacks the memory.

        What takes long or can fail is done here: engines are built by now, schedules planned, memory found, sinks made.
        """
        config, before = box.fitted.box.config, self.now
        kept = {camera.id: camera for camera in before.cameras
                if before.box.fitted.box.config.cameras[camera.id] == config.cameras.get(camera.id)}  # fmt: skip
        work = self._made(box, dataclasses.replace(self._identity, bundle=box.fitted.box.bundle.digest), kept)
        alike = self._runs_alike(work) - before.executor.cold
        work.executor.believe(before.executor, alike)
        needed = arena_bytes(box.costs, config.budget_bytes)
        smallest = min(cost.workspace_bytes for cost in box.costs.queries.values())
        most = max(needed, config.budget_bytes - smallest)
        rounds = self.post.prepare(config.sinks)
        try:
            memory = self.arena.prepare(box.store, needed, most, config.budget_bytes, box.layouts)
        except (RuntimeError, MemoryError, OSError) as error:
            raise _lacking(box, needed) from error
        fresh = tuple(camera for camera in work.cameras if camera.id not in kept)
        cold = frozenset(work.queries) - alike
        return PendingConfig(work, memory, rounds, fresh, cold)

    def go_over(self, successor: PendingConfig) -> None:
        """Let it be at work from now on; call it between two frames, in the thread that runs queries."""
        before, after = self.now, successor.work
        box, old, new = after.box, before.queries, after.queries
        if successor.memory.capacity_bytes is not None:  # else what the old engines see stays, and they go soon
            for engine in before.executor.device.engines.values():
                self.arena.unbind(engine)
        try:
            self.arena.take_over(successor.memory, box.store, box.fitted.box.config.budget_bytes, box.layouts)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Nothing fits now; so the next load makes way and asks for less.
            log.warning("out of memory while another box was taken up: %s", error)
        same = [query for query in new if old.get(query) == new[query]]
        after.executor.follow(before.executor, same)
        after.executor.publisher.follow(before.executor.publisher)
        after.executor.device.max_used_bytes = before.executor.device.max_used_bytes
        emptied = {query for query in old.keys() & new.keys() if not looks_alike(old[query], new[query])}
        sources = _sources(after)
        sources_before = _sources(before)
        moved = {query for query, source in sources.items() if sources_before.get(query) is not source}

        def meanwhile() -> None:
            self.ledger.add(new)
            self.mailboxes.change(new, emptied | moved)
            self._scene.change({query: demand.urgency for query, demand in box.fitted.box.demands().items()})
            if self._observer is not None:
                self._observer.change(box.fitted.box.bundle)
            if self._spool is not None:
                self._spool.queries = new

        first = self._intake.change(sources, meanwhile)
        for camera in before.cameras:
            if camera not in after.cameras:
                camera.stop()
        for camera in after.cameras:
            gains = any(sources[query] is camera for query in moved)
            camera.serve(self._wanted_of(box, camera.id), first if gains else 0)
        for camera in successor.fresh_cameras:
            camera.start()
        self.post.take(successor.rounds)
        self.now = after
        if successor.cold:
            after.executor.begin_warm_up(box.fitted.box.frames, successor.cold)

    def drop(self, successor: PendingConfig) -> None:
        """It is not needed after all."""
        self.arena.transfer.drop(successor.memory)

    def _made(self, box: ReadyBox, identity: RunIdentity, kept: Mapping[str, Camera]) -> ActiveConfig:
        opened = box.fitted.box
        config, bundle = opened.config, opened.bundle
        heard = _Heard(self.post, self._observer, self._spool, config.late == "publish")
        queries = {query.id: query for query in bundle.queries}
        parts = ExecutorParts(
            Device(self.arena, bindable_engines(box.engines, box.costs), box.costs, config.budget_bytes),
            box.fitted.policy,
            opened.demands(),
            self.mailboxes,
            Publisher(heard.answered, self.ledger, queries, identity, opened.damaged),
            self._scene.urgency,
            self.trace,
            heard.took,
        )
        looked_at = {query.camera for query in bundle.queries}
        cameras = [kept.get(name) or self._camera(box, name) for name in config.cameras if name in looked_at]
        return ActiveConfig(box, identity, Executor(parts), tuple(cameras))

    def _camera(self, box: ReadyBox, name: str) -> Camera:
        config = box.fitted.box.config.cameras[name]

        def put(query: str, frame: Frame) -> None:
            self._intake.put(camera, query, frame)

        camera = Camera(config, self._wanted_of(box, name), put, ended=self.mailboxes.nudge)
        return camera

    def _wanted_of(self, box: ReadyBox, camera: str) -> dict[str, FrameRequest]:
        return {query.id: frame_request(query) for query in box.fitted.box.bundle.queries if query.camera == camera}

    def _runs_alike(self, work: ActiveConfig) -> frozenset[str]:
        """Queries whose runs take as long as those of the same query did before, on the same engine."""
        before, engines = self.now.queries, self.now.executor.device.engines
        return frozenset(
            name for name, query in work.queries.items()
            if name in before and runs_alike(before[name], query)
            and getattr(engines[name], "name", "") == getattr(work.executor.device.engines[name], "name", "")
        )  # fmt: skip

    def _saw(self, query: str, frame: Frame) -> None:
        if self._observer is not None:
            self._observer.saw(query, frame)
        if frame.image is not None:
            self._scene.saw(query, frame.captured_at, frame.image)


class _Heard:
    """Who hears of results and turns: the post, of late ones if it `takes_late`, the observer where the box is watched,
    the spool where it has one.
    """

    def __init__(self, post: SinkManager, observer: Observing | None, spool: Spool | None, takes_late: bool) -> None:
        self._post, self._observer, self._spool, self._takes_late = post, observer, spool, takes_late

    def answered(self, parcel: ResultMessage) -> None:
        if self._observer is not None:
            self._observer.answered(parcel)
        if self._spool is not None:
            self._spool.offer(parcel)
        if self._takes_late or not parcel.record["late"]:
            self._post.offer(parcel)

    def took(self, query: str, turn: TurnTiming) -> None:
        if self._observer is not None:
            self._observer.took(query, turn)


def _sources(work: ActiveConfig) -> dict[str, Camera]:
    """The camera of each query."""
    cameras = {camera.id: camera for camera in work.cameras}
    return {name: cameras[query.camera] for name, query in work.queries.items()}


def _allocated(box: ReadyBox) -> Arena:
    config = box.fitted.box.config
    size = arena_bytes(box.costs, config.budget_bytes)
    try:
        return Arena(box.store, size, config.device, config.budget_bytes, layouts=box.layouts)
    except (RuntimeError, MemoryError) as error:
        raise _lacking(box, size) from error


def _lacking(box: ReadyBox, size: int) -> InputError:
    config = box.fitted.box.config
    fault = f"the device {config.device} has no {exact_text(size)} for weights"
    return InputError(config.path, fault, "give a smaller budget", "budget")


def _teller(trace: TraceWriter | None) -> Callable[[str, Frame], None] | None:
    """What tells a trace of every frame that arrives."""
    if trace is None:
        return None
    return lambda query, frame: trace.frame(query, frame.captured_at, time.monotonic())
