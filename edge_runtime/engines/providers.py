"""The execution providers of ONNX Runtime, and whether they can be used here. Needs no torch."""

from __future__ import annotations

from gemel.models.files.extras import has_cuda_driver, is_installed

CPU, CUDA = "cpu", "cuda"
PROVIDERS = {
    CPU: ("CPUExecutionProvider", "onnxruntime"),
    CUDA: ("CUDAExecutionProvider", "onnxruntime-gpu"),
    "tensorrt": ("TensorrtExecutionProvider", "onnxruntime-gpu"),
    "openvino": ("OpenVINOExecutionProvider", "onnxruntime-openvino"),
}
"""By the name that a box config has: the name in ONNX Runtime, and the package that has it."""


def unavailable_reason(provider: str) -> str | None:
    """Why ONNX Runtime cannot use this provider of PROVIDERS; None when it can."""
    try:
        import onnxruntime
    except ImportError:
        return "the package onnxruntime is not installed (pip install onnxruntime)"
    name, package = PROVIDERS[provider]
    if name not in onnxruntime.get_available_providers():
        return f"this onnxruntime has no {name} (install {package} in its place)"
    return None


def has_cuda_provider() -> bool:
    """Whether ONNX Runtime is what runs networks on the GPU of this machine, since torch is not installed."""
    return not is_installed("torchvision") and has_cuda_driver() and unavailable_reason(CUDA) is None
