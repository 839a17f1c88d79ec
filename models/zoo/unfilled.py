"""Architectures without weights: on the device "meta" nothing is allocated, and nothing drawn at random either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.erfinv_})
"""What random weights are made with, besides `torch.nn.init`; on "meta" torch would import a compiler for them."""


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
    with torch.device(device), _Unfilled():
        yield
