"""The verdict from tallies: how sure one can be, and when nothing can be said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.evaluation import BELOW, KEPT, MIN_COMPARED_FRAMES, TOO_FEW, UNSURE, ComparedFrames, compare_agreement
from models.tasks import task_of

CLASSES, BOXES = task_of("classification"), task_of("detection")


def frame_counts(counts: np.ndarray, expected: float = 1.0) -> ComparedFrames:
    return ComparedFrames(counts, expected)


def tallies(right: np.ndarray) -> ComparedFrames:
    """Of a classifier with two classes that take turns, right where it says so."""
    counts = np.zeros((len(right), 2, 2), np.int64)
    for index, is_right in enumerate(right):
        counts[index, :, index % 2] = is_right, 1
    return frame_counts(counts)


@pytest.mark.parametrize(("share", "frames", "verdict"), [
    (1.0, MIN_COMPARED_FRAMES, KEPT), (0.99, 400, KEPT), (0.5, 400, BELOW), (0.9, 60, UNSURE),
    (0.0, MIN_COMPARED_FRAMES, BELOW), (0.0, MIN_COMPARED_FRAMES - 1, TOO_FEW), (1.0, 0, TOO_FEW),
])  # fmt: skip
def test_the_verdict_follows_from_the_interval(share, frames, verdict):
    right = np.random.default_rng(4).permutation(np.arange(frames) < round(share * frames))
    found = compare_agreement(tallies(right), CLASSES, 0.95)
    assert (found.frames, found.verdict) == (frames, verdict)
    if verdict == TOO_FEW:
        assert found.ratio is None and found.ci95 is None
    else:
        assert found.ratio == pytest.approx(share, abs=0.02)


def test_frames_without_anything_to_see_are_no_evidence():
    nothing = np.zeros((500, 3), np.int64)
    assert compare_agreement(frame_counts(nothing), BOXES, 0.95).verdict == TOO_FEW
    nothing[: MIN_COMPARED_FRAMES - 1] = 1
    assert compare_agreement(frame_counts(nothing), BOXES, 0.95).verdict == TOO_FEW
    nothing[: 2 * MIN_COMPARED_FRAMES] = (0, 0, 2)  # objects that the box no longer sees
    found = compare_agreement(frame_counts(nothing), BOXES, 0.95)
    assert (found.ratio, found.verdict, found.frames) == (0.0, BELOW, 500)


@given(st.lists(st.booleans(), min_size=MIN_COMPARED_FRAMES, max_size=150), st.floats(0.01, 1))
def test_the_ratio_lies_in_its_interval_and_the_verdict_is_that_of_both(right, target):
    found = compare_agreement(tallies(np.array(right)), CLASSES, target)
    assert found.ratio is not None and found.ci95 is not None
    low, high = found.ci95
    assert 0 <= low <= high <= 1
    assert (found.verdict == BELOW) == (high < target)
    assert (found.verdict == KEPT) == (high >= target and found.ratio >= target)
