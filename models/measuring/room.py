"""Memory that is full: how that is told, and going on with less at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

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
    """Whether the device (or the host) had no memory left for what was asked, which another try may get."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    of_device = isinstance(error, RuntimeError) or type(error).__module__.startswith(_ONNX_RUNTIME)
    return of_device and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def make_room() -> None:
    """Free what nobody holds any more, on a card, too. To be called once the error is dealt with: it holds much."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def halving(most: int, attempt: Callable[[int], T], least: int = 1) -> tuple[int, T]:
    """`most`, or what is left of it once it was halved until `attempt` of it had memory enough; and what that returned.

    What `attempt` raises goes on from here when it is something else, or when `least` of it is too much.
    """
    size = most
    while True:
        try:
            return size, attempt(size)
        except Exception as error:
            if size <= least or not is_out_of_memory(error):
                raise
        make_room()
        size = max(least, size // 2)
