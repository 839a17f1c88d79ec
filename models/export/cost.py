"""What a model costs to run, found on the meta device: operations and the peak of its intermediates."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from gemel.models.preprocess import InputSize, height_width


@torch.inference_mode(False)
@torch.no_grad()
def flops(module: nn.Module, input_size: InputSize, batch: int = 1) -> int:
    """Floating-point operations of one forward pass, a multiply-add counted as 2. `module` is on "meta"."""
    with FlopCounterMode(display=False) as counter:
        _forward(module, input_size, batch)
    return counter.get_total_flops()


@torch.inference_mode(False)
@torch.no_grad()
def workspace_bytes(module: nn.Module, input_size: InputSize, batch: int = 1) -> int:
    """Peak bytes of tensors alive during one eager forward pass, its input included and the weights not.

    `module` is on "meta". Memory inside a kernel is not counted.
    """
    with _LiveBytes(module) as live:
        _forward(module, input_size, batch)
    return live.peak


@torch.inference_mode(False)
@torch.no_grad()
def layer_flops(module: nn.Module, input_size: InputSize) -> list[tuple[str, int]]:
    """The leaf modules that a forward pass of one frame calls, in order, each with the operations up to its end.

    The last entry, without a path, is the whole pass. `module` is on "meta".
    """
    done: list[tuple[str, int]] = []
    hooks = []
    with FlopCounterMode(display=False) as counter:
        for path, leaf in module.named_modules():
            if not any(leaf.children()):
                hooks.append(
                    leaf.register_forward_hook(
                        lambda _module, _inputs, _outputs, path=path: done.append(
                            (path, counter.get_total_flops())
                        )
                    )
                )
        try:
            _forward(module, input_size, 1)
        finally:
            for hook in hooks:
                hook.remove()
    return [*done, ("", counter.get_total_flops())]


def _forward(module: nn.Module, input_size: InputSize, batch: int) -> None:
    was_training = module.training
    module.eval()
    module(torch.empty(batch, 3, *height_width(input_size), device="meta"))
    module.train(was_training)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages between their first appearance and their end."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        tensors = [*module.parameters(), *module.buffers()]
        self._known = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                self._see(value.untyped_storage())
        self.peak = max(self.peak, self._live)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._live += size
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size
