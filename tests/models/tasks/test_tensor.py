"""Tensor: agreement of any outputs by argmax, cosine and relative error; what a result holds of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gemel.models.files.io import MAX_VALUES
from gemel.models.measures.evaluation import find_gap
from gemel.models.measures.evidence import EvidenceConfig
from gemel.models.predictions import unpack_float16
from gemel.models.tasks import task_of
from gemel.models.tensors import as_arrays
from tests.models.measures.test_evaluation import make_split
from tests.models.queries import make_query

TASKS = {
    by: task_of(make_query(task="tensor", agreement=by, classes=())) for by in ("argmax", "cosine", "relative-error")
}


def predict(by: str, outputs):
    return TASKS[by].predictions(None, as_arrays(outputs), [(1, 1)], ())


def score(by: str, outputs, wanted) -> float:
    task = TASKS[by]
    return task.metric_of(task.tallies(predict(by, outputs), predict(by, wanted), ()).sum(axis=0))


@pytest.mark.parametrize(("by", "wanted"), [("argmax", 0.5), ("cosine", np.sqrt(0.5)), ("relative-error", 0.0)])
def test_agreement_is_the_mean_of_the_outputs(by, wanted):
    mine, theirs = torch.tensor([[[1.0, 1.0], [1.0, 0.0]]]), torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    theirs = theirs if by == "argmax" else torch.tensor([[[0.0, 0.0], [2.0, 0.0]]])
    mine = mine if by == "argmax" else torch.tensor([[[0.0, 2.0], [2.0, 0.0]]])
    assert score(by, mine, theirs) == pytest.approx(wanted)
    assert score(by, (mine, mine), {"a": mine, "b": mine}) == 1
    assert TASKS[by].metric == f"{by.replace('-', '_')}_agreement"


def test_argmax_of_maps_is_over_their_first_axis():
    (found,) = predict("argmax", torch.eye(3).view(1, 3, 1, 3))
    assert found.values[0].tolist() == [[0, 1, 2]] and found.shapes == ((3, 1, 3),)
    assert found.to_record() == {"outputs": [{"shape": [3, 1, 3], "argmax": [[0, 1, 2]]}]}


def test_values_in_a_result_are_bounded():
    small, large = predict("cosine", (torch.full((1, 2), 1e6), torch.zeros(1, MAX_VALUES + 1)))[0].to_record()[
        "outputs"
    ]
    assert unpack_float16(small["float16"], small["shape"]).tolist() == [65504, 65504]
    assert large["shape"] == [MAX_VALUES + 1] and len(large["sha256"]) == 64 and "float16" not in large


@pytest.mark.parametrize("by", TASKS)
def test_evidence_needs_answers_that_differ(by):
    query, config = make_query(task="tensor", agreement=by, classes=()), EvidenceConfig(min_samples=4)
    same = predict(by, torch.ones(6, 3))
    assert "a constant answer agrees" in find_gap(query, make_split(tuple(same), ["one"] * len(same)), same, config)
    other = predict(by, torch.eye(6))
    assert find_gap(query, make_split(tuple(other), ["one"] * len(other)), other, config) == ""
    assert "4 are needed" in find_gap(query, make_split(tuple(other[:3]), ["one"] * len(other[:3])), other[:3], config)
