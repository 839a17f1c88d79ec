"""Darknet's `.weights` files: a short header, then every convolution's values in the order of the network."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gemel.models.errors import InputError
from gemel.models.io import open_regular

VALUE_BYTES, VERSION_BYTES = 4, 12
MAX_VERSION = 1000
"""Darknet's versions are 0.1 to 0.2.5; files of other formats begin with far larger numbers."""
COPY_HINT = "copy or download it again, or give the file darknet wrote"


class DarknetLayer(NamedTuple):
    """One convolution: its path, its norm's path (None: it has a bias instead), and whether it is an output, whose
    channels follow the classes.
    """

    conv: str
    norm: str | None = None
    output: bool = False


def read_darknet(path: Path, module: nn.Module, key: str = "weights") -> dict[str, Tensor]:
    """The tensors of a darknet `.weights` file under the names of `module`'s state dict; the module is not changed.

    The module's `darknet_layers()` lists all its convolutions in the order of darknet's cfg file. A file that ends
    between two of them, as `darknet partial` writes them (darknet53.conv.74), gives the tensors before that; one of
    another class count gives outputs of its own width. The caller checks whether they fit. Raises InputError for
    another format, a file cut short within a convolution or too long, and for a module without `darknet_layers`.
    Format: darknet's src/parser.c, load_weights_upto and load_convolutional_weights.
    """
    model = type(module).__name__
    if not hasattr(module, "darknet_layers"):
        raise InputError(path, f"darknet's weights do not fit {model}", "use them with yolov3 or yolov3_tiny", key)
    layers: Sequence[DarknetLayer] = module.darknet_layers()  # type: ignore[operator]
    shapes = [_shapes(module, layer) for layer in layers]
    ends = list(accumulate(map(_count, shapes)))
    with open_regular(path, "check the path", key) as file:
        head = file.read(VERSION_BYTES)
        major, minor, _ = struct.unpack("<3i", head) if len(head) == VERSION_BYTES else (-1, -1, -1)
        if not (0 <= major < MAX_VERSION and 0 <= minor < MAX_VERSION):
            raise InputError(path, "is no darknet weights file", COPY_HINT, key)
        # From version 0.2 on, the count of images seen in training has eight bytes instead of four.
        start = file.seek(VERSION_BYTES + (8 if major * 10 + minor >= 2 else 4))
        count, torn = divmod(os.fstat(file.fileno()).st_size - start, VALUE_BYTES)
        if torn:
            problem = f"is cut short: it ends with {torn} of a value's {VALUE_BYTES} bytes"
            raise InputError(path, problem, COPY_HINT, key)
        if count in ends:
            shapes = shapes[: ends.index(count) + 1]
        elif width := _output_width(layers, shapes, count):
            shapes = [_shapes(module, layer, width) for layer in layers]
        elif count > ends[-1]:
            problem = f"holds {count:,} values, {count - ends[-1]:,} more than {model} takes"
            raise InputError(path, problem, "give weights of this architecture", key)
        else:
            layer = next(layer for layer, end in zip(layers, ends, strict=True) if end > count)
            problem = f"{ends[-1] - count:,} of {ends[-1]:,} values of {model} are missing"
            hint = "copy or download it again, or give weights of this architecture"
            raise InputError(path, f"is cut short within {layer.conv}: {problem}", hint, key)
        values = torch.from_numpy(np.frombuffer(bytearray(file.read(count * VALUE_BYTES)), "<f4", count))
    named = {name: shape for layer in shapes for name, shape in layer.items()}
    parts = values.split([math.prod(shape) for shape in named.values()])
    return {name: part.view(shape) for (name, shape), part in zip(named.items(), parts, strict=True)}


def _shapes(module: nn.Module, layer: DarknetLayer, width: int | None = None) -> dict[str, tuple[int, ...]]:
    """The tensors of one convolution in the file's order; `width` replaces the channels of an output."""
    shape = tuple(module.get_parameter(f"{layer.conv}.weight").shape)
    if layer.output and width is not None:
        shape = (width, *shape[1:])
    if layer.norm is None:
        vectors = [f"{layer.conv}.bias"]
    else:
        vectors = [f"{layer.norm}.{name}" for name in ("bias", "weight", "running_mean", "running_var")]
    return {**dict.fromkeys(vectors, shape[:1]), f"{layer.conv}.weight": shape}


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def _output_width(
    layers: Sequence[DarknetLayer], shapes: Sequence[dict[str, tuple[int, ...]]], values: int
) -> int | None:
    """The width of the outputs for which the file has this many values; None if there is none."""
    fixed = sum(_count(shape) for layer, shape in zip(layers, shapes, strict=True) if not layer.output)
    per_channel = 0
    for layer, shape in zip(layers, shapes, strict=True):
        if layer.output:
            per_channel += _count(shape) // shape[f"{layer.conv}.weight"][0]
    if per_channel == 0 or values <= fixed or (values - fixed) % per_channel:
        return None
    return (values - fixed) // per_channel
