"""Past the ceiling: candidates, what a step does to plan and weights, what is kept, and the bundle that comes of it."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import merger.beyond.risk as beyond_start
import merger.beyond.search as beyond_module
from merger import TrainOptions, merge, train_originals
from merger.bench.bounds import Bounds
from merger.bench.merged import Merged, snapshot
from merger.bench.method import MergeOptions
from merger.bench.sizes import stored_bytes
from merger.bench.standing import training_flops
from merger.bench.workbench import Workbench
from merger.beyond.candidates import INSIDE, LOW_RANK, Candidate, inside, low_rank, steps_between, units
from merger.beyond.risk import INPUT_FRAMES, applied, errors, inputs_of, with_risk
from merger.beyond.search import _Search, beyond
from merger.journal.checkpoint import Checkpoint
from merger.methods.wide import whole_plan
from merger.start.choosing import averaged
from merger.training.loop import Recipe, Work
from models.bundle import open_bundle, verify_bundle
from models.errors import InputError
from models.sharing.groups import ceiling_bytes
from models.sharing.layers import layers_of_all, model_bytes
from models.sharing.plan import SharingPlan, tie
from models.workload import Workload, load_workload
from tests.merger.deep import FACTORY
from tests.merger.tiny import write_workload

RECIPE = Recipe(rate=2e-3, epochs=2, batch=16, features=1.0)
OPTIONS = MergeOptions(RECIPE, choose_rate=False, precision="fp32", beyond=True)
EASY = replace(OPTIONS, margin=0.0)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Two queries whose models have two and four equal blocks, with trained originals."""
    folder = tmp_path_factory.mktemp("deep")
    keys = {"model": FACTORY, "model_args": {"blocks": 2}, "accuracy_target": 0.7}
    path = write_workload(folder, queries=2, frames=40, **keys)
    document = yaml.safe_load(path.read_text())
    document["queries"][0]["model_args"] = {"blocks": 4}
    path.write_text(yaml.safe_dump(document))
    train_originals(load_workload(path), options=TrainOptions(rate=3e-3, passes=800, max_cycles=1))
    return load_workload(path)


@pytest.fixture
def bench(deep: Workload) -> Workbench:
    return Workbench(deep)


@pytest.fixture
def merged(bench: Workbench) -> Merged:
    """Everything tied with the mean weights, nothing retrained."""
    plan = whole_plan(bench, OPTIONS)
    return Merged(plan, averaged(plan, {query: snapshot(model) for query, model in bench.originals.items()}))


def _search(bench: Workbench, folder: Path, required: float, most_work: float = math.inf) -> _Search:
    bounds = Bounds(bench.work, most_work)
    return _Search(bench, RECIPE, dict.fromkeys(bench.queries, required), Checkpoint(folder, {}, False), bounds)


def _ladder_of(path: str, bench: Workbench, merged: Merged) -> list[Candidate]:
    """The candidates for factors of the layer at this path."""
    ladders = low_rank(bench.layers, bench.originals, merged.plan, 0)
    return next(ladder for ladder in ladders if {own for _, own in ladder[0].first} == {path})


@pytest.mark.parametrize(
    ("one", "other", "steps"),
    [
        ("layer3.1.conv1", "layer3.2.conv1", (False, 1)),
        ("layer3.1.conv1", "layer3.1.conv2", (True, 1)),
        ("features.17", "features.21", (False, 4)),
        ("blocks.denselayer5.conv2", "blocks.denselayer6.conv2", (False, 1)),
        ("layer3.1.conv1", "layer3.2.conv2", None),
        ("head.cls.conv.0", "head.box.conv.0", None),
        ("layer3.0.conv1", "fpn.0", None),
    ],
)
def test_repeated_layers_are_those_whose_paths_differ_in_one_number(one: str, other: str, steps: Any) -> None:
    assert steps_between(one, other) == steps


