"""`gemel pack` puts ONNX files into one bundle as they are and measures it beside plain sessions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import nn

import gemel
from gemel import packing
from gemel.cli import main
from gemel.models.errors import InputError
from tests.models.graph.onnx_files import CLASSES, METADATA, SIDE, write_classifier


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def write_pictures(folder: Path, count: int) -> Path:
    folder.mkdir()
    generator = np.random.default_rng(0)
    for index in range(count):
        Image.new("RGB", (2 * SIDE, 2 * SIDE), tuple((255 * generator.integers(0, 2, 3)).tolist())).save(
            folder / f"{index:04}.png"
        )
    return folder


def centre_answers(path: Path) -> None:
    """Change the last biases so that the answers of a classifier differ from colour to colour."""
    colours = np.random.default_rng(1).random((64, 3, 1, 1), dtype=np.float32)
    frames = np.broadcast_to(colours, (64, 3, SIDE, SIDE))
    (scores,) = onnxruntime.InferenceSession(str(path)).run(None, {"frames": np.ascontiguousarray(frames)})
    model = onnx.load(path)
    (bias,) = (tensor for tensor in model.graph.initializer if tensor.name == "fc.bias")
    centred = onnx.numpy_helper.to_array(bias) - np.median(np.asarray(scores), axis=0)
    bias.CopyFrom(onnx.numpy_helper.from_array(centred, bias.name))
    onnx.save(model, path)


def test_packed_files_answer_as_before_and_equal_ones_are_stored_once(tmp_path, capsys):
    gate, yard = write_classifier(tmp_path / "gate.onnx"), write_classifier(tmp_path / "yard.onnx")
    hall = write_classifier(tmp_path / "hall.onnx", seed=1)
    out = tmp_path / "box.safetensors"
    assert main(["pack", str(gate), str(yard), str(hall), "-o", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [file["id"] for file in report["files"]] == ["gate", "yard", "hall"]
    assert report["bytes_after"] < report["bytes_before"], "gate and yard are the same network"
    assert all(report[arm][key] > 0 for arm in ("sessions", "packed") for key in ("pss_bytes", "anonymous_bytes", "ms"))
    assert gemel.verify(out) == []
    bundle, generator = gemel.open_bundle(out), np.random.default_rng(0)
    for query, path in (("gate", gate), ("hall", hall)):
        frames = generator.random((1, 3, SIDE, SIDE), dtype=np.float32)
        (expected,) = onnxruntime.InferenceSession(str(path)).run(None, {"frames": frames})[:1]
        with torch.no_grad():
            answers = bundle.build(query)(torch.from_numpy(frames))
        assert np.allclose(
            np.asarray(answers[0] if isinstance(answers, tuple) else answers), np.asarray(expected), atol=1e-5
        )


def test_file_that_no_decoder_reads_is_packed_with_its_outputs_as_they_are(tmp_path):
    path = write_classifier(tmp_path / "gate.onnx")
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, path)
    gemel.pack([path], tmp_path / "box")
    (query,) = gemel.open_bundle(tmp_path / "box").queries
    assert query.task == "tensor"


def test_files_of_one_name_get_numbers(tmp_path):
    paths = []
    for seed, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        paths.append(write_classifier(tmp_path / folder / "my gate.onnx", seed=seed))
    report = gemel.pack(paths, tmp_path / "box")
    assert [file.id for file in report.files] == ["my-gate", "my-gate-2"]
    assert "2 sessions of ONNX Runtime" in report.to_text()


def test_files_of_unlike_opsets_are_packed_together(tmp_path):
    gate, yard = write_classifier(tmp_path / "gate.onnx"), write_classifier(tmp_path / "yard.onnx")
    model = onnx.load(yard)
    model.opset_import[0].version, model.ir_version = 11, 6
    onnx.save(model, yard)
    report = gemel.pack([gate, yard], tmp_path / "box")
    assert report.bytes_after < report.bytes_before, "their weights are the same"
    frame = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        answers = [gemel.open_bundle(tmp_path / "box").build(query)(frame) for query in ("gate", "yard")]
    assert torch.equal(*answers)


def write_pool(path: Path, shape: list[int | str]) -> Path:
    """A network of one layer over an input of this shape."""
    node = onnx.helper.make_node("ReduceMax", ["x"], ["y"], axes=[1], keepdims=0)
    values = [onnx.helper.make_tensor_value_info(name, 1, dims) for name, dims in (("x", shape), ("y", None))]
    graph = onnx.helper.make_graph([node], "pool", values[:1], values[1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8), path)
    return path


@pytest.mark.parametrize(("shape", "problem"), [
    (["batch", 7], r"gate\.onnx: its input 'x' has 2 axes, not a picture's four"),
    (["batch", 5, 8, 8], r"gate\.onnx: takes pictures of 5 channels"),
])  # fmt: skip
def test_frames_that_fit_no_input_are_one_line(tmp_path, shape, problem):
    path, frames = write_pool(tmp_path / "gate.onnx", shape), write_pictures(tmp_path / "frames", 4)
    with pytest.raises(InputError, match=problem):
        gemel.pack([path], tmp_path / "box", frames)
    assert not (tmp_path / "box").exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("absent.mp4", "^frames: .*absent.mp4 does not exist"),
        ("empty", "empty: frames: holds no pictures"),
        ("text.mp4", "text.mp4: cannot be opened"),
    ],
)
def test_frames_that_are_none_are_one_line(tmp_path, name, problem):
    path = write_classifier(tmp_path / "gate.onnx")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("shopping list")
    with pytest.raises(InputError, match=problem):
        gemel.pack([path], tmp_path / "box", tmp_path / name)
    assert not (tmp_path / "box").exists()


def test_all_that_is_wrong_with_files_is_told_at_once(tmp_path):
    gate = write_classifier(tmp_path / "gate.onnx")
    (tmp_path / "text.onnx").write_text("shopping list")
    with pytest.raises(InputError, match=r"text\.onnx: is damaged or is no ONNX file") as caught:
        gemel.pack([tmp_path / "text.onnx", gate, tmp_path / "absent.onnx"], tmp_path / "box")
    assert ["absent.onnx: model: cannot be read" in str(error) for error in caught.value.others] == [True]
    with pytest.raises(InputError, match="given twice") as caught:
        gemel.pack([gate, gate, tmp_path / "notes.txt"], tmp_path / "box")
    assert ["notes.txt: is no .onnx file" in str(error) for error in caught.value.others] == [True]


def test_frames_are_opened_before_anything_takes_time(tmp_path):
    path, begun = write_classifier(tmp_path / "gate.onnx"), list[str]()
    (tmp_path / "text.mp4").write_text("shopping list")
    with pytest.raises(InputError, match="cannot be opened"):
        gemel.pack([path], tmp_path / "box", tmp_path / "text.mp4", lambda event, **fields: begun.append(event))
    assert begun == []


def test_report_ends_with_the_command_that_serves_the_bundle(tmp_path):
    paths = [write_classifier(tmp_path / f"{name}.onnx") for name in ("gate", "yard")]
    told = gemel.pack(paths, tmp_path / "box").to_text()
    assert f"serve it: gemel run {tmp_path / 'box'} --camera gate=SOURCE --camera yard=SOURCE\n" in told


def write_other(path: Path) -> Path:
    """The classifier with other weights."""
    model, generator = onnx.load(write_classifier(path)), np.random.default_rng(1)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = 0.5 + generator.random(tuple(tensor.dims), dtype=np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(model, path)
    return path


def test_files_that_are_stored_once_already_have_nothing_left_to_share(tmp_path):
    gate, yard = write_classifier(tmp_path / "gate.onnx"), write_classifier(tmp_path / "yard.onnx")
    same = gemel.pack([gate, yard], tmp_path / "same")
    assert same.ceiling_fraction == 0 and "layers of equal form" not in same.to_text()
    mixed = gemel.pack([gate, yard, write_other(tmp_path / "hall.onnx")], tmp_path / "mixed")
    assert 0.4 < mixed.ceiling_fraction < 0.5, "hall's layers, but for its head, could be gate's"


def test_packed_bundle_runs_all_queries_with_the_least_memory_of_its_plan(tmp_path):
    gemel.pack([write_classifier(tmp_path / "gate.onnx"), write_other(tmp_path / "yard.onnx")], tmp_path / "box")
    for memory in ("min", "50%", "all"):
        result = gemel.simulate(tmp_path / "box", gemel.Conditions(device="jetson-nano", memory=memory), 5.0)
        assert "none of its frames run" not in result.to_text(), memory


def test_summary_of_a_packed_bundle_says_unchanged_and_what_could_be_shared(tmp_path, capsys):
    paths = [write_classifier(tmp_path / "gate.onnx"), write_other(tmp_path / "yard.onnx")]
    gemel.pack(paths, tmp_path / "box.safetensors")
    assert main(["bundle", "show", str(tmp_path / "box.safetensors")]) == 0
    told = capsys.readouterr().out
    assert told.count("unchanged") == 2 and "no evidence" not in told and "layer-sharing bound 0.0 %" not in told


def test_pack_that_is_interrupted_leaves_nothing(tmp_path):
    path, frames = write_classifier(tmp_path / "gate.onnx"), write_pictures(tmp_path / "frames", 20)

    def interrupt(event, **fields):
        if fields.get("name") == "evaluating the originals":
            raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        gemel.pack([path], tmp_path / "box", frames, interrupt)
    assert sorted(tmp_path.iterdir()) == before


def test_stages_are_shown_in_their_order(tmp_path, capsys):
    path = write_classifier(tmp_path / "gate.onnx")
    assert main(["pack", str(path), "-o", str(tmp_path / "box")]) == 0
    told = capsys.readouterr().err
    names = [packing.READ, packing.WRITE, packing.PREPARE, *packing.MEASURE.values()]
    begun = [told.index(f"{name} ({number} of 5)") for number, name in enumerate(names, 1)]
    assert begun == sorted(begun)


def write_wide_classifier(path: Path) -> Path:
    """A classifier with weights that are worth eight bits."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, CLASSES),
    )  # fmt: skip
    frames = torch.zeros(1, 3, SIDE, SIDE)
    torch.onnx.export(
        network.eval(), (frames,), path, dynamo=False, input_names=["frames"], dynamic_axes={"frames": {0: "batch"}}
    )
    model = onnx.load(path)
    onnx.helper.set_model_props(model, METADATA)
    (bias,) = (tensor for tensor in model.graph.initializer if tensor.dims == [CLASSES])
    bias.name, old = "fc.bias", bias.name
    for node in model.graph.node:
        node.input[:] = ["fc.bias" if name == old else name for name in node.input]
    onnx.save(model, path)
    return path


