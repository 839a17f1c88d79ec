"""Choose, prepare and measure the engines of a bundle's queries, and the formats of their weights.

`gemel profile` measures each engine that can run here (`choose_engines`) and writes the choice into the profile; a box
with `engine: auto` reads it, and without a profile runs every query on torch.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from edge_runtime.engines.base import EngineError, FrameEngine
from edge_runtime.engines.package_cache import architecture_key
from edge_runtime.engines.registry import AUTO, ENGINES, FALLBACK, engine_class, make_engine
from edge_runtime.engines.torch_engine import FULL
from edge_runtime.memory.allocator import footprint_bytes
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.store import Kinds, Layouts, Store, WeightFormat, channels_last_layouts
from edge_runtime.memory.transfer import arrives_reordered, on_compute_stream
from edge_runtime.scheduler.costs import Costs, all_bytes, stored_name
from models.bundle import Bundle
from models.device import is_out_of_memory
from models.errors import InputError, message_of, one_line

SPELLS, ROUNDS = 3, 3
"""Engines are timed in turns: ROUNDS runs in each of SPELLS, of which the fastest counts."""

log = logging.getLogger("gemel.run")


@dataclass(frozen=True)
class EngineRequest:
    """On which device and in which precision (`PRECISIONS` of the torch engine) engines run.

    `stays`: all weights fit the budget and are loaded once. `overflow`: the tensors by query that are copied in every
    run, where it `overlaps` beside the layers before. Queries with an overflow, and all where the precision is not
    fp32, run on torch.
    """

    device: str = "cpu"
    precision: str = FULL
    stays: bool = True
    overflow: Mapping[str, Collection[str]] = field(default_factory=dict)
    overlaps: bool = False

    def loads_fast(self, engine: str) -> bool:
        """Whether weights stay, or are not reordered for the engine at every load: taken as stored, or arriving so."""
        as_stored = WeightFormat.STORED in engine_class(engine).formats
        return self.stays or as_stored or arrives_reordered(self.device)


def engines_for(
    bundle: Bundle,
    name: str,
    request: EngineRequest | None = None,
    profiled: Mapping[str, str] | None = None,
    ready: Mapping[str, FrameEngine] | None = None,
) -> dict[str, FrameEngine]:
    """The engine of each query, prepared and unbound; queries of `ready` have theirs.

    `name` is one of ENGINES, or "auto": then each query gets the engine that `profiled` names, and torch without one.
    Where an engine cannot run an architecture, torch does, and one line per architecture gives the reason.
    """
    request = request or EngineRequest()
    engines: dict[str, FrameEngine] = {}
    reported: set[str] = set()
    for query in (query.id for query in bundle.queries):
        wanted = name
        if ready and query in ready:
            engines[query] = ready[query]
            continue
        if name == AUTO:
            wanted = (profiled or {}).get(query, FALLBACK)
            wanted = wanted if wanted in ENGINES and request.loads_fast(wanted) else FALLBACK
        elif query in request.overflow and name != FALLBACK:
            log.warning("engine %s cannot run query %s with an overflow; engine %s does", name, query, FALLBACK)
        if request.precision != FULL or query in request.overflow:
            wanted = FALLBACK
        engines[query] = _prepare_engine(bundle, query, wanted, request, reported)
    return engines


def _prepare_engine(bundle: Bundle, query: str, name: str, request: EngineRequest, reported: set[str]) -> FrameEngine:
    if name != FALLBACK:
        try:
            if not engine_class(name).takes_tensors:
                raise EngineError("it has no session that fits the budget")
            engine = make_engine(name, bundle, query, request.device)
            engine.prepare()
            return engine
        except Exception as error:  # compilers and exporters raise errors of any type
            reason = one_line(error) if isinstance(error, EngineError) else message_of(error)
            line = f"engine {name} cannot run {bundle.query(query).model}: {reason}; engine {FALLBACK} does"
            if line not in reported:
                log.warning("%s", line)
                reported.add(line)
    overflow = request.overflow.get(query, ())
    options = {"precision": request.precision, "overflow": overflow, "overlaps": request.overlaps}
    return make_engine(FALLBACK, bundle, query, request.device, **options)


def held_bytes(engines: Collection[FrameEngine]) -> int:
    """Bytes of weights that these engines have outside the arena."""
    return sum(held.nbytes for held in {id(one.shared): one.shared for one in engines if one.shared}.values())


def common_format(engines: Collection[FrameEngine], stays: bool = True) -> WeightFormat:
    """The format that all these engines take: the fastest to run where weights stay, else the fastest to load.

    Reordering a weight takes longer than copying it, so weights that come and go are reordered only for engines that
    take no other format, or where they arrive so.
    """
    engines = [engine for engine in engines if engine.takes_tensors]
    taken = frozenset(WeightFormat).intersection(*(engine.formats for engine in engines))
    return max(taken) if stays or all(arrives_reordered(engine.device) for engine in engines) else min(taken)


def layouts_for(kinds: Kinds, weight_format: WeightFormat) -> Layouts:
    """The tensors that are channels last in this format."""
    return channels_last_layouts(kinds) if weight_format == WeightFormat.CHANNELS_LAST else frozenset()


def layouts_within(engines: Collection[FrameEngine], kinds: Kinds, costs: Costs, budget_bytes: int) -> Layouts:
    """The layouts of these tensors for these engines within a budget."""
    return layouts_for(kinds, common_format(engines, all_bytes(costs) <= budget_bytes))


def resident_arena(bundle: Bundle, engines: Mapping[str, FrameEngine]) -> Arena:
    """An arena with all tensors of these engines' queries in the fastest format they all take; the engines bound."""
    arena = Arena(Store.of_bundle(bundle), 0, next(iter(engines.values())).device)
    load_all(arena, bundle, engines)
    return arena


