"""A box before it serves, in three stages: loaded (bundle hashed, cameras probed), costed (it fits its budget), ready
(engines prepared).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge_runtime.capture.sources import FrameRequest, ProbeResult, probe_cameras
from edge_runtime.config import ACCURACY, FRAMES, BoxConfig
from edge_runtime.engines.base import FrameEngine
from edge_runtime.engines.registry import AUTO, FALLBACK, make_engine
from edge_runtime.engines.setup import EngineRequest, engines_for, layouts_within, unshared_store
from edge_runtime.engines.weight_streaming import streamable_layers
from edge_runtime.memory.store import Layouts, Store
from edge_runtime.policies import policy_named
from edge_runtime.scheduler import Policy, QuerySpec
from edge_runtime.scheduler.costs import BATCHES, BatchCost, Costs, QueryCost, all_bytes
from edge_runtime.scheduler.eviction import Overflow, OverflowLayer, overflow_of
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
from models.bundle import Bundle, BundleQuery, open_bundle
from models.bundle.format import CHUNK_BYTES, Entry, tensor_hash
from models.bundle.signing import check_signature
from models.errors import BundleError, InputError, exact_text, message_of, size_text

HASH_THREADS = 2
"""hashlib releases the interpreter lock."""
DEFAULT_FPS = 10.0
PROBE_TIMEOUT_S = 1.0
"""How long a box that starts waits for the first frames of its files."""
CLOCK_TICK_S = 0.02
"""Resolution of file times."""
DEFAULT_SIZE = (1280, 720)
"""Width and height assumed for the frames of a camera that has shown none yet."""
UNKNOWN_COPY_BYTES_PER_S = 1e12
"""Before anything is measured: a rate that no copy reaches."""

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, eq=False)
class LoadedBox:
    """A config with its bundle, and a frame for every query (RGB uint8, H, W, 3): its camera's, else a blank one.

    `probes` are the first frames of the cameras that were probed. `damaged` are queries with damaged tensors, and why:
    the others can run. `staleness` holds accuracy over age by query where that is the objective. `held_back` are
    queries that kept their old weights in a reload, and why.
    """

    config: BoxConfig
    bundle: Bundle
    damaged: Mapping[str, str]
    frames: Mapping[str, np.ndarray]
    probes: Mapping[str, ProbeResult]
    staleness: Mapping[str, Curve] = field(default_factory=dict)
    held_back: Mapping[str, str] = field(default_factory=dict)

    def specs(self) -> dict[str, QuerySpec]:
        """What the schedule knows of each query: the lower of its own and its camera's rate, priority, staleness."""
        specs = {}
        for query in self.bundle.queries:
            rates = [fps for fps in (query.fps, self.config.cameras[query.camera].fps) if fps]
            curve = self.staleness.get(query.id, ())
            specs[query.id] = QuerySpec(min(rates, default=DEFAULT_FPS), float(query.priority), curve)
        return specs


def load_box(config: BoxConfig, check: bool = False) -> LoadedBox:
    """Open and hash the bundle, and probe the cameras that its queries use, all at the same time.

    With `check` every camera is probed within its `timeout_s`. Else only files are, for a moment: a live camera is
    connected once, when the box serves, and no camera keeps a box from starting.
    Raises InputError (one line: file, key, problem, hint) where the bundle is damaged, or a query has no camera.
    """
    bundle = open_bundle(config.bundle, config.factories, config.path.resolve().parent)
    if config.public_key is not None:
        check_signature(bundle, config.public_key)
    damaged = damaged_queries(bundle, _hash_bundle(bundle))
    if len(damaged) == len(bundle.queries):
        problem = f"every query has damaged tensors: {next(iter(damaged.values()))}"
        raise BundleError(config.bundle, problem, "copy or build the bundle again")
    _check_cameras(config, bundle)
    used = {query.camera for query in bundle.queries}
    probed = [camera for camera in config.cameras.values() if camera.id in used and (check or not camera.live)]
    probes = probe_cameras(probed, None if check else PROBE_TIMEOUT_S)
    frames = {query.id: _first_frame(query, probes.get(query.camera)) for query in bundle.queries}
    return LoadedBox(config, bundle, damaged, frames, probes, _load_staleness(config, bundle))


def frame_requests(bundle: Bundle, camera: str) -> dict[str, FrameRequest]:
    """What each query of a camera takes of it."""
    return {query.id: FrameRequest(query.fps, query.roi) for query in bundle.queries if query.camera == camera}


