"""A box before it serves, in three stages: loaded (bundle hashed), costed (fits its budget), ready (engines made)."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gemel.edge_runtime.capture.sources import CameraConfig, FrameRequest
from gemel.edge_runtime.engines.base import FALLBACK, FrameEngine, runs_jointly
from gemel.edge_runtime.engines.providers import unavailable_reason
from gemel.edge_runtime.engines.setup import EngineRequest, are_paged, engines_for, held_bytes
from gemel.edge_runtime.events.rules import check_rules
from gemel.edge_runtime.life.config import ACCURACY, FRAMES, BoxConfig
from gemel.edge_runtime.memory.usage import DECODER_BYTES, base_bytes
from gemel.edge_runtime.policies import policy_named
from gemel.edge_runtime.policies.streaming import pick_overflow
from gemel.edge_runtime.scheduler import Policy, QuerySpec
from gemel.edge_runtime.scheduler.costs import BATCHES, BatchCost, Costs, JointCost, QueryCost, all_bytes
from gemel.edge_runtime.scheduler.eviction import Overflow, OverflowLayer, overflow_of
from gemel.edge_runtime.scheduler.types import Curve
from gemel.edge_runtime.simulation.profile_io import (
    PROFILE_HINT,
    MeasuredProfile,
    machine_mismatch,
    measured_costs,
    monotone_batches,
    profile_path,
    read_profile,
    read_staleness,
)
from gemel.models.bundle import Bundle, open_bundle
from gemel.models.bundle.format import CHUNK_BYTES, Entry, tensor_hash
from gemel.models.bundle.signing import check_signature
from gemel.models.errors import BundleError, InputError, exact_text, size_text
from gemel.models.notes import add_note
from gemel.models.sharing.passes import joint_queries

HASH_THREADS = 2
"""hashlib releases the interpreter lock."""
DEFAULT_FPS = 10.0
DEFAULT_SIZE = (1280, 720)
"""Width and height of the blank frames on which queries are warmed up."""
UNKNOWN_COPY_BYTES_PER_S = 1e12
"""Before anything is measured: a rate that no copy reaches."""

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, eq=False)
class LoadedBox:
    """A config with its bundle, every tensor hashed.

    `base_bytes` is what the process takes without weights and workspaces, once that is known. `damaged` are queries
    with damaged tensors, and why: the others can run. `staleness` holds accuracy over age by
    query where that is the objective. `held_back` are queries that kept their old weights in a reload, and why.
    """

    config: BoxConfig
    bundle: Bundle
    damaged: Mapping[str, str]
    staleness: Mapping[str, Curve] = field(default_factory=dict)
    held_back: Mapping[str, str] = field(default_factory=dict)
    base_bytes: int = 0

    @property
    def budget_bytes(self) -> int:
        """What weights and workspaces may take: the budget, and what `memory` leaves beside the process itself."""
        config = self.config
        if config.memory_bytes is None:
            return config.budget_bytes
        return min(config.budget_bytes, config.memory_bytes - self.base_bytes)

    @property
    def cameras(self) -> list[CameraConfig]:
        """The cameras that its queries use."""
        used = {query.camera for query in self.bundle.queries}
        return [camera for camera in self.config.cameras.values() if camera.id in used]

    def specs(self) -> dict[str, QuerySpec]:
        """What the schedule knows of each query: the lower of its own and its camera's rate, priority, staleness."""
        rates = query_rates(self.config, self.bundle)
        return {
            query.id: QuerySpec(rates[query.id], float(query.priority), self.staleness.get(query.id, ()))
            for query in self.bundle.queries
        }

    def blank_frames(self) -> dict[str, np.ndarray]:
        """A black frame for each query (RGB uint8, H, W, 3) that holds its region; one for all with one view."""
        frames: dict[str, np.ndarray] = {}
        views: dict[object, np.ndarray] = {}
        for query in self.bundle.queries:
            right, bottom = query.region.least_frame()
            frame = np.zeros((max(DEFAULT_SIZE[1], bottom), max(DEFAULT_SIZE[0], right), 3), np.uint8)
            frames[query.id] = views.setdefault(query.view, frame)
        return frames


