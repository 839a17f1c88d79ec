"""A box before it serves, in three stages: loaded (bundle hashed), costed (fits its budget), ready (engines made)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING
from typing import Any

import numpy as np

from edge_runtime.capture.sources import CameraConfig, FrameRequest
from edge_runtime.config import ACCURACY, FRAMES, BoxConfig
from edge_runtime.engines.base import EngineError, FrameEngine
from edge_runtime.engines.joint_run import runs_jointly
from edge_runtime.engines.registry import AUTO, FALLBACK, SESSIONS, engine_class, make_engine, open_sessions_by
from edge_runtime.engines.setup import EngineRequest, engines_for, held_bytes, layouts_within, unshared_store
from edge_runtime.engines.torch_engine import FULL
from edge_runtime.engines.weight_streaming import streamable_layers
from edge_runtime.events.rules import check_rules
from edge_runtime.memory.store import Layouts, Store
from edge_runtime.policies import policy_named
from edge_runtime.policies.streaming import pick_overflow
from edge_runtime.scheduler import Policy, QuerySpec
from edge_runtime.scheduler.costs import BATCHES, BatchCost, Costs, JointCost, QueryCost, all_bytes
from edge_runtime.scheduler.eviction import Overflow, OverflowLayer, overflow_of
from edge_runtime.scheduler.sessions import pick_sessions
from edge_runtime.scheduler.types import Curve
from edge_runtime.simulation.profile_io import (
    PROFILE_HINT,
    MeasuredProfile,
    machine_mismatch,
    measured_costs,
    monotone_batches,
    profile_path,
    read_profile,
    read_staleness,
)
from models.bundle import Bundle, open_bundle
from models.bundle.format import CHUNK_BYTES, Entry, tensor_hash
from models.bundle.signing import check_signature
from models.errors import BundleError, InputError, exact_text, join_names, message_of, size_text
from models.notes import add_note
from models.sharing.passes import joint_queries

HASH_THREADS = 2
"""hashlib releases the interpreter lock."""
UNPROFILED = "onnx"
"""The sessions that `auto` takes on a CPU without a profile."""
DEFAULT_FPS = 10.0
DEFAULT_SIZE = (1280, 720)
"""Width and height of the blank frames on which queries are warmed up."""
UNKNOWN_COPY_BYTES_PER_S = 1e12
"""Before anything is measured: a rate that no copy reaches."""

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, eq=False)
class LoadedBox:
    """A config with its bundle, every tensor hashed.

    `damaged` are queries with damaged tensors, and why: the others can run. `staleness` holds accuracy over age by
    query where that is the objective. `held_back` are queries that kept their old weights in a reload, and why.
    """

    config: BoxConfig
    bundle: Bundle
    damaged: Mapping[str, str]
    staleness: Mapping[str, Curve] = field(default_factory=dict)
    held_back: Mapping[str, str] = field(default_factory=dict)

    @property
    def cameras(self) -> list[CameraConfig]:
        """The cameras that its queries use."""
        used = {query.camera for query in self.bundle.queries}
        return [camera for camera in self.config.cameras.values() if camera.id in used]

    def specs(self) -> dict[str, QuerySpec]:
        """What the schedule knows of each query: the lower of its own and its camera's rate, priority, staleness."""
        specs = {}
        for query in self.bundle.queries:
            rates = [fps for fps in (query.fps, self.config.cameras[query.camera].fps) if fps]
            curve = self.staleness.get(query.id, ())
            specs[query.id] = QuerySpec(min(rates, default=DEFAULT_FPS), float(query.priority), curve)
        return specs

    def blank_frames(self) -> dict[str, np.ndarray]:
        """A black frame for each query (RGB uint8, H, W, 3) that holds its region; one for all with one view."""
        frames: dict[str, np.ndarray] = {}
        views: dict[object, np.ndarray] = {}
        for query in self.bundle.queries:
            right, bottom = query.region.least_frame()
            frame = np.zeros((max(DEFAULT_SIZE[1], bottom), max(DEFAULT_SIZE[0], right), 3), np.uint8)
            frames[query.id] = views.setdefault(query.view, frame)
        return frames


