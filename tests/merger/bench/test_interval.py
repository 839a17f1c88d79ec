"""What is required on val: a margin, or the lower end of an interval, which is wide where val is small."""

from __future__ import annotations

import pytest

from merger import MergeOptions
from merger.bench.elsewhere import Setup
from merger.bench.workbench import Workbench
from merger.events import silent


def test_without_a_margin_the_target_is_required_of_the_lower_end(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bench.queries["q0"].accuracy_target
    assert MergeOptions().required(bench)["q0"] == target < MergeOptions(margin=0.5).required(bench)["q0"]
    model, wrong = bench.models(["q0"])["q0"], bench.references["q0"].tallies.copy()
    wrong[:3, 0, 0] -= 1
    monkeypatch.setattr("merger.bench.workbench.tallies_by_unit", lambda *_: wrong)
    plain = bench.ratio("q0", model)
    bench.interval = True
    assert bench.ratio("q0", model) < plain < 1


def test_workers_judge_as_the_merge_does(bench: Workbench) -> None:
    bench.interval = True
    assert Setup.of(bench).workbench(silent).interval


def test_one_error_more_is_not_held_against_a_model(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = bench.references["q0"]
    wrong = reference.tallies.copy()
    wrong[0, 0, 0] -= 1
    monkeypatch.setattr("merger.bench.workbench.tallies_by_unit", lambda *_: wrong)
    bench.interval = True
    assert bench.ratio("q0", bench.models(["q0"])["q0"]) >= 1 - reference.one_error
    wrong[0, 0, 0] -= 1
    assert bench.ratio("q0", bench.models(["q0"])["q0"]) < 1 - 2 * reference.one_error
