"""What a decoder knows of a network, and the decoders by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gemel.models.arrays import Array, library_of
from gemel.models.decoders.families import family_preprocess
from gemel.models.decoders.grids import ALL_ROWS, Rows
from gemel.models.graph.records import Cut
from gemel.models.labels.class_names import find_names, parse
from gemel.models.plugins import Registry
from gemel.models.preprocess import Preprocess, Size

Outputs = Sequence[Array]
"""Of a network, each (N, ...)."""
Boxes = tuple[Array, Array]
"""Boxes f32 (N, A, 4) x0 y0 x1 y1 in fractions of the network's input, and scores 0..1 (N, A, C)."""
Poses = tuple[Array, Array, Array]
"""Boxes and scores, and the points of each candidate (N, A, K, 3): x and y in such fractions, and their scores."""
OVERLAP = 0.45
"""From which the weaker of two boxes is suppressed, where a family has no other."""


@dataclass(frozen=True)
class Output:
    """One output of a network for one frame.

    `shape` is without the batch; `tail` holds the operators between the output and the convolutions or linear layers
    that it comes from. `axis` is the one in which the frames of a batch follow each other; None for no batch.
    `sources` are the layers that it comes from, `depth` counts the operators before it.
    `has_corners`: it joins two differences and two sums, as the corners of boxes are made; `is_scaled`: it was
    multiplied by constants last.
    """

    name: str
    shape: tuple[int, ...]
    tail: frozenset[str] = frozenset()
    axis: int | None = 0
    has_corners: bool = False
    is_scaled: bool = False
    sources: frozenset[str] = frozenset()
    depth: int = 0

    def by_frame(self, values: Array) -> Array:
        """The output for N frames as (N, ...), whatever axis these follow each other in."""
        if self.axis:
            sides = values.shape[: self.axis], values.shape[self.axis + 1 :]
            values = values.reshape(*sides[0], -1, self.shape[self.axis], *sides[1])
            values = library_of(values).moveaxis(values, self.axis, 0)
        frames = -1 if math.prod(values.shape) else len(values)
        return values.reshape(frames, *self.shape)


AUXILIARY = re.compile(r"(?<![a-z])aux", re.IGNORECASE)
"""In the name of an output that only training used."""
SIMILAR_DEPTH = 0.9


def order_by_weight(outputs: Iterable[tuple[int, Output]]) -> list[tuple[int, Output]]:
    """Outputs of one kind with their places, the likeliest to be the network's answer first.

    Auxiliary heads branch off earlier; of a head and its softmax the first counts.
    """
    return sorted(
        outputs,
        key=lambda pair: (bool(AUXILIARY.search(pair[1].name)), -pair[1].depth // 2, pair[0]),
    )


def are_rivals(output: Output, other: Output) -> bool:
    """Whether neither of two outputs of one kind is auxiliary, or made from the same layers as the other."""
    is_auxiliary = bool(AUXILIARY.search(output.name)) != bool(AUXILIARY.search(other.name))
    is_same = bool(output.sources) and output.sources == other.sources
    return not is_auxiliary and not is_same and other.depth >= SIMILAR_DEPTH * output.depth


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

    @property
    def has_levels(self) -> bool:
        """Whether several outputs (A, 4) of unlike sizes are boxes, as of a pyramid: a pair of outputs is not all."""
        return (
            len(
                {
                    output.shape[0]
                    for output in self.outputs
                    if len(output.shape) == 2 and output.shape[1] == 4
                }
            )
            > 1
        )

    def cells(self, strides: Sequence[int]) -> int:
        """How many cells the grids of these strides have."""
        return sum(-(-self.size[0] // stride) * -(-self.size[1] // stride) for stride in strides)

    def strides(self, rows: int, *choices: Sequence[int], anchors: int = 1) -> tuple[int, ...]:
        """The first choice whose cells, with so many anchors each, are the rows of an output; empty if none is."""
        return next(
            (tuple(strides) for strides in choices if self.cells(strides) * anchors == rows), ()
        )


PLACES = ("index", "boxes", "scores", "points", "extras", "prototypes")
"""Fields of decoders that are indices of outputs."""


class Decoder:
    """The meaning of a network's outputs; a family is a frozen dataclass with the methods below.

    `width` is the number of classes that they answer with, `nms_iou` as models.objects.candidates has it. A family with
    a `key` counts only where the metadata have it, or where the query names the decoder or its task. `words` are what a
    file's metadata call it, by default its name. `has_objectness`: a score of its own says whether there is an object.
    `preparation` are fields of `Preprocess`.
    """

    name: ClassVar[str]
    task: ClassVar[str] = "detection"
    key: ClassVar[str] = ""
    words: ClassVar[tuple[str, ...]] = ()
    has_objectness: ClassVar[bool] = False
    preparation: ClassVar[Mapping[str, Any] | None] = None
    nms_iou: float | None = OVERLAP
    width: int

    @property
    def places(self) -> frozenset[int]:
        """The outputs that it reads; the first where it has no fields for them."""
        places = [getattr(self, name) for name in PLACES if hasattr(self, name)]
        return frozenset(places or [0])

    @property
    def counted(self) -> str:
        """How many classes it answers with, in words."""
        return "1 class" if self.width == 1 else f"{self.width} classes"

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """Each way in which this family explains the outputs; none where it does not."""
        raise NotImplementedError

    def takes(self, count: int) -> bool:
        """Whether so many names may be those of its classes."""
        return count == self.width

    def preprocess(self, metadata: Mapping[str, str], size: Size) -> Preprocess | None:
        """How the family that the metadata name, else this one, prepares frames; None where nothing says it."""
        return family_preprocess(metadata, size, self.preparation)

    def bounds(self, outputs: Outputs) -> Array | None:
        """At least each score of every row (N, A), where that is found faster than the scores; None decodes all."""
        return None

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Boxes | Poses:
        """The candidates of each frame, or those in some rows; a classifier's decoder has `logits` instead."""
        raise NotImplementedError

    @property
    def has_outlines(self) -> bool:
        """Whether its objects have masks, or are rotated boxes."""
        return type(self).shapes is not Decoder.shapes

    def shapes(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Mapping[str, Array]:
        """`corners` or `coefficients` of the same rows, as models.objects.candidates has them; none by default."""
        return {}


DECODERS: Registry[type[Decoder]] = Registry("gemel.decoders", "decoder", Decoder)


def point_shape(metadata: Mapping[str, str]) -> tuple[int, int] | None:
    """How many points an object has, and how many values a point; None where the metadata do not say it."""
    shape = parse(metadata.get("kpt_shape"))
    is_shape = (
        isinstance(shape, list | tuple)
        and len(shape) == 2
        and all(isinstance(size, int) for size in shape)
    )
    return (shape[0], shape[1]) if is_shape and shape[0] > 0 and shape[1] in (2, 3) else None


def count_extra(head: GraphHead) -> int:
    """The columns of a detector's rows after its classes: a mask's coefficients, or the points of a pose."""
    masks = max((output.shape[0] for output in head.outputs if len(output.shape) == 3), default=0)
    count, dims = point_shape(head.metadata) or (0, 0)
    return masks or count * dims


def class_names(metadata: Mapping[str, str]) -> tuple[str, ...] | None:
    """The classes that the metadata name, in order; None where there are none, or none that can be read."""
    stated = find_names(metadata)
    return stated.names or None if stated else None
