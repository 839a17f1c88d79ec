"""What accepts a merge: a part of val that no search saw, an error shared by all queries, and what val cannot tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.merging.acceptance import Question, Row, is_accepted, split_of
from merger import MergeOptions, merge
from merger.acceptance import ACCEPTANCE, accepted_by_holm, cut_val, find_doubt
from merger.context import MergeContext
from models.bundle import open_bundle
from models.workload import Workload
from tests.merger.guarantees import FACTORIES, must_train
from tests.merger.options import LAYERS, QUICK


@pytest.mark.parametrize("row", [Row("", 300, 3, 12), Row("", 170, 34), Row("", 60, 2, 1), Row("", 400, 2, 2)])
def test_cut_leaves_every_frame_in_one_part_and_a_third_for_the_search(row: Row) -> None:
    split, labels = split_of(row)
    question = Question(tuple(sorted(set(labels))))
    searched, kept = cut_val(question, split, labels)  # type: ignore[arg-type]
    assert sorted([*searched, *kept]) == list(range(row.frames))
    assert 0.2 < len(searched) / row.frames < 0.45
    if row.clips >= ACCEPTANCE.search_every:
        assert not {split.units[place] for place in searched} & {split.units[place] for place in kept}


def test_val_that_cannot_tell_says_how_many_frames_it_takes() -> None:
    assert find_doubt(100, 1 / 66, 0.95, 1) == ""
    assert find_doubt(100, 1 / 66, 0.95, 10) == "cannot be told with 100 frames of val; needs about 400"
    assert find_doubt(10_000, 1 / 6666, 1.0, 1).startswith("a target of 1 cannot be told")


def test_error_is_shared_by_the_queries_and_what_is_accepted_frees_its_share() -> None:
    assert accepted_by_holm({"a": 0.012, "b": 0.02}, 0.025) == {"a", "b"}
    assert accepted_by_holm({"a": 0.013, "b": 0.02}, 0.025) == set()
    assert accepted_by_holm({}, 0.025) == set()


@pytest.mark.parametrize("looks", [1, 10])
def test_models_below_their_target_are_seldom_accepted(looks: int) -> None:
    random = np.random.default_rng(0)
    wrong = [is_accepted(Row("", 400, 2), 0.95, looks, random) for _ in range(60)]
    assert sum(wrong) <= 4 and is_accepted(Row("", 2000, 2), 1.0, looks, random)


def test_refused_query_gets_its_original_back(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merger.context.find_doubt", lambda *_: "")
    monkeypatch.setattr(MergeContext, "prove", lambda self, query, model: (0.5 if query == "q1" else 1e-6, True))
    out = tmp_path / "b.safetensors"
    report = merge(workload, out, "trunk", options=MergeOptions(QUICK.recipe))
    found = {query.id: query for query in report.queries}
    assert found["q1"].ratio == 1.0 and found["q1"].network is None and found["q1"].proven
    original, state = (
        MergeContext(workload).originals["q1"].state_dict(),
        open_bundle(out, FACTORIES).build("q1").state_dict(),
    )
    assert all(torch.equal(state[key], own) for key, own in original.items())


@pytest.mark.parametrize("refused", [("q1",), ("q1", "q2")])
def test_query_that_shares_with_refused_ones_alone_gets_its_original_back(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...]
) -> None:
    must_train(monkeypatch)
    monkeypatch.setattr("merger.context.find_doubt", lambda *_: "")
    monkeypatch.setattr(MergeContext, "prove", lambda self, query, model: (0.5 if query in refused else 1e-6, True))
    monkeypatch.setattr(MergeContext, "ratio", lambda self, query, model, strict=False: 1.0)
    out = tmp_path / "b.safetensors"
    options = replace(QUICK, margin=None, top_down=replace(LAYERS, freeze_donor_first=False))
    report = merge(workload, out, options=options)
    original = MergeContext(workload).originals["q0"].state_dict()
    found = open_bundle(out, FACTORIES).build("q0").state_dict()
    assert all(torch.equal(found[key], own) for key, own in original.items()) == (len(refused) == 2)
    assert (report.saved_fraction > 0.1) == (len(refused) == 1)


def test_refused_query_with_a_good_plain_ratio_is_kept_as_unproven_if_asked(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merger.context.find_doubt", lambda *_: "")
    monkeypatch.setattr(MergeContext, "prove", lambda self, query, model: (0.5 if query == "q1" else 1e-6, True))
    options = MergeOptions(QUICK.recipe, accept_unproven=True)
    report = merge(workload, tmp_path / "b.safetensors", "trunk", options=options)
    proven = {query.id: query.proven for query in report.queries}
    assert not proven.pop("q1") and all(proven.values())
