"""Training weights for the bits they are stored in: every step sees them rounded, and moves them as they are.

A gradient passes the rounding as if it were not there (straight-through: Bengio, Leonard and Courville, Estimating or
propagating gradients, 2013; Courbariaux, Bengio and David, BinaryConnect, NeurIPS 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from merger.training.loop import Training
from merger.widths.storing import Widths
from models.bits import Bits, max_code
from models.quantization import scales_of


class Rounded:
    """A training whose weights of few bits stand rounded in its models, as they would be stored, at every step.

    Scales are chosen anew with each epoch, the last time at the end: what is judged then is what packing stores.
    """

    def __init__(self, training: Training, widths: Widths) -> None:
        self.training, self._widths = training, dict[nn.Parameter, Bits]()
        for query, model in training.models.items():
            own = dict(model.named_parameters(remove_duplicate=False))
            self._widths |= {own[name]: width for name, width in widths.get(query, {}).items() if name in own}
        self._wide = [parameter.detach().clone() for parameter in self._widths]
        self._scales = list[Tensor | None]()
        self._round()
        self.after_step: Callable[[], None] = lambda: None
        training.after_step = self._told
        training.optimiser.register_step_pre_hook(lambda *_: self._widen())
        training.optimiser.register_step_post_hook(lambda *_: self._stepped())

    def wide(self) -> dict[str, dict[str, Tensor]]:
        """Query -> name -> a copy of the weight that a step would move, of those that are rounded."""
        value = dict(zip(self._widths, self._wide, strict=True))
        return {
            query: {n: value[p].clone() for n, p in model.named_parameters(remove_duplicate=False) if p in value}
            for query, model in self.training.models.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later step depends on; tensors are those at work, not copies."""
        return {"training": self.training.state_dict(), "wide": self._wide, "scales": self._scales}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` of the same training returned."""
        self.training.load_state_dict(state["training"])
        self._wide = [tensor.to(one.device) for tensor, one in zip(state["wide"], self._widths, strict=True)]
        self._scales = [None if one is None else one.to(wide.device) for one, wide in zip(state["scales"], self._wide)]

    @torch.no_grad()
    def _widen(self) -> None:
        for parameter, wide in zip(self._widths, self._wide, strict=True):
            parameter.copy_(wide)

    def _told(self) -> None:
        self.after_step()

    def _stepped(self) -> None:
        """A step was taken; the training counts it only after that."""
        self._wide = [parameter.detach().clone() for parameter in self._widths]
        if (self.training.step + 1) % self.training.steps == 0:
            self._scales = []
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        if not self._scales:
            self._scales = [None if width == "fp16" else scales_of(p, width) for p, width in self._widths.items()]
        for (parameter, width), scale in zip(self._widths.items(), self._scales, strict=True):
            if scale is None:
                parameter.copy_(parameter.half())
                continue
            by_row, most = scale.view(-1, *(1,) * (parameter.ndim - 1)), max_code(width)
            parameter.div_(by_row).round_().clamp_(-most, most).mul_(by_row)
