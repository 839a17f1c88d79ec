"""NanoDet (RangiLyu 2020): scores, and distances to a box's sides as distributions (Li et al. 2020, section 3.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from gemel.models.arrays import Array, as_float, constant, library_of, sigmoid, softmax
from gemel.models.decoders.decoder import Boxes, Decoder, GraphHead, Outputs
from gemel.models.decoders.families import MMDET
from gemel.models.decoders.grids import ALL_ROWS, Rows, fractions, grid
from gemel.models.preprocess import Size

STRIDES = ((8, 16, 32), (8, 16, 32, 64))
BINS = (8, 17)
"""Values of one distance's distribution: 0..7 in NanoDet, 0..16 in models trained with reg_max 16."""


@dataclass(frozen=True)
class NanoDet(Decoder):
    """NanoDet: scores, and distances to a box's sides as distributions.

    `levels` are the indices of the outputs of each stride, as (scores, distances); equal where one has both.

    `centre` is what a cell's place lacks to its centre: half in NanoDet-m, nothing in NanoDet-Plus. Without
    `has_sigmoid` the scores are logits.
    """

    name = "nanodet"
    preparation = MMDET
    nms_iou = 0.6
    width: int
    strides: tuple[int, ...]
    levels: tuple[tuple[int, int], ...]
    bins: int = 8
    centre: float = 0.5
    has_sigmoid: bool = True

    @property
    def places(self) -> frozenset[int]:
        """Those of all levels."""
        return frozenset(place for level in self.levels for place in level)

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """One output (A, C + 4 x bins), or two for each level: (H W, C) and (H W, 4 x bins)."""
        if any(len(output.shape) != 2 for output in head.outputs):
            return []
        return list(_single(head) if len(head.outputs) == 1 else _by_level(head))

    def bounds(self, outputs: Outputs) -> Array:
        """The best score of each row."""
        best = self._scores(outputs).max(-1)
        return best if self.has_sigmoid else sigmoid(best)

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Boxes:
        """A side's distance is the mean of its distribution, in strides."""
        scores = as_float(self._scores(outputs)[:, rows])
        values = as_float(self._distances(outputs)[:, rows])
        places, steps = (cells[rows] for cells in grid(size, self.strides, values))
        odds = values.reshape(*values.shape[:2], 4, self.bins)
        distances = (softmax(odds) * constant(range(self.bins), values)).sum(-1) * steps
        centres = (places + self.centre) * steps
        sides = centres - distances[..., :2], centres + distances[..., 2:]
        boxes = fractions(library_of(values).concatenate(sides, -1), size)
        return boxes, scores if self.has_sigmoid else sigmoid(scores)

    def _scores(self, outputs: Outputs) -> Array:
        if len(self.levels) == 1:
            return outputs[0][..., : self.width]
        return library_of(outputs[0]).concatenate([outputs[scores] for scores, _ in self.levels], 1)

    def _distances(self, outputs: Outputs) -> Array:
        if len(self.levels) == 1:
            return outputs[0][..., self.width :]
        return library_of(outputs[0]).concatenate(
            [outputs[distances] for _, distances in self.levels], 1
        )


def _single(head: GraphHead) -> Iterator[NanoDet]:
    (output,) = head.outputs
    strides = head.strides(output.shape[0], *STRIDES)
    for bins in BINS:
        width = output.shape[1] - 4 * bins
        if strides and width > 0:
            # NanoDet-Plus has a fourth level, and takes a cell's corner for its centre.
            yield NanoDet(
                width,
                strides,
                ((0, 0),),
                bins,
                0.0 if len(strides) == 4 else 0.5,
                _ends_in_sigmoid(head, 0),
            )


def _by_level(head: GraphHead) -> Iterator[NanoDet]:
    """Names of outputs are not asked: the published file's are exchanged. Shapes say which is which."""
    for strides in STRIDES:
        counts = [head.cells((stride,)) for stride in strides]
        if sorted(output.shape[0] for output in head.outputs) != sorted([*counts, *counts]):
            continue
        for bins in BINS:
            levels = []
            for count in counts:
                same = [
                    index for index, output in enumerate(head.outputs) if output.shape[0] == count
                ]
                pair = [
                    indices
                    for indices in permutations(same, 2)
                    if head.outputs[indices[1]].shape[1] == 4 * bins
                ]
                levels += pair[:1]
            widths = {head.outputs[scores].shape[1] for scores, _ in levels}
            if len(levels) == len(strides) and len(widths) == 1:
                is_plus = 0.0 if len(strides) == 4 else 0.5
                yield NanoDet(
                    widths.pop(),
                    strides,
                    tuple(levels),
                    bins,
                    is_plus,
                    _ends_in_sigmoid(head, levels[0][0]),
                )


def _ends_in_sigmoid(head: GraphHead, index: int) -> bool:
    return "Sigmoid" in head.outputs[index].tail
