"""Originals are trained where they are missing, and stored one by one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gemel.merger.training.originals as originals_module
from gemel.merger import train_originals
from gemel.merger.checkpoint import State, snapshot
from gemel.merger.training.loop import Diverged, Training
from gemel.merger.training.originals import TrainResult
from gemel.models.errors import InputError
from gemel.models.notes import collect_notes
from gemel.models.workload import Workload, load_workload
from tests.merger.conftest import ORIGINALS
from tests.merger.kills import Killed, kill_after, to_the_end
from tests.merger.tiny import data_of, weights_of, write_workload


def test_training_skips_queries_with_weights(workload: Workload) -> None:
    kept = weights_of(workload, "q0").read_bytes()
    weights_of(workload, "q1").unlink()
    (result,) = train_originals(workload, options=ORIGINALS)
    assert result.id == "q1" and result.metric == "balanced_accuracy" and result.val >= 0.9 and result.test >= 0.8
    assert weights_of(workload, "q0").read_bytes() == kept


def test_training_with_one_seed_gives_the_same_weights(workload: Workload) -> None:
    train_originals(workload, ["q0"], options=ORIGINALS)
    once = weights_of(workload, "q0").read_bytes()
    train_originals(workload, ["q0"], options=ORIGINALS)
    assert weights_of(workload, "q0").read_bytes() == once


@pytest.mark.parametrize(("min_gain", "cycles"), [(-1.0, 3), (1.1, 2)], ids=["all cycles", "the mean of two"])
def test_interrupted_training_resumes_to_the_same_weights(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, every_chance: None, min_gain: float, cycles: int
) -> None:
    path, events = weights_of(workload, "q0"), list[str]()
    options = replace(ORIGINALS, passes=96, min_epochs=2, max_cycles=3, min_gain=min_gain)
    (straight,) = train_originals(workload, ["q0"], options=options)
    once, folder = path.read_bytes(), path.with_name(f"{path.name}.work")
    path.unlink()
    done = kill_after(monkeypatch, 4, again=True)

    def train(again: bool) -> list[TrainResult]:
        assert folder.exists() == again and not path.exists()
        return train_originals(workload, None, 0, lambda event, **_: events.append(event), options, again)

    (resumed,), kills = to_the_end(train)
    assert kills >= 3 and done[0] < 4 * (kills + 1) and events.count("cycle") == cycles, "no model is evaluated twice"
    assert path.read_bytes() == once and not folder.exists()
    assert replace(resumed, seconds=0) == replace(straight, seconds=0)


def test_interrupted_training_is_refused_without_resume(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, every_chance: None
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 2)
        train_originals(workload, ["q1"], options=ORIGINALS)
    kept = weights_of(workload, "q1").read_bytes()
    weights_of(workload, "q0").unlink()
    with pytest.raises(
        InputError, match=r"q1\.safetensors\.work: holds an interrupted training; give --resume to go on"
    ):
        train_originals(workload, ["q0", "q1"], options=ORIGINALS)
    with pytest.raises(InputError, match=r"belongs to another training \(rate differ\); remove the folder, or repeat"):
        train_originals(workload, options=replace(ORIGINALS, rate=1e-4), resume=True)
    assert not weights_of(workload, "q0").exists() and weights_of(workload, "q1").read_bytes() == kept
    results = train_originals(workload, options=ORIGINALS, resume=True)
    assert [one.id for one in results] == ["q0", "q1"], "what is missing, and what was interrupted"


def test_diverged_training_leaves_no_files(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, every_chance: None
) -> None:
    """Resume with another rate than the stored training has."""
    weights_of(workload, "q0").unlink()
    epoch, trained = Training.epoch, list[Training]()

    def diverging(training: Training) -> float:
        trained.append(training)
        if len(trained) > 1:
            raise Diverged("q0")
        return epoch(training)

    monkeypatch.setattr(Training, "epoch", diverging)
    with pytest.raises(InputError, match="training diverged; lower the rate with --rate"):
        train_originals(workload, options=ORIGINALS)
    assert not list(weights_of(workload, "q0").parent.glob("q0*"))


@pytest.mark.parametrize("gains", [True, False])
def test_val_decides_when_to_stop_not_the_state(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, gains: bool
) -> None:
    ends: list[State] = []
    kind, evaluated = originals_module._OriginalTraining, iter([0.7, 0.9, *([0.95] if gains else [0.8]), 0.6, 0.5])
    cycle = kind._train_cycle

    def train_cycle(self: Any, training: Training, *rest: Any) -> None:
        cycle(self, training, *rest)
        ends.append(snapshot(training.models["q0"]))

    monkeypatch.setattr(kind, "_train_cycle", train_cycle)
    monkeypatch.setattr(kind, "_evaluate", lambda *_: (next(evaluated), 0.0))
    (result,) = train_originals(workload, ["q0"], options=replace(ORIGINALS, max_cycles=3))
    stored = load_file(weights_of(workload, "q0"))
    assert len(ends) == 3 and result.val == (0.95 if gains else 0.6)
    if gains:
        assert all(torch.equal(stored[name], tensor) for name, tensor in ends[-1].items()), "the end of the last cycle"
        return
    measured = [name for name in stored if "running" in name or "num_batches" in name]
    mean = {name: (ends[1][name] + ends[2][name]) / 2 for name in stored}
    for known in (mean, *ends):
        assert measured and not any(torch.equal(stored[name], known[name].to(stored[name].dtype)) for name in measured)
    for name in set(mean) - set(measured):
        torch.testing.assert_close(stored[name], mean[name])


def test_original_at_chance_gives_a_warning(workload: Workload) -> None:
    options = replace(ORIGINALS, rate=1e-9, passes=16, min_epochs=1)
    with collect_notes() as notes:
        train_originals(workload, ["q0"], options=options)
    assert any("too little" in note and "lower --rate (now 1e-09)" in note for note in notes)


def test_missing_split_is_named_before_training(workload: Workload, tmp_path) -> None:
    data = data_of(workload, "q1")
    shutil.rmtree(data / "val")
    weights_of(workload, "q1").unlink()
    with pytest.raises(InputError, match=r"q1/val: data: the split 'val' is missing \(query q1\)"):
        train_originals(workload, options=ORIGINALS)
    assert not weights_of(workload, "q1").exists()


def test_weights_path_must_be_safetensors(tmp_path) -> None:
    path = write_workload(tmp_path, queries=1)
    path.write_text(path.read_text().replace("weights/q0.safetensors", "weights/q0.pt"))
    with pytest.raises(InputError, match=r"name the \.safetensors file"):
        train_originals(load_workload(path), options=ORIGINALS)
