"""What is known of a network that was read from a graph file. Needs neither torch nor ONNX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import Base64Bytes

if TYPE_CHECKING:
    from torch import Tensor


SUFFIX = "_affine"
"""Ends the path of the affine that `unfold_norms` gives a convolution."""
ZEROS, ONES = "zeros_", "ones_"
"""Begin the names of the statistics, by their length, that mark a BatchNormalization as an affine."""


@dataclass(frozen=True)
class TensorInfo:
    """An input or output: `shape` as integers, with a name for a size that is free, "batch" for the batch."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Cut:
    """What was cut off at the end: its first operator and node, its attributes and constant inputs by name.

    `inputs` are the names of the outputs that now feed it, in its order; `outputs` are those that it gave. `tail` is
    the part itself as an ONNX model, `order` the names of the file's outputs; both are empty where it was not kept.
    `given` are the names of the file's inputs, where the part reads others than the picture.
    """

    operator: str
    node: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    tail: Base64Bytes = b""
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A network read from a file. `document` is an ONNX model without weights, each named by its key in `state`.

    Its shapes are fixed but for the batch. `metadata` are the file's metadata_props. `file_input` is the input of a
    file that takes anything but the document's f32 (N, 3, H, W): (N, H, W, 3), integers, a fixed batch, any height or
    width. `led` are the outputs whose first axis, the batch, the file's own do not have.
    """

    document: bytes
    state: dict[str, Tensor]
    input: TensorInfo
    outputs: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    cut: Cut | None = None
    file_input: TensorInfo | None = None
    led: tuple[str, ...] = ()
