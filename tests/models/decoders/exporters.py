"""Small networks whose files have the inputs, outputs and metadata that exporters of detectors write."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

SIDE, QUERIES, COCO = 320, 300, 80


class Queries(nn.Module):
    """(N, 3, 320, 320) -> logits (N, 300, C) and boxes (N, 300, 4), centre and sides in fractions."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.logits, self.boxes = nn.Conv2d(3, 32, 16, 16), nn.Linear(32, classes), nn.Linear(32, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.stem(images).relu().flatten(2).transpose(1, 2)[:, :QUERIES]
        return self.logits(rows) * 4, self.boxes(rows).sigmoid()


class Deployed(nn.Module):
    """RT-DETR's, D-FINE's and DEIM's network and postprocessor: labels, boxes and scores of the best 300."""

    def __init__(self, classes: int = COCO, fixed: bool = False) -> None:
        super().__init__()
        self.queries, self.classes, self.fixed = Queries(classes), classes, fixed

    def forward(self, images: Tensor, orig_target_sizes: Tensor | None = None) -> tuple[Tensor, ...]:
        logits, boxes = self.queries(images)
        sizes = torch.tensor([[SIDE, SIDE]]) if orig_target_sizes is None else orig_target_sizes
        boxes = box_convert(boxes, "cxcywh", "xyxy") * sizes.repeat(1, 2).unsqueeze(1)
        scores, index = logits.sigmoid().flatten(1).topk(QUERIES, dim=-1)
        labels = index - index // self.classes * self.classes
        rows = (index // self.classes).unsqueeze(-1).repeat(1, 1, 4)
        return labels, boxes.gather(1, rows), scores


def export_deployed(path: Path, opset: int = 16, **options: Any) -> Path:
    """As tools/deployment/export_onnx.py of these repositories."""
    free = {"images": {0: "N"}, "orig_target_sizes": {0: "N"}}
    given = (torch.rand(1, 3, SIDE, SIDE), torch.tensor([[SIDE, SIDE]]))
    return write(
        path, Deployed(**options), given, ["images", "orig_target_sizes"], ["labels", "boxes", "scores"], opset, free
    )


def write(
    path: Path, module: nn.Module, given: tuple, inputs: list[str], outputs: list[str], opset: int = 17,
    free: dict | None = None, metadata: dict[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write a module by torch's exporter, with these names and metadata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), given, str(path), dynamo=False, opset_version=opset, input_names=inputs,
            output_names=outputs, dynamic_axes=free,
        )  # fmt: skip
    if metadata:
        model = onnx.load(path)
        onnx.helper.set_model_props(model, metadata)
        onnx.save(model, path)
    return path


ULTRALYTICS = {
    "description": "Ultralytics YOLO11n-pose model trained on yard.yaml", "author": "Ultralytics", "stride": "32",
    "batch": "1", "imgsz": "[320, 320]", "channels": "3", "end2end": "False", "args": "{'batch': 1, 'nms': False}",
}  # fmt: skip
POINTS = 5


class Cells(nn.Module):
    """(N, 3, 320, 320) -> (N, 4 + C + extra, 2100), centre and sides in pixels; with `best`, the best 300 as rows.

    Points follow the classes, or coefficients of the masks that are a second output, or angles by which boxes, then
    centre and sides also among the best, are turned.
    """

    def __init__(self, classes: int, points: int = 0, masks: int = 0, best: bool = False, angles: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classes, self.points, self.masks, self.best, self.angles = classes, points, masks, best, angles
        columns = 4 + classes + 3 * points + masks + angles
        self.levels = nn.ModuleList(nn.Conv2d(3, columns, stride, stride) for stride in (8, 16, 32))
        blobs = nn.functional.interpolate(torch.randn(1, max(1, masks), 5, 5), (SIDE // 8, SIDE // 8), mode="bicubic")
        self.register_buffer("maps", blobs, persistent=False)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        values = torch.cat([level(images).flatten(2) for level in self.levels], dim=2) * 4
        centre, sides = values[:, :2].sigmoid() * SIDE, values[:, 2:4].sigmoid() * SIDE
        extra = values[:, 4 + self.classes :]
        if self.points:
            extra = extra.unflatten(1, (self.points, 3))
            extra = torch.cat([extra[:, :, :2].sigmoid() * SIDE, extra[:, :, 2:].sigmoid()], dim=2).flatten(1, 2)
        if self.angles:
            extra = (extra.sigmoid() - 0.25) * torch.pi
            centre = centre + torch.cat([extra.cos(), extra.sin()], dim=1) * 8
        is_centred = self.angles or not self.best
        boxes = (centre, sides) if is_centred else (centre - sides / 2, centre + sides / 2)
        rows = torch.cat([*boxes, values[:, 4 : 4 + self.classes].sigmoid(), extra], dim=1)
        rows = self.choose(rows.transpose(1, 2)) if self.best else rows
        if not self.masks:
            return rows
        return rows, self.maps + 0.05 * self.levels[0](images)[:, : self.masks]

    def choose(self, rows: Tensor) -> Tensor:
        """Detect.postprocess of Ultralytics: boxes, scores and classes of the best, and what follows."""
        boxes, scores, extra = rows.split([4, self.classes, rows.shape[2] - 4 - self.classes], dim=2)
        index = scores.amax(dim=2).topk(QUERIES)[1].unsqueeze(-1)
        boxes, extra = boxes.gather(1, index.repeat(1, 1, 4)), extra.gather(1, index.repeat(1, 1, extra.shape[2]))
        scores, place = scores.gather(1, index.repeat(1, 1, self.classes)).flatten(1).topk(QUERIES)
        row = (place // self.classes)[..., None]
        label = (place % self.classes)[..., None].float()
        parts = [boxes.gather(1, row.repeat(1, 1, 4)), scores[..., None], label]
        return torch.cat([*parts, extra.gather(1, row.repeat(1, 1, extra.shape[2]))], dim=2)


def export_cells(path: Path, task: str, classes: int, **options: Any) -> Path:
    """As `yolo export format=onnx`."""
    names = str({index: f"kind {index}" for index in range(classes)})
    metadata = {**ULTRALYTICS, "task": task, "names": names}
    if task == "pose":
        metadata["kpt_shape"] = f"[{options['points']}, 3]"
    outputs = ["output0", "output1"][: 1 + bool(options.get("masks"))]
    module = Cells(classes, **options)
    return write(path, module, (torch.rand(1, 3, SIDE, SIDE),), ["images"], outputs, metadata=metadata)


class Nas(nn.Module):
    """YOLO-NAS as super-gradients exports it: u8 (N, 3, 320, 320) -> corners in pixels and scores of the best 300."""

    def __init__(self, classes: int, best: int = QUERIES, last: bool = False) -> None:
        super().__init__()
        self.cells, self.best, self.last = Cells(classes), best, last

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        frames = input.permute(0, 3, 1, 2) if self.last else input
        rows = self.cells(frames.float() / 255).transpose(1, 2)  # type: ignore[union-attr]
        boxes, scores = (
            torch.cat([rows[..., :2] - rows[..., 2:4] / 2, rows[..., :2] + rows[..., 2:4] / 2], 2),
            rows[..., 4:],
        )
        if not self.best:
            return boxes, scores
        place = scores.amax(dim=2).topk(self.best, dim=1)[1].unsqueeze(-1)
        return boxes.gather(1, place.repeat(1, 1, 4)), scores.gather(1, place.repeat(1, 1, scores.shape[2]))


def export_nas(path: Path, classes: int, flat: bool = True, last: bool = False) -> Path:
    """As `model.export(..., output_predictions_format=FLAT_FORMAT)`, or without postprocessing."""
    names = [f"{'graph1_' * flat}{name}" for name in ("pred_boxes", "pred_scores")]
    given = torch.zeros([1, SIDE, SIDE, 3] if last else [1, 3, SIDE, SIDE], dtype=torch.uint8)
    write(path, Nas(classes, QUERIES * flat, last), (given,), ["input"], names)
    if flat:
        model = onnx.load(path)
        add_suppression(model, names)
        onnx.save(model, path)
    return path


class Paddle(nn.Module):
    """PP-YOLOE and PicoDet before suppression: corners in pixels of the frame, by its scale (y, x), and scores."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.cells = Cells(classes)

    def forward(self, image: Tensor, scale_factor: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.cells(image).transpose(1, 2)  # type: ignore[union-attr]
        y, x = scale_factor.split(1, dim=1)
        half = rows[..., 2:4] / 2
        boxes = torch.cat([rows[..., :2] - half, rows[..., :2] + half], dim=2)
        return boxes / torch.cat([x, y, x, y], dim=1).unsqueeze(1), rows[..., 4:]


def export_paddle(path: Path, classes: int) -> Path:
    """As paddle2onnx writes the export of PaddleDetection: rows of class, score and corners."""
    given, parts = (torch.rand(1, 3, SIDE, SIDE), torch.ones(1, 2)), ["boxes", "scores"]
    write(path, Paddle(classes), given, ["image", "scale_factor"], parts, 13)
    model = onnx.load(path)
    add_suppression(model, parts, "multiclass_nms3_0.tmp_0", ("label_number", "score_column", "corners"))
    onnx.save(model, path)
    return path


def add_suppression(
    model: onnx.ModelProto, parts: list[str], flat: str = "graph2_flat_predictions",
    columns: tuple[str, ...] = ("frame_number", "corners", "label_number", "score_column"),
) -> None:  # fmt: skip
    """Rows of these columns: attach_onnx_nms of super-gradients."""
    graph, make, (boxes, scores) = model.graph, onnx.helper.make_node, parts
    constants = {"most": np.array([100]), "overlap": np.array([0.7], np.float32), "least": np.array([0.4], np.float32)}
    graph.initializer.extend(onnx.numpy_helper.from_array(one, name) for name, one in constants.items())
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    graph.node.extend([
        make("Transpose", [scores], ["columns"], perm=[0, 2, 1]),
        make("NonMaxSuppression", [boxes, "columns", *constants], ["chosen"], center_point_box=0),
        make("GatherND", ["columns", "chosen"], ["score"]),
        make("Split", ["chosen"], ["frame", "label", "row"], axis=1),
        make("Concat", ["frame", "row"], ["places"], axis=1),
        make("GatherND", [boxes, "places"], ["corners"]),
        make("Cast", ["frame"], ["frame_number"], to=1),
        make("Cast", ["label"], ["label_number"], to=1),
        make("Unsqueeze", ["score", "axis"], ["score_column"]),
        make("Concat", columns, [flat], axis=1),
    ])  # fmt: skip
    for node in graph.node:
        if node.op_type == "Split" and node.input[0] == "chosen":
            graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 1, 1]), "ones"))
            node.input.append("ones")
    del graph.output[:]
    graph.output.append(onnx.helper.make_tensor_value_info(flat, 1, [None, len(columns) + 3]))
