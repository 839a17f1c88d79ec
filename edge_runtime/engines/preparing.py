"""Choose, prepare and measure the engines of a bundle's queries.

`gemel profile` measures each engine that can run here (`measure_engines`) and writes the choice into the profile; a box
with `engine: auto` reads it, and without a profile runs every query on torch.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from edge_runtime.engines.architecture import architecture_key
from edge_runtime.engines.arranging import hold
from edge_runtime.engines.base import EngineError, FrameEngine
from edge_runtime.engines.eager.engine import FULL
from edge_runtime.engines.registry import AUTO, ENGINES, FALLBACK, engine_class, make_engine
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.layout import Order
from edge_runtime.memory.movers.base import arranges_ahead
from edge_runtime.memory.store import Store
from edge_runtime.memory.streams import computing
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
    run. Queries with an overflow, and all where the precision is not fp32, run on torch.
    """

    device: str = "cpu"
    precision: str = FULL
    stays: bool = True
    overflow: Mapping[str, Collection[str]] = field(default_factory=dict)

    def allows(self, query: str, engine: str) -> bool:
        """Whether the engine may be chosen for the query.

        Where weights come and go, an engine that takes channels-last weights alone would convert them at every load,
        unless they arrive so.
        """
        if engine == FALLBACK:
            return True
        loads_as_stored = Order.STORED in engine_class(engine).orders
        cheap = self.stays or loads_as_stored or arranges_ahead(self.device)
        return cheap and self.precision == FULL and query not in self.overflow


def engines_for(
    bundle: Bundle, name: str, request: EngineRequest | None = None, profiled: Mapping[str, str] | None = None
) -> dict[str, FrameEngine]:
    """The engine of each query, prepared and unbound.

    `name` is one of ENGINES, or "auto": then each query gets the engine that `profiled` names, and torch without one.
    Where an engine cannot run an architecture, torch does, and one line per architecture says why.
    """
    request = request or EngineRequest()
    chosen: dict[str, str] = {}
    for query in bundle.queries:
        wanted = (profiled or {}).get(query.id, FALLBACK) if name == AUTO else name
        allowed = request.precision == FULL and query.id not in request.overflow
        if name == AUTO:
            allowed = wanted in ENGINES and request.allows(query.id, wanted)
        elif query.id in request.overflow and wanted != FALLBACK:
            log.warning("engine %s cannot run query %s with an overflow; engine %s does", name, query.id, FALLBACK)
        chosen[query.id] = wanted if allowed else FALLBACK
    reported: set[str] = set()
    return {query: _prepare(bundle, query, engine, request, reported) for query, engine in chosen.items()}


def _prepare(bundle: Bundle, query: str, name: str, request: EngineRequest, reported: set[str]) -> FrameEngine:
    if name != FALLBACK:
        try:
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
    return make_engine(FALLBACK, bundle, query, request.device, precision=request.precision, overflow=overflow)


def available_engines(device: str) -> list[str]:
    """The engines that `gemel profile` measures on a device ("cpu" or "cuda")."""
    return [name for name in ENGINES if engine_class(name).automatic and engine_class(name).missing(device) is None]


def choose_engines(bundle: Bundle, device: str = "cpu") -> dict[str, str]:
    """The fastest engine of each query by measurement, all taking weights in one format.

    Queries of one architecture are measured once.
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
    return fastest_of_one_format(times, {name: engine_class(name).orders for name in names})


def fastest_of_one_format(
    times: Mapping[str, Mapping[str, float]], formats: Mapping[str, Collection[Order]]
) -> dict[str, str]:
    """The fastest engine of each query by its milliseconds per engine, all taking weights in one format.

    `formats` are the formats by engine; of the formats the one with the smaller sum of times is taken.
    """
    options = []
    for format in (Order.CHANNELS_LAST, Order.STORED):
        fitting = [name for name, own in formats.items() if format in own]
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
    times: dict[str, list[float]] = {}
    arena = Arena(Store.of_bundle(bundle), 0, device)
    try:
        for spell in range(SPELLS):
            for name in names:
                try:
                    if spell == 0:
                        engines[name] = make_engine(name, bundle, query, device)
                        engines[name].prepare()
                        times[name] = []
                    if name in times:
                        hold(arena, bundle, {query: engines[name]})
                        times[name] += _time_runs(engines[name], arena)
                except Exception as error:
                    if not (isinstance(error, (EngineError, InputError)) or is_out_of_memory(error)):
                        raise
                    log.info("engine %s cannot run %s: %s", name, bundle.query(query).model, error)
                    times.pop(name, None)
                if name in engines:
                    engines[name].unbind()
    finally:
        arena.close()
    if FALLBACK in names and FALLBACK not in times:
        raise InputError("engines", f"{FALLBACK} could not be measured", f"name one in the config (engine: {FALLBACK})")
    return {name: min(own) for name, own in times.items()}


def _time_runs(engine: FrameEngine, arena: Arena) -> list[float]:
    """Milliseconds of ROUNDS runs, after one warm-up run."""
    on_gpu, size = arena.device.type != "cpu", engine.query.input_size
    clock = time.perf_counter if on_gpu or torch.get_num_threads() > 1 else time.thread_time
    times = []
    with torch.inference_mode(), computing(arena.device):
        frames = torch.zeros(1, 3, size, size, device=arena.device).contiguous(memory_format=torch.channels_last)
        for _ in range(ROUNDS + 1):
            start = clock()
            engine.forward(frames)
            arena.synchronise()
            times.append(1000 * (clock() - start))
    return times[1:]
