"""FastestDet (X. Ma 2022): ShuffleNetV2 0.5x, one map, and a head of a quarter of a million parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_iou, generalized_box_iou_loss

from gemel.models.detector import BoxTarget, OneStage
from gemel.models.preprocess import InputSize, height_width
from gemel.models.zoo.detectors.box_ops import DISTILL_BACKGROUND

from .box_losses import divergence

STRIDE = 16
STAGES = ((24, 48, 4), (48, 96, 8), (96, 192, 4))
"""Channels in and out, and blocks."""
BOX_VALUES = 5
"""Objectness, x, y, width, height; the classes follow."""
BOX_WEIGHT, OBJECTNESS_WEIGHT = 8, 16
ROUNDING = 1e-6
EMPTY_SHARE = 0.75
"""Weight of the cells without an object, all together, beside those with one."""


def _conv(
    in_channels: int, channels: int, kernel: int, groups: int = 1, stride: int = 1, relu: bool = True
) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(channels), *([nn.ReLU(inplace=True)] if relu else [])]


class ShuffleBlock(nn.Module):
    """A unit of ShuffleNetV2 (Ma et al. 2018, figure 3) in Megvii's layout: the shuffle comes first."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        half = channels // 2
        own = in_channels if stride == 2 else in_channels // 2
        self.branch_main = nn.Sequential(
            *_conv(own, half, 1), *_conv(half, half, 3, half, stride, relu=False), *_conv(half, channels - own, 1)
        )
        self.branch_proj = (
            nn.Sequential(*_conv(own, own, 3, own, stride, relu=False), *_conv(own, own, 1)) if stride == 2 else None
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.branch_proj is not None:
            return torch.cat([self.branch_proj(x), self.branch_main(x)], dim=1)
        return torch.cat([x[:, ::2], self.branch_main(x[:, 1::2])], dim=1)


class ShuffleNetV2(nn.Module):
    """Maps at strides 8, 16 and 32."""

    def __init__(self) -> None:
        super().__init__()
        self.first_conv = nn.Sequential(*_conv(3, STAGES[0][0], 3, stride=2))
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.stage2, self.stage3, self.stage4 = (
            nn.Sequential(
                ShuffleBlock(in_channels, channels, 2),
                *(ShuffleBlock(channels, channels, 1) for _ in range(blocks - 1)),
            )
            for in_channels, channels, blocks in STAGES
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = self.stage2(self.maxpool(self.first_conv(x)))
        middle = self.stage3(fine)
        return fine, middle, self.stage4(middle)


class Conv1x1(nn.Module):
    """A 1x1 convolution under the name the published weights have for it."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv1x1 = nn.Sequential(*_conv(in_channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv1x1(x)


class SPP(nn.Module):
    """One, two and three depthwise 5x5 in parallel: as wide a view as pooling of three sizes would give."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.Conv1x1 = Conv1x1(in_channels, channels)
        self.S1, self.S2, self.S3 = (
            nn.Sequential(*(part for _ in range(depth) for part in _conv(channels, channels, 5, channels)))
            for depth in (1, 2, 3)
        )
        self.output = nn.Sequential(*_conv(3 * channels, channels, 1, relu=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.Conv1x1(x)
        return F.relu(x + self.output(torch.cat([self.S1(x), self.S2(x), self.S3(x)], dim=1)))


class Branch(nn.Module):
    """A depthwise 5x5 and a 1x1 to the outputs, both with norms."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv5x5 = nn.Sequential(*_conv(channels, channels, 5, channels), *_conv(channels, outputs, 1, relu=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv5x5(x)


class Head(nn.Module):
    """Objectness, box and classes, each of its own branch: (N, 5 + C, H, W), all before their activation."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1x1 = Conv1x1(channels, channels)
        self.obj_layers = Branch(channels, 1)
        self.reg_layers = Branch(channels, 4)
        self.cls_layers = Branch(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1x1(x)
        return torch.cat([self.obj_layers(x), self.reg_layers(x), self.cls_layers(x)], dim=1)


class FastestDet(OneStage):
    """x f32 (N, 3, H, W), RGB in 0..1 -> one map (N, 5 + C, H / 16, W / 16).

    The published weights saw blue first; the channels are turned here, so that weights and frames both stay as
    they are. State dict keys are the authors'.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        width = STAGES[1][1]
        self.backbone = ShuffleNetV2()
        self.SPP = SPP(sum(channels for _, channels, _ in STAGES), width)
        self.detect_head = Head(width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        fine, middle, coarse = self.backbone(x.flip(1))
        fine = F.avg_pool2d(fine, 3, stride=2, padding=1)
        coarse = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        return (self.detect_head(self.SPP(torch.cat([fine, middle, coarse], dim=1))),)

    def decode(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The centre is within one cell of its own cell; sides are fractions of the input."""
        rows = _rows(outputs)
        return _boxes(rows, outputs[0].shape), rows[..., :1].sigmoid() * rows[..., BOX_VALUES:].softmax(dim=-1)

    def loss(self, outputs: Sequence[Tensor], targets: Sequence[BoxTarget]) -> Tensor:
        """The published loss, in two points simplified: GIoU instead of SIoU, and the choice of cells per object.

        The four cells around an object's centre may answer for it; those do whose box fits no worse than the four
        do on average (the authors average over the batch, which can leave an object without any). The objectness
        of a cell that answers shall be the IoU of its box.
        """
        rows = _rows(outputs)
        boxes = _boxes(rows, outputs[0].shape)
        found, empty, wrong_box, wrong_class = [], [], [rows.new_zeros(0)], [rows.new_zeros(0)]
        for frame, target in enumerate(targets):
            wanted = torch.zeros(rows.shape[1], device=rows.device)
            objects, labels = target.boxes.to(rows.device), target.labels.to(rows.device)
            index, cell, overlap = _assign(boxes[frame].detach(), objects, outputs[0].shape)
            wanted[cell] = overlap.clamp(min=0)
            wrong = F.smooth_l1_loss(rows[frame, :, 0].sigmoid(), wanted, reduction="none")
            answers = torch.zeros_like(wanted, dtype=torch.bool)
            answers[cell] = True
            empty.append(wrong[~answers].sum() / len(wanted))
            found.append(wrong[answers].sum() / answers.sum().clamp(min=1))
            wrong_box.append(generalized_box_iou_loss(boxes[frame, cell], objects[index]))
            wrong_class.append(F.cross_entropy(rows[frame, cell, BOX_VALUES:], labels[index], reduction="none"))
        count = max(1, sum(map(len, wrong_box)))
        objectness = EMPTY_SHARE * torch.stack(empty).mean() + (1 - EMPTY_SHARE) * torch.stack(found).mean()
        of_objects = BOX_WEIGHT * torch.cat(wrong_box).sum() + torch.cat(wrong_class).sum()
        return OBJECTNESS_WEIGHT * objectness + of_objects / count

    def distill(self, outputs: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
        """Divergence of objectness and classes and GIoU of the boxes, where the original sees objects.

        Objectness is weighted by the larger of both models' object probabilities, class and box by the original's.
        """
        rows, given = _rows(outputs), _rows(teacher)
        wanted = given[..., 0].sigmoid()
        weight = wanted.maximum(rows[..., 0].detach().sigmoid()) + DISTILL_BACKGROUND
        objectness = divergence(rows[..., 0], given[..., 0]) * weight
        own, original = (each[..., BOX_VALUES:].log_softmax(dim=-1) for each in (rows, given))
        classes = F.kl_div(own, original, log_target=True, reduction="none").sum(dim=-1)
        shape = outputs[0].shape
        box = generalized_box_iou_loss(_boxes(rows, shape), _boxes(given, shape))
        return (objectness + wanted * (classes + BOX_WEIGHT * box)).sum() / wanted.sum().clamp(min=1)


def _rows(outputs: Sequence[Tensor]) -> Tensor:
    """All cells, f32 (N, H x W, 5 + C), row by row."""
    return outputs[0].float().flatten(2).transpose(1, 2)


def _boxes(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Boxes (N, H x W, 4) x0 y0 x1 y1 in fractions of the input."""
    height, width = shape[2:]
    y, x = torch.meshgrid(
        torch.arange(height, device=rows.device), torch.arange(width, device=rows.device), indexing="ij"
    )
    cells = torch.stack([x, y], dim=-1).flatten(0, 1)
    grid = torch.tensor([width, height], device=rows.device)
    centre = (rows[..., 1:3].tanh() + cells) / grid
    half = rows[..., 3:BOX_VALUES].sigmoid() / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def _assign(boxes: Tensor, objects: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Which cells answer for which of M objects: index of the object, of the cell, and the IoU of its box."""
    grid = torch.tensor([shape[3], shape[2]], device=boxes.device)
    corner = ((objects[:, None, :2] + objects[:, None, 2:]) / 2 * grid).floor()
    around = corner + torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]], device=boxes.device)
    inside = (around < grid).all(dim=-1)
    cell = (around[..., 1] * grid[0] + around[..., 0]).long().clamp(max=len(boxes) - 1)
    overlap = box_iou(boxes, objects).T.gather(1, cell)
    mean = (overlap * inside).sum(dim=1, keepdim=True) / inside.sum(dim=1, keepdim=True)
    index, place = (inside & (overlap >= mean - ROUNDING)).nonzero(as_tuple=True)
    return index, cell[index, place], overlap[index, place]


def fastestdet(num_classes: int, input_size: InputSize = 352) -> FastestDet:
    """FastestDet; the published weights fit when there are 80 classes (the zoo counts a background, it has none)."""
    if any(side % (2 * STRIDE) for side in height_width(input_size)):
        raise ValueError(f"input_size must be a multiple of {2 * STRIDE}, not {input_size}")
    return FastestDet(num_classes - 1)
