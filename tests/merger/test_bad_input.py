"""What a merge refuses or puts up with, as seen at the command line: one clear line, exit code 2 for input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import nn

from gemel.cli import main
from gemel.merger import merge
from gemel.merger.context import MergeContext
from gemel.merger.reference import find_class_order
from gemel.models.files.weights import save_weights
from gemel.models.predictions import ClassPrediction
from gemel.models.workload import Workload, load_workload
from tests.merger.options import QUICK
from tests.merger.tiny import data_of, weights_of, write_random_weights, write_workload


@pytest.fixture
def untrained_workload(tmp_path: Path) -> Path:
    """A workload file of two queries with random weights."""
    path = write_workload(tmp_path / "w", queries=2, frames=12)
    write_random_weights(path)
    return path


def _edit(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    document = yaml.safe_load(path.read_text())
    change(document["queries"])
    path.write_text(yaml.safe_dump(document))


def _without_class(path: Path) -> None:
    shutil.rmtree(data_of(load_workload(path), "q1") / "test" / "left")


def _target(path: Path) -> None:
    _edit(path, lambda queries: queries[1].update(accuracy_target=1.05))


def _another_class(path: Path) -> None:
    _edit(path, lambda queries: queries[1]["classes"].append("middle"))
    for split in ("train", "val", "test"):
        data = path.parent / "data" / "q1" / split
        shutil.copytree(data / "left", data / "middle")


def _classes_in_another_order(path: Path) -> None:
    weights = weights_of(load_workload(path), "q1")
    save_weights(weights, load_file(weights), classes=["right", "left"])


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (_without_class, ("test/left", "no frames of class 'left' (query q1)", "add frames of it, or take")),
        (_target, ("workload.yaml", "queries[1].accuracy_target", "less than or equal to 1")),
        (_another_class, ("q1.safetensors", "only the head does not fit the class list", "list in `classes`")),
        (_classes_in_another_order, ("q1.safetensors", 'trained for the classes ["right", "left"]', "list in `class")),
    ],
    ids=["test", "target above 1", "more classes", "classes in another order"],
)
def test_merge_with_bad_input_is_one_line_and_leaves_nothing(
    untrained_workload: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    damage: Callable[[Path], None],
    parts: tuple,
) -> None:
    damage(untrained_workload)
    assert main(["merge", str(untrained_workload), "-o", str(tmp_path / "b.gemel")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gemel: ")]
    assert len(lines) == 1 and all(part in lines[0] for part in parts), lines
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_merge_of_an_original_at_chance_gives_no_evidence(
    untrained_workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    main(["merge", str(untrained_workload), "-o", str(tmp_path / "b.gemel"), "--method", "none"])
    shown = capsys.readouterr()
    assert "no evidence: its original reaches only 0." in shown.out
    (line,) = (line for line in shown.err.splitlines() if "q0: no evidence: its original reaches only" in line)
    assert "balanced_accuracy on val; " in line and "it keeps its own weights; train it longer" in line


def test_merge_with_swapped_classes_names_the_right_order(
    workload: Workload, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    weights = weights_of(workload, "q1")
    save_weights(weights, load_file(weights))  # as from elsewhere: they no longer say which classes they are of
    _edit(workload.path, lambda queries: queries[1]["classes"].reverse())
    main(["merge", str(workload.path), "-o", str(tmp_path / "b.gemel"), "--method", "none", "--json"])
    shown = capsys.readouterr()
    right = ", ".join(workload.query("q1").classes)
    text = f"q1: the original's predictions fit the labels if its outputs are named {right}, in this order"
    notes = json.loads(shown.out)["notes"]
    assert f"{text}; list `classes` in this order, or check the weights" in notes
    (evidence,) = (note for note in notes if note.startswith("q1: no evidence"))
    assert "; list `classes` in this order, or check the weights" in evidence and "train it" not in evidence
    lines = shown.err.splitlines()
    assert all(any(line.endswith(f"note: {note}") for line in lines) for note in notes)


@pytest.mark.parametrize("answered", ["bbbbbbbbb", "aaabbbccc", "bacacbcba"], ids=["one class", "right", "guessed"])
def test_class_order_of_unclear_answers_is_none(workload: Workload, answered: str) -> None:
    query = replace(workload.query("q1"), classes=("a", "b", "c"))
    assert find_class_order(query, [ClassPrediction(label, 1.0, ()) for label in answered], "aaabbbccc") is None


def test_query_below_target_keeps_its_original_and_is_logged(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = MergeContext.ratio

    def ratio(ctx: MergeContext, query: str, model: nn.Module) -> float:
        return 0.99 if query == "q1" else measure(ctx, query, model)

    monkeypatch.setattr(MergeContext, "ratio", ratio)
    _edit(workload.path, lambda queries: queries[1].update(accuracy_target=1.0))
    out = tmp_path / "b.gemel"
    report = merge(load_workload(workload.path), out, options=QUICK)
    by_id = {query.id: query for query in report.queries}
    assert by_id["q1"].ratio == 1.0 and by_id["q1"].met and report.saved_fraction > 0.1
    rows = [json.loads(line) for line in out.with_name("b.gemel.log.jsonl").read_text().splitlines()]
    touched = [row for row in rows if "set" in row and any(query == "q1" for query, _ in row["set"])]
    assert touched
    for row in touched:
        assert row["outcome"] in ("partly", "refused") and all(query != "q1" for query, _ in row["kept"])
        assert row["in_the_way"]["q1"]["ratio"] == 0.99 and row["in_the_way"]["q1"]["required"] == 1.0
