"""Weights that a layer uses from scratch memory: packed ones, unpacked there, and ones that overflow, copied there.

Both happen just before the layer runs; afterwards the memory is another layer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from edge_runtime.memory.arena import TensorOf, WaitFor
from edge_runtime.memory.store import row_major_strides
from edge_runtime.scheduler.eviction import (
    OverflowLayer,
    OverflowTensor,
    scratch_bytes,
    scratch_spans,
    tensor_scratch_bytes,
)
from models.bits import BIT_WIDTHS, BYTE, stored_bytes
from models.bundle import Bundle, BundleQuery
from models.bundle.manifest import StoredTensor
from models.quantization import WIDE, unpack

BUFFERS = 2
"""While one is being copied from, the next tensor is read into the other."""


class PinnedStream:
    """Copies tensors of at most `max_bytes`, one after the other, through pinned memory to a GPU.

    The CPU reads ahead while the GPU computes; it waits only for a buffer that is still being copied from. A copy waits
    for what was queued before, since it overwrites another layer's weights; what is queued next waits for the copy.
    `cuda` is torch.cuda, or a stand-in of tests.
    """

    def __init__(self, max_bytes: int, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda, self._stream = device, cuda, cuda.Stream(device)
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(max_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)]
        self._copied: list[Any] = [None] * BUFFERS
        self._turn = 0

    def copy(self, read: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
        """The tensor that `read` writes into memory it is given (uint8), in `target` (uint8) on the device."""
        self._turn = (self._turn + 1) % BUFFERS
        previous = self._copied[self._turn]
        if previous is not None:
            previous.synchronize()
        source = read(self._buffers[self._turn][: target.numel()])
        target = target.view(source.dtype).view(source.shape)
        computing = self._cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._cuda.Event()
            event.record(self._stream)
        computing.wait_event(event)
        self._copied[self._turn] = event
        return target


HALF = "fp16"
READS_WEIGHTS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that read the weights of their linear layers without calling them."""
ALIGNMENT_BYTES = 64
"""Staged tensors begin at multiples of this, as memory that torch allocates itself does."""


@dataclass(eq=False)
class _StagedWeight:
    """One staged tensor: the attribute of the module that takes it, `start` bytes into the scratch.

    It is made from what is `stored` in the arena or, where it `overflows`, from what `read` gives of the bundle.
    """

    where: dict[str, Any]
    attribute: str
    shape: tuple[int, ...]
    part: OverflowTensor
    own: StoredTensor | None
    start: int
    nbytes: int
    read: Callable[[Tensor | None], Tensor] | None = None
    stored: Tensor | None = None
    factor: Tensor | None = None

    @property
    def overflows(self) -> bool:
        """Whether it is read from the bundle in each run."""
        return self.read is not None

    @property
    def awaited(self) -> list[str]:
        """The names of the tensors in the arena that it is made from."""
        return [*(() if self.overflows else (self.part.tensor,)), *(() if self.scale is None else (self.scale,))]

    @property
    def scale(self) -> str | None:
        """The name of the scale that its codes are multiplied by."""
        return None if self.own is None else self.own.scale

    def fill(self, scratch: Tensor, streamed: PinnedStream | None) -> None:
        """Unpack or copy it into its place, and let the module use it; an overflow to a GPU is `streamed` there."""
        if self.own is None:
            assert self.read is not None
            target = scratch[self.start : self.start + self.nbytes]
            self.where[self.attribute] = self.read(target) if streamed is None else streamed.copy(self.read, target)
            return
        if self.read is None:
            stored = self.stored
        elif streamed is None:
            stored = self.read(None)
        else:  # copied packed, since that is fewer bytes
            behind = self.start + _align(math.prod(self.shape) * WIDE.itemsize)
            stored = streamed.copy(self.read, scratch[behind : behind + self.nbytes])
        assert stored is not None, "bind comes before a run"
        # In the format of the arena: an engine that takes channels last gets that.
        strides = stored.stride() if self.own.shape is None else row_major_strides(self.shape)
        wide = scratch.view(WIDE).as_strided(self.shape, strides, self.start // WIDE.itemsize)
        self.where[self.attribute] = unpack(stored, self.factor, self.own.dtype, wide)


class WeightStreaming:
    """The tensors of one query's module that are on the meta device between runs.

    These are the packed ones, and those named in `overflow`, which are read from the bundle in each run. `bytes` of
    scratch are taken for the time of a run: the most that is in use at once. A layer that is called again before
    another layer took its memory is not staged again. `overflow_bytes` counts the bytes copied from the bundle;
    `streamed` copies them to a GPU. A run raises OSError when the bundle's file has become shorter.
    """

    def __init__(
        self,
        model: nn.Module,
        bundle: Bundle,
        query: BundleQuery,
        overflow: Collection[str],
        device: str,
        streamed: PinnedStream | None = None,
    ) -> None:
        layers = (
            streamable_layers(model, query.input_size, query.tensors, query.stored, device)
            if query.stored or overflow
            else ()
        )
        self._streamed = streamed
        self.bytes, self._spans = scratch_bytes(layers, overflow), scratch_spans(layers, overflow)
        self.overflow_bytes = 0
        self._all: list[_StagedWeight] = []
        own = unpacked_weights(query.stored, device)
        for index, layer in enumerate(layers):
            places = _places(model, bundle, own, layer, self._spans[index][0], overflow)
            if places:
                model.get_submodule(layer.path).register_forward_pre_hook(self._before(index, places))
            self._all += places
        self._empty = [(place, place.where[place.attribute]) for place in self._all]
        self._scratch: Tensor | None = None
        self._there: set[int] = set()
        self._wait: WaitFor | None = None

    @property
    def keys(self) -> frozenset[str]:
        """The state dict keys of what is staged."""
        return frozenset(place.part.key for place in self._all)

    @property
    def bound(self) -> list[Tensor]:
        """The tensors of the arena that a run reads."""
        return [tensor for place in self._all for tensor in (place.stored, place.factor) if tensor is not None]

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None) -> None:
        """As `Bindable.bind`."""
        for place in self._all:
            if not place.overflows:
                place.stored = tensor_of(place.part.tensor)
            place.factor = None if place.scale is None else tensor_of(place.scale)
        self._wait = wait

    def unbind(self) -> None:
        """As `Bindable.unbind`."""
        for place in self._all:
            place.factor = None
            if not place.overflows:
                place.stored = None

    @contextmanager
    def scratch(self, device: torch.device) -> Iterator[None]:
        """The module can run in this context."""
        self._scratch = torch.empty(self.bytes, dtype=torch.uint8, device=device) if self._all else None
        try:
            yield
        finally:
            for place, placeholder in self._empty:
                place.where[place.attribute] = placeholder
            self._scratch = None
            self._there.clear()

    def _before(self, index: int, places: list[_StagedWeight]) -> Callable[..., None]:
        awaited = [name for place in places for name in place.awaited]
        overflow_bytes = sum(place.nbytes for place in places if place.overflows)
        begin, end = self._spans[index]
        overlapping = {one for one, (start, stop) in enumerate(self._spans) if start < end and begin < stop}

        def hook(_module: nn.Module, _inputs: Any) -> None:
            if self._scratch is None or index in self._there:
                return
            if self._wait is not None:
                self._wait(awaited)
            self._there -= overlapping
            for place in places:
                place.fill(self._scratch, self._streamed)
            self._there.add(index)
            self.overflow_bytes += overflow_bytes

        return hook


