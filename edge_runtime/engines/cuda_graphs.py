"""Replay runs from CUDA graphs: all kernels of a run are launched together instead of one by one from Python."""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemel.edge_runtime.memory.transfer import compute_stream
from gemel.models.out_of_memory import is_out_of_memory

MAX_GRAPHS = 8
"""Of one engine; the least recently used one is dropped."""
MAX_PLACEMENTS = 64
"""That are remembered as seen once."""
TOLERANCE = 1e-3
"""The largest difference of a replay from the plain run, as a fraction of the tensor's largest value."""

log = logging.getLogger("gemel.run")

Forward = Callable[[Tensor], Any]


@dataclass(frozen=True)
class _CapturedRun:
    """A captured run: it reads `frames` and writes `outputs`."""

    graph: Any
    frames: Tensor
    outputs: Any

    def replay(self, batch: Tensor) -> Any:
        self.frames.copy_(batch)
        self.graph.replay()
        # Copied, since the next graph reuses the memory of the pool.
        return pytree.tree_map_only(Tensor, Tensor.clone, self.outputs)


class CudaGraphs:
    """The graphs of one engine, by the placement of its tensors and the shape of the batch.

    A graph holds addresses. The tensors of a query return to a few places, and stay there where all fit the budget, so
    a placement gets a graph when it is seen a second time. All graphs share one memory pool, which they may because one
    runs after the other on the compute stream; on another stream, as in a reload, runs are plain. A graph is compared
    with a plain run before it is used. A run that waits for the GPU is never captured, since torch's allocator does not
    recover from a failed capture (pytorch/pytorch pull requests 180395 and 190308). `cuda` is torch.cuda, or a
    stand-in of tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._graphs: OrderedDict[Hashable, _CapturedRun] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._refused = False
        _ALL.add(self)

    def run(self, placement: Hashable, forward: Forward, batch: Tensor) -> Any:
        """What `forward` gives for this batch, its tensors placed as `placement` says."""
        key = placement, tuple(batch.shape)
        elsewhere = self._cuda.current_stream(self._device) != compute_stream(self._device, self._cuda)
        if self._refused or elsewhere:
            return forward(batch)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph.replay(batch)
        outputs = _run_and_drop_graphs_if_full(forward, batch)
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > MAX_PLACEMENTS:
                self._seen.popitem(last=False)
        elif captured := self._capture(forward, batch, outputs):
            self._graphs[key] = captured
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            self.refuse()
        return outputs

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return bool(self._graphs)

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._graphs.clear()
        self._seen.clear()

    def refuse(self) -> bool:
        """Have no graphs any more; whether there were any."""
        had, self._refused = bool(self._graphs), True
        self.clear()
        return had

    def _capture(self, forward: Forward, batch: Tensor, expected: Any) -> _CapturedRun | None:
        """A graph of this run that was verified to give what is expected; None where there is none."""
        try:
            with _no_synchronisation(self._cuda):
                forward(batch)
            graph, frames = self._cuda.CUDAGraph(), batch.clone()
            stream = _capture_stream(self._device, self._cuda)
            capture = self._cuda.graph(graph, pool=self._pool(), stream=stream, capture_error_mode="thread_local")
            with self._cuda.stream(stream), capture:  # torch leaves its stream the current one where a capture fails
                outputs = forward(frames)
            captured = _CapturedRun(graph, frames, outputs)
            found = pytree.tree_leaves(captured.replay(batch))
            if all(map(_is_close, found, pytree.tree_leaves(expected))):
                return captured
            log.warning("a run replayed from a graph differs from the plain run: graphs are not used")
        except Exception as error:  # a library may do what no graph can hold, and raises errors of its own
            log.debug("a run cannot be captured as a graph: %s", error)
        return None

    def _pool(self) -> Any:
        """The memory pool of the device's graphs; None, which makes a new one, where no graph exists.

        torch refuses a pool that no graph uses any more.
        """
        alike = [own for own in list(_ALL) if (own._device, own._cuda) == (self._device, self._cuda)]
        return next((one.graph.pool() for own in alike for one in own._graphs.values()), None)


_ALL: weakref.WeakSet[CudaGraphs] = weakref.WeakSet()


def cuda_graphs_for(device: torch.device) -> CudaGraphs | None:
    """The graphs of an engine on a GPU; None on the CPU."""
    return CudaGraphs(device) if device.type == "cuda" else None


def _run_and_drop_graphs_if_full(forward: Forward, batch: Tensor) -> Any:
    """A plain run; where memory runs out and graphs hold some, all graphs are dropped before weights are."""
    try:
        return forward(batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        had_graphs = [one.refuse() for one in list(_ALL)]
        if not any(had_graphs):
            raise
        log.warning("there is no memory for graphs beside weights and workspace: they are not used")
    return forward(batch)


@functools.cache
def _capture_stream(device: torch.device, cuda: Any) -> Any:
    return cuda.Stream(device)


@contextmanager
def _no_synchronisation(cuda: Any) -> Iterator[None]:
    """What waits for the GPU raises RuntimeError meanwhile: a graph cannot hold it."""
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    before = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode(before)


def _is_close(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return one == other
    if one.shape != other.shape or not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    scale = float(other.abs().max()) or 1.0
    return float((one - other).abs().max()) <= TOLERANCE * scale