def load_box(config: BoxConfig) -> LoadedBox:
    """Open and hash the bundle. No camera is connected before the box serves, so none keeps it from starting.

    Raises InputError (one line: file, key, problem, hint) where the bundle is damaged, or a query has no camera.
    """
    bundle = open_bundle(config.bundle, config.factories, config.path.resolve().parent)
    if config.public_key is not None:
        check_signature(bundle, config.public_key)
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
    check_rules(config.path, config.rules, bundle.queries, push_cameras)
    cameras = {query.id: query.camera for query in bundle.queries}
    for index, sink in enumerate(config.sinks):
        if found := sink.topic_problem(cameras):
            raise InputError(config.path, *found, f"sinks[{index}].topic")
    return LoadedBox(config, bundle, damaged, _load_staleness(config, bundle))


def frame_requests(bundle: Bundle, camera: str) -> dict[str, FrameRequest]:
    """What each query of a camera takes of it."""
    return {query.id: FrameRequest(query.fps, query.region) for query in bundle.queries if query.camera == camera}


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
        return self.loaded.config.budget_bytes - self.held_bytes

    @property
    def is_resident(self) -> bool:
        """Whether all weights fit at once, so that each is loaded once."""
        return all_bytes(self.policy.view(self.within.costs)) <= self.arena_budget_bytes

    def with_engines(self, engines: Mapping[str, FrameEngine]) -> CostedBox:
        """The same box with other engines, except for queries that overflow.

        Raises InputError where one needs more than the budget leaves it.
        """
        overflow, loaded = self.within.tensors, self.loaded
        mixed = {**engines, **{query: self.engines[query] for query in overflow}}
        whole, within = _budgeted_costs(loaded, mixed, self.profile)
        for query in within.tensors.keys() - overflow.keys():
            problem = f"query '{query}' fits the budget on engine {FALLBACK}, not on {engines[query].name}"
            raise InputError(loaded.config.path, problem, f"use engine {FALLBACK}", "engine")
        if (within.tensors, within.overlaps) != (overflow, self.within.overlaps):
            problem = f"other weights overflow than on engine {FALLBACK}"
            raise InputError(loaded.config.path, problem, f"use engine {FALLBACK}", "engine")
        return replace(self, engines=mixed, whole=whole, within=within)

    def to_json(self) -> dict[str, Any]:
        """What is known before the start: the bytes needed, whether all can stay resident, and what overflows."""
        costs, config, bundle = self.policy.view(self.whole), self.loaded.config, self.loaded.bundle
        return {
            "bundle": str(bundle.path), "digest": bundle.digest, "device": config.device, "engine": config.engine,
            "budget_bytes": config.budget_bytes, "session_bytes": self.held_bytes,
            "weights_bytes": costs.resident_bytes(costs.tensor_bytes.keys()) + self.held_bytes,
            "workspace_bytes": max(cost.workspace_bytes for cost in costs.queries.values()),
            "damaged": self.loaded.damaged, "held_back": dict(self.loaded.held_back),
            "fits": all_bytes(costs) <= self.arena_budget_bytes,
            "least_budget_bytes": max(map(costs.alone_bytes, costs.queries)), "overflow_bytes": self.within.run_bytes,
        }  # fmt: skip


def cost_box(loaded: LoadedBox) -> CostedBox:
    """The costs of the box's queries on the fallback engine: preparing others may take minutes.

    Raises InputError, with the bytes needed, where a query does not fit the budget even alone (with an overflow, if the
    config allows that).
    """
    config, bundle = loaded.config, loaded.bundle
    policy = policy_named(config.policy, str(config.path), "policy")
    engines = {query.id: make_engine(FALLBACK, bundle, query.id, config.device) for query in bundle.queries}
    profile = _usable_profile(config, bundle)
    whole, within = _budgeted_costs(loaded, engines, profile)
    return CostedBox(loaded, policy, engines, profile, whole, within)