def test_units_are_every_stored_weight_once(bench: Workbench, merged: Merged) -> None:
    found = units(bench.layers, merged.plan)
    members = [member for unit in found for member in unit]
    assert len(members) == len(set(members)) == sum(not layer.head for layer in bench.layers)
    assert set(merged.plan.shared) <= set(found)


def test_neighbours_of_a_stage_pair_up_until_one_weight_is_left(bench: Workbench, merged: Merged) -> None:
    plan, sizes = merged.plan, []
    while found := inside(bench.layers, plan, 0):
        sizes.append(len(found))
        for candidate in found:
            assert all(".conv1" in path for _, path in (*candidate.first, *candidate.second))
            plan = candidate.as_set(plan)
    assert sizes == [2, 1]  # four weights of the stage, then two
    layers = {(layer.query, layer.path): layer for layer in bench.layers}
    stage = next(members for members in plan.shared if ("q0", "stage.0.conv1") in members)
    assert len(stage) == 6
    assert plan.saved_bytes(bench.layers) == ceiling_bytes(bench.layers) + 3 * layers[stage[0]].bytes


def test_a_step_inside_ties_two_layers_of_one_model(bench: Workbench, merged: Merged) -> None:
    candidate = inside(bench.layers, merged.plan, 0)[0]
    after = applied(bench, merged, candidate, {})
    models = bench.tied(after.plan, list(bench.queries), after.states)
    parameters = {id(models[q].get_submodule(p).weight) for q, p in (*candidate.first, *candidate.second)}
    assert len(parameters) == 1
    assert stored_bytes(bench, merged.plan) - stored_bytes(bench, after.plan) == candidate.saved_bytes


def test_factors_take_the_layers_place_and_are_shared(bench: Workbench, merged: Merged) -> None:
    ladder = _ladder_of("wide", bench, merged)
    assert [one.rank for one in ladder] == sorted({one.rank for one in ladder})
    after = applied(bench, merged, ladder[-1], inputs_of(bench, merged, ladder))
    models = bench.models(bench.queries, after.states, after.plan)
    tie(models, after.plan)
    assert models["q0"].get_parameter("wide.a.weight") is models["q1"].get_parameter("wide.a.weight")
    assert models["q0"].get_parameter("wide.b.bias") is not models["q1"].get_parameter("wide.b.bias")
    assert stored_bytes(bench, merged.plan) - stored_bytes(bench, after.plan) == ladder[-1].saved_bytes
    assert after.plan.without("q0").low_rank == {"q1": {"wide": ladder[-1].rank}}
    assert SharingPlan.from_json(json.loads(json.dumps(after.plan.to_json()))) == after.plan


def test_the_risk_is_that_of_the_best_start_and_falls_with_the_rank(bench: Workbench) -> None:
    for model in bench.originals.values():  # a trained layer of so small a task is of low rank already
        torch.nn.init.normal_(model.get_parameter("wide.weight"), std=0.05)
    alone = Merged(SharingPlan(), {query: snapshot(model) for query, model in bench.originals.items()})
    before = errors(bench, alone, ["q0", "q1"])
    ladder = _ladder_of("wide", bench, alone)
    inputs = inputs_of(bench, alone, ladder)
    found = [with_risk(bench, alone, one, inputs, before) for one in ladder]
    assert found[0].risk > found[-1].risk
    assert [Candidate.from_plain(one.to_plain()) for one in found] == found
    pair = inside(bench.layers, alone.plan, 0)[0]
    by_start = {}
    for start in ("mean", "first", "second"):
        tried = applied(bench, alone, replace(pair, start=start), {})
        by_start[start] = max(after - before[q] for q, after in errors(bench, tried, sorted(pair.queries)).items())
    judged = with_risk(bench, alone, pair, {}, before)
    assert judged.start == min(by_start, key=lambda start: by_start[start])
    assert judged.risk == pytest.approx(by_start[judged.start])


