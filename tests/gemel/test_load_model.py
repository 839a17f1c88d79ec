"""`gemel.load_model` and models of a bundle answer single frames."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

import gemel
from gemel.models.bundle import BundleQuery, Made, write_bundle
from gemel.models.errors import InputError
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query
from tests.models.graph.onnx_files import SIDE, write_classifier

CLASSES = ("car", "bus", "truck")


@pytest.fixture
def frame() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (2 * SIDE, 3 * SIDE, 3), dtype=np.uint8)


def test_a_file_answers_arrays_and_pictures(tmp_path, frame):
    model = gemel.load_model(write_classifier(tmp_path / "best.onnx"))
    found = model.predict(frame)  # type: ignore[operator]
    assert found == model.predict(Image.fromarray(frame)) and model.classes == CLASSES  # type: ignore[operator]
    with torch.no_grad():
        probabilities = model.decode(model(model.preprocess(frame)))  # type: ignore[operator]
    assert torch.allclose(probabilities[0], torch.tensor(found.probabilities), atol=1e-6)
    assert "best.onnx: classification of car, bus, truck, 16 x 16" in repr(model)
    other = copy.deepcopy(model)
    assert other.predict.model is other and other.predict(frame) == found  # type: ignore[operator,union-attr]


def test_what_a_file_does_not_say_is_given_by_name(tmp_path, frame):
    path = write_classifier(tmp_path / "best.onnx")
    file = onnx.load(path)
    del file.metadata_props[:]
    onnx.save(file, path)
    with pytest.raises(InputError, match=r"as the decoder .* reads it, and names none"):
        gemel.load_model(path)
    with pytest.raises(InputError, match=r"give them: preprocess=gemel\.Preprocess"):
        gemel.load_model(path, classes=["a", "b", "c"])
    model = gemel.load_model(path, classes=["a", "b", "c"], preprocess=gemel.Preprocess((SIDE, SIDE)))
    assert model.predict(frame).label in "abc"  # type: ignore[operator]


def test_a_bundles_model_answers_in_pixels_of_the_frame(tmp_path, frame):
    write_classifier(tmp_path / "best.onnx")
    text = "name: w\ncameras: {one: {source: one.mp4}}\nqueries: [{id: gate, camera: one, model: best.onnx}]\n"
    Path(tmp_path / "w.yaml").write_text(text)
    (query,) = load_workload(tmp_path / "w.yaml").queries
    write_bundle(tmp_path / "box", {"gate": build_query(query)}, [BundleQuery.of(query)], Made("w", "none", 0))
    bundle = gemel.open_bundle(tmp_path / "box")
    model = bundle.build("gate")
    assert repr(bundle) == f"<bundle {tmp_path / 'box'}: gate (graph)>" and model.classes == CLASSES
    assert model.predict(frame) == gemel.load_model(tmp_path / "best.onnx").predict(frame)  # type: ignore[operator]


def test_wrong_arguments_are_one_line(tmp_path):
    path = write_classifier(tmp_path / "best.onnx")
    with pytest.raises(InputError, match=r"classes: 'car' is one text; give a list: classes=\['car'\]"):
        gemel.load_model(path, classes="car")
    with pytest.raises(InputError, match="task: there is no task 'depth'; choose one of: classification, "):
        gemel.load_model(path, task="depth")
    with pytest.raises(InputError, match="the workload: is int; give the path of a workload file"):
        gemel.merge(3, tmp_path / "box")  # type: ignore[arg-type]
    for wrong in (5, None, torch.nn.Linear(2, 2)):
        with pytest.raises(InputError, match=f"the model: is {type(wrong).__name__}; give the path of its file"):
            gemel.load_model(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the bundle: is NoneType"):
        gemel.open_bundle(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="classes: 1 is int; name classes by text"):
        gemel.load_model(path, classes=[1, 2, 3])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"preprocess: is dict; give gemel\.Preprocess"):
        gemel.load_model(path, preprocess={"scale": 1})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="min_score: is 'a'; give a number from 0 to 1"):
        gemel.load_model(path, min_score="a")  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"'x\.pth' is weights without their network, .* name its network in a workload"
    ):
        gemel.load_model("x.pth")
    for call in (gemel.pack, gemel.compare_reports):
        for wrong in ("one.onnx", []):
            with pytest.raises(InputError, match="are no list of paths, or none"):
                call(wrong, tmp_path / "out")