def test_frames_make_int8_where_plain_agreement_may_decide(tmp_path):
    path = write_wide_classifier(tmp_path / "gate.onnx")
    centre_answers(path)
    frames = write_pictures(tmp_path / "frames", 60)
    report = gemel.pack([path], tmp_path / "box", frames, accept_unproven=True)
    (file,) = report.files
    assert file.bits == "int8" and file.agreement is not None and file.agreement >= 0.95
    assert report.bytes_after < report.bytes_before


@pytest.mark.parametrize(("names", "problem"), [
    (["gate.onnx", "gate.onnx"], r"gate\.onnx: is given twice"),
    (["notes.txt"], r"notes\.txt: is no \.onnx file"),
    (["text.onnx"], r"text\.onnx: "),
    (["absent.onnx"], r"absent\.onnx: model: cannot be read"),
])  # fmt: skip
def test_bad_file_is_one_line_and_nothing_is_written(tmp_path, names, problem):
    write_classifier(tmp_path / "gate.onnx")
    for name in ("notes.txt", "text.onnx"):
        (tmp_path / name).write_text("shopping list")
    with pytest.raises(InputError, match=problem):
        gemel.pack([tmp_path / name for name in names], tmp_path / "box")
    assert not (tmp_path / "box").exists()


def test_an_output_that_exists_is_kept(tmp_path):
    path = write_classifier(tmp_path / "gate.onnx")
    (tmp_path / "box").write_text("mine")
    with pytest.raises(InputError, match="exists"):
        gemel.pack([path], tmp_path / "box")
    assert (tmp_path / "box").read_text() == "mine"
