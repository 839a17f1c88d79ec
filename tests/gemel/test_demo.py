"""The demo: the whole road on rendered clips, gone on with where it was interrupted."""

import json
from dataclasses import replace

import pytest
import torch

from gemel import demo
from gemel.cli import main
from gemel.demo import run_demo
from gemel.models.errors import InputError
from gemel.report.document import Report


@pytest.fixture
def quick(monkeypatch, write_tiny):
    """The demo over tiny footage, with hardly any training; everything else is as always."""
    torch.set_num_threads(1)
    monkeypatch.setattr(demo, "write_sample", write_tiny)
    recipe = replace(demo.MERGING.recipe, epochs=1, frames_per_epoch=16)
    short = {task: replace(options, passes=16, min_epochs=1) for task, options in demo.TRAINING.items()}
    monkeypatch.setattr(demo, "TRAINING", short)
    monkeypatch.setattr(demo, "MERGING", replace(demo.MERGING, recipe=recipe, max_minutes=0.0))
    monkeypatch.setattr(demo, "BOX_S", 1.0)


def test_demo_has_the_promised_keys(quick, tmp_path, capsys):
    out = tmp_path / "demo"
    code = main(["demo", "--out", str(out), "--json"])
    written = capsys.readouterr()
    said = json.loads(written.out)
    assert {"bundle", "report", "saved_fraction", "ceiling_fraction", "queries", "streaming"} <= set(said)
    assert code == (0 if all(query["met"] for query in said["queries"]) else 1)
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    for row in said["box"]["ledger"]:
        assert row["received"] == row["processed"] + row["failed"] + row["pending"] + sum(row["dropped"].values()) > 0
    assert (out / "results.jsonl").exists()
    steps = written.err.splitlines()
    assert "rendering the camera clips; training the originals (classification);" in steps[0]
    assert json.loads((out / "report.json").read_text())["headline"]["memory"] == demo.BOX_MEMORY


def test_demo_text_ends_with_what_to_look_at(document, tmp_path):
    merged = {"saved_fraction": 0.646, "ceiling_fraction": 0.667, "queries": []}
    ledger = {"query": "a", "received": 1, "processed": 1, "late": 0, "dropped": {}, "failed": 0, "pending": 0}
    box = {"ledger": [ledger], "seconds": 6.0, "stopped_by": "time limit reached", "bytes_moved": 0, "swaps": 0}
    box |= {"max_used_bytes": 1, "budget_bytes": 2, "sinks": [], "cameras": [], "spool": None, "joint": {"runs": 0}}
    for row in document["streaming"]:
        if row["memory"] == "min" and row["query"] == "bridge-cars":
            row["accuracy"] = {"originals": 0.27, "merged": 0.08}[row["arm"]]
    last = (
        demo.Demo(tmp_path / "report.html", merged, Report.model_validate(document), box, 200.0)
        .to_text()
        .splitlines()[-7:]
    )
    assert "Ship it for two of three: bridge-cars falls short" in last[0]
    assert last[1] == "  WORSE: bridge-cars, starved on the stream: 0.27 -> 0.08 with 38.1 MiB (min)"
    assert str(tmp_path / "report.html") in last[3]
    assert [line.strip()[:2] for line in last[4:]] == ["1.", "2.", "3."]


def test_an_interrupted_demo_goes_on_after_its_last_finished_step(quick, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(demo, "evaluate", interrupt)
        assert main(["demo", "--out", str(tmp_path)]) == 130
    for step in ("write_sample", "train_originals", "merge"):
        monkeypatch.setattr(demo, step, interrupt)
    evaluated = []
    monkeypatch.setattr(demo, "evaluate", lambda *words, **_: evaluated.append(words) or {"streaming": []})
    assert run_demo(tmp_path).merged["queries"]
    assert evaluated[0][0] == tmp_path / demo.BUNDLE


def test_demo_folder_of_others_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_demo_other_seed_is_refused(tmp_path):
    demo._claim_folder(tmp_path, seed=0)
    with pytest.raises(InputError, match="another seed"):
        demo._claim_folder(tmp_path, seed=1)