def test_a_ladder_begins_where_the_risk_can_be_borne_and_larger_ranks_are_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[int] = []

    def judge(candidate: Candidate) -> Candidate:
        judged.append(candidate.rank)
        return replace(candidate, risk=1 / candidate.rank)

    monkeypatch.setattr(beyond_module, "MAX_RISK", 1 / 8)
    ladder = [Candidate(LOW_RANK, (("q0", "wide"),), rank=rank) for rank in (4, 8, 16)]
    found = [(one["rank"], one["risk"]) for one in beyond_module._judged(ladder, judge)]
    assert found == [(8, 1 / 8), (16, 1 / 8)] and judged == [4, 8]
    assert [one["rank"] for one in beyond_module._judged(ladder[:1], judge)] == [4], "the last is kept in any case"


def test_one_try_takes_private_or_shared_steps_up_to_a_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beyond_module, "MOST_RISK", 0.5)
    one, both = (("q0", "a"),), (("q0", "b"), ("q1", "b"))
    risks = [Candidate(LOW_RANK, one, risk=risk) for risk in (0.2, 0.3, 0.1)]
    assert beyond_module._together(risks) == risks[:2]
    assert beyond_module._together([risks[0], Candidate(LOW_RANK, both, risk=0.1), risks[2]]) == risks[:1]
    alone = Candidate(LOW_RANK, both, risk=3.0)
    assert beyond_module._together([alone, risks[0]]) == [alone], "a single one may be as risky as it is"


def test_only_a_risky_try_is_long_and_only_where_there_is_work_for_it(bench: Workbench, tmp_path: Path) -> None:
    search, queries = _search(bench, tmp_path / "work", 0.95), list(bench.queries)
    limit = beyond_module.MAX_RISK
    assert (search._epochs(queries, limit), search._epochs(queries, limit * 1.01)) == (1, 4)
    needed = training_flops(bench, queries, replace(RECIPE, epochs=4))
    for work, epochs in ((needed, 4), (needed - 1, 1)):
        assert replace(search, bounds=Bounds(Work(), work))._epochs(queries, 1.0) == epochs


def test_nothing_is_accepted_that_has_not_been_trained(bench: Workbench, merged: Merged, tmp_path: Path) -> None:
    judged: Counter[str] = Counter()

    def good_until_trained(query: str, _model: Any) -> float:
        judged[query] += 1
        return 1.0 if judged[query] == 1 else 0.94

    search = _search(bench, tmp_path / "work", 0.95)
    chunk = [Candidate.from_plain(search._queue(LOW_RANK, merged)[0][0])]
    bench.ratio = good_until_trained  # type: ignore[method-assign]
    found = search._try(merged, chunk)
    assert not found["accepted"] and set(found["ratios"].values()) == {0.94}, "what it began with does not count"
    bench.ratio = lambda query, model: 1.0
    found = replace(search, journal=Checkpoint(tmp_path / "again", {}, False))._try(merged, chunk)
    assert found["accepted"] and found["epochs"] == 1
    states = Merged.from_plain(found["merged"]).states
    start = applied(bench, merged, chunk[0], inputs_of(bench, merged, chunk)).states
    query = min(chunk[0].queries)
    assert any(not torch.equal(tensor, start[query][name]) for name, tensor in states[query].items())


def test_the_inputs_of_layers_are_measured_over_all_their_queries_in_one_pass_each(
    bench: Workbench, merged: Merged
) -> None:
    ladders = low_rank(bench.layers, bench.originals, merged.plan, 0)
    before = bench.work.total
    found = inputs_of(bench, merged, [ladder[0] for ladder in ladders])
    passes = sum(min(INPUT_FRAMES, len(bench.train[q])) * bench.work.of(bench.queries[q]) for q in bench.queries)
    assert bench.work.total - before == passes
    seen: list[torch.Tensor] = []
    for query in ("q0", "q1"):
        model = bench.models([query], merged.states, merged.plan)[query].eval()
        model.get_submodule("wide").register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        data = bench.train[query]
        with torch.no_grad():
            model(data.frames(torch.linspace(0, len(data) - 1, min(INPUT_FRAMES, len(data))).long().tolist()))
    scale = beyond_start._input_scale(found, [("q0", "wide"), ("q1", "wide")])
    assert scale is not None and torch.allclose(scale, torch.cat(seen).square().mean(0).sqrt(), rtol=1e-4)
    assert beyond_start._input_scale(found, [("q0", "never")]) is None


