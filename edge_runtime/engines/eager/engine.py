"""The engine `torch`: eager PyTorch, its parameters and buffers set to the arena's tensors."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from edge_runtime.engines.base import FrameEngine
from edge_runtime.engines.eager.gate import gated
from edge_runtime.engines.eager.slots import Slot, layers_to_wait_for
from edge_runtime.engines.eager.staging import HALF, Staging
from edge_runtime.engines.eager.streamed import Streamed
from edge_runtime.engines.graphs import graphs_for
from edge_runtime.memory.binding import TensorOf, Wait
from edge_runtime.memory.layout import Order
from models.bits import BIT_WIDTHS
from models.bundle import Bundle

FULL = "fp32"
PRECISIONS: dict[str, torch.dtype | None] = {FULL: None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What convolutions and matrix products may be computed in."""


class TorchEngine(FrameEngine):
    """Eager PyTorch: one query's module, its parameters and buffers set to the tensors it is bound to.

    The module itself holds no weights; until `bind` its tensors lie on the meta device and a run fails. Tensors that
    are stored packed stay so, and are widened while a run needs them; those named in `overflow` are never bound but
    copied from the bundle while a run needs them (`Staging`). Outputs are bit-equal to those of the module that
    `Bundle.build` makes. With `precision`
    "bf16" or "fp16" convolutions and matrix products are computed so (autocast): weights stay as they are and are cast
    in every run, outputs differ in the third digit. With `half`, and on a card always, weights stored as float16 are
    not widened but computed with as they are, and so is the rest (autocast). On a card runs are replayed from graphs
    (`Graphs`). Raises BundleError when the bundle's tensors don't fit the architecture.
    """

    name = "torch"
    starts_early = True
    orders = frozenset(Order)
    runs_packed = frozenset(BIT_WIDTHS)

    def __init__(
        self,
        bundle: Bundle,
        query_id: str,
        device: str | torch.device = "cpu",
        precision: str = FULL,
        overflow: Collection[str] = (),
        half: bool = False,
    ) -> None:
        super().__init__(bundle, query_id, device)
        half = half or self.device.type != "cpu"
        self._cast_to = PRECISIONS[precision]
        if half and self._cast_to is None and any(own.dtype == HALF for own in self.query.stored.values()):
            self._cast_to = torch.float16
        most = max(map(bundle.nbytes, overflow), default=0)
        streamed = Streamed(most, self.device) if most and self.device.type != "cpu" else None
        self._staging = Staging(self.model, bundle, self.query, overflow, "cuda" if half else "cpu", streamed)
        staged = self._staging.keys
        self._slots = [Slot(self.model, path, name) for path, name in self.query.tensors.items() if path not in staged]
        self._layers = layers_to_wait_for(self.model, self.query.places())
        self._wait: Wait | None = None
        self._graphs = None if overflow else graphs_for(self.device)
        self._placement: tuple[int, ...] = ()

    def bind(self, tensor_of: TensorOf, wait: Wait | None = None) -> None:
        """Point every parameter and buffer at the tensor of its name; those already there are left alone."""
        for slot in self._slots:
            tensor = tensor_of(slot.name)
            if tensor is not slot.bound:
                slot.set(tensor)
        self._staging.bind(tensor_of, wait)
        self._wait = wait
        if self._graphs is not None:
            bound = [slot.bound for slot in self._slots if slot.bound is not None]
            self._placement = tuple(tensor.data_ptr() for tensor in (*bound, *self._staging.bound))

    def unbind(self) -> None:
        """Put the module back on the meta device."""
        for slot in self._slots:
            slot.clear()
        self._staging.unbind()
        if self._graphs is not None:
            self._graphs.clear()

    def forward(self, batch: Tensor) -> Any:
        """What the module returns; where its tensors are still arriving, layer by layer as they do."""
        if self._graphs is None or self._wait is not None:
            return self._called(batch)
        return self._graphs.run(self._placement, self._called, batch)

    def _called(self, batch: Tensor) -> Any:
        arriving = gated(self._layers, self._wait) if self._wait else nullcontext()
        # Nothing may be kept from run to run: what is cast would be a second copy of the weights.
        casting = (
            torch.autocast(self.device.type, self._cast_to, cache_enabled=False) if self._cast_to else nullcontext()
        )
        with arriving, self._staging.scratch(self.device), casting:
            return self.model(batch)

    def workspace_of(self, count: int) -> int:
        """Intermediates, and the scratch for what is widened or overflows."""
        return super().workspace_of(count) + self._staging.bytes

    @property
    def replays(self) -> bool:
        """Whether it has graphs to replay."""
        return self._graphs is not None and self._graphs.any

    @property
    def overflow_bytes(self) -> int:
        """The bytes that runs have copied from the bundle so far."""
        return self._staging.overflow_bytes
