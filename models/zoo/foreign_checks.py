"""What a user's own module must be so that its tensors can be stored, shared and loaded one by one."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from models.detector import Detector, OneStage
from models.errors import InputError

DETECTOR_METHODS = ("candidates", "loss", "distill", "exported")
ONE_STAGE_METHODS = ("decode", "loss", "distill")


def check_foreign(model: str, module: nn.Module, task: str) -> None:
    """Raise InputError for a module whose tensors cannot be stored and shared one by one, or which is no detector."""
    if task == "detection":
        _check_detector(model, module)
    tensors = module.state_dict(keep_vars=True)
    _check_untied(model, tensors)
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            fault = f"{name} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
            raise InputError(model, fault, f"store {name} as .contiguous() in the factory")
    _check_apart(model, tensors)


def _check_detector(model: str, module: nn.Module) -> None:
    base, needed = (OneStage, ONE_STAGE_METHODS) if isinstance(module, OneStage) else (Detector, DETECTOR_METHODS)
    missing = [name for name in needed if getattr(type(module), name, None) in (None, getattr(base, name))]
    if missing or not hasattr(module, "nms_iou"):
        fault = f"{type(module).__name__} is no detector: it lacks {', '.join(missing or ['nms_iou'])}"
        raise InputError(model, fault, "derive it from models.detector.OneStage or Detector")


def _check_untied(model: str, tensors: dict[str, Tensor]) -> None:
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        first = names.setdefault(id(tensor), name)
        if first != name:
            remedy = f"give {name} a parameter of its own: nn.Parameter({first}.detach().clone())"
            raise InputError(model, f"{first} and {name} are one tensor", remedy)


def _check_apart(model: str, tensors: dict[str, Tensor]) -> None:
    """No two tensors may use the same memory."""
    spans = sorted(
        (tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.itemsize, tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor.nbytes
    )
    for (storage, start, nbytes, name), (other_storage, other_start, _, other) in pairwise(spans):
        if storage == other_storage and other_start < start + nbytes:
            raise InputError(model, f"{name} and {other} overlap in memory", f"store {other} as a .clone() of its own")
