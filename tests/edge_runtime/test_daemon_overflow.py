"""A box whose budget is below its largest query: refused with what it needs, or run when the config asks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from edge_runtime.daemon import run
from models import zoo
from models.bundle import BundleQuery, Made, open_bundle, write_bundle
from models.errors import InputError
from tests.edge_runtime.test_daemon import damage, frames_of
from tests.edge_runtime.tiny import query as tiny_query
from tests.edge_runtime.tiny import trained_looking, write_clip, write_config

CAMERAS = {"left": {"source": "left.mp4"}}
CLASSES = ("a", "b", "c")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clip of 12 frames and a bundle of `big`, 45 MB, and a tiny `gate`."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("box")
    write_clip(folder / "left.mp4", 12)
    torch.manual_seed(0)
    big = zoo.build("resnet18", CLASSES, {}, 32).eval()
    query = BundleQuery(
        id="big",
        camera="left",
        task="classification",
        classes=CLASSES,
        model="resnet18",
        model_args={},
        input_size=32,
        preprocess=zoo.preprocess_of("resnet18", 32),
        fps=6.0,
        sla_ms=20_000.0,
        accuracy_target=0.95,
    )
    write_bundle(
        folder / "tiny.safetensors",
        {"big": big, "gate": trained_looking(1)},
        [query, tiny_query("gate", "left")],
        Made("overflow", "none", 0),
    )
    return folder


def test_overflow_off_refusal_names_the_option(box: Path) -> None:
    path = write_config(box, cameras=CAMERAS, budget="15MB")
    needs = (
        r"query 'big' alone needs (.* MiB \(.* bytes\)), 42.\d MiB of weights and .* of workspace, "
        r"the budget is 14.3 MiB \(15,000,000 bytes\); give at least \1, or set `overflow: true`"
    )
    with pytest.raises(InputError, match=needs):
        run(path)


def test_overflow_keeps_budget_and_answers(box: Path) -> None:
    sinks = [{"kind": "jsonl", "path": "overflow.jsonl"}]
    config = write_config(box, cameras=CAMERAS, budget="15MB", overflow=True, engine="auto", sinks=sinks)
    checked = run(config, check=True)
    assert list(checked["overflow_bytes"]) == ["big"] and not checked["fits"]
    assert 30e6 < checked["overflow_bytes"]["big"] < 40e6 < checked["least_budget_bytes"]
    summary = run(config)
    assert summary["balanced"] and summary["engines"]["big"] == "torch" and summary["max_used_bytes"] <= 15_000_000
    records = [json.loads(line) for line in (box / "overflow.jsonl").read_text().splitlines()]
    big = [record for record in records if record["query"] == "big"]
    assert big and {record["query"] for record in records} == {"big", "gate"}
    runs, rest = divmod(summary["bytes_overflowed"], checked["overflow_bytes"]["big"])
    assert not rest and 1 <= runs <= len(big)
    bundle, frames = open_bundle(box / "tiny.safetensors"), frames_of(box / "left.mp4")
    prepare, model = bundle.query("big").preprocess, bundle.build("big")
    for record in big:
        batch = prepare.normalise(torch.stack([prepare.resize(frames[record["frame"]])]))
        with torch.inference_mode():
            scores = model(batch).softmax(1)[0]
        assert record["label"] == CLASSES[int(scores.argmax())]
        assert record["score"] == pytest.approx(float(scores.max()), rel=1e-5)


def test_overflow_refuses_too_small_budget(box: Path) -> None:
    with pytest.raises(InputError, match=r"give at least \d.* bytes\) with `overflow: true`"):
        run(write_config(box, cameras=CAMERAS, budget="2MB"))
    path = write_config(box, cameras=CAMERAS, budget="2MB", overflow=True)
    with pytest.raises(InputError, match=r"alone needs \d.* bytes\) even with an overflow") as refused:
        run(path)
    said = str(refused.value).rpartition("at least ")[2]
    least = int(said.rpartition("(")[2].removesuffix(" bytes)").replace(",", ""))
    assert run(write_config(box, cameras=CAMERAS, budget=least, overflow=True), check=True)["ok"]
    with pytest.raises(InputError, match=f"give at least {re.escape(said)}"):
        run(write_config(box, cameras=CAMERAS, budget=least - 1, overflow=True), check=True)


def test_overflow_disables_damaged_query(box: Path, tmp_path: Path) -> None:
    bundle = open_bundle(box / "tiny.safetensors")
    largest = max(bundle.names_in_order("big"), key=bundle.nbytes)
    damage(
        bundle.path, tmp_path / "tiny.safetensors", [bundle.header.data_start + bundle.header.entries[largest].begin]
    )
    cameras = {"left": {"source": str(box / "left.mp4")}}
    summary = run(write_config(tmp_path, cameras=cameras, budget="15MB", overflow=True))
    big, gate = summary["ledger"]
    assert big["failed"] == big["received"] > 0 and gate["processed"] and not gate["failed"]
    assert "content hash" in summary["queries"][0]["last_failure"]
