"""Which tensors of a bundle are what their names say, and which queries cannot be trusted where some are not.

The first stage of a box: its bundle is opened and its cameras are asked for a frame, nothing is allocated.

The second stage of a box: what its queries cost and whether they fit its budget, before anything is allocated.

The third stage of a box: its engines, prepared, and how tensors lie in memory for them.

With engine `auto` a box runs the engines that its profile names, and torch without one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge_runtime.capture.sources import FrameRequest, ProbeResult, probe_cameras, region_problem
from edge_runtime.config import ACCURACY, FRAMES, BoxConfig
from edge_runtime.engines.base import FrameEngine
from edge_runtime.engines.registry import AUTO, FALLBACK, make_engine
from edge_runtime.engines.setup import EngineRequest, engines_for, layouts_within, unshared_store
from edge_runtime.engines.weight_streaming import streamable_layers
from edge_runtime.memory.memory_format import Layouts
from edge_runtime.memory.store import Store
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

# hashlib lets go of the interpreter meanwhile.
HASH_THREADS = 2


def tensors_of(bundle: Bundle) -> list[Entry]:
    """All that can be hashed, in file order."""
    return [entry for entry in bundle.header.entries.values() if not entry.is_pad]


def is_sound(bundle: Bundle, entry: Entry, paced: Callable[[int], object] = lambda _: None) -> bool:
    """Whether a tensor's bytes match its name; those that are gone do not. `paced` hears of every piece read."""
    digest, room = tensor_hash(entry.dtype, entry.shape), memoryview(bytearray(min(CHUNK_BYTES, entry.nbytes)))
    start = bundle.header.data_start + entry.begin
    try:
        for at in range(0, entry.nbytes, CHUNK_BYTES):
            piece = room[: min(CHUNK_BYTES, entry.nbytes - at)]
            bundle.file.read(start + at, piece)
            digest.update(piece)
            paced(len(piece))
    except OSError:
        return False
    return digest.hexdigest() == entry.name


def damaged_tensors(bundle: Bundle) -> frozenset[str]:
    """The tensors whose bytes do not match their names.

    Every tensor is rehashed once, when the box starts (the bundle is read for that anyway), so that no load has to:
    hashing runs at a few times less than the rate of copying.
    """
    entries = tensors_of(bundle)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        sound = pool.map(lambda entry: is_sound(bundle, entry), entries)
        return frozenset(entry.name for entry, whole in zip(entries, sound) if not whole)


def damaged_queries(bundle: Bundle, damaged: Collection[str]) -> dict[str, str]:
    """Query id -> what is damaged, of every query with one of these tensors."""
    reasons = {}
    for query in bundle.queries:
        hit = [(path, name) for path, name in query.places().items() if name in damaged]
        if hit:
            path, name = hit[0]
            more = f" and {len(hit) - 1} more" if len(hit) > 1 else ""
            reasons[query.id] = f"tensor {name[:12]} ({path}){more} does not match its content hash"
    return reasons


UNKNOWN_FPS = 10.0
AT_ONCE_S = 1.0
"""How long a box that starts waits for its files' first frames."""
CLOCK_TICK_S = 0.02
"""File systems note times no finer than this."""
PLAUSIBLE_SIZE = (1280, 720)
"""Width and height of the frames of a camera that has shown none yet."""

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, eq=False)
class LoadedBox:
    """A config whose bundle can be read, with a frame for every query (RGB uint8, H, W, 3).

    It is one of its camera's where that has answered, else a blank one. `answers` are those of the cameras that were
    asked. `bad` are tensors that are not what they were, `damaged` the queries with such, and why: the others can run.
    `staleness` holds the queries' curves where accuracy over time is aimed at.
    `held_back` are queries that kept the weights of the bundle before, and why (`edge_runtime.canary`).
    """

    config: BoxConfig
    bundle: Bundle
    bad: frozenset[str]
    damaged: Mapping[str, str]
    frames: Mapping[str, np.ndarray]
    answers: Mapping[str, ProbeResult]
    held_back: Mapping[str, str] = field(default_factory=dict)
    staleness: Mapping[str, Curve] = field(default_factory=dict)

    def demands(self) -> dict[str, QuerySpec]:
        """What each query asks for: the lower of its own and its camera's rate, its priority, what its answers are
        worth as they age."""
        demands = {}
        for query in self.bundle.queries:
            rates = [fps for fps in (query.fps, self.config.cameras[query.camera].fps) if fps]
            fps, known = min(rates, default=UNKNOWN_FPS), self.staleness.get(query.id)
            demands[query.id] = QuerySpec(fps, float(query.priority), () if known is None else known)
        return demands


