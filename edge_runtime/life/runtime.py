"""The runtime of a box: what lives as long as its process, and the active config and bundle, which reloads replace."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gemel.edge_runtime.capture.camera import Camera
from gemel.edge_runtime.capture.push import AnyCamera, PushCamera
from gemel.edge_runtime.capture.reconnect import CameraPhase
from gemel.edge_runtime.capture.skipping import Skip
from gemel.edge_runtime.capture.sources import CameraConfig
from gemel.edge_runtime.events.clips import ClipRecorder
from gemel.edge_runtime.events.rules import QueryRules
from gemel.edge_runtime.events.stage import EventStage
from gemel.edge_runtime.events.tracking import DEFAULT_TRACKING
from gemel.edge_runtime.frames.part_times import PART_TIMES, Part
from gemel.edge_runtime.frames.queues import STILL, Frame, FrameRouter, Ledger, Mailboxes, SceneChange
from gemel.edge_runtime.frames.results import Publisher, RunIdentity
from gemel.edge_runtime.frames.samples import Spool
from gemel.edge_runtime.life.box import ReadyBox, frame_requests
from gemel.edge_runtime.life.device import Device, arena_bytes
from gemel.edge_runtime.life.executor import Executor, TurnTiming
from gemel.edge_runtime.life.load_monitor import LoadMonitor
from gemel.edge_runtime.life.switches import AdjustedRules, CameraSwitch, Switches, adjust_rules, parse_order
from gemel.edge_runtime.memory.page_memory import PageMemory, PageStore, open_memory
from gemel.edge_runtime.simulation.trace import TraceWriter
from gemel.edge_runtime.sinks.base import QUERY, ResultMessage
from gemel.edge_runtime.sinks.worker import SinkManager
from gemel.models.bundle import BundleQuery
from gemel.models.errors import InputError, exact_text
from gemel.models.out_of_memory import is_out_of_memory
from gemel.models.tasks import task_of

if TYPE_CHECKING:
    from gemel.edge_runtime.http.snapshots import Observer

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, eq=False)
class ActiveConfig:
    """What serves one config and bundle."""

    box: ReadyBox
    identity: RunIdentity
    executor: Executor
    cameras: tuple[AnyCamera, ...]

    @cached_property
    def queries(self) -> dict[str, BundleQuery]:
        """Its queries by id."""
        return {query.id: query for query in self.box.bundle.queries}

    @cached_property
    def query_bytes(self) -> dict[str, tuple[int, int]]:
        """By query the bytes of its tensors, and of those that no other query has."""
        bundle = self.box.bundle
        names = {query: set(bundle.names_in_order(query)) for query in self.queries}
        uses = Counter(name for tensors in names.values() for name in tensors)
        return {
            query: (sum(map(bundle.nbytes, tensors)), sum(bundle.nbytes(name) for name in tensors if uses[name] == 1))
            for query, tensors in names.items()
        }

    @property
    def sources(self) -> dict[str, AnyCamera]:
        """The camera of each query."""
        cameras = {camera.id: camera for camera in self.cameras}
        return {name: cameras[query.camera] for name, query in self.queries.items()}

    @property
    def bundle_problem(self) -> str | None:
        """One line when the bundle's file was changed in place after it was hashed: nothing is loaded from it then."""
        file, path = self.box.bundle.file, self.box.bundle.path
        if file.stamp() == file.opened_as:
            return None
        return f"{path} was changed in place: nothing is loaded from it; rename a new bundle into place, and reload"


@dataclass(frozen=True, eq=False)
class PendingConfig:
    """What is ready to become active; no thread of it runs yet. `cold` are queries that need a warm-up."""

    config: ActiveConfig
    memory: Any
    cold: frozenset[str]


