"""Scores, flips and the verdict on agreement, compared with values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.models.data import Frames, Split
from gemel.models.measures.agreement import (
    BELOW,
    KEPT,
    MIN_COMPARED,
    ONE_ANSWER,
    TOO_FEW,
    UNSURE,
    ComparedFrames,
    compare_agreement,
    is_surely_below,
)
from gemel.models.measures.evaluation import (
    EvidenceState,
    compare,
    find_gap,
    is_competent,
    load_labels,
    score,
    threshold_without_labels,
)
from gemel.models.predictions import BoxLabels, ClassPrediction, DetectionPrediction
from gemel.models.tasks import task_of
from tests.models.queries import make_query

QUERY = make_query(classes=("a", "b"))
CLASSIFICATION, DETECTION = task_of("classification"), task_of("detection")


def make_split(labels, units) -> Split:
    frames = [partial(np.full, (8, 8, 3), 40 + index % 200, np.uint8) for index in range(len(units))]
    return Split("test", Frames(frames), labels, tuple(units), tuple(map(float, range(len(units)))))


def predict_labels(labels: str) -> list[ClassPrediction]:
    return [ClassPrediction(label, 1.0, ()) for label in labels]


def test_score_of_a_classifier_is_the_mean_recall() -> None:
    assert score(CLASSIFICATION, predict_labels("aaaa"), tuple("aaab"), ("a", "b"), 0) == 0.5
    assert score(CLASSIFICATION, predict_labels("aabb"), tuple("aaab"), ("a", "b"), 0) == pytest.approx((2 / 3 + 1) / 2)
    assert score(CLASSIFICATION, [None, *predict_labels("b")], tuple("ab"), ("a", "b"), 0) == 0.5


def test_compare_of_one_model_with_itself_is_unchanged() -> None:
    labels = "ab" * 20
    split, answers = make_split(tuple(labels), "uuvv" * 10), predict_labels(labels)
    found = compare(QUERY, split, answers, answers, 0.0)
    assert (found.ratio, found.met, found.state, found.proven) == (1.0, True, EvidenceState.UNCHANGED, False)
    assert found.units == 2 and found.samples == 40 and found.evidence == "labels"
    assert "lower_end" in found.to_json() and found.to_json()["from"] is None


def test_compare_counts_right_answers_that_are_wrong_now() -> None:
    labels = "ab" * 20
    original, merged = predict_labels("b" + labels[1:]), predict_labels(labels[:-1] + "a")
    found = compare(QUERY, make_split(tuple(labels), "u" * 40), original, merged, 0.0)
    assert found.flips is not None and (found.flips.right, found.flips.wrong) == (39, 1)
    assert found.flips.frames == ("u 39 s",)
    assert 1 / 39 < found.flips.upper_end < 0.15 and found.state is EvidenceState.NOT_PROVEN


def test_compare_without_labels_takes_the_predictions_of_the_original() -> None:
    split = make_split(None, "uuuu")
    assert load_labels(QUERY, split, predict_labels("aabb"), 0.0) == ["a", "a", "b", "b"]
    found = compare(QUERY, split, predict_labels("aabb"), predict_labels("aaab"), 0.0)
    assert found.original == 1.0 and found.merged == 0.75


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({"task": "detection"}, 0.25), ({"task": "detection", "min_score": 0.4}, 0.4), ({"task": "classification"}, 0.0)],
)
def test_threshold_without_labels_leaves_out_boxes_of_low_score(keys: dict[str, Any], expected: float) -> None:
    assert threshold_without_labels(make_query(**keys)) == expected


def test_compare_counts_nothing_in_crowds() -> None:
    car, crowd = (0.0, 0.0, 10.0, 10.0), (20.0, 20.0, 60.0, 60.0)
    labels = (BoxLabels(("car",), (car,), BoxLabels(("car",), (crowd,))),) * 4
    original = [DetectionPrediction(("car", "car"), (0.9, 0.8), (car, (25.0, 25.0, 35.0, 35.0)))] * 4
    merged = [DetectionPrediction(("car", "car"), (0.9, 0.8), (car, (45.0, 45.0, 55.0, 55.0)))] * 4
    query = make_query(task="detection", classes=("car",))
    found = compare(query, make_split(labels, "uuvv"), original, merged, 0.5)
    assert (found.original, found.merged, found.agreement) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("labels", "units", "gap"),
    [
        ("a" * 40, "u", "all 40 frames of test have one answer (a)"),
        ("a" * 40 + "b", "uv", "test holds 40 of 'a', 1 of 'b'; 2 frames of each of two answers are needed"),
        ("a" * 20 + "b" * 2, "uv", ""),
        ("ab" * 20, "u", ""),
        ("a" * 20 + "b" * 20 + "c", "uv", ""),
        ("ab" * 20, "uv", ""),
        ("ab" * 20, ("block-0", "block-1"), ""),
    ],
)
def test_find_gap_of_a_classifier_needs_two_answers(labels: str, units, gap: str) -> None:
    split = make_split(tuple(labels), [units[index % len(units)] for index in range(len(labels))])
    query = make_query(classes=("a", "b", "c"))
    assert find_gap(query, split, labels) == gap
    found = compare(query, split, predict_labels(labels), predict_labels(labels), 0.0)
    assert (found.met, found.evidence, found.reason) == (not gap, "none" if gap else "labels", gap)


@pytest.mark.parametrize(
    ("objects", "units", "gap"),
    [
        ([], "u", "test holds no objects (car); 2 are needed"),
        (["car"], "u", "test holds 1 object (car); 2 are needed"),
        (["car"] * 20, "u", ""),
        (["car", "bus"], "u", "test holds 1 of 'car', 1 of 'bus'; 2 objects of one class are needed"),
        (["car"] * 20 + ["bus"], "u", ""),
    ],
)
def test_find_gap_of_a_detector_needs_objects(objects: list[str], units: str, gap: str) -> None:
    labels = [BoxLabels(tuple(objects), ((0.0, 0.0, 4.0, 4.0),) * len(objects)), BoxLabels()]
    query = make_query(task="detection", classes=("car",))
    assert find_gap(query, make_split(tuple(labels), [units[0], units[-1]]), labels) == gap


def repeat_frames(*values: int, count: int = 40) -> Frames:
    return Frames([partial(np.full, (8, 8, 3), values[at % len(values)], np.uint8) for at in range(count)])


@pytest.mark.parametrize(
    ("values", "gap"),
    [
        ((0,), "all 40 frames of test are black"),
        ((0, 5, 16), "all 40 frames of test are black"),
        ((90,), "all 40 frames of test are equal"),
        ((0, 90), "all 40 frames of test are black (20) or equal"),
        ((0, 0, 0, 90, 91), ""),
        ((90, 91), ""),
    ],
)
def test_find_gap_needs_frames_that_differ(values: tuple[int, ...], gap: str) -> None:
    split = replace(make_split(tuple("ab" * 20), "u" * 40), frames=repeat_frames(*values))
    assert find_gap(make_query(classes=("a", "b")), split, tuple("ab" * 20)) == gap


def test_find_gap_decodes_few_frames_of_ordinary_footage() -> None:
    split = make_split(tuple("ab" * 20), "u" * 40)
    decoded: list[int] = []
    loaders = [lambda at=at: decoded.append(at) or split.frames[at] for at in range(40)]
    assert find_gap(make_query(classes=("a", "b")), replace(split, frames=Frames(loaders)), tuple("ab" * 20)) == ""
    assert decoded == [0, 1]


@pytest.mark.parametrize(("right", "is_weak"), [(22, True), (23, True), (30, False)])
def test_compare_takes_a_weak_original_for_no_evidence(right: int, is_weak: bool) -> None:
    labels = "ab" * 20
    answers = predict_labels("".join(one if at < right else "ba"[one == "b"] for at, one in enumerate(labels)))
    again = list(answers)
    found = compare(make_query(classes=("a", "b")), make_split(tuple(labels), "u" * 40), answers, again, 0.0)
    assert (found.worth, found.met, found.evidence) == (not is_weak, not is_weak, "none" if is_weak else "labels")
    assert found.reason == (
        f"its original reaches only {found.original:.2f} balanced_accuracy on test" if is_weak else ""
    )


def test_is_competent_needs_a_margin_above_chance() -> None:
    detector = make_query(task="detection", classes=("car",))
    assert not is_competent(QUERY, 0.55) and is_competent(QUERY, 0.65)
    assert not is_competent(detector, 0.45) and is_competent(detector, 0.5)


def make_tallies(right: np.ndarray) -> ComparedFrames:
    """Of a classifier with two classes that alternate, right where `right` is true."""
    counts = np.zeros((len(right), 2, 2), np.int64)
    for index, is_right in enumerate(right):
        counts[index, :, index % 2] = is_right, 1
    return ComparedFrames(counts)


def judge_tallies(found: ComparedFrames, task, target: float = 0.95):
    return compare_agreement(found, task, target, is_surely_below(found, task, target, 0.01))


@pytest.mark.parametrize(("share", "frames", "verdict"), [
    (1.0, MIN_COMPARED, KEPT), (0.99, 400, KEPT), (0.5, 400, BELOW), (0.8, 64, BELOW), (0.9, 60, UNSURE),
    (0.0, MIN_COMPARED, BELOW), (0.0, MIN_COMPARED - 1, TOO_FEW), (1.0, 0, TOO_FEW),
])  # fmt: skip
def test_compare_agreement_gives_the_verdict_of_the_test(share, frames, verdict):
    right = np.random.default_rng(4).permutation(np.arange(frames) < round(share * frames))
    found = judge_tallies(make_tallies(right), CLASSIFICATION)
    assert (found.frames, found.verdict) == (frames, verdict)
    assert found.ratio == (None if verdict == TOO_FEW else pytest.approx(share, abs=0.02))


def test_compare_agreement_on_frames_of_one_class_is_no_evidence():
    counts = np.zeros((100, 2, 2), np.int64)
    counts[:, :, 0] = 1
    assert judge_tallies(ComparedFrames(counts), CLASSIFICATION).verdict == ONE_ANSWER
    counts[:, 0, 0] = 0  # all wrong
    assert judge_tallies(ComparedFrames(counts), CLASSIFICATION).verdict == BELOW


def test_compare_agreement_counts_only_frames_with_anything_to_compare():
    counts = np.zeros((500, 3), np.int64)
    assert judge_tallies(ComparedFrames(counts), DETECTION).verdict == TOO_FEW
    counts[: MIN_COMPARED - 1] = 1
    assert judge_tallies(ComparedFrames(counts), DETECTION).verdict == TOO_FEW
    counts[: 2 * MIN_COMPARED] = (0, 0, 2)  # objects that the box no longer sees
    found = judge_tallies(ComparedFrames(counts), DETECTION)
    assert (found.ratio, found.verdict, found.frames) == (0.0, BELOW, 500)


@pytest.mark.parametrize(("burst", "limit"), [(1, 0.01), (3, 0.015)])
def test_models_that_agree_as_they_should_are_seldom_below(burst, limit):
    random, below = np.random.default_rng(burst), 0
    for _ in range(1000):
        begins = random.random(64 + burst) < 1 - 0.95 ** (1 / burst)
        right = ~np.array([begins[place : place + burst].any() for place in range(64)])
        below += is_surely_below(make_tallies(right), CLASSIFICATION, 0.95, 0.01)
    assert below / 1000 <= limit


@given(st.lists(st.booleans(), min_size=MIN_COMPARED, max_size=150), st.floats(0.01, 1))
def test_compare_agreement_is_consistent_for_drawn_frames(right, target):
    found = judge_tallies(make_tallies(np.array(right)), CLASSIFICATION, target)
    assert found.ratio is not None
    assert found.verdict == BELOW or (found.verdict == UNSURE) == (found.ratio < target)