def damaged_tensors(bundle: Bundle) -> frozenset[str]:
    """The tensors whose bytes do not match their names: all are hashed once, when the bundle is opened."""
    entries = [entry for entry in bundle.header.entries.values() if not entry.is_pad]
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        matches = pool.map(lambda entry: _matches_name(bundle, entry), entries)
        return frozenset(entry.name for entry, is_whole in zip(entries, matches) if not is_whole)


def _matches_name(bundle: Bundle, entry: Entry) -> bool:
    digest, buffer = tensor_hash(entry.dtype, entry.shape), memoryview(bytearray(min(CHUNK_BYTES, entry.nbytes)))
    start = bundle.header.data_start + entry.begin
    try:
        for at in range(0, entry.nbytes, CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, entry.nbytes - at)]
            bundle.file.read(start + at, piece)
            digest.update(piece)
    except OSError:
        return False
    return digest.hexdigest() == entry.name


def damaged_queries(bundle: Bundle, damaged: Collection[str]) -> dict[str, str]:
    """By query with one of these tensors, which one is damaged."""
    reasons = {}
    for query in bundle.queries:
        hit = [(path, name) for path, name in query.places().items() if name in damaged]
        if hit:
            path, name = hit[0]
            more = f" and {len(hit) - 1} more" if len(hit) > 1 else ""
            reasons[query.id] = f"tensor {name[:12]} ({path}){more} does not match its content hash"
    return reasons


def _hash_bundle(bundle: Bundle) -> frozenset[str]:
    """The damaged tensors. From then on reads fail when the file was changed in place; BundleError if it is already."""
    before = bundle.file.opened_as
    age_s = time.time() - before.mtime_ns / 1e9
    if 0 <= age_s < CLOCK_TICK_S:  # a write a moment later could have the same time
        time.sleep(CLOCK_TICK_S)
    damaged = damaged_tensors(bundle)
    if bundle.file.stamp() != before:
        raise BundleError(bundle.path, "changes while it is read", "write it under another name and rename it")
    bundle.file.proven = before
    return damaged


def _check_cameras(config: BoxConfig, bundle: Bundle) -> None:
    for query in bundle.queries:
        if query.camera not in config.cameras:
            problem = f"query '{query.id}' of the bundle needs a camera '{query.camera}'"
            raise InputError(config.path, problem, f"add `{query.camera}: {{source: ...}}`", "cameras")
    for camera in config.cameras.keys() - {query.camera for query in bundle.queries}:
        log.warning("camera %s is not opened: no query of the bundle uses it", camera)


def _first_frame(query: BundleQuery, probe: ProbeResult | None) -> np.ndarray:
    """The frame of the query's camera, or a blank picture that holds its region."""
    if probe is not None and probe.image is not None:
        height, width = probe.image.shape[:2]
        if FrameRequest(query.fps, query.roi).region_problem(query.id, width, height) is None:
            return probe.image
    width, height = DEFAULT_SIZE
    if query.roi is not None:
        width, height = max(width, math.ceil(query.roi[2])), max(height, math.ceil(query.roi[3]))
    return np.zeros((height, width, 3), np.uint8)


