"""Runs of a card replayed from graphs (CUDA graphs): its kernels started together, not one by one by the interpreter.

Never run on a card: tests stand in for capture and replay. Each graph is compared with a plain run before it is used.
"""

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

from edge_runtime.memory.transfer import compute_stream
from models.device import is_out_of_memory

MAX_GRAPHS = 8
"""Of one engine; the one that was not used for longest goes."""
MAX_PLACEMENTS = 64
"""That are remembered as seen once."""
TOLERANCE = 1e-3
"""The most a replay may be from the plain run it was captured beside, in shares of its tensor's largest value."""

log = logging.getLogger("gemel.run")

Forward = Callable[[Tensor], Any]


@dataclass(frozen=True)
class _Graph:
    """A captured run: it reads `frames` and leaves what it finds in `outputs`."""

    graph: Any
    frames: Tensor
    outputs: Any

    def replay(self, batch: Tensor) -> Any:
        self.frames.copy_(batch)
        self.graph.replay()
        # Memory of the pool, which the next graph uses again.
        return pytree.tree_map_only(Tensor, Tensor.clone, self.outputs)


class CudaGraphs:
    """The graphs of one engine, by what it is bound to and the shape of the batch.

    A graph knows addresses alone. Tensors of a query come back to a few places, and stay there where all fit the
    budget; so a placement is worth a graph when it is seen again. All graphs use one pool of memory, which they may
    since one runs after the other. What cannot be captured (a run that asks the card how to go on) runs as ever, and
    so does an engine whose replay was once not what a plain run gave. It is never begun to be captured: torch's
    allocator does not recover from a capture that failed (pytorch/pytorch pull requests 180395 and 190308). That one
    runs after the other is so on the compute stream alone; whoever tries an engine elsewhere, as a reload does, runs it
    plainly. `cuda` is torch.cuda, or what stands in for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._refused = False
        _EVERYBODYS.add(self)

    def run(self, placement: Hashable, forward: Forward, batch: Tensor) -> Any:
        """What `forward` gives for this batch, its tensors lying where `placement` says."""
        key = placement, tuple(batch.shape)
        elsewhere = self._cuda.current_stream(self._device) != compute_stream(self._device, self._cuda)
        if self._refused or elsewhere:
            return forward(batch)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph.replay(batch)
        outputs = _with_room(forward, batch)
        if key in self._seen:
            self._keep(key, self._captured(forward, batch, outputs))
        else:
            self._seen[key] = None
            while len(self._seen) > MAX_PLACEMENTS:
                self._seen.popitem(last=False)
        return outputs

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return bool(self._graphs)

    def clear(self) -> None:
        """Forget all graphs, and let go of their memory."""
        self._graphs.clear()
        self._seen.clear()

    def refuse(self) -> bool:
        """Have no graphs any more; whether there were any."""
        had, self._refused = bool(self._graphs), True
        self.clear()
        return had

    def _keep(self, key: Hashable, graph: _Graph | None) -> None:
        if graph is None:
            self.refuse()
            return
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)

    def _captured(self, forward: Forward, batch: Tensor, expected: Any) -> _Graph | None:
        """A graph of this run that was seen to give what is expected of it; None where there is none."""
        try:
            with _waiting_is_refused(self._cuda):
                forward(batch)
            graph, frames = self._cuda.CUDAGraph(), batch.clone()
            stream = _capturing(self._device, self._cuda)
            capture = self._cuda.graph(graph, pool=self._pool(), stream=stream, capture_error_mode="thread_local")
            with self._cuda.stream(stream), capture:  # torch leaves its stream the current one where a capture fails
                outputs = forward(frames)
            made = _Graph(graph, frames, outputs)
            if _alike(made.replay(batch), expected):
                return made
            log.warning("a run replayed from a graph is not what it should be: graphs are left out")
        except Exception as error:  # a library may do what no graph can hold, and says so in its own way
            log.debug("a run cannot be captured as a graph: %s", error)
        return None

    def _pool(self) -> Any:
        """The memory of all graphs there are on this device; None, which asks for a new one, where there are none.

        One that no graph uses any more must not be asked for: torch takes that for a fault.
        """
        living = (
            one.graph.pool()
            for owner in list(_EVERYBODYS)
            if (owner._device, owner._cuda) == (self._device, self._cuda)
            for one in owner._graphs.values()
        )
        return next(living, None)


_EVERYBODYS: weakref.WeakSet[CudaGraphs] = weakref.WeakSet()


def _with_room(forward: Forward, batch: Tensor) -> Any:
    """A plain run; where memory runs out and graphs hold some, all graphs go before weights have to."""
    try:
        return forward(batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        held = [one.refuse() for one in list(_EVERYBODYS)]
        if not any(held):
            raise
        log.warning("there is no room for graphs beside weights and workspace: they are left out")
    return forward(batch)


def cuda_graphs_for(device: torch.device) -> CudaGraphs | None:
    """For an engine on a card; None on the CPU."""
    return CudaGraphs(device) if device.type == "cuda" else None


@functools.cache
def _capturing(device: torch.device, cuda: Any) -> Any:
    """The stream that all graphs of a device are captured on."""
    return cuda.Stream(device)


@contextmanager
def _waiting_is_refused(cuda: Any) -> Iterator[None]:
    """What waits for the card raises RuntimeError meanwhile, and no graph can hold it."""
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    before = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode(before)


def _alike(found: Any, expected: Any) -> bool:
    pairs = list(zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True))
    return all(_near(one, other) if isinstance(one, Tensor) else one == other for one, other in pairs)


def _near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    if not one.numel():
        return True
    scale = float(other.abs().max()) or 1.0
    return float((one - other).abs().max()) <= TOLERANCE * scale
