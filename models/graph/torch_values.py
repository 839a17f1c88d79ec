"""Tensors and attributes of a graph file as torch has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor


def to_torch(array: np.ndarray) -> Tensor:
    """An array as a tensor of its own memory; half and double precision as float32, four bits as eight."""
    if array.dtype.name in ("float16", "bfloat16", "float64") or array.dtype.name.startswith(
        "float8"
    ):
        return torch.from_numpy(array.astype(np.float32))
    if array.dtype.name in ("int4", "int2"):
        return torch.from_numpy(array.astype(np.int8))
    if array.dtype.name in ("uint4", "uint2"):
        return torch.from_numpy(array.astype(np.uint8))
    return torch.from_numpy(np.array(array, order="C"))


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """A node's attributes as Python values; a tensor becomes a torch tensor."""
    values = {}
    for name, attribute in node.attributes.items():
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            value = to_torch(value.numpy())
        elif attribute.type in (
            ir.AttributeType.INTS,
            ir.AttributeType.FLOATS,
            ir.AttributeType.STRINGS,
        ):
            value = list(value)
        values[name] = value
    return values
