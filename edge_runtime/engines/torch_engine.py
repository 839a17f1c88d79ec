"""The engine `torch`: eager PyTorch, its parameters and buffers set to the arena's tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from edge_runtime.engines.base import FrameEngine, TensorOf, Wait
from edge_runtime.engines.slots import Slot, layers_to_wait_for
from edge_runtime.engines.widening import Widening
from edge_runtime.gate import gated
from models.bundle import Bundle


class TorchEngine(FrameEngine):
    """Eager PyTorch: one query's module, its parameters and buffers set to the tensors it is bound to.

    The module itself holds no weights; until `bind` its tensors lie on the meta device and a run fails. Tensors that
    are stored narrow stay so, and are widened while a run needs them (`Widening`). Outputs are bit-equal to those of
    the module that `Bundle.build` makes. Raises BundleError when the bundle's tensors don't fit the architecture.
    """

    name = "torch"
    streams = True
    channels_last = None
    runs_narrow = True

    def __init__(self, bundle: Bundle, query_id: str, device: str | torch.device = "cpu") -> None:
        super().__init__(bundle, query_id, device)
        state = self.query.state()
        self._slots = [Slot(self.model, path, name) for path, name in state.items() if path not in self.query.stored]
        self._layers = layers_to_wait_for(self.model, self.query.places())
        self._widening = Widening(self.model, self.query)
        self._wait: Wait | None = None

    def bind(self, tensor_of: TensorOf, wait: Wait | None = None) -> None:
        """Point every parameter and buffer at the tensor of its name; those already there are left alone."""
        for slot in self._slots:
            tensor = tensor_of(slot.name)
            if tensor is not slot.bound:
                slot.set(tensor)
        self._widening.bind(tensor_of, wait)
        self._wait = wait

    def unbind(self) -> None:
        """Put the module back on the meta device."""
        for slot in self._slots:
            slot.clear()
        self._widening.unbind()

    def forward(self, batch: Tensor) -> Any:
        """What the module returns; where its tensors are still arriving, layer by layer as they do."""
        with gated(self._layers, self._wait) if self._wait else nullcontext(), self._widening.scratch(self.device):
            return self.model(batch)

    def workspace_of(self, count: int) -> int:
        """Intermediates, and the scratch for what is widened."""
        return super().workspace_of(count) + self._widening.bytes

