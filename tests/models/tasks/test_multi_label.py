"""Multi-label classification: F1 of the mean class, its threshold, evidence, labels from tables."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from gemel.models.data import load_split
from gemel.models.errors import InputError
from gemel.models.measures.evaluation import find_gap
from gemel.models.measures.evidence import EvidenceConfig
from gemel.models.predictions import LabelSet, LabelsPrediction
from gemel.models.tasks import task_of
from tests.models.measures.test_evaluation import make_split
from tests.models.queries import make_query

QUERY = make_query(classes=("car", "person"), multi_label=True)
TASK = task_of(QUERY)


def test_macro_f1_is_the_mean_of_the_classes_that_occur():
    found = [LabelsPrediction(("car", "person"), (0.9, 0.2)), LabelsPrediction(("car",), (0.8,)), None]
    labels = [LabelSet(("car",)), LabelSet(("person",)), LabelSet(("car",))]
    counts = TASK.tallies(found, labels, QUERY.classes, 0.5)
    assert counts.sum(axis=0).tolist() == [[1, 0], [2, 0], [2, 1]]
    assert TASK.metric_of(counts.sum(axis=0)) == pytest.approx(0.25)


def test_threshold_is_chosen_for_the_mean_class():
    found = [LabelsPrediction(("car", "person"), (0.9, 0.6)), LabelsPrediction(("person", "car"), (0.8, 0.3))]
    threshold = TASK.choose_threshold(found, [LabelSet(("car", "person")), LabelSet(("person",))])
    assert 0.3 < threshold <= 0.6


def test_predictions_are_ranked_and_cut():
    (found,) = TASK.predictions(None, np.array([[-3.0, 2.0]], np.float32), [(1, 1)], QUERY.classes, 0.5)
    assert found.classes == ("person",) and found.to_record()["labels"][0]["score"] == pytest.approx(0.881, abs=1e-3)


def test_evidence_needs_a_class_with_and_without():
    config = EvidenceConfig(min_samples=3)
    some = [LabelSet(("car",)), LabelSet()] * 3
    assert find_gap(QUERY, make_split(tuple(some), ["one"] * 6), some, config) == ""
    every = [LabelSet(("car",))] * 6
    assert "no class in 3 frames" in find_gap(QUERY, make_split(tuple(every), ["one"] * 6), every, config)


@pytest.mark.parametrize(("table", "wanted"), [
    ("path,label\na.png,car;person\nb.png,\nc.png,person\n", [("car", "person"), (), ("person",)]),
    ("filename,Car,Person\na.png,1,0\nb.png,1,1\nc.png,0,0\n", [("car",), ("car", "person"), ()]),
])  # fmt: skip
@pytest.mark.parametrize("in_splits", [False, True])
def test_label_sets_are_read_from_tables(tmp_path: Path, table, wanted, in_splits):
    for split in ("train", "val", "test") if in_splits else ("",):
        (tmp_path / split).mkdir(exist_ok=True)
        for at, name in enumerate("abc"):
            cv2.imwrite(str(tmp_path / split / f"{name}.png"), np.full((8, 8, 3), at * 50, np.uint8))
        (tmp_path / split / "_classes.csv").write_text(table)
    query = make_query(classes=("car", "person"), multi_label=True, data=tmp_path)
    found = [load_split(query, split).labels or () for split in ("train", "val", "test")]
    assert found[0] == tuple(map(LabelSet, wanted)) if in_splits else sum(found, ()) == tuple(map(LabelSet, wanted))


def test_a_table_without_a_class_is_refused(tmp_path):
    (tmp_path / "labels.csv").write_text("path,car\na.png,1\n")
    with pytest.raises(InputError, match="no column 'person'"):
        load_split(make_query(classes=("car", "person"), multi_label=True, data=tmp_path), "train")
