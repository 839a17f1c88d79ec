"""Embedding: recall@1 of identities, agreement of directions, evidence, losses."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from gemel.models.data import load_split
from gemel.models.measures.evaluation import find_gap
from gemel.models.measures.evidence import EvidenceConfig
from gemel.models.predictions import EmbeddingPrediction, IdentityLabel, unpack_float16
from gemel.models.tasks import task_of
from tests.models.measures.test_evaluation import make_split
from tests.models.queries import make_query

TASK = task_of("embedding")
QUERY = make_query(task="embedding", classes=())


def predict(*rows: tuple[float, ...]) -> list[EmbeddingPrediction]:
    return TASK.predictions(None, np.array(rows, np.float32), [(1, 1)] * len(rows), ())


def labels_of(*names: str) -> list[IdentityLabel]:
    """`a1` is the identity a in the clip 1."""
    return [IdentityLabel(name[0], name[1:]) for name in names]


def score(predictions, labels) -> float:
    return TASK.metric_of(TASK.tallies(predictions, labels, ()).sum(axis=0))


def test_recall_counts_neighbours_of_other_clips():
    near, far = (1.0, 0.0), (0.0, 1.0)
    found = predict(near, near, far, far)
    assert score(found, labels_of("a1", "a2", "b1", "b2")) == 1
    assert score(found, labels_of("a1", "b1", "a2", "b2")) == 0
    same_clip = predict(near, near, far)
    assert score(same_clip, labels_of("a1", "a1", "a2")) == 1, "of one identity any neighbour is right"
    tallies = TASK.tallies(same_clip, labels_of("a1", "a2", "b1"), ())
    assert tallies.tolist() == [[1, 1], [1, 1], [0, 0]], "an identity shown once asks nothing"
    assert TASK.tallies([None, *same_clip[1:]], labels_of("a1", "a2", "b1"), ())[:2].tolist() == [[0, 1], [0, 1]]


def test_agreement_is_the_mean_cosine():
    first, second = predict((2.0, 0.0), (0.0, 3.0)), predict((1.0, 1.0), (0.0, -1.0))
    assert score(first, first) == 1
    assert score(first, second) == pytest.approx(np.sqrt(0.5) / 2)


def test_record_holds_float16():
    (found,) = predict((3.0, 4.0))
    assert unpack_float16(found.to_record()["embedding"], (2,)).tolist() == pytest.approx([0.6, 0.8], abs=1e-3)


def test_identities_are_folders_that_differ_between_splits(tmp_path):
    for split, names in (("train", "abc"), ("val", "de"), ("test", "fg")):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            cv2.imwrite(str(tmp_path / split / name / "clip7__000100.png"), np.zeros((8, 8, 3), np.uint8))
    split = load_split(make_query(task="embedding", classes=(), data=tmp_path), "val")
    assert split.labels == (IdentityLabel("d", "clip7"), IdentityLabel("e", "clip7"))


def test_evidence_needs_two_identities_or_vectors_that_differ(tmp_path):
    config = EvidenceConfig(min_samples=4)
    labels = labels_of(*(f"a{index}" for index in range(6)))
    assert "1 identities" in find_gap(QUERY, make_split(tuple(labels), ["one"] * len(labels)), labels, config)
    labels = labels_of(*(f"{'ab'[index % 2]}{index}" for index in range(6)))
    assert find_gap(QUERY, make_split(tuple(labels), ["one"] * len(labels)), labels, config) == ""
    same, other = (
        predict(*[(1.0, 0.05 * index) for index in range(6)]),
        predict(*[(1.0, 3.0 * index) for index in range(6)]),
    )
    assert "a constant answer agrees" in find_gap(QUERY, make_split(tuple(same), ["one"] * len(same)), same, config)
    assert find_gap(QUERY, make_split(tuple(other), ["one"] * len(other)), other, config) == ""
