"""A query that overflows against the same one resident: what a run takes, what the process holds."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import held_bytes
from edge_runtime.box import known_costs
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.engines.weight_streaming import streamable_layers
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.store import Store
from edge_runtime.scheduler.eviction import Overflow, overflow_of
from models.bundle import Bundle, open_bundle
from models.preprocess import height_width

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Of the weights: what a query may have resident and as scratch, beside its intermediates."""
MIB = 2**20


def overflow(bundle: Bundle, rounds: int) -> list[dict[str, Any]]:
    """A row per share: MiB resident and copied in a run, ms by both clocks over all resident, MiB a process holds."""
    frame = torch.rand(1, 3, *height_width(bundle.queries[0].input_size)).contiguous(memory_format=torch.channels_last)
    cases = {share: _bind_share(bundle, share) for share in SHARES}
    wall: dict[float, list[float]] = {share: [] for share in SHARES}
    busy: dict[float, list[float]] = {share: [] for share in SHARES}
    with torch.inference_mode():
        wanted = cases[1.0][0].forward(frame)
        for index in range(rounds + 2):
            for share, (engine, *_) in cases.items():
                start, spent = time.perf_counter(), time.process_time()
                got = engine.forward(frame)
                if index >= 2:
                    busy[share].append(1000 * (time.process_time() - spent))
                    wall[share].append(1000 * (time.perf_counter() - start))
                assert torch.equal(got, wanted), "what overflows answers otherwise"
    none = _measure_held(bundle.path, 0.0)
    rows = []
    for share, (engine, arena, found) in cases.items():
        held = _measure_held(bundle.path, share)
        nbytes = found.run_bytes.get(engine.query.id, 0)
        rows.append(
            {
                "share": share,
                "resident_mib": round(arena.residency.resident_bytes / MIB, 1),
                "overflow_mib": round(nbytes / MIB, 1),
                "workspace_mib": round(engine.workspace_bytes / MIB, 1),
                "ms": round(median(wall[share]), 1),
                "ratio": round(median(wall[share]) / median(wall[1.0]), 3),
                "cpu_ratio": round(median(busy[share]) / median(busy[1.0]), 3),
                **{f"{kind}_mib": round((held[kind] - none[kind]) / MIB, 1) for kind in held},
            }
        )
    return rows


def hold_bundle(path: Path, share: float) -> dict[str, int]:
    """Bytes of this process with one engine bound, after runs: private ones, and those no file stands behind; with a
    share of 0 nothing is bound.
    """
    bundle = open_bundle(path)
    query = bundle.queries[0]
    engine, *_others = _bind_share(bundle, share) if share else (TorchEngine(bundle, query.id),)
    if share:
        with torch.inference_mode():
            for _ in range(3):
                engine.forward(torch.rand(1, 3, *height_width(query.input_size)))
    gc.collect()
    return held_bytes()


def _measure_held(path: Path, share: float) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.engines.overflow", str(path), str(share)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def _bind_share(bundle: Bundle, share: float) -> tuple[TorchEngine, Arena, Overflow]:
    """An engine within so much of its weights, and all that is kept resident in an arena of that size."""
    query = bundle.queries[0]
    whole = TorchEngine(bundle, query.id)
    costs = known_costs(bundle, {query.id: whole}, None)
    budget = costs.queries[query.id].workspace_bytes + int(share * costs.weights_bytes(query.id))
    layers = streamable_layers(whole.model, query, "cpu")
    found = overflow_of(costs, budget, lambda _: layers)
    assert not found.lacking, f"it does not run in {budget} bytes: {found.lacking}"
    engine = TorchEngine(bundle, query.id, overflow=found.tensors.get(query.id, ()))
    kept: Sequence[str] = found.costs.queries[query.id].tensors
    assert engine.workspace_bytes + found.costs.weights_bytes(query.id) <= budget
    arena = Arena(Store.of_bundle(bundle), found.costs.resident_bytes(kept))
    arena.change((), kept)
    engine.bind(arena.tensor)
    return engine, arena, found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(hold_bundle(Path(sys.argv[1]), float(sys.argv[2]))))
