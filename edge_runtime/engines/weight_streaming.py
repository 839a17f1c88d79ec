"""Weights that a layer uses from scratch memory: packed ones, unpacked there, and ones that overflow, copied there.

Both happen just before the layer runs; afterwards the memory is another layer's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from gemel.edge_runtime.memory.binding import TensorOf, WaitFor
from gemel.edge_runtime.memory.store import row_major_strides
from gemel.edge_runtime.scheduler.eviction import (
    OverflowLayer,
    OverflowTensor,
    scratch_bytes,
    scratch_spans,
    tensor_scratch_bytes,
)
from gemel.models.bits import BIT_WIDTHS, BYTE, stored_bytes
from gemel.models.bundle import Bundle, BundleQuery
from gemel.models.bundle.manifest import StoredTensor
from gemel.models.preprocess import Size
from gemel.models.quantization import WIDE, unpack

BUFFERS = 2
"""While one is being copied from, the next tensor is read into the other."""
HALF = "fp16"
READS_WEIGHTS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that read the weights of their linear layers without calling them."""
ALIGNMENT_BYTES = 64
"""Staged tensors begin at multiples of this, as memory that torch allocates itself does."""


class PinnedStream:
    """Copies tensors of at most `max_bytes`, one after the other, through pinned memory to a GPU.

    The CPU reads ahead while the GPU computes; it waits only for a buffer that is still being copied from. A copy waits
    for `after`, or for all that was queued before, since it overwrites another layer's weights; what is queued next
    waits for the copy. `cuda` is torch.cuda, or a stand-in of tests.
    """

    def __init__(self, max_bytes: int, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda, self._stream = device, cuda, cuda.Stream(device)
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(max_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)]
        self._copied: list[Any] = [None] * BUFFERS
        self._turn = 0

    def mark(self) -> Any:
        """An event after what is queued on the GPU by now."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def copy(self, read: Callable[[Tensor], Tensor], target: Tensor, after: Any = None) -> Tensor:
        """The tensor that `read` writes into memory it is given (uint8), in `target` (uint8) on the device."""
        self._turn = (self._turn + 1) % BUFFERS
        previous = self._copied[self._turn]
        if previous is not None:
            previous.synchronize()
        source = read(self._buffers[self._turn][: target.numel()])
        target = target.view(source.dtype).view(source.shape)
        computing = self._cuda.current_stream(self._device)
        if after is None:
            self._stream.wait_stream(computing)
        else:
            self._stream.wait_event(after)
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self.mark()
        computing.wait_event(event)
        self._copied[self._turn] = event
        return target


@dataclass(eq=False)
class _StagedWeight:
    """One staged tensor: the module's table and the attribute in it, and where its scratch begins.

    It is made from what is `stored` in the arena or, where it overflows, from what `read` gives of the bundle. Codes
    (`packed`) are multiplied by the `factor`.
    """

    where: dict[str, Any]
    attribute: str
    part: OverflowTensor
    packed: StoredTensor | None
    start: int
    nbytes: int
    read: Callable[[Tensor | None], Tensor] | None
    stored: Tensor | None = None
    factor: Tensor | None = None

    def __post_init__(self) -> None:
        self.placeholder: Tensor = self.where[self.attribute]
        self.scale = None if self.packed is None else self.packed.scale
        """The name of the factor."""

    @property
    def awaited(self) -> list[str]:
        """The names of the tensors in the arena that it is made from."""
        return [*([self.part.tensor] if self.read is None else []), *([] if self.scale is None else [self.scale])]

    def bind(self, tensor_of: TensorOf) -> None:
        if self.read is None:
            self.stored = tensor_of(self.part.tensor)
        self.factor = None if self.scale is None else tensor_of(self.scale)

    def unbind(self) -> None:
        self.stored = self.factor = None

    def fill(self, scratch: Tensor, streamed: PinnedStream | None, after: Any = None) -> None:
        """Unpack or copy it into its place, and let the module use it.

        An overflow to a GPU is `streamed` there, after this event or all that is queued.
        """
        if self.packed is None:
            assert self.read is not None
            self.where[self.attribute] = self._copy(scratch, self.start, streamed, after)
            return
        shape, stored = tuple(self.placeholder.shape), self.stored
        if self.read is not None:  # to a GPU it is copied packed, since that is fewer bytes
            behind = self.start + _align(math.prod(shape) * WIDE.itemsize)
            stored = self.read(None) if streamed is None else self._copy(scratch, behind, streamed, after)
        assert stored is not None, "bind comes before a run"
        # In the format of the arena: an engine that takes channels last gets that.
        strides = stored.stride() if self.packed.shape is None else row_major_strides(shape)
        wide = scratch.view(WIDE).as_strided(shape, strides, self.start // WIDE.itemsize)
        self.where[self.attribute] = unpack(stored, self.factor, self.packed.dtype, wide)

    def _copy(self, scratch: Tensor, start: int, streamed: PinnedStream | None, after: Any) -> Tensor:
        assert self.read is not None
        target = scratch[start : start + self.nbytes]
        return self.read(target) if streamed is None else streamed.copy(self.read, target, after)


class WeightStreaming:
    """The tensors of one query's module that are on the meta device between runs.

    These are the packed ones, and those named in `overflow`, which are read from the bundle in each run. `bytes` of
    scratch are taken for the time of a run: the most that is in use at once. A layer that is called again before
    another layer took its memory is not staged again. `overflow_bytes` counts the bytes copied from the bundle;
    `streamed` copies them to a GPU; where it also `overlaps`, layers take turns with two scratches, and a copy runs
    beside the layer before it. A run raises OSError when the bundle's file has become shorter.
    """

    def __init__(
        self,
        model: nn.Module,
        bundle: Bundle,
        query: BundleQuery,
        overflow: Collection[str],
        device: str,
        streamed: PinnedStream | None = None,
        overlaps: bool = False,
    ) -> None:
        layers = streamable_layers(model, query, device) if query.stored or overflow else ()
        self._streamed = streamed
        self.bytes, self._turns = scratch_bytes(layers, overflow, overlaps), turns_of(layers, overflow, overlaps)
        starts = [turn * self.bytes // 2 for turn in self._turns]
        spans = zip(starts, scratch_spans(layers, overflow), strict=True)
        self._spans = [(start + begin, start + end) for start, (begin, end) in spans]
        self._overlaps = overlaps
        self._free: list[Any] = [None, None]
        self.overflow_bytes = 0
        self._all: list[_StagedWeight] = []
        packed = unpacked_weights(query.stored, device)
        for index, layer in enumerate(layers):
            staged, start = list[_StagedWeight](), self._spans[index][0]
            for part in layer.parts:
                size = tensor_scratch_bytes(part, overflow)
                if not size:
                    continue
                path, _, attribute = part.key.rpartition(".")
                module = model.get_submodule(path)
                where: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
                nbytes = bundle.nbytes(part.tensor)
                read = partial(bundle.read, part.tensor) if part.tensor in overflow else None
                staged.append(_StagedWeight(where, attribute, part, packed.get(part.key), start, nbytes, read))
                start += size
            if staged:
                module = model.get_submodule(layer.path)
                module.register_forward_pre_hook(self._before(index, staged))
                if overlaps:
                    module.register_forward_hook(self._after(index))
            self._all += staged
        self._scratch: Tensor | None = None
        self._there: set[int] = set()
        self._wait: WaitFor | None = None

    @property
    def keys(self) -> frozenset[str]:
        """The state dict keys of what is staged."""
        return frozenset(one.part.key for one in self._all)

    @property
    def bound(self) -> list[Tensor]:
        """The tensors of the arena that a run reads."""
        return [tensor for one in self._all for tensor in (one.stored, one.factor) if tensor is not None]

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None) -> None:
        for one in self._all:
            one.bind(tensor_of)
        self._wait = wait

    def unbind(self) -> None:
        for one in self._all:
            one.unbind()

    @contextmanager
    def scratch(self, device: torch.device) -> Iterator[None]:
        """The module can run in this context."""
        self._scratch = torch.empty(self.bytes, dtype=torch.uint8, device=device) if self._all else None
        if self._overlaps and self._streamed is not None:
            self._free = [self._streamed.mark()] * 2
        try:
            yield
        finally:
            for one in self._all:
                one.where[one.attribute] = one.placeholder
            self._scratch, self._free = None, [None, None]
            self._there.clear()

    def _before(self, index: int, staged: list[_StagedWeight]) -> Callable[..., None]:
        awaited = [name for one in staged for name in one.awaited]
        overflow_bytes = sum(one.nbytes for one in staged if one.read is not None)
        turn = self._turns[index]
        begin, end = self._spans[index]
        overlapping = {other for other, (start, stop) in enumerate(self._spans) if start < end and begin < stop}

        def hook(_module: nn.Module, _inputs: Any) -> None:
            if self._scratch is None or index in self._there:
                return
            if self._wait is not None:
                self._wait(awaited)
            self._there -= overlapping
            for one in staged:
                one.fill(self._scratch, self._streamed, self._free[turn])
            self._there.add(index)
            self.overflow_bytes += overflow_bytes

        return hook

    def _after(self, index: int) -> Callable[..., None]:
        """The next copy into this layer's scratch waits for what is queued once the layer has returned."""

        def hook(*_given: Any) -> None:
            if self._scratch is not None and self._streamed is not None:
                self._free[self._turns[index]] = self._streamed.mark()

        return hook


