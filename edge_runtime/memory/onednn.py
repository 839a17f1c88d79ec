"""Weights of convolutions in the blocked order of oneDNN, which computes PyTorch's convolutions on a processor.

Such a weight has no strides: only oneDNN reads it, by a description that is told the memory's address. Here that memory
is the arena's, so the weight is there once, and every engine that calls `convolve` runs from it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edge_runtime.memory.layout import Layout
from models.quantization import WIDE

MIN_BYTES = 512 * 1024
"""A smaller weight is put into order in less time than oneDNN's own call costs over PyTorch's (docs/figures.md)."""
MAX_PADDING = 1.04
"""The most a blocked weight may take over its stored bytes: oneDNN pads rows of powers of two by a thirty-second, and
few channels to a whole block, which is not worth its memory."""
NONE = "none"
_CAPSULE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
"""A C pointer as an object, in which PyTorch takes the handle of a tensor."""


class Convolution(NamedTuple):
    """What a convolution does with its weight (out, in / groups, height, width), on frames of `size`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    size: tuple[int, int]


@dataclass(frozen=True)
class Blocked(Layout):
    """A convolution's weight as oneDNN wants it: `described` is how oneDNN writes that down, `taken` its bytes."""

    convolution: Convolution
    described: bytes
    taken: int

    arranged = True

    @property
    def nbytes(self) -> int:
        """Up to MAX_PADDING times the stored bytes."""
        return self.taken

    def view(self, whole: Tensor, offset: int) -> Tensor:
        """An opaque tensor at that place; it can be convolved with, and nothing else."""
        return _opaque(whole, offset, self)

    def arrange(self, whole: Tensor, offset: int) -> None:
        """See `Layout.arrange`."""
        arranged = _reordered(Layout.view(self, whole, offset), self.convolution)
        ctypes.memmove(whole.data_ptr() + offset, torch.ops.mkldnn.data_ptr(arranged), self.taken)


@lru_cache(maxsize=4096)
def blocked(convolution: Convolution, least_bytes: int = MIN_BYTES) -> Blocked | None:
    """The layout of this convolution's weight.

    None where it is smaller than `least_bytes`, where oneDNN pads it too much, or cannot be told an address.
    """
    if math.prod(convolution.shape) * WIDE.itemsize < least_bytes or not usable():
        return None
    weight = torch.zeros(convolution.shape)
    layout = _wanted(weight, convolution)
    return layout if layout.taken <= MAX_PADDING * weight.nbytes else None


