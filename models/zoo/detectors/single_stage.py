"""SSD: the detector over feature maps and default boxes, its loss and its distillation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from gemel.models.detector import BoxTarget, OneStage
from gemel.models.preprocess import InputSize, height_width
from gemel.models.zoo.detectors.box_ops import (
    DISTILL_BACKGROUND,
    FixedBoxes,
    box_extent,
    decode_boxes,
)

MATCH_IOU = 0.5
NEGATIVES_PER_POSITIVE = 3


def match(default_boxes: Tensor, boxes: Tensor, valid: Tensor) -> Tensor:
    """Index of the object each default box answers for, (N, A), -1 for none (Liu et al. 2016, section 2.2).

    default_boxes (A, 4), boxes (N, M, 4), valid (N, M) marks the rows that are objects. A default box takes the object
    it overlaps most if the IoU is MATCH_IOU or more; every object also gets the default box that fits it best.
    """
    frames, objects = valid.shape
    if objects == 0:
        return torch.full((frames, len(default_boxes)), -1, device=default_boxes.device)
    iou = box_iou(boxes.flatten(0, 1), default_boxes).view(frames, objects, -1)
    iou = iou.masked_fill(~valid[..., None], -1)
    overlap, matched = iou.max(dim=1)
    matched[overlap < MATCH_IOU] = -1
    frame, row = valid.nonzero(as_tuple=True)
    matched[frame, iou.argmax(dim=2)[frame, row]] = row
    return matched


def ssd_loss(
    outputs: tuple[Tensor, Tensor],
    targets: Sequence[BoxTarget],
    default_boxes: Tensor,
    box_coder: BoxCoder,
) -> Tensor:
    """Cross-entropy with hard negatives plus smooth L1 of the boxes, over the number of matched default boxes."""
    logits, deltas = outputs
    boxes, labels = _stack(targets, logits.device)
    matched = match(default_boxes, boxes, labels >= 0)
    positive = matched >= 0
    count = max(1, int(positive.sum()))
    frame, anchor = positive.nonzero(as_tuple=True)
    row = matched[frame, anchor]
    target_deltas = box_coder.encode_single(boxes[frame, row], default_boxes[anchor])
    box_loss = F.smooth_l1_loss(deltas[frame, anchor], target_deltas, reduction="sum")
    classes = torch.zeros_like(matched)
    classes[frame, anchor] = labels[frame, row] + 1  # logit 0 is the background's
    class_loss = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view(
        matched.shape
    )
    negatives = class_loss.detach().masked_fill(positive, -1)
    wanted_negatives = (NEGATIVES_PER_POSITIVE * positive.sum(dim=1, keepdim=True)).clamp(
        min=NEGATIVES_PER_POSITIVE
    )
    rank = negatives.argsort(dim=1, descending=True).argsort(dim=1)
    counted = positive | ((rank < wanted_negatives) & (negatives >= 0))
    return (box_loss + class_loss[counted].sum()) / count


def distill_loss(outputs: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor]) -> Tensor:
    """Divergence of the class distributions and smooth L1 of the deltas, where the original sees objects.

    A default box is weighted by the larger of both models' object probabilities, so that false alarms are penalised as
    well as misses; the sum is divided by the original's total, on the scale of `ssd_loss`.
    """
    logits, deltas = outputs
    teacher_logits, teacher_deltas = teacher
    target = teacher_logits.log_softmax(dim=-1)
    student = logits.log_softmax(dim=-1)
    seen = 1 - target[..., 0].exp()
    imagined = 1 - student.detach()[..., 0].exp()
    mass = seen.sum().clamp(min=1)
    divergence = F.kl_div(student, target, log_target=True, reduction="none").sum(dim=-1)
    class_loss = (divergence * (seen.maximum(imagined) + DISTILL_BACKGROUND)).sum()
    box_loss = (F.smooth_l1_loss(deltas, teacher_deltas, reduction="none").sum(dim=-1) * seen).sum()
    return (class_loss + box_loss) / mass


def _stack(targets: Sequence[BoxTarget], device: torch.device) -> tuple[Tensor, Tensor]:
    """Boxes (N, M, 4) and labels (N, M), which are -1 in the rows beyond a frame's objects."""
    max_objects = max(len(target.labels) for target in targets)
    boxes = torch.zeros(len(targets), max_objects, 4)
    labels = torch.full((len(targets), max_objects), -1)
    for index, target in enumerate(targets):
        boxes[index, : len(target.labels)] = target.boxes
        labels[index, : len(target.labels)] = target.labels
    return boxes.to(device), labels.to(device)