class Runtime:
    """Memory, mailboxes, ledger and the receivers of results; `active` serves with them.

    Raises InputError where the device lacks the memory.
    """

    def __init__(self, box: ReadyBox, sinks: SinkManager, observer: Observer | None, spool: Spool | None) -> None:
        self.recorder = None if box.config.clips is None else ClipRecorder(box.config.clips)
        self.sinks, self._observer, self._spool = sinks, observer, spool
        size = arena_bytes(box.costs, box.arena_budget_bytes)
        with _describe_lack(box, size):
            self.arena = open_memory(box.store, size, box.config.device, box.arena_budget_bytes, box.layouts)
        self.trace = TraceWriter(box.config.trace) if box.config.trace else None
        self.ledger = Ledger(box.costs.queries)
        self.mailboxes = Mailboxes(box.costs.queries, self.ledger, on_frame=self._trace_frame)
        self._scene = SceneChange(_priorities(box))
        self._router = FrameRouter(self.mailboxes, self._receive_frame)
        identity = RunIdentity(box.bundle.digest)
        self.switches = Switches(None if box.config.spool is None else box.config.spool.path)
        self.events = EventStage(identity.run, sinks.offer, self.recorder)
        self._is_adjusted = True
        self.active = self._build(box, identity, {})
        self.adjusted = self._adjust(self.active)
        self._serve_cameras(self.active)
        self._router.change(self.active.sources)
        self._past_overflow_bytes = 0

    @property
    def overflow_bytes(self) -> int:
        """The bytes that runs of queries that overflow have copied so far."""
        return self._past_overflow_bytes + self.active.box.overflow_bytes

    def prepare(self, box: ReadyBox) -> PendingConfig:
        """Build what serves another box, beside the active one; InputError where the device lacks the memory.

        All that takes long or can fail is done here.
        """
        before = self.active
        kept = {
            camera.id: camera
            for camera in before.cameras
            if before.box.config.cameras[camera.id] == box.config.cameras.get(camera.id)
        }
        after = self._build(box, replace(before.identity, bundle=box.bundle.digest), kept)
        warm = _queries_of_equal_cost(before, after) - before.executor.cold
        after.executor.inherit_costs(before.executor, warm)
        budget = box.arena_budget_bytes
        needed = arena_bytes(box.costs, budget)
        smallest = min(cost.workspace_bytes for cost in box.costs.queries.values())
        if isinstance(box.store, PageStore) != isinstance(self.arena, PageMemory):
            problem = "runs on another kind of engine than the bundle that serves"
            raise InputError(box.bundle.path, problem, "start the box again")
        with _describe_lack(box, needed):
            memory = self.arena.prepare(box.store, needed, max(needed, budget - smallest), box.layouts)
        return PendingConfig(after, memory, frozenset(after.queries) - warm)

    def activate(self, pending: PendingConfig) -> None:
        """Serve the pending config from now on; call it between two frames, in the thread that runs queries."""
        before, after = self.active, pending.config
        self._take_over_memory(before, pending)
        old, new = before.queries, after.queries
        after.executor.publisher.inherit(before.executor.publisher)
        after.executor.device.max_used_bytes = before.executor.device.max_used_bytes
        after.executor.joint = before.executor.joint
        sources, old_sources = after.sources, before.sources
        moved = {name for name, source in sources.items() if old_sources.get(name) is not source}
        reframed = {name for name in old.keys() & new.keys() if old[name].region != new[name].region}

        def switch_queries() -> None:
            self.ledger.add(new)
            self.mailboxes.change(new, reframed | moved)
            self._scene.change(_priorities(after.box))
            if self._observer is not None:
                self._observer.change({name: query.camera for name, query in new.items()})
            if self._spool is not None:
                self._spool.queries = new
            self.adjusted = self._adjust(after)

        first = self._router.change(sources, switch_queries)
        for camera in set(before.cameras) - set(after.cameras):
            camera.stop()
        self._serve_cameras(after, {sources[name].id: first for name in moved})
        for camera in after.cameras:
            if camera not in before.cameras:
                camera.start()
        self.sinks.change(after.box.config.sinks)
        self._past_overflow_bytes += before.box.overflow_bytes
        self.active = after
        if pending.cold or after.executor.checks_passes:
            after.executor.begin_warm_up(after.box.costed.loaded.blank_frames(), pending.cold)

    def discard(self, pending: PendingConfig) -> None:
        """Release the memory of a pending config that is not needed."""
        self.arena.discard(pending.memory)

    def ease_decoding(self, load: LoadMonitor) -> None:
        """Let the cameras of an overloaded box decode no more than it answers."""
        answered = {name: own.answered_fps for name, own in load.queries.items()} if load.is_overloaded else {}
        for camera in self.active.cameras:
            if isinstance(camera, Camera):
                camera.answered_fps = answered

    def check_events(self) -> None:
        """Do what orders have changed, and end the events of cameras that are away; call it between two frames."""
        if not self._is_adjusted:
            self._is_adjusted = True
            self.adjusted = self._adjust(self.active)
            self._serve_cameras(self.active)
        away = {camera.id for camera in self.active.cameras if camera.state is not CameraPhase.STREAMING}
        self.events.check(away, time.monotonic())

    def order(self, kind: str, name: str, text: bytes, by: str) -> CameraSwitch:
        """Set some keys of a camera or query by JSON, from any thread, and return what is set of it.

        KeyError for an unknown name, InputError for an order that cannot be read or does not fit the config.
        """
        active = self.active
        cameras = {query.id: query.camera for query in active.queries.values()}
        if name not in (cameras if kind == QUERY else cameras.values()):
            raise KeyError(f"the box has no {kind} '{name:.60}'")
        keys = parse_order(kind, text)
        try:
            return self.switches.order(
                kind, name, keys, by, lambda values: adjust_rules(active.box.config, active.queries, values)
            )
        finally:
            self.events.paused = self.switches.list_paused(cameras)
            self._is_adjusted = False
            self.mailboxes.wake()

    def settings(self, query: str) -> dict[str, Any]:
        """What holds for a query: whether it is `on`, its `fps`, and where it has boxes `min_score` and `zones`."""
        adjusted, active = self.adjusted, self.active
        held: dict[str, Any] = {"on": query not in self.events.paused, "fps": adjusted.rates.get(query)}
        if task_of(active.queries[query]).has_boxes:
            rules = adjusted.rules.get(query, QueryRules())
            scores = dict(rules.filter.min_score)
            held |= {"min_score": scores.get("", 0.0) if scores.keys() <= {""} else scores, "zones": dict(rules.zones)}
        return held

    def _adjust(self, active: ActiveConfig) -> AdjustedRules:
        """Serve by the config and what a person has set."""
        config, adjusted = active.box.config, self.switches.adjust(active.box.config, active.queries)
        wants_pictures = (
            config.http is not None or self.recorder is not None or any(sink.wants_images for sink in config.sinks)
        )
        self.events.paused = self.switches.list_paused({query.id: query.camera for query in active.queries.values()})
        self.events.change(active.queries, adjusted.rules, adjusted.rates, wants_pictures)
        active.executor.change_rates(adjusted.rates)
        for name, engine in active.box.engines.items():
            is_tracked = name in adjusted.rules and adjusted.rules[name].tracking
            engine.weak_score = DEFAULT_TRACKING.weak_score if is_tracked else math.inf
        if self._observer is not None:
            self._observer.zones = {camera: tuple(self.events.places(camera)) for camera in config.cameras}
        return adjusted

    def _serve_cameras(self, active: ActiveConfig, first: Mapping[str, int] = MappingProxyType({})) -> None:
        """Give each query its frames at its rate; those of some cameras are numbered from `first` up."""
        for camera in active.cameras:
            requests = frame_requests(active.box.bundle, camera.id, self.adjusted.requests)
            camera.serve(requests, first.get(camera.id, 0))

    def _take_over_memory(self, before: ActiveConfig, pending: PendingConfig) -> None:
        box = pending.config.box
        if (
            not isinstance(self.arena, PageMemory) and pending.memory.capacity_bytes is not None
        ):  # the old arena goes, so the old engines must not refer to it
            for engine in before.executor.device.engines.values():
                self.arena.unbind(engine)
        try:
            self.arena.take_over(pending.memory, box.store, box.arena_budget_bytes, box.layouts)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Nothing fits now, so the next load evicts everything and shrinks the budget.
            log.warning("out of memory during a reload: %s", error)

    def _build(self, box: ReadyBox, identity: RunIdentity, kept: Mapping[str, AnyCamera]) -> ActiveConfig:
        config, bundle = box.config, box.bundle
        queries = {query.id: query for query in bundle.queries}
        executor = Executor(
            Device(self.arena, box.engines, box.costs, box.arena_budget_bytes),
            box.policy,
            box.costed.loaded.specs(),
            self.mailboxes,
            Publisher(
                partial(self._send, config.late == "publish"), self.ledger, queries, identity, box.costed.loaded.damaged
            ),
            self._scene.urgency,
            self.trace,
            self._record_turn,
        )
        cameras = [kept.get(camera.id) or self._build_camera(box, camera) for camera in box.costed.loaded.cameras]
        return ActiveConfig(box, identity, executor, tuple(cameras))

    def _build_camera(self, box: ReadyBox, config: CameraConfig) -> AnyCamera:
        def put(query: str, frame: Frame) -> str | None:
            with PART_TIMES.count(Part.EVENTS):
                refusal = self.events.admit(query, frame)
            outcome = self._router.put(camera, query, frame, refusal)
            if refusal == STILL and self._observer is not None:
                self._observer.hold_result(query, frame)
            return outcome

        def skip(query: str, reason: str) -> None:
            self._router.skip(camera, query, reason)

        requests, camera = frame_requests(box.bundle, config.id), None
        if config.is_push:
            camera = PushCamera(config, requests, put, skip, ended=self.mailboxes.wake)
        else:
            packets, main = None if self.recorder is None else self.recorder.ring(config.id), None
            if config.detect is not None and packets is not None:
                packets.is_main = True
                beside = replace(config, id=f"{config.id}, main stream", detect=None, skip=str(Skip.NONKEY))
                main, packets = Camera(beside, {}, lambda query, frame: None, packets=packets), None
            camera = Camera(
                config.seen, requests, put, ended=self.mailboxes.wake,
                packets=packets, is_on=lambda query: self.events.is_on(query, time.time()), main=main,
            )  # fmt: skip
        return camera

    def _receive_frame(self, query: str, frame: Frame) -> None:
        if self._observer is not None:
            self._observer.add_frame(query, frame)
        if frame.image is not None:
            self._scene.add(query, frame.captured_at, frame.image)

    def _trace_frame(self, query: str, frame: Frame) -> None:
        if self.trace is not None:
            self.trace.frame(query, frame.captured_at, time.monotonic())

    def _send(self, publishes_late: bool, message: ResultMessage) -> Mapping[str, Any]:
        """Hand out a result; returns its record as sinks get it."""
        if self._spool is not None:  # what a drift check compares is not filtered
            with PART_TIMES.count(Part.SPOOL):
                self._spool.offer(message)
        with PART_TIMES.count(Part.EVENTS):
            message = self.events.apply(message)
        if self._observer is not None:
            self._observer.add_result(message.record)
        if publishes_late or not message.record["late"]:
            self.sinks.offer(message)
        return message.record

    def _record_turn(self, query: str, timing: TurnTiming) -> None:
        if self._observer is not None:
            self._observer.add_turn(query, timing)


