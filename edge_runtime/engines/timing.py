"""How long each engine takes for a frame of an architecture here: measured once, kept in the engines' cache."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from edge_runtime.engines.architecture import key_of
from edge_runtime.engines.arranging import hold
from edge_runtime.engines.base import EngineError, FrameEngine
from edge_runtime.engines.cache import EngineCache
from edge_runtime.engines.registry import ENGINES, FALLBACK, engine_named, make_engine
from edge_runtime.engines.telling import told_while
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.faults import is_out_of_memory
from edge_runtime.memory.layout import Order
from edge_runtime.memory.movers.base import arranges_ahead
from edge_runtime.memory.store import Store
from edge_runtime.memory.streams import computing
from models.bundle import Bundle
from models.errors import InputError

SUFFIX = ".choice"
SPELLS, ROUNDS = 3, 3

log = logging.getLogger("gemel.run")

Times = Mapping[str, float]
"""Milliseconds of a run of one frame by engine."""


def candidates(device: str, stays: bool = True) -> list[str]:
    """The engines that can run on this device ("cpu" or "cuda") and that `auto` chooses from.

    Where weights come and go (`stays` False), engines that want them arranged are left out, unless they arrive so:
    each load would take as long as several.
    """
    stays = stays or arranges_ahead(device)
    return [
        name
        for name in ENGINES
        if engine_named(name).automatic
        and engine_named(name).missing(device) is None
        and (stays or Order.STORED in engine_named(name).orders)
    ]


class Stopwatch:
    """The times of a bundle's queries in these engines. Each architecture is measured once on a machine.

    Raises InputError where the engines' cache cannot be used.
    """

    def __init__(self, bundle: Bundle, device: str, engines: Sequence[str]) -> None:
        self._bundle, self._device, self._engines = bundle, device, list(engines)
        self._cache = EngineCache()

    def known(self, query: str) -> Times | None:
        """The times where they were measured before; None otherwise."""
        _, key = self._key(query)
        kept = self._cache.find(key, SUFFIX)
        return None if kept is None else kept.notes["ms"]

    def times(self, query: str) -> Times:
        """The times, measured unless they are known; what takes long is said before it begins."""
        model, key = self._key(query)

        def measure(path: Path) -> Mapping[str, Any]:
            log.info(
                "measuring which engine runs %s fastest (%s): takes a minute or two, once for this architecture",
                model,
                ", ".join(self._engines),
            )
            with told_while(f"measuring which engine runs {model} fastest"):
                found = measured(self._bundle, query, self._device, self._engines)
            path.write_text(json.dumps(found))
            shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in sorted(found.items(), key=lambda one: one[1]))
            log.info("one frame of %s: %s", model, shown)
            return {"ms": found}

        return self._cache.fetch(key, SUFFIX, measure).notes["ms"]

    def _key(self, query: str) -> tuple[str, dict[str, Any]]:
        """The name of a query's model, and the key of its architecture with these engines."""
        reference = make_engine(FALLBACK, self._bundle, query, self._device)
        versions = {name: engine_named(name).detail(self._device) for name in self._engines}
        stored = sorted({own.dtype for own in reference.query.stored.values()})
        own = key_of(reference.query, reference.model, reference.device)
        return reference.query.model, {"choice": versions, "stored": stored, **own}


def measured(bundle: Bundle, query: str, device: str, engines: Sequence[str]) -> dict[str, float]:
    """Milliseconds of a run of one frame in each of the engines that can run this query.

    The quickest of ROUNDS in each of SPELLS, engines in turns: whatever else the machine does, serving frames for one,
    makes runs longer and never shorter. Where torch has one thread, which runs them all, only its processor time
    counts. One arena holds the weights, as the engine whose turn it is takes them. An engine for which there is not
    enough memory is left out; InputError where that is torch.
    """
    able: dict[str, FrameEngine] = {}
    taken: dict[str, list[float]] = {}
    arena = Arena(Store.of_bundle(bundle), 0, device)
    try:
        for spell in range(SPELLS):
            for name in engines:
                try:
                    if spell == 0:
                        able[name] = make_engine(name, bundle, query, device)
                        able[name].prepare()
                        taken[name] = []
                    if name in taken:
                        hold(arena, bundle, {query: able[name]})
                        taken[name] += _runs(able[name], arena)
                except Exception as error:
                    if not (isinstance(error, (EngineError, InputError)) or is_out_of_memory(error)):
                        raise
                    log.info("engine %s cannot run %s: %s", name, bundle.query(query).model, error)
                    taken.pop(name, None)
                if name in able:
                    able[name].unbind()
    finally:
        arena.close()
    if FALLBACK in engines and FALLBACK not in taken:
        raise InputError("engines", f"{FALLBACK} could not be measured", f"name one in the config (engine: {FALLBACK})")
    return {name: min(times) for name, times in taken.items()}


def _runs(engine: FrameEngine, arena: Arena) -> list[float]:
    """Milliseconds of ROUNDS runs, after one that does not count."""
    on_card, size = arena.device.type != "cpu", engine.query.input_size
    clock = time.perf_counter if on_card or torch.get_num_threads() > 1 else time.thread_time
    times = []
    with torch.inference_mode(), computing(arena.device):
        frames = torch.zeros(1, 3, size, size, device=arena.device).contiguous(memory_format=torch.channels_last)
        for _ in range(ROUNDS + 1):
            start = clock()
            engine.forward(frames)
            arena.synchronise()
            times.append(1000 * (clock() - start))
    return times[1:]
