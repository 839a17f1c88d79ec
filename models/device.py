"""Devices: out-of-memory errors and retries, TF32, pinned copies to the GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# torch raises OutOfMemoryError from its own allocator; from the driver and the libraries comes a RuntimeError that
# only its text tells apart. ONNX Runtime has errors of its own, which are no RuntimeErrors; the last three signs are
# the allocators of torch's CPU and of ONNX Runtime.
_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUDA out of memory",
    "CUDA failure 2:",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "Failed to allocate memory",
    "std::bad_alloc",
)
_ONNX_RUNTIME = "onnxruntime."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    of_device = isinstance(error, RuntimeError) or type(error).__module__.startswith(_ONNX_RUNTIME)
    return of_device and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def empty_caches() -> None:
    """Free garbage and torch's cached GPU memory; call it after the error, which holds tensors, is gone."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def retry_with_smaller_batch(most: int, attempt: Callable[[int], T], least: int = 1) -> tuple[int, T]:
    """The largest batch size, halved from `most`, for which `attempt` does not run out of memory, and its result.

    Other errors, and running out of memory at `least`, are raised.
    """
    size = most
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