def query_rates(config: BoxConfig, bundle: Bundle) -> dict[str, float]:
    """The frames a second of each query: the lower of its rate and its camera's."""
    rates = {}
    for query in bundle.queries:
        given = [fps for fps in (query.fps, config.cameras[query.camera].fps) if fps]
        rates[query.id] = min(given, default=DEFAULT_FPS)
    return rates


def load_box(config: BoxConfig) -> LoadedBox:
    """Open and hash the bundle. No camera is connected before the box serves, so none keeps it from starting.

    Raises InputError (one line: file, key, problem, hint) where the bundle is damaged, or a query has no camera.
    """
    bundle = open_bundle(config.bundle, config.factories, config.path.resolve().parent)
    if config.public_key is not None:
        release = check_signature(bundle, config.public_key)
        if release.is_over(time.time()):
            text = f"the bundle was signed to serve until {release.end_text}; it is served on"
            add_note(config.path, text, "sign and install a newer one")
    damaged = _damaged_queries(bundle, _damaged_tensors(bundle))
    if bundle.file.stamp() != bundle.file.opened_as:
        raise BundleError(bundle.path, "changes while it is read", "write it under another name and rename it")
    bundle.file.proven = bundle.file.opened_as  # from now on reads fail when the file was changed in place
    if len(damaged) == len(bundle.queries):
        problem = f"every query has damaged tensors: {next(iter(damaged.values()))}"
        raise BundleError(config.bundle, problem, "copy or build the bundle again")
    for query in bundle.queries:
        if query.camera not in config.cameras:
            problem = f"query '{query.id}' of the bundle needs a camera '{query.camera}'"
            raise InputError(config.path, problem, f"add `{query.camera}: {{source: ...}}`", "cameras")
        camera_fps = config.cameras[query.camera].fps
        if query.fps and camera_fps and camera_fps < query.fps:
            text = f"query {query.id} is to have {query.fps:g} frames a second, its camera gives {camera_fps:g}"
            add_note(config.path, text, f"raise `fps` of camera {query.camera}")
    push_cameras = {name for name, camera in config.cameras.items() if camera.is_push}
    check_rules(config.path, config.rules, bundle.queries, push_cameras, query_rates(config, bundle))
    cameras = {query.id: query.camera for query in bundle.queries}
    for index, sink in enumerate(config.sinks):
        if found := sink.topic_problem(cameras):
            raise InputError(config.path, *found, f"sinks[{index}].topic")
    return LoadedBox(config, bundle, damaged, _load_staleness(config, bundle))


def frame_requests(
    bundle: Bundle, camera: str, rates: Mapping[str, float | None] | None = None
) -> dict[str, FrameRequest]:
    """What each query of a camera takes of it, at other rates than the bundle says where `rates` are given."""
    return {
        query.id: FrameRequest(query.fps if rates is None else rates[query.id], query.region)
        for query in bundle.queries
        if query.camera == camera
    }


def _damaged_tensors(bundle: Bundle) -> set[str]:
    """The tensors whose bytes do not match their names."""

    def is_whole(entry: Entry) -> bool:
        digest, buffer = tensor_hash(entry.dtype, entry.shape), memoryview(bytearray(min(CHUNK_BYTES, entry.nbytes)))
        start = bundle.header.data_start + entry.begin
        try:
            for at in range(0, entry.nbytes, CHUNK_BYTES):
                piece = buffer[: entry.nbytes - at]
                bundle.file.read(start + at, piece)
                digest.update(piece)
        except OSError:
            return False
        return digest.hexdigest() == entry.name

    entries = [entry for entry in bundle.header.entries.values() if not entry.is_pad]
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return {entry.name for entry, whole in zip(entries, pool.map(is_whole, entries)) if not whole}


