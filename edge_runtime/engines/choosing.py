"""Which engine runs which query: the one asked for, or the fastest here, measured once per architecture."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from edge_runtime.engines.architecture import key_of
from edge_runtime.engines.arranging import resident
from edge_runtime.engines.base import EngineError, FrameEngine
from edge_runtime.engines.cache import EngineCache
from edge_runtime.engines.eager.engine import FULL
from edge_runtime.engines.registry import AUTO, ENGINES, engine_named, make_engine
from edge_runtime.memory.layout import Order
from models.bundle import Bundle
from models.errors import InputError

FALLBACK = "torch"
"""Runs every architecture."""
SUFFIX = ".choice"
ROUNDS = 7

log = logging.getLogger("gemel.run")


def engines_for(
    bundle: Bundle,
    wanted: str,
    device: str = "cpu",
    precision: str = FULL,
    stays: bool = True,
    streamed: Mapping[str, Collection[str]] | None = None,
) -> dict[str, FrameEngine]:
    """The engine of each query, prepared and unbound; `wanted` is a name of ENGINES or "auto".

    A `precision` other than fp32 is for the engine torch alone, whatever was wanted. So are queries that stream:
    `streamed` names their tensors that do. `stays` says that weights are loaded once (`fastest`).

    Where an engine cannot run an architecture, torch does, and one line per architecture says why. What takes long
    the first time (compiling, measuring) is said before it begins. All take the weights in one order.
    """
    streamed = streamed or {}
    on_torch = {query.id for query in bundle.queries if precision != FULL or query.id in streamed}
    others = [query.id for query in bundle.queries if query.id not in on_torch]
    if wanted not in (AUTO, FALLBACK):
        for query in streamed:
            log.warning("engine %s cannot stream the weights of query %s; engine %s does", wanted, query, FALLBACK)
    chosen = fastest(bundle, device, stays, others) if wanted == AUTO else dict.fromkeys(others, wanted)
    told: set[str] = set()
    return {
        query.id: make_engine(
            FALLBACK, bundle, query.id, device, precision=precision, streamed=streamed.get(query.id, ())
        )
        if query.id in on_torch
        else _prepared(chosen[query.id], bundle, query.id, device, told)
        for query in bundle.queries
    }


def fastest(
    bundle: Bundle, device: str = "cpu", stays: bool = True, queries: Sequence[str] | None = None
) -> dict[str, str]:
    """The name of the fastest engine for each query (all unless named), of those that take the weights in one order.

    Each architecture is measured once on a machine: runs of one frame, engines in turns, medians. The times are kept
    in the engine's cache; where that cannot be used, nothing is measured and torch runs. Where weights come and go
    (`stays` False), engines that want them arranged are left out: each load would take as long as several.
    """
    asked = [query.id for query in bundle.queries] if queries is None else list(queries)
    usable = [
        name
        for name in ENGINES
        if engine_named(name).automatic
        and engine_named(name).missing(device) is None
        and (stays or Order.STORED in engine_named(name).orders)
    ]
    if usable == [FALLBACK] or not asked:
        return dict.fromkeys(asked, FALLBACK)
    try:
        cache = EngineCache()
    except InputError as error:
        log.warning("%s; engine torch runs all queries", error)
        return dict.fromkeys(asked, FALLBACK)
    times = {query: _times(bundle, query, device, usable, cache) for query in asked}
    return best_of_one_order(times, {name: engine_named(name).orders for name in usable})


def best_of_one_order(
    times: Mapping[str, Mapping[str, float]], orders: Mapping[str, Collection[Order]]
) -> dict[str, str]:
    """The fastest engine of each query by its times (query -> engine -> ms), all taking weights in one order.

    `orders` is `FrameEngine.orders` by engine; the order with which the times come to less in sum is taken.
    """
    options = []
    for order in (Order.CHANNELS_LAST, Order.STORED):
        fitting = [name for name, own in orders.items() if order in own]
        if all(any(name in found for name in fitting) for found in times.values()):
            chosen = {
                query: min((name for name in fitting if name in found), key=found.__getitem__)
                for query, found in times.items()
            }
            options.append((sum(times[query][name] for query, name in chosen.items()), chosen))
    return min(options, key=lambda option: option[0])[1]


def _prepared(name: str, bundle: Bundle, query: str, device: str, told: set[str]) -> FrameEngine:
    model = bundle.query(query).model
    try:
        engine = make_engine(name, bundle, query, device)
        if not engine.ready():
            log.info("preparing engine %s for %s: takes a minute or so, once for this architecture", name, model)
        engine.prepare()
        return engine
    except (EngineError, InputError) as error:
        if name == FALLBACK:
            raise
        line = f"engine {name} cannot run {model}: {error}; engine {FALLBACK} does"
        if line not in told:
            log.warning("%s", line)
            told.add(line)
        return make_engine(FALLBACK, bundle, query, device)


def _times(bundle: Bundle, query: str, device: str, usable: list[str], cache: EngineCache) -> Mapping[str, float]:
    """Milliseconds of a run of one frame per engine that can run this query."""
    reference = make_engine(FALLBACK, bundle, query, device)
    versions = {name: engine_named(name).detail(device) for name in usable}
    stored = sorted({own.dtype for own in reference.query.stored.values()})
    key = {"choice": versions, "stored": stored, **key_of(reference.query, reference.model, reference.device)}

    def measure(path: Path) -> Mapping[str, Any]:
        log.info(
            "measuring which engine runs %s fastest (%s): takes a minute or two, once for this architecture",
            reference.query.model,
            ", ".join(usable),
        )
        found = _measured(bundle, query, device, usable)
        path.write_text(json.dumps(found))
        shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in sorted(found.items(), key=lambda one: one[1]))
        log.info("one frame of %s: %s", reference.query.model, shown)
        return {"ms": found}

    return cache.fetch(key, SUFFIX, measure).notes["ms"]


def _measured(bundle: Bundle, query: str, device: str, usable: list[str]) -> dict[str, float]:
    engines: dict[str, FrameEngine] = {}
    arenas = []
    for name in usable:
        try:
            engine = make_engine(name, bundle, query, device)
            engine.prepare()
            arenas.append(resident(bundle, {query: engine}))
            engines[name] = engine
        except (EngineError, InputError) as error:
            log.info("engine %s cannot run %s: %s", name, bundle.query(query).model, error)
    size = bundle.query(query).input_size
    frames = torch.zeros(1, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    taken: dict[str, list[float]] = {name: [] for name in engines}
    with torch.inference_mode():
        for round_index in range(ROUNDS + 1):
            for name, engine in engines.items():
                start = time.perf_counter()
                engine.forward(frames)
                if device == "cuda":
                    torch.cuda.synchronize()
                if round_index:
                    taken[name].append(1000 * (time.perf_counter() - start))
    for arena in arenas:
        arena.close()
    return {name: median(times) for name, times in taken.items()}
