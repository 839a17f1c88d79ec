"""Files as exporters of detectors write them, through the whole road: import, decode, export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from gemel.models.decoders.families import PLAIN
from gemel.models.decoders.files import load_file
from gemel.models.decoders.graph_model import GraphDetector
from gemel.models.decoders.losses import dense_loss
from gemel.models.detector import BoxTarget, PoseTarget
from gemel.models.errors import InputError
from gemel.models.graph import load_graph
from gemel.models.graph.fill import fill_graph
from gemel.models.graph.stored import store_graph
from gemel.models.graph.unfold import unfold_norms
from gemel.models.notes import collect_notes
from gemel.models.objects.candidates import DecodedReader
from gemel.models.objects.outlines import fill_outline
from gemel.models.predictions import DetectionPrediction
from gemel.models.preprocess import Preprocess
from gemel.models.tensors import as_arrays
from tests.models.decoders.exporters import (
    COCO,
    POINTS,
    QUERIES,
    SIDE,
    Cells,
    Deployed,
    export_cells,
    export_deployed,
    export_nas,
    export_paddle,
    write,
)  # fmt: skip
from tests.models.decoders.tiny_graphs import TinyYolox, export

BOX_TOLERANCE_PX, SCORE_TOLERANCE = 0.01, 1e-5
WIDTH, HEIGHT = 640, 480
SIZES = np.array([[WIDTH, HEIGHT]])


def draw(count: int = 2, side: int = SIDE) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def run(file: Path | bytes, frames: torch.Tensor, **more: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(file) if isinstance(file, Path) else file)
    name = next(one.name for one in session.get_inputs() if one.name not in more)
    return [np.asarray(one) for one in session.run(None, {name: frames.numpy(), **more})]


def write_again(file: Path) -> bytes:
    graph = unfold_norms(load_graph(file))
    model = fill_graph(store_graph(graph), lambda key: graph.state[key].numpy()).to_proto()
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


@pytest.mark.parametrize("opset", [11, 16])
def test_file_with_frame_sizes_answers_as_its_postprocessor(tmp_path: Path, opset: int) -> None:
    file = export_deployed(tmp_path / "dfine.onnx", opset)
    model = load_file(file, (), None, "auto", None, 0.0)
    with torch.no_grad():
        boxes, scores, *_ = model.decode(model(draw()))
    sizes = SIZES.repeat(2, axis=0)
    for frame, (label, box, score) in enumerate(zip(*run(file, draw(), orig_target_sizes=sizes), strict=True)):
        best, places = scores[frame].flatten().topk(QUERIES)
        pixels = boxes[frame][places // COCO] * torch.tensor([WIDTH, HEIGHT] * 2)
        assert np.abs(best.numpy() - score).max() < SCORE_TOLERANCE
        assert (places % COCO).tolist() == label.tolist()
        assert np.abs(pixels.numpy() - box).max() < BOX_TOLERANCE_PX


def test_file_with_frame_sizes_is_written_with_both_inputs(tmp_path: Path) -> None:
    file = export_deployed(tmp_path / "dfine.onnx")
    again = write_again(file)
    session = onnxruntime.InferenceSession(again)
    assert [one.name for one in session.get_inputs()] == ["images", "orig_target_sizes"]
    assert [one.name for one in session.get_outputs()] == ["labels", "boxes", "scores"]
    frames = draw(1)
    for mine, theirs in zip(run(again, frames, orig_target_sizes=SIZES), run(file, frames, orig_target_sizes=SIZES)):
        assert np.allclose(mine, theirs, atol=1e-3)


def test_boxes_in_pixels_of_a_built_in_size_are_fractions(tmp_path: Path) -> None:
    given, names = (draw(1),), ["labels", "boxes", "scores"]
    file = write(tmp_path / "fixed.onnx", Deployed(), given, ["images"], names, 17, {"images": {0: "N"}})
    model = load_file(file, (), None, "auto", None, 0.0)
    with torch.no_grad():
        boxes, scores, *_ = model.decode(model(draw(1)))
    _, box, score = run(file, draw(1))
    best, places = scores[0].flatten().topk(QUERIES)
    assert np.abs(best.numpy() - score[0]).max() < SCORE_TOLERANCE
    assert np.abs(boxes[0][places // COCO].numpy() * SIDE - box[0]).max() < BOX_TOLERANCE_PX


def test_second_input_that_layers_follow_is_refused(tmp_path: Path) -> None:
    class Conditioned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picture, self.size = torch.nn.Conv2d(3, 8, 16, 16), torch.nn.Linear(2, 8)

        def forward(self, images: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
            return self.picture(images).flatten(2).mean(2) + self.size(size)

    given = (draw(1), torch.rand(1, 2))
    file = write(tmp_path / "two.onnx", Conditioned(), given, ["images", "size"], ["scores"])
    with pytest.raises(InputError, match=r"takes 2 inputs \('images', 'size'\)"):
        load_graph(file)


@torch.no_grad()
def answer(file: Path, frames: torch.Tensor, **keys) -> tuple[list[torch.Tensor], GraphDetector]:
    """Boxes in pixels of the input, scores, and points where there are any."""
    model = load_file(file, (), keys.get("task"), "auto", None, 0.0)
    assert isinstance(model, GraphDetector)
    boxes, scores, *points = model.decode(model(frames))
    return [boxes * SIDE, scores, *(one * torch.tensor([SIDE, SIDE, 1]) for one in points)], model


def test_pose_file_answers_with_boxes_and_points(tmp_path: Path) -> None:
    file = export_cells(tmp_path / "pose.onnx", "pose", 2, points=POINTS)
    (boxes, scores, points), model = answer(file, draw(1))
    assert model.decoder.name == "yolo-pose" and model.has_points and model.reader.columns == (0, 1)
    (rows,) = run(file, draw(1))
    rows = rows.transpose(0, 2, 1)
    assert np.abs((boxes[..., :2] + boxes[..., 2:]).numpy() / 2 - rows[..., :2]).max() < BOX_TOLERANCE_PX
    assert np.abs(scores.numpy() - rows[..., 4:6]).max() < SCORE_TOLERANCE
    assert np.abs(points.numpy() - rows[..., 6:].reshape(1, -1, POINTS, 3)).max() < BOX_TOLERANCE_PX
    frame = model.reader.candidates(as_arrays(model(draw(1))), 0.5)[0]
    assert frame.points is not None and frame.points.shape[1:] == (POINTS, 3)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("pose", {"points": POINTS}),
        ("segment", {"masks": 8}),
        ("detect", {}),
        ("pose", {"points": POINTS, "classes": 4}),
    ],
)
def test_best_rows_of_a_file_are_among_the_candidates(tmp_path: Path, task: str, options: dict) -> None:
    file = export_cells(tmp_path / "best.onnx", task, **{"classes": 3, "best": True, **options})
    (boxes, scores, *points), model = answer(file, draw(1))
    assert model.nms_iou is None
    found = torch.from_numpy(run(file, draw(1))[0][0])
    near, row = torch.cdist(found[:, :4], boxes[0], p=float("inf")).min(dim=1)
    assert near.max() < BOX_TOLERANCE_PX
    assert (scores[0][row, found[:, 5].long()] - found[:, 4]).abs().max() < SCORE_TOLERANCE
    for one in points:
        assert (one[0][row].flatten(1) - found[:, 6:]).abs().max() < BOX_TOLERANCE_PX


SHAPES: dict[str, dict] = {"segment": {"masks": 8}, "obb": {"angles": True}}


def predict(file: Path, decoder: str = "auto") -> tuple[DetectionPrediction, GraphDetector]:
    """The answer to a square frame, which the input holds pixel by pixel, and the model."""
    model = load_file(file, (), None, decoder, Preprocess((SIDE, SIDE), **PLAIN), 0.0)
    assert isinstance(model, GraphDetector)
    frame = (draw(1)[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    return model.predict(frame), model  # type: ignore[operator]


@pytest.mark.parametrize("best", [False, True])
def test_masks_of_a_file_are_outlines_of_its_objects(tmp_path: Path, best: bool) -> None:
    file = export_cells(tmp_path / "masks.onnx", "segment", 3, masks=8, best=best)
    with collect_notes() as notes:
        found, model = predict(file)
    assert model.decoder.name == "yolo-seg" and not any("not read" in note for note in notes)
    frame = (draw(1) * 255).round() / 255
    rows, prototypes = run(file, frame)
    rows = rows[0] if best else rows[0].T
    corners = rows[:, :4] if best else np.hstack([rows[:, :2] - rows[:, 2:4] / 2, rows[:, :2] + rows[:, 2:4] / 2])
    maps = torch.nn.functional.interpolate(torch.from_numpy(prototypes), size=(SIDE, SIDE), mode="bilinear")[0]
    overlaps = []
    for box, outline in zip(found.boxes, found.outlines, strict=True):
        row = rows[np.abs(corners.clip(0, SIDE) - box).max(axis=1).argmin()]
        mask = (torch.from_numpy(row[-8:]) @ maps.flatten(1)).view(SIDE, SIDE).numpy() > 0
        x0, y0, x1, y1 = (round(side) for side in box)
        inside = np.zeros_like(mask)
        inside[y0:y1, x0:x1] = mask[y0:y1, x0:x1]
        filled = fill_outline(outline, (0, 0), 1.0, (SIDE, SIDE))
        overlaps.append((inside & filled).sum() / max(1, (inside | filled).sum()))
    assert len(overlaps) > 10 and np.median(overlaps) > 0.9


def test_masks_may_be_left_out_by_the_decoder_for_boxes(tmp_path: Path) -> None:
    file = export_cells(tmp_path / "masks.onnx", "segment", 3, masks=8)
    with collect_notes() as notes:
        found, model = predict(file, "yolo")
    assert model.decoder.name == "yolo" and found.boxes and not found.outlines
    assert any("not read: output1" in note for note in notes)


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("classes", [1, 3, 4])
def test_rotated_boxes_of_a_file_are_four_corners(tmp_path: Path, best: bool, classes: int) -> None:
    file = export_cells(tmp_path / "obb.onnx", "obb", classes, best=best, angles=True)
    found, model = predict(file)
    assert model.decoder.name == "yolo-obb" and model.decoder.width == classes
    frame = (draw(1) * 255).round() / 255
    rows = run(file, frame)[0][0]
    rows = rows if best else rows.T
    angle = rows[:, -1:]
    across, down = np.hstack([np.cos(angle), np.sin(angle)]), np.hstack([-np.sin(angle), np.cos(angle)])
    first = rows[:, :2] - across * rows[:, 2:3] / 2 - down * rows[:, 3:4] / 2
    third = rows[:, :2] + across * rows[:, 2:3] / 2 + down * rows[:, 3:4] / 2
    assert len(found.outlines) == len(found.boxes) > 5
    for (corners,), box in zip(found.outlines, found.boxes, strict=True):
        apart = np.abs(np.hstack([first - corners[0], third - corners[2]])).max(axis=1)
        assert len(corners) == 4 and apart.min() < BOX_TOLERANCE_PX
        hull = np.array([*np.min(corners, axis=0), *np.max(corners, axis=0)]).clip(0, SIDE)
        assert np.abs(hull - box).max() < BOX_TOLERANCE_PX


@pytest.mark.parametrize(("task", "decoder"), [("segment", "yolo-seg"), ("obb", "yolo-obb")])
def test_outlines_are_seen_in_a_file_without_metadata(tmp_path: Path, task: str, decoder: str) -> None:
    outputs = ["rows", "maps"][: 1 + (task == "segment")]
    file = write(tmp_path / "bare.onnx", Cells(3, **SHAPES[task]), (draw(1),), ["images"], outputs)
    model = load_file(file, ("one", "two", "three"), None, "auto", Preprocess((SIDE, SIDE), **PLAIN), 0.0)
    assert isinstance(model, GraphDetector) and model.decoder.name == decoder


@pytest.mark.parametrize("task", SHAPES)
@pytest.mark.parametrize("best", [False, True])
def test_files_with_outlines_are_written_again_and_learn(tmp_path: Path, task: str, best: bool) -> None:
    file = export_cells(tmp_path / "file.onnx", task, 2, best=best, **SHAPES[task])
    for mine, theirs in zip(run(write_again(file), draw(1)), run(file, draw(1)), strict=True):
        assert np.allclose(mine, theirs, atol=1e-3)
    model = load_file(file, (), None, "auto", None, 0.0).train()
    outputs = model(draw())
    target = BoxTarget(torch.tensor([[0.2, 0.2, 0.6, 0.5]]), torch.tensor([1]))
    loss = model.loss(outputs, [target, target]) + model.distill(outputs, [one.detach() + 0.1 for one in outputs])  # type: ignore[operator]
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(one.isfinite().all() for one in gradients)


def test_points_without_metadata_need_the_task(tmp_path: Path) -> None:
    given = (draw(1),)
    file = write(tmp_path / "plain.onnx", Cells(1, points=POINTS), given, ["images"], ["output0"])
    (_, scores, points), _ = answer(file, draw(1), task="keypoints")
    assert scores.shape[2] == 1 and points.shape[2] == POINTS


def test_labelled_points_teach_points_alone() -> None:
    boxes, scores = torch.tensor([[[0.1, 0.1, 0.5, 0.5]]]), torch.full((1, 1, 1), 0.9)
    points = torch.full((1, 1, 2, 3), 0.3, requires_grad=True)
    wanted = torch.tensor([[[0.2, 0.2, 1.0], [0.9, 0.9, 0.0]]])
    dense_loss(boxes, scores, [PoseTarget(boxes[0], torch.tensor([0]), wanted)], points).backward()
    gradient = points.grad
    assert gradient is not None and (gradient[0, 0, 0, :2] > 0).all() and (gradient[0, 0, 1, :2] == 0).all()
    assert gradient[0, 0, 0, 2] < 0 < gradient[0, 0, 1, 2]
    with pytest.raises(InputError, match="the labels have 2 points, the model has 5"):
        dense_loss(boxes, scores, [PoseTarget(boxes[0], torch.tensor([0]), wanted)], torch.rand(1, 1, 5, 3))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_yolo_nas_of_integers_answers_as_its_file(tmp_path: Path, flat: bool, last: bool) -> None:
    file = export_nas(tmp_path / "nas.onnx", 3, flat, last)
    model = load_file(file, ("car", "bus", "truck"), None, "auto", None, 0.0)
    prepared = model.preprocess.preprocess  # type: ignore[union-attr]
    assert isinstance(prepared, Preprocess)
    assert (prepared.resize, prepared.scale, prepared.mean) == ("letterbox", 255, (0, 0, 0))
    pixels = (draw(1) * 255).round()
    assert isinstance(model, GraphDetector) and model.decoder.name == "ssd"
    with torch.no_grad():
        boxes, scores, *_ = model.decode(model(pixels))
    whole = pixels.permute(0, 2, 3, 1) if last else pixels
    outputs = run(file, whole.to(torch.uint8))
    found = torch.from_numpy(outputs[0] if flat else np.concatenate([np.zeros((2100, 1)), outputs[0][0]], 1)).float()
    assert len(found) > 3
    near, row = torch.cdist(found[:, 1:5], boxes[0] * SIDE, p=float("inf")).min(dim=1)
    assert near.max() < BOX_TOLERANCE_PX
    if flat:
        assert (scores[0][row, found[:, 5].long()] - found[:, 6]).abs().max() < SCORE_TOLERANCE
    again = write_again(file)
    session = onnxruntime.InferenceSession(again)
    (given,) = session.get_inputs()
    assert (given.name, given.type) == ("input", "tensor(uint8)") and given.shape[1:] == list(whole.shape[1:])
    for mine, theirs in zip(run(again, whole.to(torch.uint8)), outputs, strict=True):
        assert np.abs(mine - theirs).max() < BOX_TOLERANCE_PX


def test_paddle_file_with_a_scale_factor_answers_as_its_file(tmp_path: Path) -> None:
    file, scale = export_paddle(tmp_path / "ppyoloe.onnx", 3), np.array([[0.5, 0.25]], np.float32)
    model = load_file(file, ("car", "bus", "truck"), None, "auto", Preprocess((SIDE, SIDE)), 0.0)
    assert isinstance(model, GraphDetector) and model.decoder.name == "ssd"
    with torch.no_grad():
        boxes, scores, *_ = model.decode(model(draw(1)))
    rows = torch.from_numpy(run(file, draw(1), scale_factor=scale)[0])
    assert len(rows) > 3
    pixels = rows[:, 2:] * torch.tensor([0.25, 0.5, 0.25, 0.5])
    near, row = torch.cdist(pixels, boxes[0] * SIDE, p=float("inf")).min(dim=1)
    assert near.max() < BOX_TOLERANCE_PX
    assert (scores[0][row, rows[:, 0].long()] - rows[:, 1]).abs().max() < SCORE_TOLERANCE
    again = write_again(file)
    assert [one.name for one in onnxruntime.InferenceSession(again).get_inputs()] == ["image", "scale_factor"]
    assert np.abs(run(again, draw(1), scale_factor=scale)[0] - rows.numpy()).max() < BOX_TOLERANCE_PX


def test_channels_last_with_free_sides_take_the_size_asked_for(tmp_path: Path) -> None:
    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.conv(input.permute(0, 3, 1, 2)).mean((2, 3))

    free = {"input": {0: "n", 1: "h", 2: "w"}}
    file = write(tmp_path / "last.onnx", Last(), (torch.rand(1, 8, 8, 3),), ["input"], ["scores"], free=free)
    with pytest.raises(InputError, match=r"name it: input_size: \[H, W\]"):
        load_graph(file)
    graph = load_graph(file, (8, 12))
    assert graph.input.shape == ("batch", 3, 8, 12)
    assert graph.file_input is not None and graph.file_input.shape == ("batch", "height", "width", 3)


def test_rows_that_can_reach_a_score_give_the_candidates_of_all_rows(tmp_path: Path) -> None:
    file = export(tmp_path / "tiny.onnx", TinyYolox(3), names=json.dumps(["a", "b", "c"]))
    model = load_file(file, (), None, "yolox", Preprocess((96, 96)), 0.0)
    assert isinstance(model, GraphDetector)
    outputs = as_arrays(model(draw(side=96)))
    decoded = model.reader.decode(outputs)
    least = float(np.quantile(decoded[1], 0.9))
    found = model.reader.candidates(outputs, least)
    wanted = DecodedReader(model.nms_iou).candidates(decoded, least)
    assert sum(len(one.scores) for one in found) > 10
    for one, other in zip(found, wanted, strict=True):
        assert all(np.allclose(mine, theirs) for mine, theirs in zip(one[:3], other[:3], strict=True))
