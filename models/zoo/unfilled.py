"""Architectures without weights: on the device "meta" nothing is allocated, and nothing drawn at random either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.compiler import without_compiler

FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.erfinv_})
"""What random weights are made with, besides `torch.nn.init`."""


class _Unfilled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FILLS or getattr(func, "__module__", None) == nn.init.__name__:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def built_on(device: str | torch.device) -> Iterator[None]:
    """What is built inside lies on this device."""
    if torch.device(device).type != "meta":
        with torch.device(device):
            yield
        return
    with without_compiler(), torch.device(device), _Unfilled():
        yield