def load_box(config: BoxConfig, check: bool = False) -> LoadedBox:
    """Open and rehash the bundle, and ask cameras that a query looks at for a frame, all at the same time.

    With `check` every one is asked and has its `timeout_s`. Else only files are, for a moment: a live camera is
    connected once, when the box serves, and no camera keeps a box from starting.
    Raises InputError (one line: file, key, fault, remedy) where the bundle is faulty, or a query has no camera.
    """
    bundle = open_bundle(config.bundle, config.factories, config.path.resolve().parent)
    if config.public_key is not None:
        check_signature(bundle, config.public_key)
    bad = _bad_tensors(bundle)
    damaged = _damaged(config, bundle, bad)
    _check_cameras(config, bundle)
    looked_at = {query.camera for query in bundle.queries}
    asked = [one for one in config.cameras.values() if one.id in looked_at and (check or not one.live)]
    answers = probe_cameras(asked, None if check else AT_ONCE_S)
    frames = {query.id: _frame(query, answers.get(query.camera)) for query in bundle.queries}
    return LoadedBox(config, bundle, bad, damaged, frames, answers, staleness=_staleness(config, bundle))


def _staleness(config: BoxConfig, bundle: Bundle) -> dict[str, Curve]:
    """The curves to aim by; InputError where they are asked for by name and were never measured."""
    if config.objective == FRAMES:
        return {}
    with contextlib.nullcontext() if config.objective == ACCURACY else contextlib.suppress(InputError):
        return read_staleness(bundle)
    return {}


def frame_request(query: BundleQuery) -> FrameRequest:
    """What a query wants of its camera."""
    return FrameRequest(query.fps, query.roi)


def _frame(query: BundleQuery, answer: ProbeResult | None) -> np.ndarray:
    """What the query's camera shows, or a blank picture in which its region lies."""
    if answer is not None and answer.image is not None:
        height, width = answer.image.shape[:2]
        if region_problem(query.id, frame_request(query), width, height) is None:
            return answer.image
    width, height = PLAUSIBLE_SIZE
    if query.roi is not None:
        width, height = max(width, math.ceil(query.roi[2])), max(height, math.ceil(query.roi[3]))
    return np.zeros((height, width, 3), np.uint8)


def _bad_tensors(bundle: Bundle) -> frozenset[str]:
    """Hash every tensor; from then on the file is read only as long as it looks as it did before.

    Raises BundleError where it changes meanwhile.
    """
    before = bundle.file.opened_as
    age_s = time.time() - before.mtime_ns / 1e9
    if 0 <= age_s < CLOCK_TICK_S:  # what is written a moment later could not be told by its time
        time.sleep(CLOCK_TICK_S)
    bad = damaged_tensors(bundle)
    if bundle.file.stamp() != before:
        raise BundleError(bundle.path, "changes while it is read", "write it under another name and rename it")
    bundle.file.proven = before
    return bad


def _damaged(config: BoxConfig, bundle: Bundle, bad: frozenset[str]) -> dict[str, str]:
    """Damage to some queries' tensors leaves the others running."""
    damaged = damaged_queries(bundle, bad)
    if len(damaged) == len(bundle.queries):
        fault = f"every query has damaged tensors: {next(iter(damaged.values()))}"
        raise BundleError(config.bundle, fault, "copy or build the bundle again")
    return damaged


