"""Stands in for torch.cuda on a machine without a GPU: streams do nothing, and every call is put on record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

TOTAL_BYTES = 2**30
STREAMS = 32


class FakeCuda:
    """Work is done at once, in the order of the calls; `record` holds (what, stream, event) in that order.

    `allowed_bytes` is what torch's allocator may take, None without a limit. With `pin_code` no memory can be
    pinned, and the next kernel gets the error (`Kernels`).
    """

    def __init__(self, pin_code: int = 0) -> None:
        self.record: list[tuple[str, str, int | None]] = []
        self.compute, self.events, self.pinned, self.pin_code = FakeStream(self, "compute"), 0, [], pin_code
        self.active, self.allowed_bytes, self.pending = self.compute, None, 0
        self.pools: list[object] = []
        self.captures, self.refuses_waiting = 0, False
        self.streams: dict[tuple[str, int], tuple[int, list[FakeStream]]] = {}

    def get_device_properties(self, _device: object) -> SimpleNamespace:
        return SimpleNamespace(total_memory=TOTAL_BYTES)

    def set_per_process_memory_fraction(self, fraction: float, device: object) -> None:
        assert isinstance(device, int), "torch asks for an index"
        self.allowed_bytes = None if fraction == 1.0 else round(fraction * TOTAL_BYTES)

    def Stream(self, device: object, priority: int = 0) -> FakeStream:
        """As torch's: few streams of a device and a priority, which are handed out in turns."""
        turn, streams = self.streams.setdefault((str(device), priority), (0, []))
        if turn % STREAMS == len(streams):
            streams.append(FakeStream(self, "computing" if priority else "copy"))
        self.streams[str(device), priority] = turn + 1, streams
        return streams[turn % STREAMS]

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        self.events += 1
        return FakeEvent(self, self.events - 1)

    def current_stream(self, _device: object) -> FakeStream:
        return self.active

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.active = self.active, stream
        try:
            yield
        finally:
            self.active = before

    def synchronize(self, _device: object) -> None:
        self.record.append(("synchronise", "all", None))

    def get_sync_debug_mode(self) -> int:
        return 2 * self.refuses_waiting

    def set_sync_debug_mode(self, mode: str | int) -> None:
        self.refuses_waiting = mode in ("error", 2)

    def wait_for_result(self) -> None:
        """As `nonzero` or `item` do, which no graph can hold."""
        if self.refuses_waiting:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.active.name == "capture":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph()

    @contextmanager
    def graph(
        self, graph: FakeGraph, pool: object | None, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        """As torch's: a pool is taken while a graph lives that uses it, and a capture that fails leaves its stream the
        current one."""
        self.captures += 1
        graph.own_pool = pool or object()
        self.pools.append(graph.own_pool)
        before, self.active = self.active, FakeStream(self, "capture")
        with graph:
            yield
        self.active = before

    def empty_cache(self) -> None:
        self.record.append(("empty cache", "all", None))

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, pointer: int, _nbytes: int, _flags: int) -> int:
        if self.pin_code:
            self.pending = self.pin_code
        else:
            self.pinned.append(pointer)
        return self.pin_code

    def cudaHostUnregister(self, pointer: int) -> int:
        self.pinned.remove(pointer)
        return 0


class Kernels(TorchDispatchMode):
    """Puts torch's operations on record with the stream they go to; the first one behind a failed call raises."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("add_", "copy_") and self.cuda.pending:
            self.cuda.pending = 0
            raise RuntimeError("CUDA error: out of memory")
        self.cuda.record.append((name, self.cuda.active.name, None))
        return func(*args, **(kwargs or {}))


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.cuda_stream = 0 if name == "default" else 1

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.record.append((f"behind {other.name}", self.name, None))

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.record.append(("wait", self.name, event.index))

    def synchronize(self) -> None:
        self.cuda.record.append(("synchronise", self.name, None))


class FakeEvent:
    def __init__(self, cuda: FakeCuda, index: int) -> None:
        self.cuda, self.index = cuda, index

    def record(self, stream: FakeStream) -> None:
        self.cuda.record.append(("event", stream.name, self.index))

    def synchronize(self) -> None:
        self.cuda.record.append(("wait", "host", self.index))

    def elapsed_time(self, _end: FakeEvent) -> float:
        return 2000.0


class FakeGraph(TorchDispatchMode):
    """Keeps the operations that are called while it is captured, and does them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self.replays, self.own_pool = 0, object()

    def pool(self) -> object:
        return self.own_pool

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.operations:
            for before, after in zip(pytree.tree_leaves(out), pytree.tree_leaves(func(*args, **kwargs))):
                if isinstance(before, Tensor) and before is not after:
                    before.copy_(after)