def load_all(arena: Arena, bundle: Bundle, engines: Mapping[str, FrameEngine]) -> None:
    """The same in an arena of this bundle; engines that were bound to it before must be unbound."""
    names = tuple(dict.fromkeys(name for query in engines for name in bundle.names_in_order(query)))
    layouts = layouts_for({name: arena.store.kinds[name] for name in names}, common_format(engines.values()))
    arena.resize(sum(footprint_bytes(bundle.nbytes(name)) for name in names), None, layouts)
    arena.change((), names)
    for engine in engines.values():
        engine.bind(arena.tensor)


def unshared_store(store: Store, costs: Costs) -> Store:
    """The store under the names that `costs` uses: `tensor@query` for a policy without sharing, the same bytes."""
    names = {name: stored_name(name) for name in costs.tensor_bytes}
    return replace(
        store,
        extents={name: store.extents[stored] for name, stored in names.items()},
        kinds={name: store.kinds[stored] for name, stored in names.items()},
    )


def available_engines(device: str) -> list[str]:
    """The engines that `gemel profile` measures on a device ("cpu" or "cuda")."""
    return [name for name in ENGINES if engine_class(name).automatic and engine_class(name).missing(device) is None]


def choose_engines(bundle: Bundle, device: str = "cpu") -> dict[str, str]:
    """The fastest engine of each query by measurement, all taking weights in one format.

    Queries of one architecture are measured once. Raises InputError where torch cannot run a query.
    """
    names = available_engines(device)
    if names == [FALLBACK]:
        return {query.id: FALLBACK for query in bundle.queries}
    measured: dict[str, dict[str, float]] = {}
    times: dict[str, Mapping[str, float]] = {}
    for query in bundle.queries:
        stored = sorted({own.dtype for own in query.stored.values()})
        model = bundle.build(query.id, "meta")
        key = json.dumps([stored, architecture_key(query, model, torch.device(device))], sort_keys=True)
        if key not in measured:
            measured[key] = measure_engines(bundle, query.id, device, names)
            found = sorted(measured[key].items(), key=lambda one: one[1])
            log.info("one frame of %s: %s", query.model, ", ".join(f"{name} {ms:.1f} ms" for name, ms in found))
        times[query.id] = measured[key]
    return fastest_of_one_format(times, {name: engine_class(name).formats for name in names})


def fastest_of_one_format(
    times: Mapping[str, Mapping[str, float]], formats: Mapping[str, Collection[WeightFormat]]
) -> dict[str, str]:
    """The fastest engine of each query by its milliseconds per engine, all taking weights in one format.

    `formats` are those of each engine; the format with the smaller sum of times is taken.
    """
    options = []
    for weight_format in (WeightFormat.CHANNELS_LAST, WeightFormat.STORED):
        fitting = [name for name, own in formats.items() if weight_format in own]
        if all(any(name in found for name in fitting) for found in times.values()):
            chosen = {
                query: min((name for name in fitting if name in found), key=found.__getitem__)
                for query, found in times.items()
            }
            options.append((sum(times[query][name] for query, name in chosen.items()), chosen))
    return min(options, key=lambda option: option[0])[1]


def measure_engines(bundle: Bundle, query: str, device: str, names: Collection[str]) -> dict[str, float]:
    """Milliseconds of a run of one frame by engine; engines that cannot run the query, or lack memory, are left out.

    The smallest time counts: other work on the machine makes runs longer, never shorter. Raises InputError where torch
    cannot run the query.
    """
    engines: dict[str, FrameEngine] = {}
    times: dict[str, list[float]] = {name: [] for name in names}
    arena = Arena(Store.of_bundle(bundle), 0, device)
    try:
        for _ in range(SPELLS):
            for name in tuple(times):
                try:
                    if name not in engines:
                        engines[name] = make_engine(name, bundle, query, device)
                        engines[name].prepare()
                    load_all(arena, bundle, {query: engines[name]})
                    times[name] += _time_runs(engines[name], arena)
                except Exception as error:
                    if not (isinstance(error, (EngineError, InputError)) or is_out_of_memory(error)):
                        raise
                    log.info("engine %s cannot run %s: %s", name, bundle.query(query).model, error)
                    del times[name]
                if name in engines:
                    engines[name].unbind()
    finally:
        arena.close()
    if FALLBACK in names and FALLBACK not in times:
        raise InputError("engines", f"{FALLBACK} could not be measured", f"name one in the config (engine: {FALLBACK})")
    return {name: min(own) for name, own in times.items()}


def _time_runs(engine: FrameEngine, arena: Arena) -> list[float]:
    """Milliseconds of ROUNDS runs, after one warm-up run."""
    on_gpu, size = arena.device.type != "cpu", engine.query.preprocess.size
    clock = time.perf_counter if on_gpu or torch.get_num_threads() > 1 else time.thread_time
    times = []
    with torch.inference_mode(), on_compute_stream(arena.device):
        frames = torch.zeros(1, 3, *size, device=arena.device).contiguous(memory_format=torch.channels_last)
        for _ in range(ROUNDS + 1):
            start = clock()
            engine.forward(frames)
            arena.synchronise()
            times.append(1000 * (clock() - start))
    return times[1:]
