"""What a failure of the device is called, in every form it comes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

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


@contextmanager
def telling_out_of_memory(device: torch.device) -> Iterator[None]:
    """Code compiled by AOTInductor fails with a RuntimeError that does not say why: OutOfMemoryError where torch's
    allocator has counted one meanwhile. On a card alone.
    """
    before = _refused(device)
    try:
        yield
    except RuntimeError as error:
        if _refused(device) > before and not is_out_of_memory(error):
            raise torch.OutOfMemoryError(f"CUDA out of memory in compiled code: {error}") from error
        raise


def _refused(device: torch.device) -> int:
    """How often the allocator had to refuse so far."""
    return torch.cuda.memory_stats(device).get("num_ooms", 0) if device.type == "cuda" else 0