BOX_CODE_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
MapShape = tuple[int, int, int]
SingleStageOutputs = tuple[Tensor, Tensor]


class SingleStage(OneStage):
    """SSD without pre- and postprocessing (Liu et al. 2016), so that an engine sees nothing but tensors.

    `forward`: x f32 (N, 3, H, W) -> logits (N, A, C + 1), class 0 the background, and box deltas (N, A, 4) against
    the A default boxes of `default_boxes`. State dict keys are torchvision's: `backbone.*` and `head.*`.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, default_boxes: Tensor) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.box_coder = BoxCoder(BOX_CODE_WEIGHTS)
        self._boxes = FixedBoxes(default_boxes)

    def forward(self, x: Tensor) -> SingleStageOutputs:
        outputs = self.head(list(self.backbone(x).values()))
        return outputs["cls_logits"], outputs["bbox_regression"]

    def default_boxes(self, device: torch.device | str = "cpu") -> Tensor:
        """The A default boxes, f32 (A, 4) x0 y0 x1 y1 in fractions of the input."""
        return self._boxes.on(device)

    def decode(self, outputs: SingleStageOutputs) -> tuple[Tensor, Tensor]:
        logits, deltas = outputs
        boxes = decode_boxes(deltas.float(), self.default_boxes(deltas.device), BOX_CODE_WEIGHTS)
        return boxes, logits.float().softmax(dim=-1)[..., 1:]

    def loss(self, outputs: SingleStageOutputs, targets: Sequence[BoxTarget]) -> Tensor:
        """SSD's loss, see `ssd_loss`."""
        return ssd_loss(outputs, targets, self.default_boxes(outputs[0].device), self.box_coder)

    def distill(self, outputs: SingleStageOutputs, teacher: SingleStageOutputs) -> Tensor:
        """Distance from the original's outputs, see `distill_loss`."""
        return distill_loss(outputs, teacher)


def single_stage(
    backbone: nn.Module,
    build_head: Callable[[list[int], list[int]], nn.Module],
    generator: DefaultBoxGenerator,
    input_size: InputSize,
) -> SingleStage:
    """A detector over a backbone that returns an ordered dict of maps; `build_head(channels, boxes per cell)`."""
    shapes = list(map_shapes(backbone, input_size).values())
    head = build_head([channels for channels, _, _ in shapes], generator.num_anchors_per_location())
    return SingleStage(
        backbone, head, _fractions(generator, input_size, [shape[1:] for shape in shapes])
    )


def map_shapes(backbone: nn.Module, input_size: InputSize) -> dict[str, MapShape]:
    """(channels, height, width) of each feature map by its name, worked out without computing or allocating anything.

    Raises ValueError when the input is too small for the backbone's last map.
    """
    state = {key: value.detach().to("meta") for key, value in backbone.state_dict().items()}
    frames = torch.zeros(1, 3, *height_width(input_size), device="meta")
    training = backbone.training
    try:
        maps: OrderedDict[str, Tensor] = functional_call(backbone.eval(), state, (frames,))
    except RuntimeError as error:
        raise ValueError(f"input_size {input_size} is too small for this backbone") from error
    finally:
        backbone.train(training)
    return {
        name: (feature_map.shape[1], feature_map.shape[2], feature_map.shape[3])
        for name, feature_map in maps.items()
    }


def spread(scales: Sequence[float], maps: int) -> list[float]:
    """Scales for `maps` feature maps, one more than maps; two numbers are spread in equal ratios.

    Raises ValueError when the scales do not rise or their count fits neither form.
    """
    values = [float(scale) for scale in scales]
    if len(values) not in (2, maps + 1) or values[0] <= 0 or values != sorted(values):
        raise ValueError(
            f"scales must be 2 or {maps + 1} rising numbers above 0, not {list(scales)}"
        )
    if len(values) == maps + 1:
        return values
    low, high = values
    return [low * (high / low) ** (step / maps) for step in range(maps + 1)]


def _fractions(
    generator: DefaultBoxGenerator, input_size: InputSize, grids: Sequence[tuple[int, int]]
) -> Tensor:
    with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
        size = height_width(input_size)
        frame = ImageList(torch.empty(1, 1, *size), [size])
        boxes = generator(frame, [torch.empty(1, 1, *grid) for grid in grids])[0]
        return boxes / box_extent(input_size).on("cpu")