def known_costs(bundle: Bundle, engines: Mapping[str, FrameEngine], profile: MeasuredProfile | None) -> Costs:
    """Costs before anything ran: as measured, else bytes and deadlines; times are learned while running.

    A query whose engine takes no tensors of the arena needs none. Passes for several queries are those that these
    engines have.
    """
    measured = None if profile is None else measured_costs(bundle, profile)
    queries = {}
    for query in bundle.queries:
        engine, known = engines[query.id], None if measured is None else measured.queries[query.id]
        if known is not None and engine.takes_tensors:
            queries[query.id] = known
            continue
        runs_s = _session_runs(profile, query.id, engine)
        batches = (BatchCost(count, runs_s.get(count, 0.0), engine.workspace_of(count)) for count in BATCHES)
        names = bundle.names_in_order(query.id) if engine.takes_tensors else ()
        queries[query.id] = QueryCost.of_batches(names, query.sla_ms / 1000, monotone_batches(batches))
    sizes = {name: bundle.nbytes(name) for name in sorted({name for cost in queries.values() for name in cost.tensors})}
    alike = [
        own for own in joint_queries(bundle.queries, bundle.nbytes) if runs_jointly([engines[query] for query in own])
    ]
    if measured is None:
        joint = tuple(
            JointCost(own, replace(queries[own[0]], tensors=(), sla_s=min(queries[query].sla_s for query in own)))
            for own in alike
        )
        return Costs(queries, sizes, UNKNOWN_COPY_BYTES_PER_S, joint=joint)
    joint = tuple(one for one in measured.joint if one.queries in alike)
    return Costs(queries, sizes, measured.copy_bytes_per_s, measured.load_latency_s, joint=joint)


def _session_runs(profile: MeasuredProfile | None, query: str, engine: FrameEngine) -> dict[int, float]:
    """Seconds of a session's runs by batch, as measured."""
    sessions = profile.sessions if profile is not None else ()
    found = next((one for one in sessions if query in one.batches and one.engine == engine.session_of), None)
    return {} if found is None else {batch.count: batch.run_s for batch in found.batches[query]}


def _budgeted_costs(
    loaded: LoadedBox, engines: Mapping[str, FrameEngine], profile: MeasuredProfile | None
) -> tuple[Costs, Overflow]:
    """The costs with every weight resident, and those within the budget; InputError where there are none."""
    config, bundle = loaded.config, loaded.bundle

    def layers(name: str) -> Sequence[OverflowLayer]:
        query = bundle.query(name)
        return streamable_layers(engines[name].model, query, config.device)

    whole = known_costs(bundle, engines, profile)
    budget_bytes = config.budget_bytes - held_bytes(engines.values())
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
            f"{' even with an overflow' if config.overflow else ''}, the budget is {exact_text(config.budget_bytes)}"
        )
        hint = "" if config.overflow else ", or set `overflow: true`: then weights are copied in every run"
        raise InputError(config.path, problem, f"give at least {exact_text(needed)}{hint}", "budget")
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
    engines: Mapping[str, FrameEngine]
    store: Store
    costs: Costs
    layouts: Layouts

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
        return self.config.budget_bytes - held_bytes(self.engines.values())

    @property
    def engine_names(self) -> dict[str, str]:
        """The engine of each query by name."""
        return {query: engine.name for query, engine in self.engines.items()}

    @property
    def overflow_bytes(self) -> int:
        """The bytes that runs of queries that overflow have copied so far."""
        return sum(engine.overflow_bytes for engine in self.engines.values())


def prepare_engines(costed: CostedBox, serving: Collection[FrameEngine] = ()) -> ReadyBox:
    """Prepare the engines that the config names; with `auto` those of the profile, without one sessions and torch.

    A query gets an engine with weights of its own where these fit the budget beside all other weights, and beside
    those of the engines that are `serving`. Raises InputError where an engine does not fit the budget.
    """
    config, bundle = costed.loaded.config, costed.loaded.bundle
    for query, nbytes in costed.within.run_bytes.items():
        if nbytes:
            log.info("query %s overflows: every run copies %s", query, size_text(nbytes))
    ready = _open_sessions(costed, serving)
    if config.engine == AUTO and costed.profile is None:
        _log_unprofiled(costed, ready)
    stays = bool(ready) or costed.is_resident
    within = costed.within
    request = EngineRequest(config.device, config.precision, stays, within.tensors, within.overlaps)
    profiled = None
    if costed.profile is not None:
        profiled = {query: measured.engine for query, measured in costed.profile.queries.items()}
    engines = engines_for(bundle, config.engine, request, profiled, ready)
    try:
        return _build_ready(costed.with_engines(engines), engines)
    except InputError as error:
        if config.engine != AUTO:
            raise
        log.warning("%s; engine %s runs all queries", message_of(error), FALLBACK)
        return _build_ready(costed, engines_for(bundle, FALLBACK, request))


