"""NanoDet (RangiLyu 2020): scores, and distances to a box's sides as distributions (Li et al. 2020, section 3.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from models.decoders.families import MMDET, family_preprocess
from models.decoders.grids import fractions, grid
from models.decoders.registry import Boxes, Decoder, GraphHead, register
from models.preprocess import Preprocess, Size

STRIDES = ((8, 16, 32), (8, 16, 32, 64))
BINS = (8, 17)
"""Values of one distance's distribution: 0..7 in NanoDet, 0..16 in models trained with reg_max 16."""


@register
@dataclass(frozen=True)
class NanoDet(Decoder):
    """`levels` are the indices of the outputs of each stride, as (scores, distances); equal where one has both.

    `centre` is what a cell's place lacks to its centre: half in NanoDet-m, nothing in NanoDet-Plus. Without
    `has_sigmoid` the scores are logits.
    """

    name = "nanodet"
    nms_iou = 0.6
    width: int
    strides: tuple[int, ...]
    levels: tuple[tuple[int, int], ...]
    bins: int = 8
    centre: float = 0.5
    has_sigmoid: bool = True

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """One output (A, C + 4 x bins), or two for each level: (H W, C) and (H W, 4 x bins)."""
        if any(len(output.shape) != 2 for output in head.outputs):
            return []
        return list(_single(head) if len(head.outputs) == 1 else _by_level(head))

    def preprocess(self, metadata: Mapping[str, str], size: Size) -> Preprocess | None:
        """Stretched, blue first, ImageNet's mean and deviation."""
        return family_preprocess(metadata, size, MMDET)

    def decode(self, outputs: Sequence[Tensor], size: Size) -> Boxes:
        """A side's distance is the mean of its distribution, in strides."""
        if len(self.levels) == 1:
            rows = outputs[0].float()
            scores, values = rows[..., : self.width], rows[..., self.width :]
        else:
            scores, values = (torch.cat([outputs[i].float() for i in each], dim=1) for each in zip(*self.levels))
        scores = scores if self.has_sigmoid else scores.sigmoid()
        places, steps = grid(size, self.strides, values.device)
        bins = torch.arange(self.bins, device=values.device, dtype=torch.float32)
        distances = (values.unflatten(-1, (4, self.bins)).softmax(dim=-1) * bins).sum(dim=-1) * steps
        centres = (places + self.centre) * steps
        return fractions(torch.cat([centres - distances[..., :2], centres + distances[..., 2:]], dim=-1), size), scores


def _single(head: GraphHead) -> Iterator[NanoDet]:
    (output,) = head.outputs
    strides = head.strides(output.shape[0], *STRIDES)
    for bins in BINS:
        width = output.shape[1] - 4 * bins
        if strides and width > 0:
            # NanoDet-Plus has a fourth level, and takes a cell's corner for its centre.
            yield NanoDet(width, strides, ((0, 0),), bins, 0.0 if len(strides) == 4 else 0.5, _ends_in_sigmoid(head, 0))


def _by_level(head: GraphHead) -> Iterator[NanoDet]:
    """Names of outputs are not asked: the published file's are exchanged. Shapes say which is which."""
    for strides in STRIDES:
        counts = [head.cells((stride,)) for stride in strides]
        if sorted(output.shape[0] for output in head.outputs) != sorted([*counts, *counts]):
            continue
        for bins in BINS:
            levels = []
            for count in counts:
                same = [index for index, output in enumerate(head.outputs) if output.shape[0] == count]
                pair = [each for each in permutations(same, 2) if head.outputs[each[1]].shape[1] == 4 * bins]
                levels += pair[:1]
            widths = {head.outputs[scores].shape[1] for scores, _ in levels}
            if len(levels) == len(strides) and len(widths) == 1:
                is_plus = 0.0 if len(strides) == 4 else 0.5
                yield NanoDet(widths.pop(), strides, tuple(levels), bins, is_plus, _ends_in_sigmoid(head, levels[0][0]))


def _ends_in_sigmoid(head: GraphHead, index: int) -> bool:
    return "Sigmoid" in head.outputs[index].tail