def _load_staleness(config: BoxConfig, bundle: Bundle) -> dict[str, Curve]:
    """Accuracy over age by query; InputError where the config asks for it and it was never measured."""
    if config.objective == FRAMES:
        return {}
    with contextlib.nullcontext() if config.objective == ACCURACY else contextlib.suppress(InputError):
        return read_staleness(bundle)
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
    def is_resident(self) -> bool:
        """Whether all weights fit at once, so that each is loaded once."""
        return all_bytes(self.policy.view(self.within.costs)) <= self.loaded.config.budget_bytes

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
        return CostedBox(loaded, self.policy, mixed, self.profile, whole, within)

    def to_json(self) -> dict[str, Any]:
        """What is known before the start: the bytes needed, whether all can stay resident, and what overflows."""
        costs, config, bundle = self.policy.view(self.whole), self.loaded.config, self.loaded.bundle
        return {
            "bundle": str(bundle.path), "digest": bundle.digest, "device": config.device, "engine": config.engine,
            "budget_bytes": config.budget_bytes, "weights_bytes": costs.resident_bytes(costs.tensor_bytes.keys()),
            "workspace_bytes": max(cost.workspace_bytes for cost in costs.queries.values()),
            "damaged": self.loaded.damaged, "held_back": dict(self.loaded.held_back),
            "fits": all_bytes(costs) <= config.budget_bytes,
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
    """Costs before anything ran: as measured, else bytes and deadlines; times are learned while running."""
    if profile is not None:
        return measured_costs(bundle, profile)
    queries = {}
    for query in bundle.queries:
        first, *larger = monotone_batches(
            BatchCost(count, 0.0, engines[query.id].workspace_of(count)) for count in BATCHES
        )
        queries[query.id] = QueryCost(
            bundle.names_in_order(query.id), 0.0, first.workspace_bytes, query.sla_ms / 1000, tuple(larger)
        )
    names = {name for cost in queries.values() for name in cost.tensors}
    return Costs(queries, {name: bundle.nbytes(name) for name in names}, UNKNOWN_COPY_BYTES_PER_S)


def _budgeted_costs(
    loaded: LoadedBox, engines: Mapping[str, FrameEngine], profile: MeasuredProfile | None
) -> tuple[Costs, Overflow]:
    """The costs with every weight resident, and those within the budget; InputError where there are none."""
    config, bundle = loaded.config, loaded.bundle

    def layers(name: str) -> Sequence[OverflowLayer]:
        query = bundle.query(name)
        return streamable_layers(engines[name].model, query.input_size, query.tensors, query.stored, config.device)

    whole = known_costs(bundle, engines, profile)
    within = overflow_of(whole, config.budget_bytes, layers)
    _check_budget(config, whole, within)
    return whole, within


def _check_budget(config: BoxConfig, whole: Costs, within: Overflow) -> None:
    budget = exact_text(config.budget_bytes)
    if within.lacking and config.overflow:
        query, needed = max(within.lacking.items(), key=lambda item: item[1])
        problem = f"query '{query}' alone needs {exact_text(needed)} even with an overflow, the budget is {budget}"
        raise InputError(config.path, problem, f"give at least {exact_text(needed)}", "budget")
    too_large = {*within.lacking, *within.tensors}
    if not too_large or config.overflow:
        return
    query = max(too_large, key=whole.alone_bytes)
    needed, workspace = whole.alone_bytes(query), whole.queries[query].workspace_bytes
    problem = (
        f"query '{query}' alone needs {exact_text(needed)}, {size_text(needed - workspace)} of weights and "
        f"{size_text(workspace)} of workspace, the budget is {budget}"
    )
    if query in within.lacking:
        hint = f"give at least {exact_text(within.lacking[query])} with `overflow: true`"
    else:
        hint = f"set `overflow: true`: it copies {size_text(within.run_bytes[query])} in every run then"
    raise InputError(config.path, problem, f"give at least {exact_text(needed)}, or {hint}", "budget")


def _usable_profile(config: BoxConfig, bundle: Bundle) -> MeasuredProfile | None:
    """What `gemel profile` measured on this machine with the config's engine; else None, with a warning."""
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
    path = profile_path(bundle.path)
    log.warning("%s: measured on another machine or engine (%s); %s", path, mismatch, PROFILE_HINT)
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
    def engine_names(self) -> dict[str, str]:
        """The engine of each query by name."""
        return {query: engine.name for query, engine in self.engines.items()}

    @property
    def overflow_bytes(self) -> int:
        """The bytes that runs of queries that overflow have copied so far."""
        return sum(engine.overflow_bytes for engine in self.engines.values())


def prepare_engines(costed: CostedBox) -> ReadyBox:
    """Prepare the engines that the config names; with `auto` those of the profile, and torch without one.

    Raises InputError where an engine does not fit the budget.
    """
    config, bundle = costed.loaded.config, costed.loaded.bundle
    request = EngineRequest(config.device, config.precision, costed.is_resident, costed.within.tensors)
    for query, nbytes in costed.within.run_bytes.items():
        log.info("query %s overflows: every run copies %s", query, size_text(nbytes))
    profiled = None
    if costed.profile is not None:
        profiled = {query: measured.engine for query, measured in costed.profile.queries.items()}
    engines = engines_for(bundle, config.engine, request, profiled)
    try:
        return _build_ready(costed.with_engines(engines), engines)
    except InputError as error:
        if config.engine != AUTO:
            raise
        log.warning("%s; engine %s runs all queries", message_of(error), FALLBACK)
        return _build_ready(costed, engines_for(bundle, FALLBACK, request))


def format_engines(names: Mapping[str, str]) -> str:
    """How many queries run on which engine: `3 queries on compiled and 1 query on torch`."""
    counted = Counter(names.values()).most_common()
    return " and ".join(f"{count} {'query' if count == 1 else 'queries'} on {name}" for name, count in counted)


def _build_ready(costed: CostedBox, engines: Mapping[str, FrameEngine]) -> ReadyBox:
    costs = costed.policy.view(costed.within.costs)
    store = unshared_store(Store.of_bundle(costed.loaded.bundle), costs)
    layouts = layouts_within(engines.values(), store.kinds, costs, costed.loaded.config.budget_bytes)
    return ReadyBox(costed, engines, store, costs, layouts)