def _check_cameras(config: BoxConfig, bundle: Bundle) -> None:
    for query in bundle.queries:
        if query.camera not in config.cameras:
            fault = f"query '{query.id}' of the bundle needs a camera '{query.camera}'"
            raise InputError(config.path, fault, f"add `{query.camera}: {{source: ...}}`", "cameras")
    for camera in config.cameras.keys() - {query.camera for query in bundle.queries}:
        log.warning("camera %s is not opened: no query of the bundle uses it", camera)


# Before anything is measured: a rate that no copy reaches.
UNKNOWN_COPY_BYTES_PER_S = 1e12


@dataclass(frozen=True, eq=False)
class CostedBox:
    """A box whose queries fit its budget with these `engines`, unbound as they are.

    `whole` are the costs with every weight resident, `within` those in which the budget is kept, where queries may
    overflow; `profile` is what was measured here, if anything.
    """

    box: LoadedBox
    policy: Policy
    engines: Mapping[str, FrameEngine]
    profile: MeasuredProfile | None
    whole: Costs
    within: Overflow

    @property
    def stays(self) -> bool:
        """Whether all weights fit at once, so that each is loaded once."""
        return all_bytes(self.policy.view(self.within.costs)) <= self.box.config.budget_bytes

    def on(self, engines: Mapping[str, FrameEngine]) -> CostedBox:
        """The same box with other engines; those of queries that overflow stay.

        Raises InputError where one needs more than the budget leaves it.
        """
        overflow, box = self.within.tensors, self.box
        mixed = {**engines, **{query: self.engines[query] for query in overflow}}
        whole, within = _costs_of(box, mixed, self.profile)
        for query in within.tensors.keys() - overflow.keys():
            fault = f"query '{query}' fits the budget on engine {FALLBACK}, not on {engines[query].name}"
            raise InputError(box.config.path, fault, f"use engine {FALLBACK}", "engine")
        return CostedBox(box, self.policy, mixed, self.profile, whole, within)

    def to_json(self) -> dict[str, Any]:
        """What is known before the start: what is needed, whether all of it can stay resident, and what overflows."""
        costs, config, bundle = self.policy.view(self.whole), self.box.config, self.box.bundle
        return {
            "bundle": str(bundle.path), "digest": bundle.digest, "device": config.device, "engine": config.engine,
            "budget_bytes": config.budget_bytes, "weights_bytes": costs.resident_bytes(costs.tensor_bytes.keys()),
            "workspace_bytes": max(cost.workspace_bytes for cost in costs.queries.values()),
            "damaged": self.box.damaged, "held_back": dict(self.box.held_back),
            "fits": all_bytes(costs) <= config.budget_bytes,
            "least_budget_bytes": max(map(costs.alone_bytes, costs.queries)), "overflow_bytes": self.within.run_bytes,
        }  # fmt: skip


def cost_box(box: LoadedBox) -> CostedBox:
    """What the box's queries cost on the engine that runs everything: preparing others may take minutes.

    Raises InputError, which says how much is needed, where a query does not fit the budget even alone: with an
    overflow, if the config allows that.
    """
    config, bundle = box.config, box.bundle
    policy = policy_named(config.policy, str(config.path), "policy")
    engines = {query.id: make_engine(FALLBACK, bundle, query.id, config.device) for query in bundle.queries}
    profile = _usable_profile(config, bundle)
    whole, within = _costs_of(box, engines, profile)
    return CostedBox(box, policy, engines, profile, whole, within)


def known_costs(bundle: Bundle, engines: Mapping[str, FrameEngine], profile: MeasuredProfile | None) -> Costs:
    """What is known before anything ran: as measured, else bytes and deadlines.

    What is not known is learned while running.
    """
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


def _costs_of(
    box: LoadedBox, engines: Mapping[str, FrameEngine], profile: MeasuredProfile | None
) -> tuple[Costs, Overflow]:
    """The costs with every weight resident, and those within the budget; InputError where there are none."""
    config, bundle = box.config, box.bundle

    def layers(query: str) -> Sequence[OverflowLayer]:
        asked = bundle.query(query)
        return streamable_layers(engines[query].model, asked.input_size, asked.tensors, asked.stored, config.device)

    whole = known_costs(bundle, engines, profile)
    within = overflow_of(whole, config.budget_bytes, layers)
    _refuse_too_large(config, whole, within)
    return whole, within


