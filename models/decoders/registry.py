"""What a decoder knows of a network, and the decoders by name."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from models.preprocess import Preprocess, Size

if TYPE_CHECKING:
    from models.graph import Cut

Boxes = tuple[Tensor, Tensor]
"""Boxes f32 (N, A, 4) x0 y0 x1 y1 in fractions of the network's input, and scores 0..1 (N, A, C)."""
Poses = tuple[Tensor, Tensor, Tensor]
"""Boxes and scores, and the points of each candidate (N, A, K, 3): x and y in such fractions, and their scores."""
UNUSED = "unused "
"""Begins the name of a number of COCO's that no class has."""
OVERLAP = 0.45
"""From which the weaker of two boxes is suppressed, where a family has no other."""
MAX_METADATA = 2**20
"""Characters of one value that are parsed."""


@dataclass(frozen=True)
class Output:
    """One output of a network for one frame.

    `shape` is without the batch; `tail` holds the operators between the output and the convolutions or linear layers
    that it comes from. `axis` is the one in which the frames of a batch follow each other; None for no batch.
    `has_corners`: it joins two differences and two sums, as the corners of boxes are made; `is_scaled`: it was
    multiplied by constants last.
    """

    name: str
    shape: tuple[int, ...]
    tail: frozenset[str] = frozenset()
    axis: int | None = 0
    has_corners: bool = False
    is_scaled: bool = False


@dataclass(frozen=True)
class GraphHead:
    """The outputs of a network for frames of `size` (H, W), and what its file says about them.

    `cut` is what chose among the candidates at the end and was cut off. `is_whole`: the file takes integers 0..255.
    """

    outputs: tuple[Output, ...]
    size: Size
    metadata: Mapping[str, str] = field(default_factory=dict)
    cut: Cut | None = None
    is_whole: bool = False

    @property
    def family(self) -> str:
        """The family that the exporter names, in lower case; empty where it names none."""
        return (self.metadata.get("model_family") or self.metadata.get("description", "")).lower()

    def cells(self, strides: Sequence[int]) -> int:
        """How many cells the grids of these strides have."""
        return sum(-(-self.size[0] // stride) * -(-self.size[1] // stride) for stride in strides)

    def strides(self, rows: int, *choices: Sequence[int], anchors: int = 1) -> tuple[int, ...]:
        """The first choice whose cells, with so many anchors each, are the rows of an output; empty if none is."""
        return next((tuple(each) for each in choices if self.cells(each) * anchors == rows), ())


class Decoder:
    """The meaning of a network's outputs; a family is a frozen dataclass with the methods below.

    `width` is the number of classes that they answer with, `nms_iou` as models.detector has it. A family with a `key`
    counts only where the metadata have it, or where the query names the decoder or its task. A `bounded` family has one
    output whose column 4 is at least each score of its row, and its `decode` takes `rows`, those that it is given.
    """

    name: ClassVar[str]
    task: ClassVar[str] = "detection"
    key: ClassVar[str] = ""
    bounded: ClassVar[bool] = False
    nms_iou: float | None = OVERLAP
    width: int

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """Each way in which this family explains the outputs; none where it does not."""
        raise NotImplementedError

    def preprocess(self, metadata: Mapping[str, str], size: Size) -> Preprocess | None:
        """How the family prepares frames; None where nothing says it."""
        raise NotImplementedError

    def decode(self, outputs: Sequence[Tensor], size: Size) -> Boxes | Poses:
        """The candidates of each frame; a classifier's decoder has `logits` instead."""
        raise NotImplementedError


DECODERS: dict[str, type[Decoder]] = {}
Family = TypeVar("Family", bound=Decoder)


def register(cls: type[Family]) -> type[Family]:
    """Enter a family under its name."""
    DECODERS[cls.name] = cls
    return cls


def parse(text: str | None) -> Any:
    """A value of a file's metadata, JSON or a Python literal as Ultralytics writes them; None for anything else."""
    if not text or len(text) > MAX_METADATA:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return None


def point_shape(metadata: Mapping[str, str]) -> tuple[int, int] | None:
    """How many points an object has, and how many values a point; None where the metadata do not say it."""
    found = parse(metadata.get("kpt_shape"))
    is_shape = isinstance(found, list | tuple) and len(found) == 2 and all(isinstance(one, int) for one in found)
    return (found[0], found[1]) if is_shape and found[0] > 0 and found[1] in (2, 3) else None


def count_extra(head: GraphHead) -> int:
    """The columns of a detector's rows after its classes: a mask's coefficients, or the points of a pose."""
    masks = max((output.shape[0] for output in head.outputs if len(output.shape) == 3), default=0)
    count, dims = point_shape(head.metadata) or (0, 0)
    return masks or count * dims


def class_names(metadata: Mapping[str, str]) -> tuple[str, ...] | None:
    """The classes that the metadata name, in order; None where there are none, or gaps between their indices."""
    for key in ("names", "gemel.classes", "classes", "class_names", "labels"):
        value = parse(metadata.get(key))
        if isinstance(value, dict):
            indexed = {str(index): name for index, name in value.items()}
            value = [indexed.get(str(index)) for index in range(len(value))]
        if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
            return tuple(str(name) for name in value)
    return None