def _open_sessions(costed: CostedBox, serving: Collection[FrameEngine]) -> dict[str, FrameEngine]:
    """Engines with weights of their own, of as many queries as fit the budget beside the weights of all others."""
    loaded, bundle = costed.loaded, costed.loaded.bundle
    config, found = loaded.config, dict[str, FrameEngine]()
    for name, wanted in _wanted_sessions(costed).items():
        networks: dict[tuple[str | None, ...], list[str]] = {}
        for query in wanted:
            networks.setdefault(bundle.query(query).network, []).append(query)
        for queries in networks.values():  # apart: one that has no session leaves the others theirs
            try:
                for engines in open_sessions_by(name, bundle, queries, config.device, precision=config.precision):
                    mixed = {**found, **engines}
                    costs = known_costs(bundle, {**costed.engines, **mixed}, costed.profile)
                    needed = all_bytes(costed.policy.view(costs)) + held_bytes([*mixed.values(), *serving])
                    if needed <= config.budget_bytes:
                        found = mixed
                    else:
                        text = "a session of %s needs a budget of %s: the weights stay apart and shared"
                        log.info(text, ", ".join(engines), size_text(needed))
            except EngineError as error:
                log.log(WARNING if config.engine == name else INFO, "engine %s: no session: %s", name, error)
    return found


def _log_unprofiled(costed: CostedBox, ready: Collection[str]) -> None:
    """One line: what `auto` takes without a profile, and why."""
    rest = [query.id for query in costed.loaded.bundle.queries if query.id not in ready]
    if not costed.is_resident:
        choice = f"{FALLBACK}, since not all weights fit the budget"
    elif not ready:
        choice = f"{FALLBACK}, since there is no session of ONNX Runtime that fits the budget"
    else:
        choice = f"sessions of ONNX Runtime for {join_names(list(ready), 5)}"
        choice += f", {FALLBACK} for {join_names(rest, 5)}" if rest else ""
    log.info("engine auto without a profile: %s; `gemel profile` measures what is faster", choice)


def _wanted_sessions(costed: CostedBox) -> dict[str, list[str]]:
    """The queries by the engine that is to run them in sessions: the named one, or what the profile shows is faster.

    Without a profile a CPU takes ONNX Runtime's where all weights fit the budget: they outran torch on every
    architecture that was measured.
    """
    config, bundle = costed.loaded.config, costed.loaded.bundle
    able = [
        query.id
        for query in bundle.queries
        if query.id not in costed.loaded.damaged and query.id not in costed.within.tensors
    ]
    if config.engine in SESSIONS:
        return {config.engine: able}
    found: dict[str, list[str]] = {}
    if config.engine != AUTO or config.precision != FULL:
        return found
    if costed.profile is None:
        can_run = config.device == "cpu" and engine_class(UNPROFILED).missing(config.device) is None
        return {UNPROFILED: able} if can_run and costed.is_resident else found
    costs = costed.policy.view(costed.whole)
    for one in pick_sessions(costs, costed.profile.sessions, config.budget_bytes):
        if one.engine in SESSIONS:
            found.setdefault(one.engine, []).extend(query for query in one.batches if query in able)
    return found


def _build_ready(costed: CostedBox, engines: Mapping[str, FrameEngine]) -> ReadyBox:
    costs = costed.policy.view(costed.within.costs)
    store = unshared_store(Store.of_bundle(costed.loaded.bundle), costs)
    layouts = layouts_within(engines.values(), store.kinds, costs, costed.arena_budget_bytes)
    return ReadyBox(costed, engines, store, costs, layouts)
