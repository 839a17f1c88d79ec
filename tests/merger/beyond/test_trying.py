"""One try past the ceiling: how long it trains, who trains, who is mended, and what is accepted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.bench.bounds import Bounds
from merger.bench.merged import Merged
from merger.bench.standing import training_flops
from merger.bench.workbench import Workbench
from merger.beyond.candidates import LOW_RANK, low_rank
from merger.beyond.proposing import MAX_RISK, queue_of
from merger.beyond.risk import applied, inputs_of
from merger.journal.checkpoint import Checkpoint
from merger.training.recipe import Recipe
from merger.training.work import Work
from models.sharing.plan import SharingPlan
from tests.merger.beyond.tries import RECIPE, trying


def test_only_a_risky_try_is_long_and_only_where_there_is_work_for_it(bench: Workbench, tmp_path: Path) -> None:
    search, queries = trying(bench, tmp_path / "work", 0.95), list(bench.queries)
    limit = MAX_RISK
    assert (search.epochs(queries, limit), search.epochs(queries, limit * 1.01)) == (1, 4)
    needed = training_flops(bench, queries, replace(RECIPE, epochs=4))
    for work, epochs in ((needed, 4), (needed - 1, 1)):
        assert replace(search, bounds=Bounds(Work(), work)).epochs(queries, 1.0) == epochs


def test_nothing_is_accepted_that_has_not_been_trained(bench: Workbench, merged: Merged, tmp_path: Path) -> None:
    judged: Counter[str] = Counter()

    def good_until_trained(query: str, _model: Any) -> float:
        judged[query] += 1
        return 1.0 if judged[query] == 1 else 0.94

    search = trying(bench, tmp_path / "work", 0.95)
    chunk = queue_of(bench, LOW_RANK, merged, search.journal).ladders[0][:1]
    bench.ratio = good_until_trained  # type: ignore[method-assign]
    found = search.take(merged, chunk)
    assert found.merged is None and set(found.ratios.values()) == {0.94}, "what it began with does not count"
    bench.ratio = lambda query, model: 1.0
    found = replace(search, journal=Checkpoint(tmp_path / "again", {}, False)).take(merged, chunk)
    assert found.merged is not None and found.epochs == 1
    states = found.merged.states
    start = applied(bench, merged, chunk[0], inputs_of(bench, merged, chunk)).states
    query = min(chunk[0].queries)
    assert any(not torch.equal(tensor, start[query][name]) for name, tensor in states[query].items())


def test_weights_that_one_query_has_for_itself_come_first_and_what_is_shared_stands_still(
    bench: Workbench, merged: Merged, tmp_path: Path
) -> None:
    judged: list[str] = []

    def met_once_trained(query: str, _model: Any) -> float:
        judged.append(query)
        return 0.94 if len(judged) == 1 else 1.0

    bench.ratio = met_once_trained  # type: ignore[method-assign]
    search = trying(bench, tmp_path / "work", 0.95)
    queue = [ladder[0] for ladder in queue_of(bench, LOW_RANK, merged, search.journal).ladders]
    alone = [candidate for candidate in queue if candidate.alone]
    assert alone and queue[: len(alone)] == alone != queue
    found = search.take(merged, alone)
    assert found.merged is not None and found.epochs == 1 and set(judged) == set(found.ratios) == {"q0"}
    for query, path in (member for members in merged.plan.shared for member in members):
        assert torch.equal(found.merged.states[query][f"{path}.weight"], merged.states[query][f"{path}.weight"])


def test_in_a_try_those_who_have_what_is_required_make_room_for_the_others(
    bench: Workbench, merged: Merged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eased: list[set[str]] = []
    training = bench.training

    def noted(models: Any, recipe: Recipe, names: Any, plan: Any) -> Any:
        eased.append(set(names))
        return training(models, recipe, names, plan)

    monkeypatch.setattr(bench, "training", noted)
    bench.ratio = lambda query, model: {"q0": 0.96, "q1": 0.8}[query]
    search = trying(bench, tmp_path / "work", 0.95)
    shared = next(ladder for ladder in low_rank(bench.layers, bench.originals, merged.plan, 0) if not ladder[0].alone)
    search.take(merged, shared[:1])
    assert eased == [{"q0"}]


@pytest.mark.parametrize(
    ("fallen", "lifted", "tried", "accepted"),
    [
        ({"q0": 0.94, "q1": 0.93}, 0.96, ["q1", "q0"], True),
        ({"q0": 0.94, "q1": 0.93}, 0.949, ["q1"], False),
        ({"q0": 0.94, "q1": 0.89}, 0.96, [], False),
        ({"q0": 0.94, "q1": 1.0}, 0.96, ["q0"], True),
    ],
)
def test_queries_just_below_are_mended_by_their_private_parts(
    bench: Workbench, merged: Merged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    fallen: dict[str, float], lifted: float, tried: list[str], accepted: bool,
) -> None:  # fmt: skip
    alone: list[str] = []

    def private(_: Any, begins: Any, plan: SharingPlan, query: str, recipe: Recipe, required: float, *__: Any) -> Any:
        assert plan != merged.plan and required == 0.95 and recipe.epochs == 1
        alone.append(query)
        return {"state": {**begins[0], "mended": torch.ones(1)}, "ratio": lifted, "epochs": 1}

    monkeypatch.setattr("merger.beyond.trying.train_private", private)
    bench.ratio = lambda query, model: fallen[query]
    search = trying(bench, tmp_path / "work", 0.95)
    shared = next(ladder for ladder in low_rank(bench.layers, bench.originals, merged.plan, 0) if not ladder[0].alone)
    found = search.take(merged, shared[:1])
    assert (alone, found.merged is not None) == (tried, accepted)
    if found.merged is not None:
        states = found.merged.states
        assert {query for query in states if "mended" in states[query]} == set(tried)
        assert found.ratios == {**fallen, **dict.fromkeys(tried, lifted)}