def _damaged_queries(bundle: Bundle, damaged: Collection[str]) -> dict[str, str]:
    """By query with one of these tensors, which one is damaged."""
    reasons = {}
    for query in bundle.queries:
        hit = [(path, name) for path, name in query.places().items() if name in damaged]
        if hit:
            path, name = hit[0]
            more = f" and {len(hit) - 1} more" if len(hit) > 1 else ""
            reasons[query.id] = f"tensor {name[:12]} ({path}){more} does not match its content hash"
    return reasons


def _load_staleness(config: BoxConfig, bundle: Bundle) -> dict[str, Curve]:
    """Accuracy over age by query; InputError where the config asks for it and it was never measured."""
    if config.objective == FRAMES:
        return {}
    try:
        return read_staleness(bundle)
    except InputError:
        if config.objective == ACCURACY:
            raise
        return {}


@dataclass(frozen=True, eq=False)
class CostedBox:
    """A box whose queries fit its budget with these `engines`, which are not bound to weights.

    `whole` are the costs with every weight resident, `within` those that keep the budget, where queries may overflow;
    `profile` is what was measured on this machine, if anything.
    """

    loaded: LoadedBox
    policy: Policy
    engines: Mapping[str, FrameEngine]
    profile: MeasuredProfile | None
    whole: Costs
    within: Overflow

    @property
    def held_bytes(self) -> int:
        """The bytes of weights that engines have outside the arena."""
        return held_bytes(self.engines.values())

    @property
    def arena_budget_bytes(self) -> int:
        """The budget of the arena and the workspaces."""
        return self.loaded.budget_bytes - self.held_bytes

    @property
    def is_resident(self) -> bool:
        """Whether all weights fit at once, so that each is loaded once."""
        return all_bytes(self.policy.view(self.within.costs)) <= self.arena_budget_bytes

    def to_json(self) -> dict[str, Any]:
        """What is known before the start: the bytes needed, whether all can stay resident, and what overflows."""
        costs, config, bundle = self.policy.view(self.whole), self.loaded.config, self.loaded.bundle
        return {
            "bundle": str(bundle.path), "digest": bundle.digest, "device": config.device, "engine": config.engine,
            "budget_bytes": self.loaded.budget_bytes, "memory_bytes": config.memory_bytes,
            "base_bytes": self.loaded.base_bytes,
            "weights_bytes": costs.resident_bytes(costs.tensor_bytes.keys()) + self.held_bytes,
            "workspace_bytes": max(cost.workspace_bytes for cost in costs.queries.values()),
            "damaged": self.loaded.damaged, "held_back": dict(self.loaded.held_back),
            "fits": all_bytes(costs) <= self.arena_budget_bytes,
            "least_budget_bytes": max(map(costs.alone_bytes, costs.queries)), "overflow_bytes": self.within.run_bytes,
        }  # fmt: skip


def cost_box(loaded: LoadedBox) -> CostedBox:
    """The box with its engines, whose graphs are prepared if need be, and its costs.

    Raises InputError, with the bytes needed, where a query does not fit the budget even alone (with an overflow, if the
    config allows that), and where no installed engine can run one.
    """
    config, bundle = loaded.config, loaded.bundle
    policy = policy_named(config.policy, str(config.path), "policy")
    request = EngineRequest(
        config.device,
        config.engine_options,
        damaged=loaded.damaged,
        max_workspace_bytes=config.budget_bytes,
    )
    if request.provider is not None and (reason := unavailable_reason(request.provider)):
        raise InputError(config.path, reason, "", "provider")
    engines = engines_for(bundle, config.engine, request)
    loaded = _with_base(loaded)
    profile = _usable_profile(config, bundle)
    whole, within = _budgeted_costs(loaded, engines, profile)
    return CostedBox(loaded, policy, engines, profile, whole, within)


def _with_base(loaded: LoadedBox) -> LoadedBox:
    """The box with what its process takes by itself; InputError where `memory` is not more."""
    memory = loaded.config.memory_bytes
    streams = sum(1 + (camera.detect is not None) for camera in loaded.cameras if not camera.is_push)
    base = base_bytes() + DECODER_BYTES * streams
    if memory is not None and base >= memory:
        problem = f"the process alone takes {exact_text(base)}, without any weights"
        raise InputError(loaded.config.path, problem, f"give more than {size_text(base)}", "memory")
    return replace(loaded, base_bytes=base)


