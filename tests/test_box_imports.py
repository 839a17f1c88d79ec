"""What a box needs before and after its networks runs where neither torch nor torchvision can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODULES = (
    "antialias", "arrays", "objects.boxes", "objects.candidates", "measures.evidence", "objects.masks",
    "measures.metrics", "files.pictures", "predictions", "preprocess", "labels.rle", "tasks", "decoders",
    "decoders.heads", "decoders.outputs", "decoders.readers", "measures.agreement", "bundle",
    "export.document_costs", "files.extras", "export.network_outputs", "out_of_memory", "graph.stored",
)  # fmt: skip
BLOCK = """
import sys
sys.modules["torch"] = sys.modules["torchvision"] = None
import numpy as np
"""
FRAME = "np.random.default_rng(0).integers(0, 256, (90, 160, 3), np.uint8)"
EXAMPLES = {
    "preprocess": f"""
from gemel.models.preprocess import Cropped, Preprocess, Region
for resize in ("stretch", "letterbox", "center-crop"):
    for antialias in (True, False):
        preprocess = Preprocess((32, 48), resize, channels="bgr", antialias=antialias)
        values = Cropped(preprocess, Region((10, 10, 150, 80)))({FRAME})
        assert values.shape == (1, 3, 32, 48) and values.dtype == np.float32
""",
    "classification": """
from gemel.models.tasks import task_of
(found,) = task_of("classification").predictions(None, np.array([[1.0, 3.0]], np.float32), [(9, 9)], ("a", "b"))
assert found.label == "b" and abs(found.score - 0.881) < 1e-3
""",
    "several labels": """
from gemel.models.tasks.multi_label import MultiLabel
(found,) = MultiLabel().predictions(None, np.array([[1.0, -300.0]], np.float32), [(9, 9)], ("a", "b"), 0.5)
assert found.classes == ("a",)
""",
    "detection": """
from gemel.models.objects.candidates import DecodedReader
from gemel.models.preprocess import Preprocess
from gemel.models.tasks import task_of
boxes = np.array([[[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.49], [0.5, 0.5, 1.0, 1.0]]], np.float32)
scores = np.array([[[0.9, 0.0], [0.8, 0.0], [0.0, 0.7]]], np.float32)
task, preprocess = task_of("detection"), Preprocess((64, 64), "letterbox")
(found,) = task.predictions(DecodedReader(0.5), (boxes, scores), [(200, 100)], ("car", "bus"), 0.3, preprocess)
assert found.classes == ("car", "bus") and found.boxes[1] == (100.0, 50.0, 200.0, 100.0)
label = task.labels_of(found, 0.5)
assert task.metric_of(task.tallies([found], [label], ("car", "bus"))[0]) == 1
""",
    "keypoints": """
from gemel.models.objects.candidates import SuppressedReader
from gemel.models.tasks import task_of
outputs = [np.full((1, 1, 4), 0.5, np.float32), np.ones((1, 1), np.float32), np.zeros((1, 1), np.int64)]
points = np.full((1, 1, 2, 3), 0.25, np.float32)
(found,) = task_of("keypoints").predictions(SuppressedReader(), (*outputs, points), [(200, 100)], ("person",))
assert found.points == (((50.0, 25.0, 0.25), (50.0, 25.0, 0.25)),)
""",
    "segmentation": """
from gemel.models.tasks import task_of
logits = np.zeros((1, 2, 4, 4), np.float32)
logits[0, 1, :, 2:] = 1
(found,) = task_of("segmentation").predictions(None, logits, [(8, 8)], ("background", "person"))
assert found.to_record()["segments"][0]["area"] == 32
""",
    "embedding": """
from gemel.models.tasks import task_of
(found,) = task_of("embedding").predictions(None, np.array([[3.0, 4.0]], np.float32), [(9, 9)], ())
assert np.allclose(found.vector, [0.6, 0.8])
""",
    "tensor": """
from gemel.models.tasks import task_of
(found,) = task_of("tensor").predictions(None, (np.ones((1, 2), np.float32), np.ones((1, 3), np.int64)), [(9, 9)], ())
assert found.shapes == ((2,),)
""",
    "an imported detector": """
from gemel.models.decoders import DECODERS, coco_names, imagenet_names
from gemel.models.decoders.readers import choose_reader
from gemel.models.decoders.decoder import GraphHead, Output
from gemel.models.tasks import task_of
head = GraphHead((Output("out", (84, 525)),), (160, 160), {"author": "Ultralytics"})
reader = choose_reader(head, "auto", "detection", ("person", "car"), "model.onnx")
assert reader.decoder.name == "yolo" and reader.columns == (0, 2)
values = np.zeros((1, 84, 525), np.float32)
values[0, [0, 1, 2, 3, 6], 7] = [80, 80, 40, 40, 0.9]
(found,) = task_of("detection").predictions(reader, reader.answer([values]), [(160, 160)], ("person", "car"), 0.3)
assert found.classes == ("car",) and found.boxes == ((60.0, 60.0, 100.0, 100.0),)
assert len(coco_names()) == 80 and len(imagenet_names()) == 1000
""",
}
"""Code by what it shows."""


def run_without_torch(code: str, repository: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", BLOCK + code], cwd=repository, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("shown", EXAMPLES)
def test_example_runs_without_torch(shown: str, repository: Path) -> None:
    run_without_torch(EXAMPLES[shown], repository)


def test_modules_of_a_box_import_no_torch(repository: Path) -> None:
    run_without_torch("\n".join(f"import gemel.models.{name}" for name in MODULES), repository)
