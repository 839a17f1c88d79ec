"""Darknet's `.weights` files: a short header, then every convolution's values in the order of the network."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from models.errors import InputError

VALUE_BYTES = 4
VERSION_BYTES = 12
LARGEST_VERSION = 1000
"""Darknet marks transposed matrices by a version above this; no convolution has any, and no other file starts so."""


class DarknetLayer(NamedTuple):
    """One convolution: paths of the convolution and of its norm (None: it has a bias instead), and whether it is
    an output, whose width follows the classes.
    """

    conv: str
    norm: str | None = None
    output: bool = False


class DarknetOrder(NamedTuple):
    """The convolutions as darknet's cfg file lists them; the first `backbone` of them are the backbone."""

    layers: tuple[DarknetLayer, ...]
    backbone: int


@runtime_checkable
class Darknet(Protocol):
    """A module whose weights darknet's files hold: it says in which order."""

    def darknet_order(self) -> DarknetOrder: ...


class _Slot(NamedTuple):
    name: str
    shape: tuple[int, ...]


def read_darknet(path: Path, module: nn.Module, key: str = "weights") -> dict[str, Tensor]:
    """The tensors of a darknet `.weights` file under the names of `module`'s state dict; the module stays as it is.

    A file that ends right after the backbone (darknet53.conv.74) gives the backbone's tensors alone. A file of
    another class count gives outputs of its own width: whether they fit is for the caller to say. Raises InputError
    for a file that is none of darknet's, cut short, or too long, and for a module without `darknet_order`.
    Format: darknet's src/parser.c, load_weights_upto and load_convolutional_weights.
    """
    if not isinstance(module, Darknet):
        fault = f"darknet weights do not fit {type(module).__name__}"
        raise InputError(path, fault, "use them with yolov3 or yolov3_tiny", key)
    order = module.darknet_order()
    values = _values(path, key)
    backbone = [_slots(module, layer) for layer in order.layers[: order.backbone]]
    whole = [_slots(module, layer) for layer in order.layers]
    if len(values) == _count(backbone):
        return _cut(values, backbone)
    if len(values) != _count(whole):
        width = _width_of_outputs(module, order.layers, len(values))
        if width is None:
            _refuse(path, key, type(module).__name__, order.layers, whole, len(values))
        whole = [_slots(module, layer, width) for layer in order.layers]
    return _cut(values, whole)


def _values(path: Path, key: str) -> np.ndarray:
    """Everything behind the header, float32."""
    try:
        with path.open("rb") as file:
            head = file.read(VERSION_BYTES)
            major, minor, _ = struct.unpack("<3i", head) if len(head) == VERSION_BYTES else (-1, -1, -1)
            if not (0 <= major < LARGEST_VERSION and 0 <= minor < LARGEST_VERSION):
                raise InputError(path, "is no darknet weights file", "give the .weights file darknet wrote", key)
            # From version 0.2 on, the count of images seen has eight bytes instead of four.
            file.seek(8 if major * 10 + minor >= 2 else 4, 1)
            content = file.read()
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}", "check the path", key) from error
    if len(content) % VALUE_BYTES:
        fault = f"is cut short: {len(content) % VALUE_BYTES} bytes of a value are left at its end"
        raise InputError(path, fault, "copy or download it again", key)
    return np.frombuffer(bytearray(content), dtype="<f4")


def _slots(module: nn.Module, layer: DarknetLayer, width: int | None = None) -> list[_Slot]:
    """What one convolution reads, in order; `width` replaces the channels of an output."""
    weight = tuple(module.get_parameter(f"{layer.conv}.weight").shape)
    if layer.output and width is not None:
        weight = (width, *weight[1:])
    if layer.norm is None:
        vectors = [f"{layer.conv}.bias"]
    else:
        vectors = [f"{layer.norm}.{name}" for name in ("bias", "weight", "running_mean", "running_var")]
    return [*(_Slot(name, weight[:1]) for name in vectors), _Slot(f"{layer.conv}.weight", weight)]


def _count(layers: Sequence[Sequence[_Slot]]) -> int:
    return sum(math.prod(slot.shape) for layer in layers for slot in layer)


def _cut(values: np.ndarray, layers: Sequence[Sequence[_Slot]]) -> dict[str, Tensor]:
    tensors, start = {}, 0
    everything = torch.from_numpy(values)
    for name, shape in (slot for layer in layers for slot in layer):
        end = start + math.prod(shape)
        tensors[name] = everything[start:end].view(shape)
        start = end
    return tensors


def _width_of_outputs(module: nn.Module, layers: Sequence[DarknetLayer], values: int) -> int | None:
    """The channels of the outputs with which a file of so many values fits; None when there are no such."""
    outputs = [layer for layer in layers if layer.output]
    if not outputs:
        return None
    fixed = _count([_slots(module, layer) for layer in layers if not layer.output])
    per_channel = _count([_slots(module, layer, 1) for layer in outputs])
    width, rest = divmod(values - fixed, per_channel)
    return width if width > 0 and rest == 0 else None


def _refuse(
    path: Path, key: str, model: str, names: Sequence[DarknetLayer], layers: Sequence[Sequence[_Slot]], values: int
) -> NoReturn:
    wanted = _count(layers)
    if values > wanted:
        fault = f"holds {values:,} values, {values - wanted:,} more than {model} takes"
        raise InputError(path, fault, "give weights of this architecture", key)
    left = values
    for name, layer in zip(names, layers, strict=True):
        size = _count([layer])
        if left < size:
            break
        left -= size
    fault = f"is cut short: it ends in {name.conv}, {wanted - values:,} of {wanted:,} values of {model} are missing"
    raise InputError(path, fault, "download it again, or give weights of this architecture", key)