def _queries_of_equal_cost(before: ActiveConfig, after: ActiveConfig) -> frozenset[str]:
    """Queries with the same architecture and engine as before, so that their runs take equally long."""
    old, new = before.executor.device.engines, after.executor.device.engines
    return frozenset(
        name
        for name, query in after.queries.items()
        if name in before.queries
        and architecture_of(before.queries[name]) == architecture_of(query)
        and getattr(old[name], "name", "") == getattr(new[name], "name", "")
    )


def architecture_of(query: BundleQuery) -> tuple[Any, ...]:
    """What of a query decides how long a run takes: equal for networks that differ in their weights alone."""
    dtypes = {key: stored.dtype for key, stored in query.stored.items()}
    return query.network, query.model_args, query.input_size, len(query.classes), query.preprocess, dtypes


def _priorities(box: ReadyBox) -> dict[str, float]:
    return {query: spec.urgency for query, spec in box.costed.loaded.specs().items()}


@contextlib.contextmanager
def _describe_lack(box: ReadyBox, size: int) -> Iterator[None]:
    """InputError in place of the device's error where it has no memory for so many bytes of weights."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        problem = f"the device {box.config.device} has no {exact_text(size)} for weights"
        raise InputError(box.config.path, problem, "give a smaller budget", "budget") from error
