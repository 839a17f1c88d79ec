"""A running box over mapped weights: networks of every kind, runs beyond its memory, reloads and their trial."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

from gemel.edge_runtime.life.daemon import run
from gemel.models.bundle import BundleQuery, Made, write_bundle
from gemel.models.export.export_document import export_documents
from gemel.models.preprocess import Preprocess
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query
from tests.edge_runtime.engines.sample_bundles import build_model, make_query
from tests.edge_runtime.life.test_reload import ENOUGH, ON_LEFT, negate_head, scale_slightly
from tests.edge_runtime.local_box import LocalBox, replace_bundle
from tests.edge_runtime.tiny import (
    LOOPED,
    query,
    tiny_bundle,
    trained_looking,
    write_clip,
    write_config,
    write_folder,
)
from tests.models.graph.onnx_files import write_classifier

BUNDLE = "mapped.gemel"
RECURRENT = "tests.edge_runtime.engines.test_mapped_box:Recurrent"
TWO_STAGE = "fasterrcnn_mobilenet_v3_large_320_fpn"


class Recurrent(nn.Module):
    """A convolution whose columns an LSTM reads."""

    def __init__(self, num_classes: int, input_size: int = 16) -> None:
        super().__init__()
        self.conv, self.lstm, self.fc = nn.Conv2d(3, 8, 3), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 16, 16) -> (N, C)."""
        return self.fc(self.lstm(self.conv(x).mean(2).transpose(1, 2))[0][:, -1])


@pytest.fixture(autouse=True)
def use_cache(tmp_path, monkeypatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path) -> Path:
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 10)
    return tmp_path


def write_scaled(path: Path) -> Path:
    """A classifier whose scores are multiplied by what a second input says."""
    model = onnx.load(write_classifier(path))
    graph = model.graph
    (output,) = graph.output
    graph.node[-1].output[0] = "raw"
    graph.node.append(helper.make_node("Mul", ["raw", "scale"], [output.name]))
    graph.input.append(helper.make_tensor_value_info("scale", onnx.TensorProto.FLOAT, ["batch", 1]))
    onnx.save(model, path)
    return path


@pytest.mark.slow
def test_two_stages_several_inputs_and_a_recurrence_serve_side_by_side(folder):
    write_scaled(folder / "scaled.onnx")
    entry = {"id": "scaled", "camera": "left", "model": "scaled.onnx", "sla_ms": 20_000}
    (folder / "w.yaml").write_text(
        json.dumps({"name": "w", "cameras": {"left": {"source": "left.mp4"}}, "queries": [entry]})
    )
    (scaled,) = load_workload(folder / "w.yaml").queries
    torch.manual_seed(0)
    models = {"stages": build_model(TWO_STAGE, 96), "words": Recurrent(3).eval(), "scaled": build_query(scaled).eval()}
    queries = [
        make_query("stages", TWO_STAGE, 96, min_score=0.01, sla_ms=20_000.0), query("words", "left", model=RECURRENT),
        BundleQuery.of(scaled),
    ]  # fmt: skip
    write_bundle(folder / BUNDLE, models, queries, Made("w", "none", 0), documents=export_documents(models, queries))
    config = write_config(folder, bundle=BUNDLE, engine="onnx", factories=[RECURRENT], budget="2GiB")
    summary = run(config)
    assert summary["engines"] == dict.fromkeys(models, "onnx") and summary["balanced"]
    rows = {row["query"]: row for row in summary["ledger"]}
    assert all(row["processed"] and not row["dropped"].get("engine") for row in rows.values()), rows


BOUNDED = """
import json, sys
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.engines.mapped import SessionEngine
measured = SessionEngine.workspace_of
SessionEngine.workspace_of = lambda self, count: 0 if self.query.id == "large" else measured(self, count)
print(json.dumps(run(sys.argv[1])))
"""


def test_runs_beyond_the_arena_fail_with_a_reason_and_the_box_serves_on(folder):
    models = {"small": trained_looking(1), "large": trained_looking(2)}
    queries = [query("small", "left"), query("large", "right", input_size=512, preprocess=Preprocess((512, 512)))]
    replace_bundle(folder / BUNDLE, models, *queries, documents=True)
    config = write_config(folder, bundle=BUNDLE, engine="onnx", budget="2MiB")
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(config)], capture_output=True, text=True, check=False, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    rows = {row["query"]: row for row in summary["ledger"]}
    assert summary["balanced"] and rows["small"]["processed"] and not rows["large"]["processed"]
    assert "takes more memory than the box may use for runs" in done.stderr


def test_a_reload_opens_a_second_bundle_beside_the_first(folder):
    config = write_config(folder, bundle=BUNDLE, engine="onnx", cameras=LOOPED)
    tiny_bundle(folder / BUNDLE, documents=True)
    with LocalBox(config) as box:
        first = box.more("gate", "yard")[-1]["bundle"]
        models = {"gate": trained_looking(7), "new": trained_looking(8)}
        replace_bundle(folder / BUNDLE, models, query("gate", "left"), query("new", "right"), documents=True)
        assert box.reload() is None
        second = box.service.summary()["digest"][:12]
        box.until(lambda: [one for one in box.records("new") if one["bundle"] == second])
    assert first != second and set(box.summary["engines"].values()) == {"onnx"} and box.summary["balanced"]


def test_new_weights_are_tried_beside_the_old_ones(folder):
    models = {name: trained_looking(seed) for seed, name in enumerate(("gate", "yard"), 1)}
    replace_bundle(folder / BUNDLE, models, *ON_LEFT, documents=True)
    spool = {"path": "spool", "every_s": 0.01}
    config = write_config(folder, bundle=BUNDLE, engine="onnx", cameras=LOOPED, spool=spool)
    with LocalBox(config) as box:
        samples = "spool/samples/*-{}-*.png"
        box.until(lambda: all(len(list(folder.glob(samples.format(one.id)))) >= ENOUGH for one in ON_LEFT))
        fresh = {"gate": negate_head(trained_looking(1)), "yard": scale_slightly(trained_looking(2))}
        replace_bundle(folder / BUNDLE, fresh, *ON_LEFT, documents=True)
        assert box.reload() is None
        box.more("gate", "yard")
        assert list(box.service.summary()["held_back"]) == ["gate"]
    assert set(box.summary["engines"].values()) == {"onnx"} and box.summary["balanced"]
