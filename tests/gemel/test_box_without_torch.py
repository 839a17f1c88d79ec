"""The commands of a box where neither torch, torchvision nor SciPy can be imported; the others say what to install."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml

from gemel import check_drift
from gemel.models.bundle import BundleQuery, Made, open_bundle, write_bundle
from gemel.models.export.export_document import export_documents
from gemel.models.files.weights import load_weights
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query
from tests.edge_runtime.tiny import FACTORY, query, tiny_bundle, trained_looking, write_clip, write_config, write_folder
from tests.gemel.spools import answer
from tests.gemel.test_packing import centre_answers
from tests.models.graph.onnx_files import write_classifier
from tests.without_torch import block_torch, run_python


@dataclass(frozen=True)
class Box:
    """A folder with a bundle, cameras and a config, and the environment of its commands."""

    folder: Path
    config: Path
    environment: dict[str, str]

    def run(self, *words: str) -> tuple[int, Any, str]:
        """Exit code, JSON on stdout if any, and stderr of a command."""
        done = run_python(self.environment, "-m", "gemel", *words, folder=self.folder)
        return done.returncode, json.loads(done.stdout) if done.stdout.startswith("{") else done.stdout, done.stderr


@pytest.fixture(scope="module")
def box(tmp_path_factory, repository) -> Box:
    folder = tmp_path_factory.mktemp("box")
    tiny_bundle(folder / "tiny.safetensors", documents=True)
    write_clip(folder / "left.mp4", 12)
    write_folder(folder / "right", 10)
    config = write_config(folder, engine="onnx", factories=None)
    environment = block_torch(folder / "blocked", repository)
    return Box(folder, config, {**environment, "XDG_CACHE_HOME": str(folder / "cache")})


def test_torch_is_out_of_reach(box):
    for package in ("torch", "torchvision", "scipy"):
        assert run_python(box.environment, "-c", f"import {package}", folder=box.folder).returncode == 1


def test_the_daemon_is_imported_without_torch(box):
    done = run_python(box.environment, "-c", "import gemel.edge_runtime.life.daemon, gemel.commands", folder=box.folder)
    assert done.returncode == 0, done.stderr


def test_a_box_runs_from_cameras_to_results(box):
    code, summary, errors = box.run("run", str(box.config), "--json")
    assert code == 0, errors
    assert set(summary["engines"].values()) == {"onnx"} and summary["balanced"]
    records = [json.loads(line) for line in (box.folder / "results.jsonl").read_text().splitlines()]
    assert {record["query"] for record in records} == {"gate", "yard", "road"}
    assert all(record["label"] and 0 < record["score"] <= 1 for record in records)


def test_a_box_is_checked(box):
    code, result, errors = box.run("run", str(box.config), "--check", "--json")
    assert code == 0 and result["ok"] and result["warnings"] == [], errors


def test_a_bundle_is_prepared_shown_verified_and_compared(box):
    for words in (("prepare",), ("bundle", "show"), ("bundle", "verify")):
        code, result, errors = box.run(*words, "tiny.safetensors", "--json")
        assert code == 0, errors
        assert isinstance(result, dict)
    assert result == {"ok": True, "problems": [], "unchecked": []}
    code, result, errors = box.run("bundle", "diff", "tiny.safetensors", "tiny.safetensors", "--json")
    assert code == 0 and result["tensors"] == 0, errors


def test_a_damaged_network_is_found(box):
    content = bytearray((box.folder / "tiny.safetensors").read_bytes())
    place = content.index(b"weights.bin")
    content[place] ^= 1
    (box.folder / "damaged.safetensors").write_bytes(content)
    code, result, _ = box.run("bundle", "verify", "damaged.safetensors", "--json")
    assert code == 1 and any("damaged" in problem for problem in result["problems"])


def test_damaged_weights_of_the_cache_are_found(box):
    code, prepared, errors = box.run("prepare", "tiny.safetensors", "--json")
    assert code == 0, errors
    folder = Path(prepared["path"])
    weights = folder / "weights.bin"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.chmod(0o600)
    weights.write_bytes(content)
    code, result, _ = box.run("bundle", "verify", "tiny.safetensors", "--json")
    shutil.rmtree(folder)
    assert code == 1 and [str(weights) in problem for problem in result["problems"]] == [True]


def test_a_bundle_is_planned_and_simulated(box):
    code, plan, errors = box.run("plan", "tiny.safetensors", "--memory", "all", "--json")
    assert code == 0 and plan["fits"] and plan["in_time_fraction"] == 1, errors
    assert plan["flops_per_s"] > 0 and {row["id"] for row in plan["queries"]} == {"gate", "yard", "road"}
    code, simulated, errors = box.run("simulate", "tiny.safetensors", "--duration", "2", "--json")
    assert code == 0 and simulated, errors


def test_a_bundle_is_exported(box):
    code, result, errors = box.run("bundle", "export", "tiny.safetensors", "-o", "onnx", "--json")
    assert code == 0 and [row["query"] for row in result["queries"]] == ["gate", "yard", "road"], errors
    code, single, errors = box.run(
        "bundle", "export", "tiny.safetensors", "--query", "gate", "--batch", "2", "-o", "gate.onnx", "--json"
    )
    assert code == 0 and single["batch"] == 2, errors
    bundle = open_bundle(box.folder / "tiny.safetensors", [FACTORY], box.folder)
    files = {row["query"]: row["file"] for row in result["queries"]}
    for name, file in (*files.items(), ("gate", single["file"])):
        session = onnxruntime.InferenceSession(str(box.folder / file), providers=["CPUExecutionProvider"])
        shape = session.get_inputs()[0].shape[1:]
        frames = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
        answer = np.asarray(session.run(None, {session.get_inputs()[0].name: frames})[0])
        with torch.no_grad():
            expected = bundle.build(name)(torch.from_numpy(frames)).numpy()
        np.testing.assert_allclose(answer, expected, atol=1e-4)


def test_a_running_box_reloads_new_weights(box, tmp_path):
    path = tmp_path / "tiny.safetensors"
    tiny_bundle(path, documents=True)
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 4)
    (tmp_path / "token").write_text("a-token-of-the-tests")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    cameras = {name: {"source": source, "loop": True} for name, source in (("left", "left.mp4"), ("right", "right"))}
    keys = {
        "cameras": cameras,
        "http": {"bind": address, "token_file": "token"},
        "spool": "spool",
        "engine": "onnx",
        "factories": None,
    }
    config = write_config(tmp_path, **keys)
    command = [sys.executable, "-m", "gemel", "run", str(config)]
    with subprocess.Popen(command, cwd=tmp_path, env=box.environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None and any("serving: " in line for line in process.stderr)
            models = {"gate": trained_looking(7)}
            queries = [query("gate", "left")]
            renewed = tmp_path / "renewed.safetensors"
            write_bundle(renewed, models, queries, Made("w", "none", 0), documents=export_documents(models, queries))
            renewed.rename(path)
            code, answer, errors = box.run("reload", str(config), "--json")
            assert code == 0 and answer["applied"] is True, errors
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def drift_spool(box, tmp_path_factory) -> Path:
    """A spool of a box whose bundle has `gate` as its file has it, and `yard` not any more."""
    folder = tmp_path_factory.mktemp("drift")
    names = ("gate", "yard")
    for seed, name in enumerate(names):
        centre_answers(write_classifier(folder / f"{name}.onnx", seed=seed))
    queries = [{"id": name, "camera": "left", "model": f"{name}.onnx"} for name in names]
    cameras = {"left": {"source": "left.mp4"}}
    (folder / "w.yaml").write_text(yaml.safe_dump({"name": "w", "cameras": cameras, "queries": queries}))
    load = load_workload(folder / "w.yaml")
    models = {query.id: load_weights(query, build_query(query)).eval() for query in load.queries}
    records = [BundleQuery.of(query) for query in load.queries]
    path = folder / "onnx.safetensors"
    write_bundle(path, models, records, Made("w", "none", 0), documents=export_documents(models, records))
    bundle = open_bundle(path)
    answer(folder / "spool", bundle, range(80), names)
    (folder / "spool" / "ledger.json").write_text(json.dumps({"bundle": str(path), "digest": bundle.digest}))
    changed = onnx.load(folder / "yard.onnx")
    for tensor in changed.graph.initializer:
        if tensor.name.startswith("fc."):
            tensor.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(changed, folder / "yard.onnx")
    return folder


def test_a_drift_check_runs_originals_that_are_onnx_files(box, drift_spool):
    code, found, errors = box.run("drift", "check", str(drift_spool / "spool"), str(drift_spool / "w.yaml"), "--json")
    assert code == 1 and isinstance(found, dict), errors
    rows = {row["id"]: row for row in found["queries"]}
    assert (rows["gate"]["ratio"], rows["gate"]["verdict"]) == (1.0, "kept") and rows["gate"]["frames"] == 80
    assert rows["yard"]["ratio"] < 0.5 and rows["yard"]["verdict"] == "below"
    spool = drift_spool / "with-torch"
    shutil.copytree(drift_spool / "spool", spool, ignore=shutil.ignore_patterns("drift*"))
    for row in check_drift(spool, drift_spool / "w.yaml").to_json()["queries"]:
        assert row["ratio"] == pytest.approx(rows[row["id"]]["ratio"], abs=0.02), "as the originals in PyTorch say"


@pytest.mark.parametrize(
    ("change", "problem"),
    [(lambda w: w["queries"][0].update(model="resnet18"), "is no ONNX file, so it needs torch"),
     (lambda w: w["queries"][0].update(model="gone.onnx"), "there is no such file"),
     (lambda w: w["queries"].pop(), "does not hold the queries of")],
)  # fmt: skip
def test_a_drift_check_without_torch_names_what_it_lacks(box, drift_spool, tmp_path, change, problem):
    workload = yaml.safe_load((drift_spool / "w.yaml").read_text())
    change(workload)
    path = drift_spool / f"{tmp_path.name}.yaml"
    path.write_text(yaml.safe_dump(workload))
    code, _, errors = box.run("drift", "check", str(drift_spool / "spool"), str(path))
    assert code == 2 and problem in errors and len(errors.splitlines()) == 1
    out = ("-o", str(tmp_path / "own"))
    code, _, errors = box.run("drift", "check", str(drift_spool / "spool"), str(drift_spool / "w.yaml"), *out)
    assert code == 2 and "pip install gemel[merge]" in errors and not (tmp_path / "own").exists()


def test_the_machine_is_described(box):
    code, result, errors = box.run("doctor", "--json", "--folder", str(box.folder))
    engines = {row["engine"]: row for row in result["engines"]}
    assert code == 0 and engines["onnx"]["available"] and result["copy_gb_s"] > 0, errors
    assert not engines["torch"]["available"] and "pip install gemel[merge]" in engines["torch"]["detail"]


def test_a_bundle_is_profiled(box):
    code, profile, errors = box.run("profile", "tiny.safetensors", "--json")
    (box.folder / "tiny.safetensors.profile.json").unlink(missing_ok=True)
    assert code == 0 and {row["engine"] for row in profile["queries"]} == {"onnx"}, errors


def test_reports_are_compared(box, document):
    for name, method in (("a.json", "top-down"), ("b.json", "gemel")):
        (box.folder / name).write_text(json.dumps({**document, "method": method}))
    code, _, errors = box.run("report", "a.json", "b.json", "-o", "both.html")
    assert code == 0 and "<html" in (box.folder / "both.html").read_text(), errors


@pytest.mark.parametrize(
    "words",
    ["inspect w.yaml", "train w.yaml", "merge w.yaml -o b", "eval b w.yaml -o r", "demo", "place f.yaml -o p",
     "plan w.yaml", "simulate w.yaml", "drift mend s w.yaml -o b"],
)  # fmt: skip
def test_other_commands_say_what_to_install(box, words):
    code, _, errors = box.run(*words.split())
    assert code == 2 and "pip install gemel[merge]" in errors and len(errors.splitlines()) == 1
