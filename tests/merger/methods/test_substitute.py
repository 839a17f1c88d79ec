"""One query's network answers for others: unchanged, recalibrated, or with norms and head of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from gemel.bundle_summary import MergeOutcomes, summarize_bundle
from gemel.evaluation import open_matching_bundle, query_as_shipped
from merger import TopDownConfig, merge
from merger.context import MergeContext, Merged
from merger.events import Answer
from merger.init.average import kin_pairs
from merger.init.start import Start
from merger.methods import top_down, trunk
from merger.methods.joint_training import TRAINING, JointState, Untrained
from merger.methods.registry import MergeTask
from merger.methods.substitute import (
    NetworkAttempt,
    Networks,
    find_networks,
    network_plan,
    queries_by_task,
    receivers_of,
)
from merger.methods.top_down import TRAINING_FAR_TRUNK, Identical, is_nearer, join_parts, merge_different, trunk_tasks
from merger.methods.trunk import find_trunks, possible_bytes, train_trunks
from merger.networks import adapt_state, answered_by, outputs_of
from merger.training.recipe import Recipe
from models.bundle import open_bundle, verify_bundle
from models.notes import collect_notes
from models.sharing.plan import SharingPlan
from models.weights import save_weights
from models.workload import Workload, load_workload
from models.zoo import ENTRIES, build_query, names
from tests.merger.guarantees import FACTORIES, ratios_on_val
from tests.merger.options import QUICK


def _change(workload: Workload, **keys) -> Workload:
    document = yaml.safe_load(workload.path.read_text())
    document["queries"][1].update(keys)
    workload.path.write_text(yaml.safe_dump(document))
    return load_workload(workload.path)


def test_outputs_are_matched_by_name_then_by_place(workload: Workload) -> None:
    query, donor = workload.queries[0], workload.queries[1]
    assert outputs_of(query, replace(donor, classes=("west", "north", "east"))) == [2, 0]
    assert outputs_of(query, donor) == [0, 1]
    assert outputs_of(query, replace(donor, classes=("west", "up"))) is None
    assert outputs_of(replace(query, task="detection"), replace(donor, classes=("west", "east"))) is None


def test_adapted_head_has_the_outputs_of_the_query(ctx: MergeContext) -> None:
    query, donor = ctx.queries["q0"], replace(ctx.queries["q2"], classes=("west", "east"))
    state = ctx.originals["q2"].state_dict()
    found = adapt_state(answered_by(query, donor), donor, ctx.originals["q0"].state_dict(), state)
    assert torch.equal(found["head.weight"], state["head.weight"].flip(0))
    assert torch.equal(found["stem.0.weight"], state["stem.0.weight"])


@pytest.mark.parametrize(
    "name", ["fastestdet", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in names())]
)
def test_network_is_adapted_to_other_classes_norms_behind_heads_too(workload: Workload, name: str) -> None:
    keys = {"task": ENTRIES[name].task, "model": name, "model_args": {}, "input_size": ENTRIES[name].input_size}
    donor = replace(workload.queries[0], classes=("a", "b"), **keys)
    query = replace(donor, id="q1", classes=("c", "d", "e"))
    fresh, state = (build_query(one, "meta").state_dict() for one in (query, donor))
    found = adapt_state(query, donor, fresh, state)
    assert {key: tensor.shape for key, tensor in found.items()} == {key: one.shape for key, one in fresh.items()}
    assert any(found[key] is state[key] for key in found)


def test_substituted_query_keeps_its_question_and_takes_the_network(ctx: MergeContext) -> None:
    found = ctx.substitute({"q1": "q0"})
    assert found.queries["q1"].model_args == {"extra": False} and found.queries["q1"].classes == ("left", "right")
    assert torch.equal(
        found.bases["q1"].state_dict()["last.0.weight"], ctx.originals["q0"].state_dict()["last.0.weight"]
    )
    assert found.bases["q2"] is ctx.originals["q2"] and found.originals is ctx.originals
    assert {path for members in network_plan(found).shared for _, path in members} == {"stem.0", "body.0", "last.0"}


def test_original_of_another_size_teaches_on_its_own_frames(workload: Workload) -> None:
    path = workload.path
    document = yaml.safe_load(path.read_text())
    for query, size in zip(document["queries"], (32, 48, 32)):
        query.update(model="resnet18", model_args={}, input_size=size)
    path.write_text(yaml.safe_dump(document))
    load = load_workload(path)
    ctx = MergeContext(load)
    for query in load.queries:
        save_weights(query.weights, build_query(query).state_dict())  # type: ignore[arg-type]
    found = ctx.substitute({"q1": "q0"})
    assert found.train["q1"].frames([0]).shape[-1] == 32 and found.train["q1"].original.frames([0]).shape[-1] == 48
    seen = []
    ctx.originals["q1"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-1]))
    found.training(found.models(["q1"]), Recipe(epochs=1, frames_per_epoch=16, features=1.0)).epoch()
    assert set(seen) == {48}


@pytest.mark.parametrize("unchanged", [True, False])
def test_networks_serve_what_holds(task: MergeTask, monkeypatch: pytest.MonkeyPatch, unchanged: bool) -> None:
    monkeypatch.setattr(
        "merger.methods.substitute._unchanged_ratios",
        lambda task, donor, queries: dict.fromkeys(queries, 0.99 if unchanged else 0.5),
    )
    monkeypatch.setattr(
        "merger.methods.substitute._try_network",
        lambda task, donor, query: NetworkAttempt(Answer.NORMS_AND_HEAD, 0.97 if query == "q1" else 0.9),
    )
    found = find_networks(task)
    assert found.donors == ({"q1": "q0", "q2": "q0"} if unchanged else {"q1": "q0"})


def test_network_that_costs_more_computation_serves_nobody(task: MergeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "merger.methods.substitute._unchanged_ratios", lambda task, donor, queries: dict.fromkeys(queries, 0.99)
    )
    queries = {name: replace(query, keep_architecture=name != "q0") for name, query in task.ctx.queries.items()}
    task.ctx.queries = {**queries, "q0": replace(queries["q0"], fps=50.0)}
    task.ctx.judged = ["q0", "q1"]
    assert find_networks(task) == Networks()


def test_substitute_merge_names_the_network_in_the_bundle(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", "substitute", options=QUICK)
    served = {query.id: query.network for query in report.queries if query.network}
    assert served and report.flops_after <= report.flops_before and report.bytes_after < report.bytes_before
    assert not verify_bundle(tmp_path / "b.safetensors", FACTORIES)
    bundle = open_matching_bundle(tmp_path / "b.safetensors", workload)
    for query, donor in served.items():
        assert bundle.query(query).model_args == workload.query(donor).model_args
        assert query_as_shipped(workload.query(query), bundle).model_args == workload.query(donor).model_args
    text = summarize_bundle(bundle).to_text()
    assert "answers for" in text.splitlines()[0]


def test_query_that_keeps_its_architecture_is_answered_by_its_own(workload: Workload, tmp_path: Path) -> None:
    load = _change(workload, keep_architecture=True)
    report = merge(load, tmp_path / "b.safetensors", "substitute", options=QUICK)
    assert report.queries[1].network is None


def test_trunk_serves_all_and_saves_more_than_their_layers(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", "trunk", options=QUICK)
    donors = {query.network for query in report.queries}
    assert len(donors - {None}) == 1 and report.saved_fraction > report.ceiling_fraction
    assert min(ratios_on_val(workload, tmp_path / "b.safetensors").values()) >= 0.95


def test_top_down_takes_the_smaller_of_networks_and_layers(workload: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    report = merge(workload, out, options=replace(QUICK, top_down=TopDownConfig()))
    assert report.saved_fraction > report.ceiling_fraction and report.flops_after <= report.flops_before
    assert all(query.ratio >= 0.9 for query in report.queries)
    assert MergeOutcomes.of(open_bundle(out, FACTORIES)).note == ""


def test_queries_that_a_trunk_cannot_serve_keep_their_networks(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratio = MergeContext.ratio
    monkeypatch.setattr(
        MergeContext, "ratio",
        lambda self, query, model, **_: 0.1 if query in self.networks else ratio(self, query, model),
    )  # fmt: skip
    report = merge(workload, tmp_path / "b.safetensors", "trunk", options=QUICK)
    assert not any(query.network for query in report.queries) and report.saved_fraction < 0.01


@pytest.mark.parametrize(
    ("trunk", "layers", "is_first"), [(0.9, 0.8, True), (0.6, 0.5, True), (0.6, 0.6, False), (0.9, 0.95, False)]
)
def test_trunk_comes_first_if_it_starts_nearer_than_layers(trunk: float, layers: float, is_first: bool) -> None:
    nothing = Merged(SharingPlan(), {})
    untrained = JointState(nothing, {"one": trunk, "other": trunk}, nothing), False
    shared_layers = JointState(nothing, {"one": layers, "of another task": 0.0}, nothing), False
    required = {"one": 0.95, "other": 0.95, "of another task": 0.95}
    assert is_nearer(untrained, shared_layers, required) == is_first
    assert is_nearer(untrained, None, required)


@pytest.mark.parametrize("kin", [frozenset[tuple[str, str]](), frozenset({("q0", "q1"), ("q1", "q0")})])
def test_trunk_is_tried_where_it_could_save_more_than_the_layers_of_its_queries(
    task: MergeTask, kin: frozenset[tuple[str, str]]
) -> None:
    task = replace(task, kin=kin)
    possible = sum(possible_bytes(task).values())
    assert trunk_tasks(task, Networks()) == (["classification"], possible)
    assert possible > task.saved_bytes(task.plan)
    (one,) = find_trunks(task, Networks(), queries_by_task(task.ctx))
    assert {one.donor, *one.receivers} == {"q0", "q1", "q2"}
    task.ctx.judged = [query for query, one in task.ctx.queries.items() if one.model_args == {"extra": False}]
    others = [query for query in task.ctx.queries if query not in task.ctx.judged]
    task = replace(task, plan=task.plan.without(*others))
    assert len(task.ctx.judged) > 1 and trunk_tasks(task, Networks()) == ([], 0)


def test_networks_of_near_tasks_stay_beside_those_of_far_ones(task: MergeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    near = Merged(
        SharingPlan(((("other", "a"), ("another", "a")),)), {"other": {}, "another": {}}, {"other": "another"}
    )
    monkeypatch.setattr(MergeContext, "ratio", lambda self, query, model, **_: 0.99)
    found = train_trunks(find_trunks(task, Networks(), queries_by_task(task.ctx)), task.budget, near)
    assert near.plan.shared[0] in found.plan.shared and len(found.plan.shared) > 1
    assert found.states.keys() > near.states.keys() and found.networks.keys() > near.networks.keys()


def test_trunk_that_starts_far_off_is_trained_after_the_layers(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_down, "is_nearer", lambda *_: False)
    stages: list[str] = []
    report = merge(
        workload, tmp_path / "b.safetensors", options=replace(QUICK, top_down=TopDownConfig(substitute=False)),
        progress=lambda event, **fields: stages.append(fields["name"]) if event == "stage" else None,
    )  # fmt: skip
    assert stages.index(TRAINING) < stages.index(TRAINING_FAR_TRUNK)
    assert report.saved_fraction > report.ceiling_fraction and all(query.ratio >= 0.9 for query in report.queries)


def test_far_trunk_that_the_budget_leaves_out_is_named(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share_layers(task: MergeTask, *_: object) -> Merged:
        task.ctx.flops.add_flops(10**13)
        return Merged(SharingPlan(), {})

    monkeypatch.setattr(top_down, "is_nearer", lambda *_: False)
    monkeypatch.setattr(top_down, "merge_different", share_layers)
    options = replace(QUICK, top_down=TopDownConfig(substitute=False), max_flops=1e13)
    with collect_notes() as notes:
        merge(workload, tmp_path / "b.safetensors", options=options)
    assert any(TRAINING_FAR_TRUNK in note for note in notes)


def test_kin_of_one_network_are_not_answered_by_each_other(ctx: MergeContext, task: MergeTask) -> None:
    states = {query: dict(ctx.originals[query].state_dict()) for query in ("q0", "q2")}
    assert not kin_pairs(ctx.layers, states, 0.2)
    states["q2"] = {**states["q2"], **{key: tensor for key, tensor in states["q0"].items() if "head" not in key}}
    assert kin_pairs(ctx.layers, states, 0.2) == {("q0", "q2"), ("q2", "q0")}
    related = replace(task, kin=frozenset({("q0", "q2"), ("q2", "q0")}))
    assert "q2" not in receivers_of(related, "q0", ["q0", "q1", "q2"], Networks())


def test_queries_that_a_trunk_does_not_serve_share_their_layers(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = yaml.safe_load(workload.path.read_text())
    document["queries"].append({**document["queries"][1], "id": "q3"})
    workload.path.write_text(yaml.safe_dump(document))
    trained: list[set[str]] = []

    def share_layers(task: MergeTask, start: Start, untrained: Untrained) -> Merged:
        trained.append(task.plan.queries())
        return merge_different(task, start, untrained) if len(trained) == 1 else Merged(SharingPlan(), {})

    ratio = MergeContext.ratio
    monkeypatch.setattr(
        MergeContext, "ratio",
        lambda self, query, model, **_: 0.1 if query in ("q1", "q3") and self.networks else ratio(self, query, model),
    )  # fmt: skip
    monkeypatch.setattr(top_down, "is_nearer", lambda *_: True)
    monkeypatch.setattr(top_down, "merge_different", share_layers)
    options = replace(QUICK, top_down=TopDownConfig(substitute=False, share_identical=False))
    report = merge(load_workload(workload.path), tmp_path / "b.safetensors", options=options)
    assert trained == [{"q1", "q3"}, {"q0", "q1", "q2", "q3"}]
    assert {query.id: query.network for query in report.queries if query.network} in ({"q2": "q0"}, {"q0": "q2"})
    records = open_bundle(report.bundle, FACTORIES).manifest.queries
    weight = {record.id: record.tensors["last.0.weight"] for record in records}
    assert weight["q0"] == weight["q2"] != weight["q1"] == weight["q3"]


def test_layers_trained_with_all_leave_out_what_a_trunk_serves(ctx: MergeContext, untrained_merge: Merged) -> None:
    states = {query: dict(untrained_merge.states[query]) for query in ("q0", "q2")}
    trunk = Merged(SharingPlan(((("q0", "last.0"), ("q2", "last.0")),)), states, {"q2": "q0"})
    found = join_parts(Identical(SharingPlan(), frozenset()), ctx, trunk, untrained_merge)
    assert found.plan.shared == trunk.plan.shared and found.networks == trunk.networks
    assert found.states["q0"] is states["q0"]
    original = ctx.originals["q1"].state_dict()
    assert all(torch.equal(tensor, original[key]) for key, tensor in found.states["q1"].items())


def test_settled_queries_count_where_a_trunk_is_weighed_against_layers(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = yaml.safe_load(workload.path.read_text())
    document["queries"] = [document["queries"][0], {**document["queries"][0], "id": "q2"}]
    workload.path.write_text(yaml.safe_dump(document))
    found = []

    def weigh(layers: MergeTask, known: Networks) -> tuple[list[str], int]:
        found.append((layers.plan.queries(), trunk_tasks(layers, known)))
        return found[-1][1]

    monkeypatch.setattr(top_down, "trunk_tasks", weigh)
    options = replace(QUICK, top_down=TopDownConfig(substitute=False))
    merge(load_workload(workload.path), tmp_path / "b.safetensors", options=options)
    assert found == [({"q0", "q2"}, ([], 0))]


@pytest.mark.parametrize("payer_holds", [True, False])
def test_trunk_without_the_query_that_pays_for_another_does_not_serve_that(
    task: MergeTask, monkeypatch: pytest.MonkeyPatch, payer_holds: bool
) -> None:
    extra = {"q0": 1.0, "q1": -5.0, "q2": 3.0}
    monkeypatch.setattr("merger.methods.substitute._extra_flops", lambda ctx, query, donor: extra[query])
    (one,) = find_trunks(task, Networks(), ["classification"])
    queries = sorted({one.donor, *one.receivers} - (set() if payer_holds else {"q1"}))
    plan = SharingPlan((tuple((query, "last.0") for query in queries),))
    monkeypatch.setattr(trunk, "train_together", lambda *_: Merged(plan, {query: {} for query in queries}))
    found = train_trunks([one], task.budget)
    assert found.networks == (dict.fromkeys(one.receivers, one.donor) if payer_holds else {})
    assert found.plan.queries() == ({"q0", "q1", "q2"} if payer_holds else set())
