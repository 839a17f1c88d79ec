"""The detector all SSD families share: feature maps, a head, default boxes that are computed and never stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList

from models.detector import BoxTarget, OneStage
from models.zoo.detectors.boxes import FixedBoxes, decode_boxes
from models.zoo.detectors.losses.ssd import distill_loss, ssd_loss

BOX_CODE_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
MapShape = tuple[int, int, int]
Outputs = tuple[Tensor, Tensor]


class SingleStage(OneStage):
    """SSD without pre- and postprocessing (Liu et al. 2016), so that an engine sees nothing but tensors.

    `forward`: x f32 (N, 3, S, S) -> logits (N, A, C + 1), class 0 the background, and box deltas (N, A, 4) against
    the A default boxes of `default_boxes`. State dict keys are torchvision's: `backbone.*` and `head.*`.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, default_boxes: Tensor) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.box_coder = BoxCoder(BOX_CODE_WEIGHTS)
        self._boxes = FixedBoxes(default_boxes)

    def forward(self, x: Tensor) -> Outputs:
        outputs = self.head(list(self.backbone(x).values()))
        return outputs["cls_logits"], outputs["bbox_regression"]

    def default_boxes(self, device: torch.device | str = "cpu") -> Tensor:
        """The A default boxes, f32 (A, 4) x0 y0 x1 y1 in fractions of the frame."""
        return self._boxes.on(device)

    def decode(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        logits, deltas = outputs
        boxes = decode_boxes(deltas.float(), self.default_boxes(deltas.device), BOX_CODE_WEIGHTS)
        return boxes, logits.float().softmax(dim=-1)[..., 1:]

    def loss(self, outputs: Outputs, targets: Sequence[BoxTarget]) -> Tensor:
        """SSD's loss, see `ssd_loss`."""
        return ssd_loss(outputs, targets, self.default_boxes(outputs[0].device), self.box_coder)

    def distill(self, outputs: Outputs, teacher: Outputs) -> Tensor:
        """Distance from the original's outputs, see `distill_loss`."""
        return distill_loss(outputs, teacher)


def single_stage(
    backbone: nn.Module,
    build_head: Callable[[list[int], list[int]], nn.Module],
    generator: DefaultBoxGenerator,
    input_size: int,
) -> SingleStage:
    """A detector over a backbone that returns an ordered dict of maps; `build_head(channels, boxes per cell)`."""
    shapes = list(map_shapes(backbone, input_size).values())
    head = build_head([channels for channels, _, _ in shapes], generator.num_anchors_per_location())
    return SingleStage(backbone, head, _fractions(generator, input_size, [shape[1:] for shape in shapes]))


def map_shapes(backbone: nn.Module, input_size: int) -> dict[str, MapShape]:
    """(channels, height, width) of each feature map by its name, worked out without computing or allocating anything.

    Raises ValueError when the input is too small for the backbone's last map.
    """
    state = {key: value.detach().to("meta") for key, value in backbone.state_dict().items()}
    frames = torch.zeros(1, 3, input_size, input_size, device="meta")
    training = backbone.training
    try:
        maps: OrderedDict[str, Tensor] = functional_call(backbone.eval(), state, (frames,))
    except RuntimeError as error:
        raise ValueError(f"input_size {input_size} is too small for this backbone") from error
    finally:
        backbone.train(training)
    return {name: (one.shape[1], one.shape[2], one.shape[3]) for name, one in maps.items()}


def spread(scales: Sequence[float], maps: int) -> list[float]:
    """Scales for `maps` feature maps, one more than maps; two numbers are spread in equal ratios.

    Raises ValueError when the scales do not rise or their count fits neither form.
    """
    values = [float(scale) for scale in scales]
    if len(values) not in (2, maps + 1) or values[0] <= 0 or values != sorted(values):
        raise ValueError(f"scales must be 2 or {maps + 1} rising numbers above 0, not {list(scales)}")
    if len(values) == maps + 1:
        return values
    low, high = values
    return [low * (high / low) ** (step / maps) for step in range(maps + 1)]


def _fractions(generator: DefaultBoxGenerator, input_size: int, grids: Sequence[tuple[int, int]]) -> Tensor:
    with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
        frame = ImageList(torch.empty(1, 1, input_size, input_size), [(input_size, input_size)])
        return generator(frame, [torch.empty(1, 1, *grid) for grid in grids])[0] / input_size