def known_costs(bundle: Bundle, engines: Mapping[str, FrameEngine], profile: MeasuredProfile | None) -> Costs:
    """Costs before anything ran: as measured, else bytes and deadlines; times are learned while running.

    Mapped weights count where all are mapped: beside an arena they stay. Passes for several queries are those that
    these engines have.
    """
    paged, queries, sizes = are_paged(engines.values()), dict[str, QueryCost](), dict[str, int]()
    for query in bundle.queries:
        engine = engines[query.id]
        measured = None if profile is None else profile.queries[query.id]
        if measured is not None and measured.engine == engine.name:
            batches = measured.batches
        else:
            batches = tuple(BatchCost(count, 0.0, engine.workspace_of(count)) for count in BATCHES)
        weights = engine.weights if paged or not engine.in_pages else {}
        sizes |= weights
        queries[query.id] = QueryCost.of_batches(weights, query.sla_ms / 1000, monotone_batches(batches))
    alike = [
        own for own in joint_queries(bundle.queries, bundle.nbytes) if runs_jointly([engines[query] for query in own])
    ]
    if profile is None:
        joint = tuple(
            JointCost(own, replace(queries[own[0]], tensors=(), sla_s=min(queries[query].sla_s for query in own)))
            for own in alike
        )
        return Costs(queries, sizes, UNKNOWN_COPY_BYTES_PER_S, joint=joint)
    joint = tuple(one for one in measured_costs(bundle, profile).joint if one.queries in alike)
    return Costs(queries, sizes, profile.copy_bytes_per_s, profile.load_latency_s, joint=joint)


def _for_detector_port(costs: Costs, config: BoxConfig, bundle: Bundle) -> Costs:
    """The costs with the deadline of the port's clients for the queries that it answers.

    A result that comes later is of no use to them, and what waits behind its run would be late as well.
    """
    if config.detector_port is None:
        return costs
    answered = {
        query.id for query in bundle.queries if query.task == "detection" and config.cameras[query.camera].is_push
    }
    within_s = config.detector_port.run_within_s

    def limit(cost: QueryCost) -> QueryCost:
        return replace(cost, sla_s=min(cost.sla_s, within_s))

    queries = {name: limit(cost) if name in answered else cost for name, cost in costs.queries.items()}
    joint = tuple(
        replace(one, cost=limit(one.cost)) if answered.intersection(one.queries) else one for one in costs.joint
    )
    return replace(costs, queries=queries, joint=joint)


def _budgeted_costs(
    loaded: LoadedBox, engines: Mapping[str, FrameEngine], profile: MeasuredProfile | None
) -> tuple[Costs, Overflow]:
    """The costs with every weight resident, and those within the budget; InputError where there are none."""
    config, bundle = loaded.config, loaded.bundle

    def layers(name: str) -> Sequence[OverflowLayer]:
        engine = engines[name]
        if engine.in_pages:
            return ()
        from gemel.edge_runtime.engines.weight_streaming import streamable_layers

        return streamable_layers(engine.model, bundle.query(name), config.device)  # type: ignore[attr-defined]

    whole = _for_detector_port(known_costs(bundle, engines, profile), config, bundle)
    budget_bytes = loaded.budget_bytes - held_bytes(engines.values())
    shares = policy_named(config.policy).view(whole) is whole
    if config.overflow and shares:
        within = pick_overflow(whole, loaded.specs(), budget_bytes, layers, config.device != "cpu")
    else:
        within = overflow_of(whole, budget_bytes, layers)
    too_large: Mapping[str, int] = within.lacking
    if not config.overflow:
        too_large = {query: whole.alone_bytes(query) for query in (*within.lacking, *within.tensors)}
    if too_large:
        query, needed = max(too_large.items(), key=lambda item: item[1])
        workspace = whole.queries[query].workspace_bytes
        problem = (
            f"query '{query}' alone needs {exact_text(needed)}, {size_text(workspace)} of it for its workspace"
            f"{' even with an overflow' if config.overflow else ''}, the budget is {exact_text(loaded.budget_bytes)}"
        )
        hint = "" if config.overflow else ", or set `overflow: true`: then weights are copied in every run"
        if config.memory_bytes is None:
            raise InputError(config.path, problem, f"give at least {exact_text(needed)}{hint}", "budget")
        needed += loaded.base_bytes
        problem += f", {size_text(loaded.base_bytes)} of `memory` are the process itself"
        raise InputError(config.path, problem, f"give at least {exact_text(needed)}{hint}", "memory")
    return whole, within


