"""What a failure of the device is called, in every form it comes in."""

from __future__ import annotations

import torch

# torch raises OutOfMemoryError from its own allocator; from the driver and the libraries comes a RuntimeError that
# only its text tells apart. The last two are the allocators of torch's CPU and of ONNX Runtime.
_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUDA out of memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "Failed to allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device (or the host) had no memory left for what was asked, which another try may get."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)
