"""Real files on a real frame: what a workload takes from a file, and what its model sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import torchvision

from gemel.models.detector import Detector
from gemel.models.errors import InputError
from gemel.models.notes import collect_notes
from gemel.models.objects.candidates import suppress
from gemel.models.sharing.layers import architecture
from gemel.models.tensors import as_arrays
from gemel.models.workload import Query, load_workload
from gemel.models.zoo import build_query, preprocess_of

pytest.importorskip("gemel.models.graph")
CLIP = Path("videos") / "tfl_jc1" / "jc1.mp4"
VEHICLES = ("car", "bus", "truck")
MIN_SCORE, FRAME = 0.3, 0


def load_query(folder: Path, file: Path | str, **keys: Any) -> Query:
    """The query of a workload file that names this model, and these keys beside it."""
    query = {"id": "street", "camera": "one", "model": str(file), **keys}
    workload = {"name": "w", "cameras": {"one": {"source": "one.mp4"}}, "queries": [query]}
    (folder / "w.yaml").write_text(json.dumps(workload))
    return load_workload(folder / "w.yaml").queries[0]


@pytest.fixture(scope="module")
def frame(real_data: Path) -> np.ndarray:
    """The first frame of a camera in London, uint8 RGB (H, W, 3)."""
    with av.open(str(real_data / CLIP)) as file:
        return next(file.decode(video=0)).to_ndarray(format="rgb24")


@torch.inference_mode()
def detect(query: Query, frame: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Boxes in pixels of the frame, scores and labels, suppressed."""
    model, preprocess = build_query(query), preprocess_of(query)
    assert isinstance(model, Detector) and model.nms_iou is not None
    outputs = as_arrays(model(torch.from_numpy(preprocess(frame))))
    (found,) = model.reader.candidates(outputs, MIN_SCORE)
    best = suppress(found, model.nms_iou)
    size = (frame.shape[1], frame.shape[0])
    boxes = torch.from_numpy(preprocess.to_frame(best.boxes, size)) * torch.tensor([*size, *size])
    return boxes, torch.from_numpy(best.scores), torch.from_numpy(best.labels)


def known_vehicles(path: Path) -> torch.Tensor:
    """The boxes of the vehicles that the recorded teacher is sure of in the frame."""
    lines = map(json.loads, Path(f"{path}.teacher.jsonl").read_text().splitlines())
    boxes = [one["box"] for one in lines if one["frame"] == FRAME and one["class"] in VEHICLES and one["score"] > 0.5]
    return torch.tensor(boxes)


@pytest.mark.parametrize(("name", "least"), [("yolox_nano_416", 0.7), ("nanodet_m_320", 0.5), ("FastestDet", 0.4)])
def test_published_detectors_find_the_vehicles_of_the_teacher(
    real_data: Path, tmp_path: Path, frame: np.ndarray, name: str, least: float
) -> None:
    query = load_query(tmp_path, real_data / "models" / f"{name}.onnx", classes=list(VEHICLES))
    boxes, _, _ = detect(query, frame)
    known = known_vehicles(real_data / CLIP)
    overlap = torchvision.ops.box_iou(known, boxes).max(dim=1).values
    assert (overlap > 0.5).float().mean() >= least, (known, boxes)


@pytest.mark.parametrize("name", ["yolox_nano_416", "nanodet_m_320", "FastestDet"])
def test_outputs_of_several_frames_are_those_of_onnx_runtime(
    real_data: Path, tmp_path: Path, frame: np.ndarray, name: str
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    path = real_data / "models" / f"{name}.onnx"
    query = load_query(tmp_path, path, classes=["person"])
    inputs = torch.from_numpy(np.concatenate([preprocess_of(query)(one) for one in (frame, frame[::-1])]))
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = [{session.get_inputs()[0].name: one[None].contiguous().numpy()} for one in inputs]
    with torch.inference_mode():
        ours = build_query(query)(inputs)
    for place, theirs in enumerate(zip(*(session.run(None, feed) for feed in feeds), strict=True)):
        rows = np.stack([one.reshape(ours[place].shape[1:]) for one in theirs])
        assert np.abs(ours[place].numpy() - rows).max() < 1e-3 * max(1.0, np.abs(rows).max())


def test_file_says_task_size_and_classes(real_data: Path, tmp_path: Path) -> None:
    with collect_notes() as notes:
        query = load_query(tmp_path, real_data / "models" / "yolox_nano_416.onnx")
    assert (query.task, query.input_size, len(query.classes)) == ("detection", 416, 80)
    assert any("taken for COCO's" in note for note in notes)
    preprocess = preprocess_of(query)
    assert (preprocess.resize, preprocess.anchor, preprocess.channels) == ("letterbox", "top-left", "bgr")


def test_last_layers_of_a_file_are_heads(real_data: Path, tmp_path: Path) -> None:
    found = architecture(load_query(tmp_path, real_data / "models" / "yolox_nano_416.onnx"))
    assert sum(head for *_, head, _ in found.layers) == 9  # class, box and objectness of three levels
    assert all(path.startswith("network.") for path, *_ in found.layers)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("yolox_nano_416", (2, 3549, 85)), ("nanodet_m_320", (2, 1600, 80)), ("FastestDet", (2, 85, 22, 22))],
)
def test_model_of_the_meta_device_has_no_values(real_data: Path, tmp_path: Path, name: str, shape: tuple) -> None:
    query = load_query(tmp_path, real_data / "models" / f"{name}.onnx", classes=["person"])
    model = build_query(query, "meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model(torch.zeros(2, 3, *preprocess_of(query).size, device="meta"))[0].shape == shape


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"classes": ["perosn"]}, r"queries\[0\].classes \(street\).*has no class 'perosn'; its classes are person"),
        ({"decoder": "detr"}, r"queries\[0\].decoder \(street\).*the decoder detr does not fit"),
        ({"task": "classification"}, r"no decoder for classification fits the outputs output \[3549, 85\]"),
        ({"input_size": 320}, r"has a fixed input of 416 x 416"),
    ],
)
def test_keys_that_do_not_fit_the_file_are_refused(real_data: Path, tmp_path: Path, keys: dict, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        load_query(tmp_path, real_data / "models" / "yolox_nano_416.onnx", **keys)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"queries\[0\].model \(street\).*cannot be read: No such file"):
        load_query(tmp_path, "gone.onnx")