def _usable_profile(config: BoxConfig, bundle: Bundle) -> MeasuredProfile | None:
    """What `gemel profile` measured on this machine with the config's engine; else None, with a warning or note."""
    try:
        profile = read_profile(bundle)
    except InputError as error:
        log.warning("%s", error)
        return None
    mismatch = machine_mismatch(profile, config.device)
    if mismatch is None and profile.engine != config.engine:
        mismatch = f"engine {profile.engine}, here {config.engine}"
    if mismatch is None:
        return profile
    add_note(profile_path(bundle.path), f"left out: measured on another machine or engine ({mismatch})", PROFILE_HINT)
    return None


@dataclass(frozen=True, eq=False)
class ReadyBox:
    """A box that can serve: its engines, not bound to weights, the store of its tensors and their layouts in memory.

    `costs` are as the policy sees them.
    """

    costed: CostedBox
    store: Any
    costs: Costs
    layouts: Collection[str]

    @property
    def engines(self) -> Mapping[str, FrameEngine]:
        return self.costed.engines

    @property
    def config(self) -> BoxConfig:
        return self.costed.loaded.config

    @property
    def bundle(self) -> Bundle:
        return self.costed.loaded.bundle

    @property
    def policy(self) -> Policy:
        return self.costed.policy

    @property
    def arena_budget_bytes(self) -> int:
        """The budget of the arena and the workspaces, without the weights that engines have outside."""
        return self.costed.arena_budget_bytes

    @property
    def engine_names(self) -> dict[str, str]:
        """The engine of each query by name."""
        return {query: engine.name for query, engine in self.engines.items()}

    @property
    def overflow_bytes(self) -> int:
        """The bytes that runs of queries that overflow have copied so far."""
        return sum(engine.overflow_bytes for engine in self.engines.values())


def prepare_engines(costed: CostedBox) -> ReadyBox:
    """The box with the engines of queries that overflow, and the store of its weights.

    Raises InputError where an engine does not fit the budget.
    """
    loaded, within = costed.loaded, costed.within
    for query, nbytes in within.run_bytes.items():
        if nbytes:
            log.info("query %s overflows: every run copies %s", query, size_text(nbytes))
    if within.tensors:
        ready = {query: engine for query, engine in costed.engines.items() if query not in within.tensors}
        request = EngineRequest(loaded.config.device, loaded.config.engine_options, within.tensors, within.overlaps)
        engines = engines_for(loaded.bundle, FALLBACK, request, ready)
        costed = replace(costed, engines=engines)
    return _build_ready(costed)


def _build_ready(costed: CostedBox) -> ReadyBox:
    costs, engines, bundle = costed.policy.view(costed.within.costs), costed.engines, costed.loaded.bundle
    if are_paged(engines.values()):
        from gemel.edge_runtime.engines.mapped import page_store

        return ReadyBox(costed, page_store(engines, costs.tensor_bytes), costs, frozenset())
    from gemel.edge_runtime.engines.layouts import layouts_within, unshared_store
    from gemel.edge_runtime.memory.store import Store

    store = unshared_store(Store.of_bundle(bundle), costs)
    layouts = layouts_within(engines.values(), store.kinds, costs, costed.arena_budget_bytes)
    return ReadyBox(costed, store, costs, layouts)