def turns_of(layers: Sequence[OverflowLayer], overflow: Collection[str], overlaps: bool) -> list[int]:
    """Which of two scratches each layer has: where copies overlap runs, one after the other."""
    turns, taken = list[int](), 0
    for layer in layers:
        turns.append(taken % 2 if overlaps and overflow else 0)
        taken += any(tensor_scratch_bytes(part, overflow) for part in layer.parts)
    return turns


def unpacked_weights(stored: Mapping[str, StoredTensor], device: str) -> dict[str, StoredTensor]:
    """The packed tensors that are unpacked before use: a GPU computes with float16 as it is."""
    return {key: own for key, own in stored.items() if device == "cpu" or own.dtype != HALF}


def streamable_layers(model: nn.Module, query: BundleQuery, device: str) -> tuple[OverflowLayer, ...]:
    """The tensors of a query's model on the meta device, by the nearest called module above their use.

    Where packed weights overflow to a GPU, they take scratch as they are stored, too. Codes of less than a byte take a
    byte a weight more while they are unpacked. Some modules read the weights of their children without calling them
    (attention does): these count as the parent's. A module's memory is in use until it returns.
    """
    calls = _called_modules(model, query.preprocess.size)
    called, grouped, stored = set(calls), dict[str, list[OverflowTensor]](), unpacked_weights(query.stored, device)
    for key, tensor in model.state_dict(keep_vars=True).items():
        above = key.rpartition(".")[0]
        while above and above not in called:
            above = above.rpartition(".")[0]
        wide, packed, kept = _align(tensor.nbytes), 0, 0
        if own := stored.get(key):
            kept = wide + (_align(tensor.numel()) if BIT_WIDTHS[own.dtype] < BYTE else 0)
            packed = 0 if device == "cpu" else _align(stored_bytes(own.dtype, tensor.shape))
        part = OverflowTensor(key, query.tensors[key], kept, packed + (kept or wide))
        grouped.setdefault(above, []).append(part)
    paths = list(grouped)
    times = Counter(path for path, _ in groupby(path for path in calls if path in grouped))
    return tuple(
        OverflowLayer(
            path,
            tuple(parts),
            tuple(index for index, one in enumerate(paths) if _is_within(path, one)),
            max(1, times[path]),
        )
        for path, parts in grouped.items()
    )


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _is_within(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


@torch.no_grad()
def _called_modules(model: nn.Module, size: Size) -> list[str]:
    """The paths of the modules that one run calls, in order; nothing is computed."""
    seen: list[str] = []

    def note(path: str) -> Callable[..., None]:
        return lambda _module, _inputs: seen.append(path)

    hooks = [module.register_forward_pre_hook(note(path)) for path, module in model.named_modules()]
    try:
        model(torch.empty(1, 3, *size, device="meta"))
    finally:
        for hook in hooks:
            hook.remove()
    readers = [path for path, module in model.named_modules() if isinstance(module, READS_WEIGHTS)]
    return [path for path in seen if not any(_is_within(path, reader) for reader in readers)]