def test_the_inputs_of_a_layer_that_is_called_several_times_are_all_counted(
    bench: Workbench, merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder, made = _ladder_of("wide", bench, merged), bench.models
    once = inputs_of(bench, merged, ladder)["q0"]["wide"]

    def models(queries: Any, states: Any, plan: Any) -> Any:
        found = made(queries, states, plan)
        for model in found.values():
            model.forward = lambda frames, forward=model.forward: (forward(frames[:5]), forward(frames[5:]))
        return found

    monkeypatch.setattr(bench, "models", models)
    squares, count = inputs_of(bench, merged, ladder)["q0"]["wide"]
    assert count == once[1] and torch.allclose(squares, once[0], rtol=1e-4)


def test_the_judging_of_candidates_goes_on_where_it_was_interrupted(
    bench: Workbench, merged: Merged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []
    judged: list[Candidate] = []

    def noted(*given: Any, **keys: Any) -> Candidate:
        judged.append(given[2])
        if len(judged) == killed_at:
            raise KeyboardInterrupt
        return with_risk(*given, **keys)

    monkeypatch.setattr(beyond_module, "with_risk", noted)
    killed_at, bench.progress = 0, lambda event, **fields: shown.append({"event": event, **fields})
    straight = _search(bench, tmp_path / "straight", 0.95).queues(merged)
    assert shown[-1]["event"] == "candidates" and shown[-1]["judged"] == shown[-1]["of"] > 1

    whole, killed_at = len(judged), len(judged) + 4
    search = _search(bench, tmp_path / "work", 0.95)
    with pytest.raises(KeyboardInterrupt):
        search.queues(merged)
    search.journal.write()
    before, killed_at = len(judged), 0
    resumed = replace(search, journal=Checkpoint(tmp_path / "work", {}, resume=True))
    assert resumed.queues(merged) == straight
    assert len(judged) - before < whole


def test_factors_of_a_convolution_take_its_place(bench: Workbench, merged: Merged) -> None:
    ladder = _ladder_of("stem.0", bench, merged)
    after = applied(bench, merged, ladder[-1], inputs_of(bench, merged, ladder))
    models = bench.models(bench.queries, after.states, after.plan)
    tie(models, after.plan)
    assert models["q0"].get_parameter("stem.0.a.weight") is models["q1"].get_parameter("stem.0.a.weight")
    assert models["q0"].get_parameter("stem.0.b.weight").shape[1] == ladder[-1].rank
    assert stored_bytes(bench, merged.plan) - stored_bytes(bench, after.plan) == ladder[-1].saved_bytes


def test_a_refused_step_changes_nothing_and_says_who_stood_in_the_way(
    bench: Workbench, merged: Merged, tmp_path: Path
) -> None:
    judged: Counter[str] = Counter()

    def worse_than_it_was_merged(query: str, _model: Any) -> float:
        judged[query] += 1
        return 0.5 if judged[query] > 1 else 1.0

    bench.ratio = worse_than_it_was_merged  # type: ignore[method-assign]
    checkpoint = Checkpoint(tmp_path / "work", {}, False)
    required, bounds = dict.fromkeys(bench.queries, 0.95), Bounds(bench.work)
    after = beyond(bench, merged, replace(RECIPE, epochs=1), required, checkpoint, bounds)
    assert after.plan == merged.plan
    assert all(torch.equal(after.states[q][n], merged.states[q][n]) for q in bench.queries for n in merged.states[q])
    tries = [row for row in checkpoint.log if "accepted" in row]
    assert tries and all(row["in_the_way"] == list(row["ratios"]) and not row["accepted"] for row in tries)
    sizes = [len(row["candidates"]) for row in tries if row["beyond"] == INSIDE and len(row["ratios"]) > 1]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 1
    alone = [row["candidates"][0] for row in tries if row["beyond"] == LOW_RANK and len(row["candidates"]) == 1]
    ranks: dict[str, list[int]] = {}
    for one in alone:
        ranks.setdefault(str(one["layers"]), []).append(one["rank"])
    assert max(map(len, ranks.values())) > 1 and all(found == sorted(set(found)) for found in ranks.values())


def test_a_query_that_was_merged_with_less_than_required_keeps_half_of_the_margin(
    bench: Workbench, merged: Merged, tmp_path: Path
) -> None:
    least = (bench.queries["q1"].accuracy_target + 0.95) / 2
    for reached, afterwards, accepted in ((0.94, least, True), (0.94, least - 0.01, False), (0.6, 0.6, True)):
        ratios = itertools.chain([reached], itertools.repeat(afterwards))
        bench.ratio = lambda query, model, ratios=ratios: next(ratios) if query == "q1" else 1.0
        checkpoint = Checkpoint(tmp_path / f"{afterwards}", {}, False)
        required = dict.fromkeys(bench.queries, 0.95)
        beyond(bench, merged, replace(RECIPE, epochs=1), required, checkpoint, Bounds(bench.work))
        tries = [row for row in checkpoint.log if "accepted" in row and "q1" in row["ratios"]]
        assert tries and any(row["accepted"] for row in tries) == accepted


def test_weights_that_one_query_has_for_itself_come_first_and_what_is_shared_stands_still(
    bench: Workbench, merged: Merged, tmp_path: Path
) -> None:
    judged: list[str] = []

    def met_once_trained(query: str, _model: Any) -> float:
        judged.append(query)
        return 0.94 if len(judged) == 1 else 1.0

    bench.ratio = met_once_trained  # type: ignore[method-assign]
    search = _search(bench, tmp_path / "work", 0.95)
    queue = [Candidate.from_plain(ladder[0]) for ladder in search._queue(LOW_RANK, merged)]
    alone = [candidate for candidate in queue if candidate.alone]
    assert alone and queue[: len(alone)] == alone != queue
    found = search._try(merged, alone)
    assert found["accepted"] and found["epochs"] == 1 and set(judged) == set(found["ratios"]) == {"q0"}
    after = Merged.from_plain(found["merged"])
    for query, path in (member for members in merged.plan.shared for member in members):
        assert torch.equal(after.states[query][f"{path}.weight"], merged.states[query][f"{path}.weight"])


def test_in_a_try_those_who_have_what_is_required_make_room_for_the_others(
    bench: Workbench, merged: Merged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eased: list[set[str]] = []
    training = bench.training

    def noted(models: Any, recipe: Recipe, names: Any) -> Any:
        eased.append(set(names))
        return training(models, recipe, names)

    monkeypatch.setattr(bench, "training", noted)
    bench.ratio = lambda query, model: {"q0": 0.96, "q1": 0.8}[query]
    search = _search(bench, tmp_path / "work", 0.95)
    shared = next(ladder for ladder in low_rank(bench.layers, bench.originals, merged.plan, 0) if not ladder[0].alone)
    search._try(merged, shared[:1])
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

    def private(_: Any, at: Merged, plan: SharingPlan, query: str, recipe: Recipe, required: float, *__: Any) -> Any:
        assert plan == at.plan != merged.plan and required == 0.95 and recipe.epochs == 1
        alone.append(query)
        return {"state": {**at.states[query], "mended": torch.ones(1)}, "ratio": lifted, "epochs": 1, "carried": {}}

    monkeypatch.setattr(beyond_module, "train_private", private)
    bench.ratio = lambda query, model: fallen[query]
    search = _search(bench, tmp_path / "work", 0.95)
    shared = next(ladder for ladder in low_rank(bench.layers, bench.originals, merged.plan, 0) if not ladder[0].alone)
    found = search._try(merged, shared[:1])
    assert (alone, found["accepted"]) == (tried, accepted)
    if accepted:
        states = Merged.from_plain(found["merged"]).states
        assert {query for query in states if "mended" in states[query]} == set(tried)
        assert found["ratios"] == {**fallen, **dict.fromkeys(tried, lifted)}


def test_no_try_begins_out_of_time(bench: Workbench, merged: Merged, tmp_path: Path) -> None:
    found = _search(bench, tmp_path / "work", 0.0, most_work=0.0).run(INSIDE, merged, None)
    assert SharingPlan.from_json(found["merged"]["plan"]) == merged.plan
    assert found["rows"][-1]["tries"] == 0


def test_wide_goes_past_the_ceiling_and_the_bundle_says_so(deep: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.gemel"
    report = merge(deep, out, "wide", options=EASY)
    assert report.saved_fraction > 1.2 * report.ceiling_fraction
    assert report.bytes_before == sum(map(model_bytes, deep.queries))
    assert verify_bundle(out, [FACTORY]) == []
    bundle = open_bundle(out, [FACTORY])
    assert any("low_rank" in query.model_args for query in bundle.queries)
    several = [one for one in bundle.manifest.shared if [q for q, _ in one.members].count("q0") > 1]
    weights = [one for one in several if bundle.tensor(one.tensor).ndim == 4]
    assert all(".conv1" in path for one in weights for _, path in one.members)
    rows = [json.loads(line) for line in (tmp_path / "b.gemel.log.jsonl").read_text().splitlines()]
    totals = {row["beyond"]: row for row in rows if "work_spent" in row}
    assert set(totals) == {INSIDE, LOW_RANK}
    assert bool(weights) == (totals[INSIDE]["gained_bytes"] > 0)
    kept = [row for row in rows if row.get("accepted")]
    assert kept and all(ratio >= 0.7 for row in kept for ratio in row["ratios"].values())
    gained = sum(row["gained_bytes"] for row in totals.values())
    layers = ceiling_bytes(layers_of_all(deep.queries))
    assert report.bytes_before - report.bytes_after >= gained + 0.99 * layers


def test_a_merge_past_the_ceiling_goes_on_where_it_was_interrupted(
    deep: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = merge(deep, tmp_path / "straight.gemel", "wide", options=EASY)
    tries = _Search._try

    def killed(self: _Search, merged: Merged, chunk: Any) -> Any:
        tries(self, merged, chunk)
        self.journal.write()
        raise KeyboardInterrupt

    monkeypatch.setattr(_Search, "_try", killed)
    with pytest.raises(KeyboardInterrupt):
        merge(deep, tmp_path / "resumed.gemel", "wide", options=EASY)
    monkeypatch.setattr(_Search, "_try", tries)
    resumed = merge(deep, tmp_path / "resumed.gemel", "wide", resume=True, options=EASY)
    assert (tmp_path / "resumed.gemel").read_bytes() == (tmp_path / "straight.gemel").read_bytes()
    assert resumed.work == straight.work


def test_what_goes_past_the_ceiling_is_asked_for_in_the_right_place(workload: Workload, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--beyond: .*stops at the ceiling"):
        merge(workload, tmp_path / "b.gemel", "gemel", options=OPTIONS)
    workload.queries[0].model_args["low_rank"] = {"head": 2}
    with pytest.raises(InputError, match="low_rank: an original has no factors"):
        merge(workload, tmp_path / "b.gemel", "wide", options=OPTIONS)