def _refuse_too_large(config: BoxConfig, whole: Costs, within: Overflow) -> None:
    budget = exact_text(config.budget_bytes)
    if within.lacking and config.overflow:
        query, needed = max(within.lacking.items(), key=lambda one: one[1])
        fault = f"query '{query}' alone needs {exact_text(needed)} even with an overflow, the budget is {budget}"
        raise InputError(config.path, fault, f"give at least {exact_text(needed)}", "budget")
    too_large = {*within.lacking, *within.tensors}
    if not too_large or config.overflow:
        return
    query = max(too_large, key=whole.alone_bytes)
    needed, workspace = whole.alone_bytes(query), whole.queries[query].workspace_bytes
    fault = (
        f"query '{query}' alone needs {exact_text(needed)}, {size_text(needed - workspace)} of weights and "
        f"{size_text(workspace)} of workspace, the budget is {budget}"
    )
    least = within.lacking.get(query)
    remedy = (
        f"give at least {exact_text(least)} with `overflow: true`"
        if least is not None
        else f"set `overflow: true`: it copies {size_text(within.run_bytes[query])} in every run then"
    )
    raise InputError(config.path, fault, f"give at least {exact_text(needed)}, or {remedy}", "budget")


def _usable_profile(config: BoxConfig, bundle: Bundle) -> MeasuredProfile | None:
    """What `gemel profile` measured on this machine with the engine asked for; None, with a warning, without it."""
    try:
        profile = read_profile(bundle)
    except InputError as error:
        log.warning("%s", error)
        return None
    differing = machine_mismatch(profile, config.device)
    if differing is None and profile.engine != config.engine:
        differing = f"engine {profile.engine}, here {config.engine}"
    if differing is None:
        return profile
    log.warning(
        "%s: measured on another machine or engine (%s); %s", profile_path(bundle.path), differing, PROFILE_HINT
    )
    return None


@dataclass(frozen=True, eq=False)
class ReadyBox:
    """A box that can serve: its engines, unbound, the store of its tensors and how these lie for the engines.

    `costs` are as the policy sees them.
    """

    fitted: CostedBox
    engines: Mapping[str, FrameEngine]
    store: Store
    costs: Costs
    layouts: Layouts

    def names(self) -> dict[str, str]:
        """The engine of each query by name."""
        return {query: engine.name for query, engine in self.engines.items()}


def prepare_engines(fitted: CostedBox) -> ReadyBox:
    """Prepare the engines that the config names; with `auto` those of the profile, and torch without one.

    Raises InputError where an engine does not fit the budget.
    """
    config, bundle = fitted.box.config, fitted.box.bundle
    request = EngineRequest(config.device, config.precision, fitted.stays, fitted.within.tensors)
    for query, nbytes in fitted.within.run_bytes.items():
        log.info("query %s overflows: %s are copied in every run", query, size_text(nbytes))
    profiled = None if fitted.profile is None else {q: one.engine for q, one in fitted.profile.queries.items()}
    engines = engines_for(bundle, config.engine, request, profiled)
    try:
        return _equipped(fitted.on(engines), engines)
    except InputError as error:
        if config.engine != AUTO:
            raise
        log.warning("%s; engine %s runs all queries", message_of(error), FALLBACK)
        return _equipped(fitted, engines_for(bundle, FALLBACK, request))


def format_engines(names: Mapping[str, str], link: str = "on") -> str:
    """How many queries run on which engine: `3 queries on compiled and 1 query on torch`."""
    counted = Counter(names.values()).most_common()
    return " and ".join(f"{count} {'query' if count == 1 else 'queries'} {link} {name}" for name, count in counted)


def _equipped(fitted: CostedBox, engines: Mapping[str, FrameEngine]) -> ReadyBox:
    costs = fitted.policy.view(fitted.within.costs)
    store = unshared_store(Store.of_bundle(fitted.box.bundle), costs)
    layouts = layouts_within(engines.values(), store.kinds, costs, fitted.box.config.budget_bytes)
    return ReadyBox(fitted, engines, store, costs, layouts)
