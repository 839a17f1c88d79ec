"""`gemel drift mend`: a query whose norms or head no longer fit learns again; all else stays bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from gemel.cli import main
from gemel.drift_mend import MendConfig, MendOutcome, mend_drift, trainable_keys
from gemel.models.batchnorm import batchnorms_of, recalibrate_batchnorm
from gemel.models.bundle import BundleQuery, Made, open_bundle, verify_bundle, write_bundle
from gemel.models.bundle.delta import apply_update, write_update
from gemel.models.errors import InputError
from gemel.models.files.weights import save_weights
from gemel.models.measures.agreement import KEPT
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query
from tests.edge_runtime.tiny import FACTORY, net, picture
from tests.gemel.spools import answer, originals

FRAMES = 240


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queries `a` and `b`, which share a convolution, and a spool in which norms and head of `b` fell."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("mend")
    write_settled(folder)
    load = load_workload(folder / "workload.yaml")
    models = originals(load)
    with torch.no_grad():
        for norm in batchnorms_of(models["b"]):
            norm.running_var.mul_(2.0)  # type: ignore[operator]
        list(models["b"].parameters())[-1].add_(torch.tensor([3.0, -3.0]))
    write_bundle(
        folder / "fallen.safetensors", models, list(map(BundleQuery.of, load.queries)), Made("gate", "top-down", 0)
    )
    bundle = open_bundle(folder / "fallen.safetensors", [FACTORY])
    answer(folder / "spool", bundle, range(FRAMES), ("a", "b"))
    (folder / "spool" / "ledger.json").write_text(json.dumps({"bundle": str(bundle.path)}))
    return folder


def write_settled(folder: Path) -> None:
    """A workload of two small classifiers with norms and heads that fit pictures, and one convolution."""
    keys = {"camera": "gate", "task": "classification", "classes": ["empty", "busy"], "model": FACTORY,
            "input_size": 16, "sla_ms": 10_000}  # fmt: skip
    document = {
        "name": "gate", "accuracy_target": 0.7, "cameras": {"gate": {"source": "gate.mp4"}},
        "queries": [{"id": name, "weights": f"{name}.safetensors", **keys} for name in "ab"],
    }  # fmt: skip
    (folder / "workload.yaml").write_text(yaml.safe_dump(document))
    shown = torch.stack([torch.from_numpy(picture(seed, 16, 16)).permute(2, 0, 1) for seed in range(500, 564)])
    inputs = (shown.float() / 255 - 0.45) / 0.225
    shared: torch.Tensor | None = None
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        model = net(2)
        convolution, weight = model.get_submodule("3"), model.get_parameter("3.weight")
        shared = weight.detach() if shared is None else shared
        convolution.weight = nn.Parameter(shared.clone())
        recalibrate_batchnorm(model, inputs.split(16))
        with torch.no_grad():
            model.get_parameter("8.weight").mul_(10)
            model.get_parameter("8.bias").sub_(model.eval()(inputs).median(dim=0).values)
        save_weights(folder / f"{name}.safetensors", model.state_dict())


@pytest.fixture(scope="module")
def result(spool: Path) -> dict:
    """What the command prints, once for all tests."""
    out = spool / "mended.safetensors"
    found = mend_drift(spool / "spool", spool / "workload.yaml", out)
    return {**found.to_json(), "text": found.to_text(), "met": found.met}


def row_of(found: dict, query: str) -> dict:
    return next(row for row in found["queries"] if row["id"] == query)


def test_mend_brings_the_fallen_query_above_its_target(result: dict) -> None:
    row = row_of(result, "b")
    assert row["outcome"] == "mended" and row["before"] < 0.6 and row["after"] >= row["target"] and result["met"]
    assert row["lower_end"] >= row["target"] and row["frames"] == FRAMES
    assert row_of(result, "a")["outcome"] == "on target"
    assert "mended" in result["text"] and "gemel bundle diff" in result["text"]


def test_mend_changes_norms_and_head_of_one_query_alone(spool: Path, result: dict) -> None:
    before, after = (open_bundle(spool / name, [FACTORY]) for name in ("fallen.safetensors", "mended.safetensors"))
    assert verify_bundle(after.path, [FACTORY]) == []
    assert after.query("a").tensors == before.query("a").tensors
    changed = {key for key, name in before.query("b").tensors.items() if after.query("b").tensors[key] != name}
    wide = {key for key in changed if after.tensor(after.query("b").tensors[key]).ndim > 1}
    assert wide == {"8.weight"} and changed > wide  # the head's weight; all else are norms and biases
    for bundle in (before, after):
        assert bundle.query("a").tensors["3.weight"] == bundle.query("b").tensors["3.weight"]


def test_mend_ships_as_an_update_below_a_megabyte(spool: Path, result: dict, tmp_path: Path) -> None:
    old, new = spool / "fallen.safetensors", spool / "mended.safetensors"
    made = write_update(old, new, tmp_path / "update")
    assert made.bytes == result["update_bytes"] < 1_000_000
    apply_update(old, tmp_path / "update", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == new.read_bytes()


def test_mended_box_is_on_target_in_frames_that_it_never_saw(spool: Path, result: dict, tmp_path: Path) -> None:
    from gemel import check_drift

    answer(tmp_path / "later", open_bundle(spool / "mended.safetensors", [FACTORY]), range(1000, 1080), "ab")
    found = check_drift(tmp_path / "later", spool / "workload.yaml").to_json()
    assert {row["id"]: row["verdict"] for row in found["queries"]} == {"a": KEPT, "b": KEPT}


def test_mend_with_few_samples_proves_nothing_and_writes_nothing(spool: Path, tmp_path: Path) -> None:
    shutil.copytree(spool / "spool", tmp_path / "few")
    for path in sorted((tmp_path / "few" / "samples").glob("*-b-*"))[30:]:
        path.unlink()
    found = mend_drift(tmp_path / "few", spool / "workload.yaml", tmp_path / "out.safetensors")
    row = next(row for row in found.queries if row.id == "b")
    assert row.outcome is MendOutcome.UNPROVABLE and "needs about" in row.note and not found.met
    assert (
        found.out is None and not (tmp_path / "out.safetensors").exists() and "nothing was written" in found.to_text()
    )


def test_mend_that_cannot_learn_is_refused(spool: Path, tmp_path: Path) -> None:
    still = MendConfig(epochs=1, min_steps=1, rate=1e-9)
    found = mend_drift(spool / "spool", spool / "workload.yaml", tmp_path / "out.safetensors", config=still)
    row = next(row for row in found.queries if row.id == "b")
    assert row.outcome is MendOutcome.REFUSED and row.after is not None and row.after < row.target
    assert found.out is None and not (tmp_path / "out.safetensors").exists()


def test_trainable_keys_leave_out_a_head_that_is_too_large(spool: Path) -> None:
    query = load_workload(spool / "workload.yaml").queries[1]
    model = build_query(query)
    whole, small = (trainable_keys(query, model, most) for most in (10**6, 0))
    assert len(whole) == len(small) + 1 and all(model.get_parameter(key).ndim == 1 for key in small)


def test_mend_command_reads_its_words(spool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload, out = str(spool / "workload.yaml"), str(tmp_path / "out.safetensors")
    assert main(["drift", "mend", str(tmp_path), workload, "-o", out]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert str(tmp_path) in line
    (tmp_path / "out.safetensors").write_text("mine")
    assert main(["drift", "mend", str(spool / "spool"), workload, "-o", out]) == 2
    assert "out.safetensors" in capsys.readouterr().err and (tmp_path / "out.safetensors").read_text() == "mine"


def test_mend_onto_the_boxes_own_bundle_is_refused(spool: Path) -> None:
    with pytest.raises(InputError, match="fallen"):
        mend_drift(spool / "spool", spool / "workload.yaml", spool / "fallen.safetensors")
