"""YOLOv3 and Tiny YOLOv3 (Redmon and Farhadi 2018), convolution for convolution in the order of darknet's cfg files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.detector import BoxTarget, OneStage
from models.weights.darknet import DarknetLayer
from models.zoo.detectors.losses.yolov3 import Priors, box_values, distill_loss, yolo_loss
from models.zoo.registry import register

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
    """x f32 (N, 3, S, S) in 0..1 -> one map (N, 3 (5 + C), H, W) per level, the coarsest first.

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
        """Where the A anchors lie and how large they are."""
        grids = [(output.shape[2], output.shape[3]) for output in outputs]
        return Priors.of(grids, self.anchors, side=STRIDE * grids[0][0], device=outputs[0].device)

    def darknet_layers(self) -> list[DarknetLayer]:
        """Its convolutions in the order they were made, which is that of darknet's cfg file."""
        paths = [path for path, module in self.named_modules() if isinstance(module, nn.Conv2d)]
        return [
            DarknetLayer(path, output=True)
            if path.endswith(".output")
            else DarknetLayer(path, path.removesuffix("conv") + "norm")
            for path in paths
        ]


@register("yolov3", task="detection", scaling=((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)), input_size=416, width=81)
def yolov3(num_classes: int, input_size: int = 416, anchors: Anchors = COCO_ANCHORS) -> YOLOv3:
    """YOLOv3 on Darknet-53; `yolov3.weights` fits when there are 80 classes."""
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


@register("yolov3_tiny", task="detection", scaling=((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)), input_size=416, width=81)
def yolov3_tiny(num_classes: int, input_size: int = 416, anchors: Anchors = TINY_COCO_ANCHORS) -> YOLOv3:
    """Tiny YOLOv3; `yolov3-tiny.weights` fits when there are 80 classes."""
    outputs = _outputs(num_classes, input_size)
    backbone = TinyDarknet()
    coarse = Level(None, Convolution(1024, 256, 1), Convolution(256, 512, 3), outputs)
    fine = Level(Convolution(256, 128, 1), nn.Identity(), Convolution(128 + 256, 256, 3), outputs)
    return YOLOv3(backbone, [coarse, fine], num_classes - 1, anchors)


def _outputs(num_classes: int, input_size: int) -> int:
    """Channels of an output: the zoo counts a background among the classes, YOLO has none."""
    if input_size % STRIDE:
        raise ValueError(f"input_size must be a multiple of {STRIDE}, not {input_size}")
    return ANCHORS_PER_CELL * (BOX_VALUES + num_classes - 1)


def _per_level(anchors: Anchors, levels: int) -> list[list[tuple[float, float]]]:
    """The anchors of each level, the coarsest level first."""
    pairs = [(float(pair[0]), float(pair[1])) for pair in anchors if len(pair) == 2 and min(pair) > 0]
    if len(pairs) != len(anchors) or len(pairs) != ANCHORS_PER_CELL * levels:
        wanted = f"{ANCHORS_PER_CELL * levels} pairs [width, height] above 0"
        raise ValueError(f"anchors must be {wanted}, not {list(anchors)}")
    return [pairs[start : start + ANCHORS_PER_CELL] for start in range(0, len(pairs), ANCHORS_PER_CELL)][::-1]
