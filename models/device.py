"""Devices: retries after running out of memory, TF32, pinned copies to the GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from gemel.models.out_of_memory import is_out_of_memory

T = TypeVar("T")


def empty_caches() -> None:
    """Free garbage and torch's cached GPU memory; call it after the error, which holds tensors, is gone."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def retry_with_smaller_batch(
    largest: int, attempt: Callable[[int], T], least: int = 1
) -> tuple[int, T]:
    """The largest batch size, halved from `largest`, for which `attempt` does not run out of memory, and its result.

    Other errors, and running out of memory at `least`, are raised.
    """
    size = largest
    while True:
        try:
            return size, attempt(size)
        except Exception as error:
            if size <= least or not is_out_of_memory(error):
                raise
        empty_caches()
        size = max(least, size // 2)


_BACKENDS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)


@contextmanager
def disable_tf32(full: bool = True) -> Iterator[None]:
    """Compute float32 products exactly inside the block, or with `full` False in TF32, with 10 of 23 mantissa bits.

    By default a GPU uses TF32 for convolutions and not for matrix products.
    """
    before = [backend.allow_tf32 for backend in _BACKENDS]
    for backend in _BACKENDS:
        backend.allow_tf32 = not full
    try:
        yield
    finally:
        for backend, allowed in zip(_BACKENDS, before):
            backend.allow_tf32 = allowed


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; a copy to the GPU is asynchronous, from pinned memory."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
