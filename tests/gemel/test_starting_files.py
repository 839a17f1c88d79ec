"""`gemel init` writes a workload and a box file that inspect, merge and run --check take as they are."""

from __future__ import annotations

import json

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from gemel.cli import main
from gemel.models.errors import InputError
from gemel.models.workload import load_workload
from gemel.starting_files import write_starting_files


@pytest.fixture
def folder(tmp_path):
    """Two ONNX files, one of which names its classes by no means, and a clip."""
    for name, classes in (("door", 2), ("lamp", 3)):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
        )
        torch.onnx.export(model, (torch.zeros(1, 3, 32, 32),), str(tmp_path / f"{name}.onnx"), dynamo=False)
    writer = cv2.VideoWriter(str(tmp_path / "hall.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 5.0, (32, 24))
    for _ in range(10):
        writer.write(np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8))
    writer.release()
    return tmp_path


def test_files_of_init_are_inspected_merged_and_checked_as_they_are(folder, capsys):
    north = folder / "north"
    words = [
        "--camera",
        f"hall={folder / 'hall.mp4'}",
        "--camera",
        "gate=rtsp://127.0.0.1:9/none",
        "--model",
        f"{folder / 'door.onnx'}@hall",
        "--model",
        f"{folder / 'lamp.onnx'}@hall",
    ]
    assert main(["init", str(north), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["queries"] == ["door", "lamp"]
    assert main(["inspect", str(north / "workload.yaml"), "--json"]) == 0
    bundle = north / "box.safetensors"
    assert main(["merge", str(north / "workload.yaml"), "-o", str(bundle), "--method", "none"]) in (0, 1)
    capsys.readouterr()
    assert main(["run", str(north / "box.yaml"), "--check", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["ok"] is True and [camera["id"] for camera in checked["cameras"]] == ["hall"], "gate has no query"
    assert main(["init", str(north), *words]) == 2, "files that are there stay"


def test_answers_name_classes_and_preprocessing(folder):
    asked = []

    def ask(question: str) -> str:
        asked.append(question)
        return "open, shut" if "classes" in question else "imagenet"

    written = write_starting_files(folder, [f"door={folder / 'hall.mp4'}"], [str(folder / "door.onnx")], ask)
    (query,) = load_workload(written.workload).queries
    assert (query.task, query.classes) == ("classification", ("open", "shut")) and len(asked) == 2
    assert query.preprocess is not None and query.camera == "door"


@pytest.mark.parametrize(("cameras", "models", "problem"), [
    ([], ["door.onnx"], "no --camera NAME=SOURCE is given"),
    (["a=0"], [], "no --model FILE.onnx is given"),
    (["a=0", "b=1"], ["door.onnx"], "which camera .*door.onnx looks at; write door.onnx@CAMERA with one of: a, b"),
    (["a=0", "b=1"], ["door.onnx@c"], "--model: no camera 'c'; write door.onnx@CAMERA with one of: a, b"),
    (["a=0"], ["door.onnx", "door.onnx"], "is given twice"),
    (["a=0"], ["hall.mp4"], "is no .onnx or .pt2 file"),
    (["a b=0"], ["door.onnx"], "a b"),
])  # fmt: skip
def test_wrong_input_is_one_line_and_nothing_is_written(folder, cameras, models, problem):
    with pytest.raises(InputError, match=problem):
        write_starting_files(folder / "new", cameras, [str(folder / model) for model in models])
    assert not (folder / "new" / "workload.yaml").exists() and not (folder / "new" / "box.yaml").exists()
