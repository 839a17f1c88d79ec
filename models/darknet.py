"""Darknet's `.weights` files: a short header, then every convolution's values in the order of the network."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from models.errors import InputError
from models.io import ParseError, open_regular

VALUE_BYTES = 4
VERSION_BYTES = 12
LARGEST_VERSION = 1000
"""Darknet's versions are 0.1 to 0.2.5; files of other formats begin with far larger numbers."""


class DarknetLayer(NamedTuple):
    """One convolution: its path, its norm's path (None: it has a bias instead), and whether it is an output, whose
    channels follow the classes.
    """

    conv: str
    norm: str | None = None
    output: bool = False


@runtime_checkable
class Darknet(Protocol):
    """A module whose weights such a file can hold."""

    def darknet_layers(self) -> Sequence[DarknetLayer]:
        """All its convolutions in the order of darknet's cfg file."""
        ...


class _Slot(NamedTuple):
    """Some values that follow each other in the file: one tensor."""

    name: str
    shape: tuple[int, ...]


def read_darknet(path: Path, module: nn.Module, key: str = "weights") -> dict[str, Tensor]:
    """The tensors of a darknet `.weights` file under the names of `module`'s state dict; the module is not changed.

    A file that ends between two convolutions, as `darknet partial` writes them (darknet53.conv.74), gives the tensors
    before that; one of another class count gives outputs of its own width. The caller checks
    whether they fit. Raises InputError for another format, a file cut short within a convolution or too long, and
    for a module without `darknet_layers`.
    Format: darknet's src/parser.c, load_weights_upto and load_convolutional_weights.
    """
    if not isinstance(module, Darknet):
        fault = f"darknet's weights do not fit {type(module).__name__}"
        raise InputError(path, fault, "use them with yolov3 or yolov3_tiny", key)
    layers = module.darknet_layers()
    slots = [_slots(module, layer) for layer in layers]
    ends = list(accumulate(map(_count, slots)))
    try:
        with open_regular(path, "check the path") as file:
            count = _count_values(file)
            if count in ends:
                return _cut(_read(file, count), slots[: ends.index(count) + 1])
            if width := _width_of_outputs(module, layers, count):
                return _cut(_read(file, count), [_slots(module, layer, width) for layer in layers])
    except ParseError as fault:
        raise InputError(path, str(fault), "copy or download it again, or give the file darknet wrote", key) from fault
    except InputError as error:
        raise InputError(path, error.problem, error.hint, key) from error
    if count > ends[-1]:
        fault = f"holds {count:,} values, {count - ends[-1]:,} more than {type(module).__name__} takes"
        raise InputError(path, fault, "give weights of this architecture", key)
    torn = next(layer for layer, end in zip(layers, ends, strict=True) if end > count)
    missing = f"{ends[-1] - count:,} of {ends[-1]:,} values of {type(module).__name__} are missing"
    fault = f"is cut short within {torn.conv}: {missing}"
    raise InputError(path, fault, "copy or download it again, or give weights of this architecture", key)


def _count_values(file: BinaryIO) -> int:
    """The number of values after the header; the file is positioned at the first."""
    head = file.read(VERSION_BYTES)
    major, minor, _ = struct.unpack("<3i", head) if len(head) == VERSION_BYTES else (-1, -1, -1)
    if not (0 <= major < LARGEST_VERSION and 0 <= minor < LARGEST_VERSION):
        raise ParseError("is no darknet weights file")
    # From version 0.2 on, the count of images seen in training has eight bytes instead of four.
    start = VERSION_BYTES + (8 if major * 10 + minor >= 2 else 4)
    size = file.seek(0, io.SEEK_END) - start
    file.seek(start)
    if torn := size % VALUE_BYTES:
        raise ParseError(f"is cut short: it ends with {torn} of a value's {VALUE_BYTES} bytes")
    return size // VALUE_BYTES


def _read(file: BinaryIO, count: int) -> np.ndarray:
    """`count` float32 values; ValueError where the file has become shorter."""
    return np.frombuffer(bytearray(file.read(count * VALUE_BYTES)), dtype="<f4", count=count)


def _slots(module: nn.Module, layer: DarknetLayer, width: int | None = None) -> list[_Slot]:
    """What one convolution reads, in order; `width` replaces the channels of an output."""
    shape = tuple(module.get_parameter(f"{layer.conv}.weight").shape)
    if layer.output and width is not None:
        shape = (width, *shape[1:])
    if layer.norm is None:
        vectors = [f"{layer.conv}.bias"]
    else:
        vectors = [f"{layer.norm}.{name}" for name in ("bias", "weight", "running_mean", "running_var")]
    return [*(_Slot(name, shape[:1]) for name in vectors), _Slot(f"{layer.conv}.weight", shape)]


def _count(slots: Sequence[_Slot]) -> int:
    return sum(math.prod(slot.shape) for slot in slots)


def _cut(values: np.ndarray, layers: Sequence[Sequence[_Slot]]) -> dict[str, Tensor]:
    """Views into the values: nothing is copied."""
    tensors, start = {}, 0
    everything = torch.from_numpy(values)
    for name, shape in (slot for slots in layers for slot in slots):
        end = start + math.prod(shape)
        tensors[name] = everything[start:end].view(shape)
        start = end
    return tensors


def _width_of_outputs(module: nn.Module, layers: Sequence[DarknetLayer], values: int) -> int | None:
    """The width of the outputs for which the file has this many values; None if there is none."""
    fixed = sum(_count(_slots(module, layer)) for layer in layers if not layer.output)
    per_channel = sum(_count(_slots(module, layer, 1)) for layer in layers if layer.output)
    if per_channel == 0 or values <= fixed or (values - fixed) % per_channel:
        return None
    return (values - fixed) // per_channel
