"""The transfer: whatever is started, prefetched, evicted and slid, every byte arrives; and two faults provoked."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.found import Found, Setting
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store, channels_last_layouts
from gemel.edge_runtime.memory.transfer_cuda import PinnedStore

CAPACITY_SHARE = 0.5
SLEEP_S = 0.002


def moves(setting: Setting, found: Found) -> None:
    """Random starts, prefetches, evictions and slides, kernels that sleep between them, weights in both formats."""
    for name, arranged in (("as_stored", False), ("channels_last", True)):
        wrong, arena = _move_at_random(setting, arranged, setting.many(2000, 400))
        found.holds(f"{name}_bytes_equal", wrong == 0)
        found.note(f"{name}_loads", arena.swaps)
        found.note(f"{name}_prefetches", arena.prefetches)
        found.note(f"{name}_compactions", arena.compactions)
        found.holds(f"{name}_saw_all", bool(arena.swaps and arena.prefetches and arena.compactions))


def faults(setting: Setting, found: Found) -> None:
    """What a GPU would have shown at once: a copy over weights that are still read, and an error left behind."""
    weights = {"first": torch.rand(64, 64, 3, 3), "second": torch.rand(64, 64, 3, 3)}
    store = Store.of_tensors(weights)
    arena = Arena(store, weights["first"].nbytes, setting.device)
    with setting.on_compute_stream(), torch.inference_mode():
        arena.change((), ["first"])
        setting.busy(10 * SLEEP_S)
        read = arena.tensor("first").clone()  # queued behind the sleep
        arena.start(["second"], evict=["first"])
        arena.finish()
        found.holds("copy_waits_for_what_is_read", torch.equal(read.cpu(), weights["first"]))
    arena.close()
    if not setting.on_gpu:
        found.left_out["pending_error"] = "needs a GPU"
        return
    codes: list[int] = []
    pinned = PinnedStore(store, setting.device, _Twice(codes))
    found.holds("registered_twice_fails", bool(codes and codes[0]))
    found.holds("no_kernel_gets_the_error", float(torch.ones(8, device=setting.device).add_(1).sum()) == 16.0)
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(pinned.bytes.data_ptr(), pinned.bytes.nbytes, 0))
    try:
        torch.zeros(8, device=setting.device).add_(1)
        found.note("it_would_have", False)
    except RuntimeError:
        found.note("it_would_have", code != 0)
    pinned.close()  # what it holds for not registered
    found.holds("not_unregistered", int(runtime.cudaHostUnregister(pinned.bytes.data_ptr())) == 0)


class _Twice:
    """As torch.cuda, but memory is registered already when it is requested: the driver refuses."""

    def __init__(self, codes: list[int]) -> None:
        self._codes = codes
        self._runtime: Any = torch.cuda.cudart()

    def cudart(self) -> Any:
        """Itself."""
        return self

    def cudaHostRegister(self, *memory: int) -> int:
        """Registered once for nothing, then asked for."""
        self._runtime.cudaHostRegister(*memory)
        self._codes.append(int(self._runtime.cudaHostRegister(*memory)))
        return self._codes[-1]


def _move_at_random(setting: Setting, arranged: bool, rounds: int) -> tuple[int, Arena]:
    """How many tensors were not what they should be, of all that were looked at."""
    draws = random.Random(0)
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for index in range(24):
        channels = draws.choice((3, 16, 48))
        tensors[f"conv{index}"] = torch.rand(draws.choice((8, 32, 96)), channels, 3, 3)
        tensors[f"norm{index}"] = torch.rand(draws.choice((8, 700)))
    store = Store.of_tensors(tensors)
    capacity = int(CAPACITY_SHARE * store.data.nbytes)
    arena = Arena(store, capacity, setting.device, layouts=channels_last_layouts(store.kinds) if arranged else ())
    wrong = 0
    with setting.on_compute_stream(), torch.inference_mode():
        for _ in range(rounds):
            wanted = _some(draws, tensors, capacity // 2)
            if draws.random() < 0.5:
                setting.busy(draws.random() * SLEEP_S)
            keep = set(wanted)
            evict = [name for name in arena.residency.resident if name not in keep and draws.random() < 0.7]
            arena.start(wanted, evict=_enough(arena, wanted, evict))
            first = wanted[0]
            arena.wait([first])
            wrong += not torch.equal(arena.tensor(first).cpu(), tensors[first])
            ahead = _some(draws, tensors, capacity // 4)
            arena.residency.hold(wanted, 0)
            arena.prefetch(ahead)
            arena.finish(wanted)
            wrong += sum(not torch.equal(arena.tensor(name).cpu(), tensors[name]) for name in wanted)
            arena.residency.release(wanted, 0)
        arena.finish()
        wrong += sum(not torch.equal(arena.tensor(name).cpu(), tensors[name]) for name in arena.residency.resident)
    arena.close()
    return wrong, arena


def _some(draws: random.Random, tensors: dict[str, Tensor], most_bytes: int) -> list[str]:
    """Names of some tensors, in the order they are stored in, that come to no more than this."""
    chosen, total = set(), 0
    for name in draws.sample(list(tensors), len(tensors)):
        if total + tensors[name].nbytes + 512 <= most_bytes and draws.random() < 0.5:
            chosen.add(name)
            total += tensors[name].nbytes + 512
    return [name for name in tensors if name in chosen] or [min(tensors, key=lambda name: tensors[name].nbytes)]


def _enough(arena: Arena, wanted: list[str], evict: list[str]) -> list[str]:
    """What goes, and as much more as it takes for what is wanted to find room."""
    residency, gone = arena.residency, list(evict)
    needed = sum(residency.footprints[name] for name in wanted if name not in residency)
    others = [name for name in residency.resident if name not in wanted and name not in gone]
    free = residency.capacity_bytes - residency.resident_bytes + sum(residency.footprints[name] for name in gone)
    while free < needed and others:
        gone.append(others.pop())
        free += residency.footprints[gone[-1]]
    return gone