@lru_cache(maxsize=1)
def usable() -> bool:
    """Whether this torch runs a weight that lies blocked in memory of ours: tried once, on a small convolution."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, frames = (torch.rand(shape, generator=generator) for shape in ((16, 16, 3, 3), (1, 16, 8, 8)))
    convolution = Convolution((16, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1, (8, 8))
    try:
        layout = _wanted(weight, convolution)
        memory = torch.zeros(layout.taken // WIDE.itemsize)
        memory[: weight.numel()] = weight.reshape(-1)
        layout.arrange(memory, 0)
        with torch.inference_mode():
            found = convolve(layout.view(memory, 0), None, frames, (1, 1), (1, 1), (1, 1), 1)
        return torch.allclose(found, F.conv2d(frames, weight, padding=1), rtol=1e-4, atol=1e-4)
    except (AttributeError, RuntimeError, OSError, TypeError):  # what other versions of torch may lack
        return False


def convolve(
    weight: Tensor,
    bias: Tensor | None,
    frames: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """The convolution by oneDNN; the weight may be blocked, or lie in any other order."""
    return torch.ops.mkldnn._convolution_pointwise(
        frames, weight, bias, padding, stride, dilation, groups, NONE, [], NONE
    )


def takes_blocked(model: nn.Module, always: Collection[str] = ()) -> None:
    """Let the model's convolutions run with weights that lie blocked, beside others as before.

    With the weights of these state dict keys oneDNN is called in any case: what is compiled cannot tell.
    """
    for path, layer in _plain_convolutions(model).items():
        named = f"{path}.weight" in always
        layer._conv_forward = partial(_forward, layer, named)  # type: ignore[method-assign]


def convolutions_of(model: nn.Module, input_size: int) -> dict[str, Convolution]:
    """The convolutions of a model on the meta device, by the state dict key of the weight; nothing is computed.

    One that is called on frames of several sizes counts with the first, which in a detector is the largest; a weight
    that anything but a convolution reads does not count.
    """
    keys = {id(tensor): key for key, tensor in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Convolution] = {}

    def noted(
        layer: nn.Conv2d, own: Callable[..., Tensor], frames: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        height, width = frames.shape[-2:]
        found.setdefault(
            keys.get(id(weight), ""), Convolution(tuple(weight.shape), *_geometry(layer), layer.groups, (height, width))
        )
        return own(frames, weight, bias)

    layers = list(_plain_convolutions(model).values())
    before = [layer.__dict__.get("_conv_forward") for layer in layers]
    for layer in layers:
        layer._conv_forward = partial(noted, layer, layer._conv_forward)  # type: ignore[method-assign]
    try:
        with torch.no_grad(), _OtherReaders(keys) as others:
            model(torch.empty(1, 3, input_size, input_size, device="meta"))
    finally:
        for layer, own in zip(layers, before, strict=True):
            del layer._conv_forward
            if own is not None:
                layer._conv_forward = own  # type: ignore[method-assign]
    return {key: convolution for key, convolution in found.items() if key not in others.read | {""}}


class _OtherReaders(TorchDispatchMode):
    """Notes the tensors, named by their ids, that any operation but a convolution reads."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.read: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.convolution.default:
            self.read |= {self._names[id(one)] for one in tree_leaves((args, kwargs)) if id(one) in self._names}
        return func(*args, **(kwargs or {}))


def _plain_convolutions(model: nn.Module) -> dict[str, nn.Conv2d]:
    return {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    }


def _geometry(layer: nn.Conv2d) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    assert not isinstance(layer.padding, str)
    return tuple(layer.stride), tuple(layer.padding), tuple(layer.dilation)


def _forward(layer: nn.Conv2d, always: bool, frames: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In place of nn.Conv2d's own `_conv_forward`."""
    stride, padding, dilation = _geometry(layer)
    if weight.is_mkldnn or (always and weight is layer.weight):
        return convolve(weight, bias, frames, stride, padding, dilation, layer.groups)
    return F.conv2d(frames, weight, bias, stride, padding, dilation, layer.groups)


def _wanted(weight: Tensor, convolution: Convolution) -> Blocked:
    """How oneDNN wants this weight to lie."""
    arranged = _reordered(weight, convolution)
    described = torch.ops.mkldnn._get_mkldnn_serialized_md(arranged).numpy().tobytes()
    return Blocked(WIDE, convolution.shape, convolution, described, int(torch.ops.mkldnn._nbytes(arranged)))


def _reordered(weight: Tensor, convolution: Convolution) -> Tensor:
    """A copy of a weight that lies as stored, in the order that oneDNN wants."""
    _, stride, padding, dilation, groups, size = convolution
    frames = [1, groups * weight.shape[1], *size]
    return torch.ops.mkldnn._reorder_convolution_weight(
        weight, list(padding), list(stride), list(dilation), groups, frames
    )


def _opaque(whole: Tensor, offset: int, layout: Blocked) -> Tensor:
    """A tensor of PyTorch over memory that oneDNN reads by its own description, as AOTInductor makes its constants."""
    library = _library()
    sizes = (ctypes.c_int64 * 4)(*layout.shape)
    strides = (ctypes.c_int64 * 4)(*torch.empty(layout.shape, device="meta").stride())
    handle = ctypes.c_void_p()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(whole.data_ptr() + offset),
        ctypes.c_int64(4),
        sizes,
        strides,
        ctypes.c_int64(0),
        ctypes.c_int32(library.aoti_torch_dtype_float32()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        layout.described,
        ctypes.c_int64(len(layout.described)),
    )
    if failed:
        raise RuntimeError("oneDNN refused the description of a weight")
    tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_CAPSULE(handle, None, None))  # type: ignore
    tensor.memory = whole  # it knows an address alone: what lies there lives as long as it does
    return tensor


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
