"""YOLOv3 and Tiny YOLOv3 (Redmon and Farhadi 2018) and their losses: factories of the catalogue's workloads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_iou

from gemel.models.detector import BoxTarget, OneStage
from gemel.models.preprocess import InputSize, Size, height_width
from gemel.models.zoo.detectors.box_ops import DISTILL_BACKGROUND

from .box_losses import divergence

IGNORE_IOU = 0.5
"""A box that overlaps an object by more is no false alarm, even if another anchor answers for it (section 2.1)."""
WIDEST = 6.0
"""Largest logarithm of a box's side over its anchor's: keeps exp finite while the weights are still random."""


class Priors(NamedTuple):
    """The A anchors of a frame, f32 (A, 2) each: column and row of the cell, columns and rows of its map, and width
    and height of the anchor in fractions of the input.
    """

    cells: Tensor
    grids: Tensor
    sides: Tensor

    @classmethod
    def of(
        cls,
        grids: Sequence[tuple[int, int]],
        anchors: Sequence[Sequence[tuple[float, float]]],
        size: Size,
        device: torch.device,
    ) -> Priors:
        """For maps of (rows, columns) `grids`; `anchors` in pixels of an input of `size`, one list per map."""
        cells, sizes, sides = [], [], []
        for (rows, columns), boxes in zip(grids, anchors, strict=True):
            column, row = torch.arange(columns, device=device), torch.arange(rows, device=device)
            cell = torch.stack(torch.meshgrid(column, row, indexing="xy"), dim=-1).flatten(0, 1).float()
            cells.append(cell.repeat_interleave(len(boxes), dim=0))
            sizes.append(torch.tensor([columns, rows], device=device).float().expand(len(cells[-1]), 2))
            side = torch.tensor(boxes, device=device) / torch.tensor(size[::-1], device=device)
            sides.append(side.repeat(len(cell), 1))
        return cls(torch.cat(cells), torch.cat(sizes), torch.cat(sides))


def box_values(rows: Tensor, priors: Priors) -> Tensor:
    """Boxes (N, A, 4) x0 y0 x1 y1 in fractions of the input, from rows (N, A, 4 or more)."""
    centre = (rows[..., :2].sigmoid() + priors.cells) / priors.grids
    half = rows[..., 2:4].clamp(max=WIDEST).exp() * priors.sides / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def assign(priors: Priors, boxes: Tensor) -> Tensor:
    """Which anchors answer for which of M objects: bool (M, A).

    Of all anchors the one whose shape overlaps the object's most answers, in the cell that holds its centre; two
    anchors of one shape on different maps both do.
    """
    centre, side = (boxes[:, None, :2] + boxes[:, None, 2:]) / 2, boxes[:, None, 2:] - boxes[:, None, :2]
    common = torch.minimum(side, priors.sides).prod(dim=-1)
    overlap = common / (side.prod(dim=-1) + priors.sides.prod(dim=-1) - common)
    best = overlap >= overlap.amax(dim=1, keepdim=True) - 1e-6
    cell = torch.minimum((centre * priors.grids).floor(), priors.grids - 1)
    return best & (cell == priors.cells).all(dim=-1)


def yolo_loss(rows: Tensor, priors: Priors, targets: Sequence[BoxTarget]) -> Tensor:
    """YOLOv3's loss per object (section 2), with the gradients of darknet's src/yolo_layer.c.

    Binary cross-entropy for objectness, classes and the centre within its cell, half the squared error for the
    logarithm of width and height, the box terms weighted by 2 - width x height so that small objects count.
    """
    owner = torch.full(rows.shape[:2], -1, device=rows.device)
    counted = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
    seen = box_values(rows.detach(), priors)
    boxes = torch.cat([target.boxes for target in targets]).to(rows.device)
    labels = torch.cat([target.labels for target in targets]).to(rows.device)
    end = 0
    for frame, target in enumerate(targets):
        start, end = end, end + len(target.labels)
        if end > start:
            counted[frame] = box_iou(seen[frame], boxes[start:end]).amax(dim=1) <= IGNORE_IOU
            index, anchor = assign(priors, boxes[start:end]).nonzero(as_tuple=True)
            owner[frame, anchor] = start + index
    positive = owner >= 0
    objectness = F.binary_cross_entropy_with_logits(rows[..., 4], positive.float(), reduction="none")
    total = objectness[counted | positive].sum()
    frame, anchor = positive.nonzero(as_tuple=True)
    index, there = owner[frame, anchor], Priors(*(value[anchor] for value in priors))
    total = total + _of_objects(rows[frame, anchor], there, boxes[index], labels[index])
    return total / max(1, len(frame))


def distill_loss(rows: Tensor, teacher: Tensor) -> Tensor:
    """Distance of objectness, classes and boxes from the original's, where it sees objects.

    Objectness is weighted by the larger of both models' object probabilities, which penalises false alarms and
    misses; classes and boxes by the original's. The sum is divided by the original's total, on the scale of
    `yolo_loss`.
    """
    wanted = teacher[..., 4].sigmoid()
    imagined = rows[..., 4].detach().sigmoid()
    objectness = divergence(rows[..., 4], teacher[..., 4]) * (wanted.maximum(imagined) + DISTILL_BACKGROUND)
    classes = divergence(rows[..., 5:], teacher[..., 5:]).sum(dim=-1)
    centre = divergence(rows[..., :2], teacher[..., :2]).sum(dim=-1)
    side = (rows[..., 2:4] - teacher[..., 2:4]).square().sum(dim=-1) / 2
    return (objectness + wanted * (classes + centre + side)).sum() / wanted.sum().clamp(min=1)


def _of_objects(rows: Tensor, priors: Priors, boxes: Tensor, labels: Tensor) -> Tensor:
    """Box and class terms of the P anchors that answer for an object: rows (P, 5 + C), boxes (P, 4), labels (P,)."""
    centre, side = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    offset = (centre * priors.grids - priors.cells).clamp(0, 1)
    place = F.binary_cross_entropy_with_logits(rows[:, :2], offset, reduction="none").sum(dim=1)
    size = (rows[:, 2:4] - (side / priors.sides).log()).square().sum(dim=1) / 2
    wanted = F.one_hot(labels, rows.shape[1] - 5).float()
    classes = F.binary_cross_entropy_with_logits(rows[:, 5:], wanted, reduction="sum")
    return ((2 - side.prod(dim=1)) * (place + size)).sum() + classes


STRIDE = 32
LEAK = 0.1
NORM_EPS = 1e-5
"""Darknet adds this to the variance (src/blas_kernels.cu, normalize_kernel)."""
BOX_VALUES = 5
"""Of one anchor: x, y, width, height, objectness; its classes follow."""
ANCHORS_PER_CELL = 3
FIRST_OBJECTNESS = 0.01
"""Before training, so that the empty cells do not drown the first steps (Lin et al. 2017, section 4.1)."""
Anchors = Sequence[Sequence[float]]
COCO_ANCHORS: Anchors = (
    (10, 13), (16, 30), (33, 23), (30, 61), (62, 45), (59, 119), (116, 90), (156, 198), (373, 326)
)  # fmt: skip
# The cfg file the published weights came with gives the finer map the anchors 1 to 3 of its six: the smallest,
# (10, 14), is unused and (81, 82) used by both. Later copies say 0 to 2, with which those weights answer worse.
TINY_COCO_ANCHORS: Anchors = ((23, 27), (37, 58), (81, 82), (81, 82), (135, 169), (344, 319))


class Convolution(nn.Module):
    """A convolution that keeps or halves the map, its norm, and a leaky ReLU."""

    def __init__(self, in_channels: int, channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(channels, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.conv(x)), LEAK, inplace=True)


class Residual(nn.Module):
    """1x1 to half the channels, 3x3 back, and the input added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = Convolution(channels, channels // 2, 1)
        self.expand = Convolution(channels // 2, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.expand(self.reduce(x))


class Darknet53(nn.Module):
    """The 52 convolutions of Darknet-53 before its classifier: maps at strides 32, 16 and 8."""

    BLOCKS = (1, 2, 8, 8, 4)

    def __init__(self) -> None:
        super().__init__()
        self.stem = Convolution(3, 32, 3)
        widths = [64 * 2**stage for stage in range(len(self.BLOCKS))]
        self.stages = nn.ModuleList(
            nn.Sequential(Convolution(width // 2, width, 3, stride=2), *(Residual(width) for _ in range(blocks)))
            for width, blocks in zip(widths, self.BLOCKS)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = [self.stem(x)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return maps[:-4:-1]


class TinyDarknet(nn.Module):
    """The first seven convolutions of Tiny YOLOv3: maps at strides 32 and 16."""

    WIDTHS = (3, 16, 32, 64, 128, 256, 512, 1024)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution(a, b, 3) for a, b in pairwise(self.WIDTHS))

    def forward(self, x: Tensor) -> list[Tensor]:
        *halved, before_last, last = self.layers
        for layer in halved:
            fine = layer(x)
            x = F.max_pool2d(fine, 2)
        x = before_last(x)
        # Darknet keeps the size by a border at the right and the bottom that never wins.
        x = F.max_pool2d(F.pad(x, (0, 1, 0, 1), mode="replicate"), 2, stride=1)
        return [last(x), fine]


class Level(nn.Module):
    """One output: what comes from the coarser level is narrowed and enlarged, joins the backbone's map, and goes
    through `body` (whose result the next level gets) and `expand` to the output.
    """

    def __init__(self, reduce: nn.Module | None, body: nn.Module, expand: Convolution, outputs: int) -> None:
        super().__init__()
        self.reduce = reduce
        self.body = body
        self.expand = expand
        self.output = nn.Conv2d(expand.conv.out_channels, outputs, 1)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.reduce is not None and skip is not None:
            x = torch.cat([F.interpolate(self.reduce(x), scale_factor=2.0, mode="nearest"), skip], dim=1)
        x = self.body(x)
        return x, self.output(self.expand(x))


class YOLOv3(OneStage):
    """x f32 (N, 3, H, W) in 0..1 -> one map (N, 3 (5 + C), h, w) per level, the coarsest first.

    The channels of a cell are those of its three anchors, each x, y, width, height, objectness and C classes.
    `anchors` are widths and heights in pixels of the input, three per level, the finest level's first.
    """

    def __init__(self, backbone: nn.Module, levels: Sequence[Level], classes: int, anchors: Anchors) -> None:
        super().__init__()
        self.backbone = backbone
        self.levels = nn.ModuleList(levels)
        self.classes = classes
        self.anchors = _per_level(anchors, len(levels))
        for level in levels:
            with torch.no_grad():
                bias = level.output.bias.view(ANCHORS_PER_CELL, BOX_VALUES + classes)  # type: ignore[union-attr]
                bias[:, 4] = math.log(FIRST_OBJECTNESS / (1 - FIRST_OBJECTNESS))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, *skips = self.backbone(x)
        outputs = []
        for level, skip in zip(self.levels, [None, *skips]):
            x, output = level(x, skip)
            outputs.append(output)
        return tuple(outputs)

    def decode(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Equations of section 2.1; the score is objectness x class probability."""
        rows = self.rows(outputs)
        return box_values(rows, self.priors(outputs)), rows[..., 4:5].sigmoid() * rows[..., 5:].sigmoid()

    def loss(self, outputs: Sequence[Tensor], targets: Sequence[BoxTarget]) -> Tensor:
        """YOLOv3's loss, see `yolo_loss`."""
        return yolo_loss(self.rows(outputs), self.priors(outputs), targets)

    def distill(self, outputs: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
        """Distance from the original's outputs, see `distill_loss`."""
        return distill_loss(self.rows(outputs), self.rows(teacher))

    def rows(self, outputs: Sequence[Tensor]) -> Tensor:
        """All anchors of all cells, f32 (N, A, 5 + C): level by level, row by row, cell by cell."""
        values = BOX_VALUES + self.classes
        rows = [
            output.float().reshape(-1, ANCHORS_PER_CELL, values, *output.shape[2:]).permute(0, 3, 4, 1, 2)
            for output in outputs
        ]
        return torch.cat([row.flatten(1, 3) for row in rows], dim=1)

    def priors(self, outputs: Sequence[Tensor]) -> Priors:
        """Positions and sizes of the A anchors."""
        grids = [(output.shape[2], output.shape[3]) for output in outputs]
        size = (STRIDE * grids[0][0], STRIDE * grids[0][1])
        return Priors.of(grids, self.anchors, size, outputs[0].device)


def yolov3(num_classes: int, input_size: InputSize = 416, anchors: Anchors = COCO_ANCHORS) -> YOLOv3:
    """YOLOv3 on Darknet-53."""
    outputs = _outputs(num_classes, input_size)

    def level(in_channels: int, skip_channels: int, width: int) -> Level:
        reduce = Convolution(in_channels, width, 1) if skip_channels else None
        first = width + skip_channels if skip_channels else in_channels
        widths = (first, width, 2 * width, width, 2 * width, width)
        body = [Convolution(a, b, 3 if b > width else 1) for a, b in pairwise(widths)]
        return Level(reduce, nn.Sequential(*body), Convolution(width, 2 * width, 3), outputs)

    backbone = Darknet53()
    levels = [level(1024, 0, 512), level(512, 512, 256), level(256, 256, 128)]
    return YOLOv3(backbone, levels, num_classes - 1, anchors)


def yolov3_tiny(num_classes: int, input_size: InputSize = 416, anchors: Anchors = TINY_COCO_ANCHORS) -> YOLOv3:
    """Tiny YOLOv3."""
    outputs = _outputs(num_classes, input_size)
    backbone = TinyDarknet()
    coarse = Level(None, Convolution(1024, 256, 1), Convolution(256, 512, 3), outputs)
    fine = Level(Convolution(256, 128, 1), nn.Identity(), Convolution(128 + 256, 256, 3), outputs)
    return YOLOv3(backbone, [coarse, fine], num_classes - 1, anchors)


def _outputs(num_classes: int, input_size: InputSize) -> int:
    """Channels of an output: the zoo counts a background among the classes, YOLO has none."""
    if any(side % STRIDE for side in height_width(input_size)):
        raise ValueError(f"input_size must be a multiple of {STRIDE}, not {input_size}")
    return ANCHORS_PER_CELL * (BOX_VALUES + num_classes - 1)


def _per_level(anchors: Anchors, levels: int) -> list[list[tuple[float, float]]]:
    """The anchors of each level, the coarsest level first."""
    pairs = [(float(pair[0]), float(pair[1])) for pair in anchors if len(pair) == 2 and min(pair) > 0]
    if len(pairs) != len(anchors) or len(pairs) != ANCHORS_PER_CELL * levels:
        wanted = f"{ANCHORS_PER_CELL * levels} pairs [width, height] above 0"
        raise ValueError(f"anchors must be {wanted}, not {list(anchors)}")
    return [pairs[start : start + ANCHORS_PER_CELL] for start in range(0, len(pairs), ANCHORS_PER_CELL)][::-1]