def unpacked_weights(stored: Mapping[str, StoredTensor], device: str) -> dict[str, StoredTensor]:
    """The packed tensors that are unpacked before use: a GPU computes with float16 as it is."""
    return {key: own for key, own in stored.items() if device == "cpu" or own.dtype != HALF}


def streamable_layers(
    model: nn.Module, input_size: int, names: Mapping[str, str], stored: Mapping[str, StoredTensor], device: str
) -> tuple[OverflowLayer, ...]:
    """The tensors of a model on the meta device, by the nearest called module above their use.

    `names` are content names by state dict key, `stored` are the packed ones; where these overflow to a GPU, they take
    scratch as they are stored, too. Codes of less than a byte take a byte a weight more while they are unpacked. Some
    modules read the weights of their children without calling them (attention does): these count as the parent's. A
    module's memory is in use until it returns.
    """
    calls = _calls(model, input_size)
    called, grouped, stored = set(calls), dict[str, list[OverflowTensor]](), unpacked_weights(stored, device)
    for key, tensor in model.state_dict(keep_vars=True).items():
        above = key.rpartition(".")[0]
        while above and above not in called:
            above = above.rpartition(".")[0]
        grouped.setdefault(above, []).append(_part(key, names[key], tensor, stored.get(key), device))
    paths = list(grouped)
    times = dict.fromkeys(paths, 0)
    before = None
    for path in (path for path in calls if path in grouped):
        times[path] += path != before
        before = path
    return tuple(
        OverflowLayer(
            path,
            tuple(parts),
            tuple(index for index, one in enumerate(paths) if _within(path, one)),
            max(1, times[path]),
        )
        for path, parts in grouped.items()
    )


def _part(key: str, name: str, tensor: Tensor, stored: StoredTensor | None, device: str) -> OverflowTensor:
    nbytes = _align(tensor.nbytes)
    if stored is None:
        return OverflowTensor(key, name, 0, nbytes)
    packed = 0 if device == "cpu" else _align(stored_bytes(stored.dtype, tensor.shape))
    unpacking = _align(tensor.numel()) if BIT_WIDTHS[stored.dtype] < BYTE else 0
    return OverflowTensor(key, name, nbytes + unpacking, nbytes + packed + unpacking)


def _places(
    model: nn.Module,
    bundle: Bundle,
    stored: Mapping[str, StoredTensor],
    layer: OverflowLayer,
    begin: int,
    overflow: Collection[str],
) -> list[_StagedWeight]:
    places = []
    for part in layer.parts:
        if size := tensor_scratch_bytes(part, overflow):
            path, _, attribute = part.key.rpartition(".")
            module = model.get_submodule(path)
            where: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
            own = stored.get(part.key)
            places.append(
                _StagedWeight(
                    where,
                    attribute,
                    tuple(where[attribute].shape),
                    part,
                    own,
                    begin,
                    bundle.nbytes(part.tensor),
                    partial(bundle.read, part.tensor) if part.tensor in overflow else None,
                )
            )
            begin += size
    return places


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _within(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


@torch.no_grad()
def _calls(model: nn.Module, input_size: int) -> list[str]:
    """The paths of the modules that one run calls, in order; nothing is computed."""
    seen: list[str] = []

    def note(path: str) -> Callable[..., None]:
        return lambda _module, _inputs: seen.append(path)

    hooks = [module.register_forward_pre_hook(note(path)) for path, module in model.named_modules()]
    try:
        model(torch.empty(1, 3, input_size, input_size, device="meta"))
    finally:
        for hook in hooks:
            hook.remove()
    readers = [path for path, module in model.named_modules() if isinstance(module, READS_WEIGHTS)]
    return [path for path in seen if not any(_within(path, reader) for reader in readers)]
