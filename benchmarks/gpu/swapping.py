"""Weights that come and go: what a swap takes over a plain copy, what a prefetch costs, and no memory left."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu.bundles import FAMILIES, FEW, bundle_of
from benchmarks.gpu.found import Found, Setting
from benchmarks.gpu.running import QUERIES
from gemel.edge_runtime.engines.base import FrameEngine
from gemel.edge_runtime.engines.layouts import layouts_within
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.life.box import known_costs
from gemel.edge_runtime.life.device import Device, arena_bytes
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store

SWAP_OVER_COPY, PREFETCH_OVER_NONE = 1.15, 1.05
GRAPH_RUNS = 3
"""Runs of one placement after which the next is replayed from a graph."""


def swap(setting: Setting, found: Found) -> None:
    """A query with nothing of it resident, over a copy of as many bytes; and a resident query's run, replayed from a
    graph as in a box, with a prefetch beside it.
    """
    model = FEW[0] if setting.small else FAMILIES[0]
    bundle = bundle_of(setting.folder / "swap", QUERIES[:2], model, setting.small, shared=False)
    store = Store.of_bundle(bundle)
    engines: dict[str, FrameEngine] = {one: TorchEngine(bundle, one, setting.device) for one in QUERIES[:2]}
    layouts = layouts_within(engines.values(), store.kinds, known_costs(bundle, engines, None), 2**62)
    first, second = (bundle.names_in_order(query) for query in QUERIES[:2])
    arena = Arena(store, 2 * store.data.nbytes, setting.device, layouts=layouts)
    nbytes = sum(store.extents[name].nbytes for name in first)
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=setting.on_gpu)
    target = torch.empty(nbytes, dtype=torch.uint8, device=setting.device)
    frame = np.zeros((64, 64, 3), np.uint8)

    def cold() -> None:
        arena.start(first, waits=True)
        arena.bind(engines[QUERIES[0]], first)

    def settle() -> None:
        """The query resident and bound as between two swaps: its next runs are captured, then replayed."""
        arena.finish()
        arena.bind(engines[QUERIES[0]], first)
        for _ in range(GRAPH_RUNS):
            engines[QUERIES[0]].run([frame])

    def without() -> None:
        engines[QUERIES[0]].run([frame])

    def beside() -> None:
        engines[QUERIES[0]].run([frame], lambda: arena.prefetch(second))
        arena.synchronise()

    brought: list[int] = []
    taken: dict[str, list[float]] = {name: [] for name in ("copy", "cold", "without", "beside")}
    with setting.on_compute_stream(), torch.inference_mode():
        for index in range(setting.many(41, 2)):
            arena.change(arena.residency.resident, ())
            found_s = setting.times(1, lambda: target.copy_(source, non_blocking=True))[0]
            cold_s = _once(setting, cold)
            settle()
            without_s = setting.times(1, without)[0]
            before = arena.bytes_moved
            beside_s = _once(setting, beside, wait=False)
            arena.finish()
            brought.append(arena.bytes_moved - before)
            if index:
                for name, seconds in zip(taken, (found_s, cold_s, without_s, beside_s)):
                    taken[name].append(seconds)
    arena.close()
    copy_s, cold_s, without_s, beside_s = (float(np.median(own)) for own in taken.values())
    found.note("swap_megabytes", nbytes / 1e6)
    found.note("prefetch_megabytes", min(brought) / 1e6)
    found.holds("prefetches_bring_about_as_much", min(brought) > 0.9 * nbytes)
    found.note("copy_ms", 1000 * copy_s)
    found.note("cold_ms", 1000 * cold_s)
    found.note("run_alone_ms", 1000 * without_s)
    found.takes_at_most("cold_swap_over_copy", cold_s / copy_s, SWAP_OVER_COPY)
    found.takes_at_most("run_beside_prefetch_over_alone", beside_s / without_s, PREFETCH_OVER_NONE)


def no_memory(setting: Setting, found: Found) -> None:
    """The allocator refuses more than the budget, and the frame is answered all the same."""
    model = FEW[0] if setting.small else FAMILIES[0]
    bundle = bundle_of(setting.folder / "full", QUERIES[:2], model, setting.small)
    store = Store.of_bundle(bundle)
    engines: dict[str, FrameEngine] = {one: _Hungry(bundle, one, setting.device) for one in QUERIES[:2]}
    costs = known_costs(bundle, engines, None)
    budget = 2 * max(map(costs.alone_bytes, costs.queries))
    layouts = layouts_within(engines.values(), store.kinds, costs, budget)
    arena = Arena(store, arena_bytes(costs, budget), setting.device, budget, layouts=layouts)
    device = Device(arena, engines, costs, budget)
    frame = np.zeros((64, 64, 3), np.uint8)
    answered = 0
    with setting.on_compute_stream():
        for query in QUERIES[:2] * 2:
            device.load(((query, 1),), (), True)
            answered += len(device.run(query, [frame]))
    found.holds("every_frame_is_answered", answered == 4)
    found.holds("the_budget_is_less", device.budget_bytes < budget)
    if setting.on_gpu:
        reserved = torch.cuda.memory_reserved(setting.device)
        found.note("reserved_bytes", reserved)
        found.note("budget_bytes", device.budget_bytes)
    device.arena.close()


class _Hungry(TorchEngine):
    """Wants more than there is in its first run: for real on a GPU, said to be so elsewhere."""

    hungry = True

    def forward(self, batch: torch.Tensor) -> object:
        if self.hungry:
            type(self).hungry = False
            if self.device.type == "cuda":
                total = torch.cuda.get_device_properties(self.device).total_memory
                torch.empty(total, dtype=torch.uint8, device=self.device)
            raise torch.OutOfMemoryError("out of memory, as rehearsed")
        return super().forward(batch)


def _once(setting: Setting, action: Callable[[], object], wait: bool = True) -> float:
    """Seconds of an action that cannot be repeated as it is; with `wait` until the device has done all."""
    setting.synchronise()
    start = time.perf_counter()
    action()
    if wait:
        setting.synchronise()
    return time.perf_counter() - start
