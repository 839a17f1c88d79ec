"""F1 and mAP on cases small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.metrics import best_threshold, f1_of, match_frames
from models.predictions import BoxLabels, DetectionPrediction

HERE = (0.0, 0.0, 10.0, 10.0)
NEAR = (0.0, 0.0, 10.0, 8.0)  # IoU 0.8 with HERE
FAR = (50.0, 50.0, 60.0, 60.0)
HALF = (0.0, 0.0, 10.0, 5.0)  # IoU 0.5 with HERE
LESS = (0.0, 0.0, 10.0, 4.9)


def answer(*rows: tuple[str, float, tuple[float, float, float, float]]) -> DetectionPrediction:
    names, scores, boxes = zip(*rows)
    return DetectionPrediction(names, scores, boxes)


@pytest.mark.parametrize(
    ("case", "answers", "truths", "expected"),
    [
        ("found", [answer(("car", 0.9, NEAR))], [BoxLabels(("car",), (HERE,))], 1.0),
        ("IoU of exactly one half counts", [answer(("car", 0.9, HALF))], [BoxLabels(("car",), (HERE,))], 1.0),
        ("less does not", [answer(("car", 0.9, LESS))], [BoxLabels(("car",), (HERE,))], 0.0),
        ("another class is no hit", [answer(("bus", 0.9, HERE))], [BoxLabels(("car",), (HERE,))], 0.0),
        (
            "a second box on one object is a false alarm",
            [answer(("car", 0.9, NEAR), ("car", 0.8, HERE))],
            [BoxLabels(("car",), (HERE,))],
            2 / 3,
        ),
        ("no answer misses everything", [None], [BoxLabels(("car", "car"), (HERE, FAR))], 0.0),
        ("nothing there, nothing said", [DetectionPrediction()], [BoxLabels()], 1.0),
        ("nothing there, something said", [answer(("car", 0.9, HERE))], [BoxLabels()], 0.0),
        (
            "micro over classes and frames",
            [answer(("car", 0.9, HERE), ("bus", 0.8, FAR)), answer(("bus", 0.3, HERE))],
            [BoxLabels(("car", "bus"), (HERE, HERE)), BoxLabels(("bus",), (HERE,))],
            4 / 6,
        ),
    ],
)
def test_f1_counted_by_hand(case, answers, truths, expected):
    assert f1_of(match_frames(answers, truths).counts()) == pytest.approx(expected), case


_boxes = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(4, 20), st.integers(4, 20)).map(
    lambda b: (float(b[0]), float(b[1]), float(b[0] + b[2]), float(b[1] + b[3]))
)
_names = st.sampled_from(["car", "bus"])
_scores = st.sampled_from([0.1, 0.2, 0.35, 0.5, 0.5, 0.8])
_answers = st.lists(st.tuples(_names, _scores, _boxes), max_size=8).map(
    lambda rows: answer(*rows) if rows else DetectionPrediction()
)
_truths = st.lists(st.tuples(_names, _boxes), max_size=6).map(
    lambda rows: BoxLabels(tuple(name for name, _ in rows), tuple(box for _, box in rows))
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_answers, _truths), min_size=1, max_size=4))
def test_the_chosen_threshold_is_the_best_there_is_and_frames_add_up(frames):
    answers, truths = zip(*frames)
    matches = match_frames(answers, truths)
    best = f1_of(matches.counts(best_threshold(matches)))
    for threshold in (0.05, 0.15, 0.3, 0.4, 0.6):
        alone = [match_frames([a], [t]).counts(threshold)[0] for a, t in frames]
        assert f1_of(matches.counts(threshold)) == pytest.approx(f1_of(np.array(alone)))
        if matches.hits.any():
            assert f1_of(matches.counts(threshold)) <= best + 1e-12
