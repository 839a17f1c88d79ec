"""Workload files: what is read, and that every fault is one line naming file and key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gemel.edge_runtime.life.config import load_config
from gemel.fleet import load_fleet
from gemel.models.errors import InputError
from gemel.models.notes import collect_notes
from gemel.models.workload import load_workload


def _document() -> dict:
    return {
        "name": "junction",
        "cameras": {"bridge": {"source": "clips/bridge.mp4", "fps": 10}, "gate": {"source": "rtsp://host/gate"}},
        "queries": [
            {"id": "cars", "camera": "bridge", "task": "classification", "classes": ["none", "car"],
             "model": "resnet18", "input_size": 64, "weights": "weights/cars.safetensors", "data": "data/cars"},
            {"id": "people", "camera": "gate", "task": "detection", "classes": ["person"],
             "model": "ssdlite320_mobilenet_v3_large", "input_size": 320, "fps": 5, "roi": [0, 10, 50, 60],
             "accuracy_target": 0.9},
        ],
    }  # fmt: skip


def _write(folder: Path, document: object) -> Path:
    path = folder / "workload.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def test_workload_resolves_defaults_and_paths(tmp_path: Path) -> None:
    workload = load_workload(_write(tmp_path, _document()))
    cars, people = workload.queries
    assert cars.weights == tmp_path / "weights/cars.safetensors" and cars.data == tmp_path / "data/cars"
    assert (cars.accuracy_target, people.accuracy_target) == (0.95, 0.9)
    assert (cars.fps, people.fps) == (10, 5)
    assert workload.cameras["bridge"].source == str(tmp_path / "clips/bridge.mp4")
    assert workload.cameras["gate"].source == "rtsp://host/gate"
    assert workload.query("people") is people
    assert repr(workload).startswith("<workload junction: cars (classification by resnet18 on bridge), people (")


def _set(*steps):
    *path, key, value = steps

    def change(document: dict) -> None:
        node = document
        for step in path:
            node = node[step]
        node[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "key", "fault"),
    [
        (_set("colour", "red"), "colour", "unknown key"),
        (_set("queries", 0, "threshold", 1), "queries[0].threshold (cars)", "unknown key"),
        (_set("cameras", "bridge", "zoom", 1), "cameras.bridge.zoom", "unknown key"),
        (lambda d: d["queries"][1].pop("model"), "queries[1].model (people)", "this key is missing"),
        (_set("queries", 1, "camera", "moon"), "queries[1].camera (people)", "no camera 'moon'; use one of: bridge"),
        (_set("queries", 1, "id", "cars"), "queries[1].id", "'cars' occurs twice"),
        (_set("queries", 0, "task", "tracking"), "queries[0].task (cars)", "tracking"),
        (_set("queries", 0, "model", "resnet19"), "queries[0].model (cars)", "did you mean resnet18"),
        (_set("queries", 0, "model", "ssd300_vgg16"), "queries[0].model (cars)", "does detection, not classification"),
        (_set("queries", 0, "classes", []), "queries[0].classes (cars)", "needs two classes"),
        (_set("queries", 0, "classes", ["car"]), "queries[0].classes (cars)", "needs two classes"),
        (_set("queries", 0, "classes", ["car", "car"]), "queries[0].classes (cars)", "occurs twice"),
        (lambda d: d["queries"][0].pop("input_size"), "queries[0].input_size (cars)", "this key is missing"),
        (_set("queries", 0, "preprocess", {"size": [32, 64]}), "queries[0].preprocess.size (cars)", "input_size, 64"),
        (_set("queries", 0, "preprocess", {"scale": 2}), "queries[0].preprocess.scale (cars)", "1 or 255"),
        (_set("queries", 0, "preprocess", {"mean": [0.5]}), "queries[0].preprocess.mean", "missing"),
        (_set("queries", 0, "decoder", "yolov99"), "queries[0].decoder (cars)", "yolov5"),
        (_set("queries", 0, "model", "cars.onnx"), "queries[0].weights (cars)", "cars.onnx holds its weights"),
        (_set("queries", 0, "model", "cars.pt"), "queries[0].model (cars)", "pickled or TorchScript module"),
        (_set("queries", 0, "sla_ms", -1), "queries[0].sla_ms (cars)", "greater than or equal to 1"),
        (_set("queries", 1, "frame_size", [40, 60]), "queries[1].roi (people)", "reaches beyond frames of 40x60"),
        (_set("queries", 1, "frame_size", [0, 60]), "queries[1].frame_size[0] (people)", "greater than"),
        (_set("queries", 1, "roi", [50, 10, 0, 60]), "queries[1].roi (people)", "empty or negative"),
        (_set("accuracy_target", 1.5), "accuracy_target", "less than or equal to 1"),
        (_set("queries", []), "queries", "is empty; add at least one"),
        (_set("queries", 0, "id", "../x"), "queries[0].id", "should match pattern"),
    ],
)
def test_workload_problem_names_file_key_and_remedy(tmp_path: Path, change, key: str, fault: str) -> None:
    document = _document()
    change(document)
    path = _write(tmp_path, document)
    with pytest.raises(InputError) as caught:
        load_workload(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {key}") and fault in message and "\n" not in message
    assert caught.value.hint


def test_roi_in_pixels_of_unnamed_frames_is_noted(tmp_path: Path) -> None:
    document = _document()
    with collect_notes() as notes:
        load_workload(_write(tmp_path, document))
        document["queries"][1]["frame_size"] = [100, 80]
        assert load_workload(_write(tmp_path, document)).query("people").region.fractions == (0, 0.125, 0.5, 0.75)
        del document["queries"][1]["frame_size"]
        document["queries"][1]["roi"] = [0, 0.1, 0.5, 1]
        load_workload(_write(tmp_path, document))
    assert notes == [
        f"{tmp_path / 'workload.yaml'}: the roi of query people is in pixels, and nothing says of which frames; "
        "add `frame_size: [width, height]` of its camera, or give fractions"
    ]


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "", "name: \x00"])
def test_workload_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"workload\.yaml: is not"):
        load_workload(_write(tmp_path, text))


@pytest.mark.parametrize("text", ["queries: []\n", "name: hall\nqueries: []\n"])
def test_workload_that_is_yet_to_be_filled_in_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="queries: is empty; add at least one") as caught:
        load_workload(_write(tmp_path, text))
    assert not caught.value.others


def test_workload_with_several_faults_names_all_at_once(tmp_path: Path) -> None:
    document = _document()
    first, second = document["queries"]
    first |= {"classes": ["car", "car"], "modle": "resnet18"}
    del first["model"]
    second |= {"fps": -1}
    with pytest.raises(InputError) as caught:
        load_workload(_write(tmp_path, document))
    texts = [str(error) for error in (caught.value, *caught.value.others)]
    assert len(texts) == 2, "a misspelt key is not a missing one as well"
    assert "queries[0].modle (cars): unknown key; did you mean model?" in texts[0]
    assert "queries[1].fps (people)" in texts[1]
    first["model"] = first.pop("modle")
    second |= {"fps": 5, "camera": "gat", "classes": []}
    with pytest.raises(InputError) as caught:
        load_workload(_write(tmp_path, document))
    texts = [str(error) for error in (caught.value, *caught.value.others)]
    assert [text.split(": ")[1] for text in texts] == [
        "queries[1].camera (people)", "queries[0].classes (cars)", "queries[1].classes (people)",
    ]  # fmt: skip


def test_preprocess_by_name_is_a_mean_and_a_deviation(tmp_path: Path) -> None:
    document = _document()
    document["queries"][0]["preprocess"] = "unit"
    assert load_workload(_write(tmp_path, document)).queries[0].preprocess == {"mean": (0, 0, 0), "std": (1, 1, 1)}
    document["queries"][0]["preprocess"] = "imagenett"
    with pytest.raises(InputError, match=r"preprocess \(cars\): give imagenet or unit, or keys such as"):
        load_workload(_write(tmp_path, document))


@pytest.mark.parametrize(("name", "text", "problem"), [
    ("box.safetensors", "\0", "is a bundle or weights, no workload file"),
    ("gate.onnx", "\0", "is a model, no workload file"),
    ("box.yaml", "bundle: box.safetensors\nqueries: {}\n", "is a box config, no workload file"),
    ("city.yaml", "boxes: []\nworkloads: []\n", "is a fleet file, no workload file"),
])  # fmt: skip
def test_file_of_another_kind_is_told_as_one(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=problem) as caught:
        load_workload(tmp_path / name)
    assert not caught.value.others


def test_workload_is_told_as_one_where_another_file_is_asked(tmp_path: Path) -> None:
    path = _write(tmp_path, _document())
    with pytest.raises(InputError, match="is a workload file, no fleet file"):
        load_fleet(path)
    with pytest.raises(InputError, match="is a workload file, no box config"):
        load_config(path)
