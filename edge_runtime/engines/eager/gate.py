"""Lets a module's layers start as their weights arrive: each waits for its own tensors and for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def gated(layers: Mapping[nn.Module, Iterable[str]], wait: Callable[[Iterable[str]], None]) -> Iterator[None]:
    """While the context lasts, `wait` is called with a layer's tensor names before the layer is.

    Only what is called through its forward can be gated; a module that reads another's parameters is not.
    """

    def waiting(names: tuple[str, ...]) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            wait(names)

        return hook

    hooks = [module.register_forward_pre_hook(waiting(tuple(names))) for module, names in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
