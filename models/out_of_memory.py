"""Which errors say that memory is full, of a device or of the host. Needs no torch."""

from __future__ import annotations

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
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    of_device = isinstance(error, RuntimeError) or type(error).__module__.startswith(_ONNX_RUNTIME)
    return of_device and any(sign in str(error) for sign in _OUT_OF_MEMORY)
