"""The places of a module that tensors are bound to, and what each of its layers has to wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Slot:
    """One parameter or buffer of a module, and the name of the tensor it takes."""

    def __init__(self, model: nn.Module, path: str, name: str) -> None:
        owner, _, self._attribute = path.rpartition(".")
        module = model.get_submodule(owner)
        self._is_parameter = self._attribute in module._parameters
        self._where: dict[str, Any] = module._parameters if self._is_parameter else module._buffers
        self.bound: Tensor | None = None
        self.name = name

    def set(self, tensor: Tensor) -> None:
        """Let the module use this tensor from now on; no bytes are copied."""
        if not self._is_parameter:
            self._where[self._attribute] = tensor
        elif self.bound is not None and (self.bound.device, self.bound.layout) == (tensor.device, tensor.layout):
            self._where[self._attribute].data = tensor  # a tenth of what a new parameter costs
        else:
            self._where[self._attribute] = nn.Parameter(tensor, False)
        self.bound = tensor

    def clear(self) -> None:
        """Put the place back on the meta device."""
        if self.bound is not None:
            self.set(torch.empty(self.bound.shape, dtype=self.bound.dtype, device="meta"))


def layers_to_wait_for(model: nn.Module, state: Mapping[str, str]) -> dict[nn.Module, list[str]]:
    """The modules to wait before, each with its tensors' names.

    A module that has weights of its own and children may read the children's without calling them (attention
    does), so it stands for them.
    """
    owners = {path.rpartition(".")[0] for path in state}
    layers: dict[nn.Module, list[str]] = {}
    for path, name in state.items():
        parts = path.split(".")[:-1]
        prefixes = (".".join(parts[:length]) for length in range(len(parts) + 1))
        first = next(prefix for prefix in prefixes if prefix in owners)
        layers.setdefault(model.get_submodule(first), []).append(name)
    return layers
