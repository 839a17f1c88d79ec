"""Scores and the interval around a ratio, against values worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.data import Frames, Split
from models.evaluation import ACCEPT_CONFIDENCE, compare, is_competent, load_labels, lower_bound_ratio, score
from models.predictions import ClassPrediction
from models.tasks import task_of
from models.workload import Query


def _query(task: str = "classification", classes=("a", "b"), target: float = 0.95) -> Query:
    return Query(
        id="q", camera="c", task=task, classes=classes, model="resnet18", model_args={}, input_size=8, weights=None,
        init=None, fps=None, sla_ms=100, roi=None, min_score=0, priority=1, data=Path("."), accuracy_target=target,
    )  # fmt: skip


def _split(truths, units) -> Split:
    return Split("test", Frames([lambda: np.zeros((8, 8, 3), np.uint8)] * len(units)), truths, tuple(units), (0.0,))


def _answers(labels: str) -> list[ClassPrediction]:
    return [ClassPrediction(label, 1.0, ()) for label in labels]


def test_balanced_accuracy_is_the_mean_recall() -> None:
    task = task_of("classification")
    assert score(task, _answers("aaaa"), tuple("aaab"), ("a", "b"), 0) == 0.5
    assert score(task, _answers("aabb"), tuple("aaab"), ("a", "b"), 0) == pytest.approx((2 / 3 + 1) / 2)
    assert score(task, [None, *_answers("b")], tuple("ab"), ("a", "b"), 0) == 0.5


def test_ratio_and_interval_of_equal_answers_are_one() -> None:
    evidence = compare(_query(), _split(tuple("abab"), "uuvv"), _answers("abab"), _answers("abab"), 0.0)
    assert (evidence.ratio, evidence.ci95, evidence.met, evidence.certain) == (1.0, (1.0, 1.0), True, True)
    assert evidence.units == 2 and evidence.samples == 4


def test_a_loss_in_one_of_many_clips_is_met_but_not_certain() -> None:
    truths = "ab" * 20
    units = [f"u{index // 4}" for index in range(40)]
    merged = list(truths)
    merged[0] = "b"
    evidence = compare(_query(), _split(tuple(truths), units), _answers(truths), _answers("".join(merged)), 0.0)
    assert evidence.merged == pytest.approx(0.975) and evidence.met and not evidence.certain
    assert evidence.ci95 is not None
    assert evidence.ci95[0] < 0.95 <= evidence.ratio <= evidence.ci95[1]


def test_without_labels_the_original_is_the_reference() -> None:
    split = _split(None, "uuuu")
    assert load_labels(_query(), split, _answers("aabb"), 0.0) == ["a", "a", "b", "b"]
    evidence = compare(_query(), split, _answers("aabb"), _answers("aaab"), 0.0)
    assert evidence.original == 1.0 and evidence.merged == 0.75


def test_weak_originals_are_no_evidence() -> None:
    assert not is_competent(_query(), 0.55) and is_competent(_query(), 0.65)
    assert not is_competent(_query("detection", ("car",)), 0.45) and is_competent(_query("detection", ("car",)), 0.5)


def _draw_counts(random: np.random.Generator, units: int, frames: int, keeps: float) -> tuple[np.ndarray, np.ndarray]:
    """Counts (units, 2, 1) of an original that is right in 9 of 10 frames, and of one that keeps so much of that."""
    seen = np.full(units, frames)
    right = random.binomial(seen, 0.9)
    kept = random.binomial(right, keeps)
    return tuple(np.stack([side, seen], axis=1)[:, :, None] for side in (right, kept))  # type: ignore[return-value]


@pytest.mark.parametrize(("units", "frames"), [(8, 30), (20, 100), (200, 1)])
def test_what_is_surely_kept_is_kept_as_often_as_it_says(units: int, frames: int) -> None:
    random, task = np.random.default_rng(0), task_of("classification")
    error = 1 / (0.9 * units * frames)
    found = [lower_bound_ratio(task, *_draw_counts(random, units, frames, 0.95), error) for _ in range(400)]
    assert np.mean([ratio <= 0.95 for ratio in found]) >= ACCEPT_CONFIDENCE - 0.02


def test_what_both_answer_alike_leaves_no_doubt() -> None:
    before, _ = _draw_counts(np.random.default_rng(0), 8, 30, 1.0)
    for units in (8, 1):
        assert lower_bound_ratio(task_of("classification"), before[:units], before[:units], 0.0) == 1.0
