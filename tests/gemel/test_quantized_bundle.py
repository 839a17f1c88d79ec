"""A merge with `weights` and what the other commands say of the bundle it writes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gemel.bundle_summary import bytes_by_dtype, measure_resident_bytes
from gemel.cli import main
from gemel.merger import MergeOptions, merge
from gemel.models.bundle import open_bundle
from gemel.models.workload import load_workload
from tests.merger.options import ANY_EVIDENCE
from tests.merger.tiny import SIZE, write_random_weights, write_workload

FACTORY = "tests.merger.tiny:tiny_net"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The originals of two tiny queries, random, stored as int8."""
    folder = tmp_path_factory.mktemp("widths")
    path = write_workload(folder, queries=2, frames=12)
    write_random_weights(path)
    out = folder / "b.safetensors"
    options = MergeOptions(weights="int8", accept_unproven=True, evidence=ANY_EVIDENCE)
    merge(load_workload(path), out, "none", options=options)
    return out


def answer(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_show_says_how_the_bytes_are_stored(bundle, capsys):
    shown = answer(capsys, "bundle", "show", str(bundle))
    stored = shown["bytes"]["stored"]
    assert set(stored) == {"fp32", "fp16", "int8"} and sum(stored.values()) == shown["bytes"]["after"]
    assert stored["int8"] > stored["fp32"] and shown["bytes"]["saved_fraction"] > 0.5
    assert main(["bundle", "show", str(bundle)]) == 0
    assert "stored as fp32 " in capsys.readouterr().out


def test_packed_bundle_resident_is_what_is_stored(bundle):
    opened = open_bundle(bundle, [FACTORY])
    assert measure_resident_bytes(opened) == opened.manifest.bytes.after == sum(bytes_by_dtype(opened).values())


def test_verify_finds_it_sound_and_says_that_the_model_of_ones_own_was_not_run(bundle, tmp_path, capsys):
    assert main(["bundle", "verify", str(bundle), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["problems"] == [] and len(found["unchecked"]) == 1
    assert found["unchecked"][0].startswith(f"queries q0, q1: the code of '{FACTORY}' was not run")
    config = tmp_path / "box.yaml"
    cameras = "cameras: {gate: {source: gate.mp4}}"
    config.write_text(f"bundle: {bundle}\nbudget: 1GiB\n{cameras}\nfactories: ['{FACTORY}']\n")
    for allowing in (["--factory", FACTORY], ["--config", str(config)]):
        assert main(["bundle", "verify", str(bundle), *allowing]) == 0
        assert capsys.readouterr().out == f"{bundle}: sound\n"


def test_an_exported_model_has_the_widened_weights(bundle, tmp_path, capsys):
    runtime = pytest.importorskip("onnxruntime")
    out = tmp_path / "q0.onnx"
    words = ["bundle", "export", str(bundle), "--query", "q0", "-o", str(out), "--batch", "1", "--factory", FACTORY]
    (note,) = answer(capsys, *words)["notes"]
    assert "weights stored in" in note and note.startswith(str(bundle)) and "are written in float32;" in note
    frame = torch.rand(1, 3, SIZE, SIZE)
    session = runtime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: frame.numpy()})
    with torch.inference_mode():
        wanted = open_bundle(bundle, [FACTORY]).build("q0")(frame)
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-4, rtol=1e-3)


def test_merge_unknown_bits_are_refused(capsys):
    assert main(["merge", "w.yaml", "-o", "b", "--weights", "int5"]) == 2
    assert "int5" in capsys.readouterr().err
