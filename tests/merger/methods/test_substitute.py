"""One query's network answers for others: unchanged, recalibrated, or with norms and head of its own."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from gemel.bundle_summary import MergeOutcomes, summarize_bundle
from gemel.evaluation import open_matching_bundle, query_as_shipped
from gemel.merger import TopDownConfig, merge
from gemel.merger.context import MergeContext
from gemel.merger.events import Change
from gemel.merger.init.average import kin_pairs
from gemel.merger.methods import trunk
from gemel.merger.methods.ladder import MergeCandidate
from gemel.merger.methods.registry import MergeTask
from gemel.merger.methods.substitute import NetworkAttempt, Networks, find_networks, network_plan, receivers_of
from gemel.merger.methods.trunk import network_bytes, train_network
from gemel.merger.networks import adapt_state, answered_by, can_answer, outputs_of
from gemel.merger.training.recipe import Recipe
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.files.weights import save_weights
from gemel.models.sharing.plan import SharingPlan
from gemel.models.workload import Workload, load_workload
from gemel.models.zoo import ENTRIES, build_query, names
from tests.merger.guarantees import FACTORIES, ratios_on_val
from tests.merger.options import QUICK
from tests.models.decoders.tiny_graphs import TinyClassifier, export

LAYER_STEPS = (Change.MEAN, Change.PRIVATE, Change.LAYERS, Change.HALF)
SUBSTITUTION = replace(QUICK, top_down=TopDownConfig(without=(*LAYER_STEPS, Change.TRUNK)))
TRUNK = replace(QUICK, top_down=TopDownConfig(without=(*LAYER_STEPS, Change.NETWORK, Change.NETWORK_TRAINED)))


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


def test_a_file_answers_only_for_classes_that_it_has(workload: Workload, task: MergeTask, tmp_path: Path) -> None:
    query, path = workload.queries[0], tmp_path / "kinds.onnx"
    export(path, TinyClassifier(3), names=json.dumps(["up", *query.classes]))
    donor = replace(workload.queries[1], model=str(path), model_args={}, input_size=None, decoder="auto")
    donor = replace(donor, classes=("up", *query.classes))
    assert can_answer(query, donor) and not can_answer(replace(query, classes=("a", "b")), donor)
    assert not can_answer(replace(query, classes=("a", "b", "c")), donor)
    ctx = copy.copy(task.ctx)
    ctx.queries = {**ctx.queries, "q1": donor, "q0": replace(query, classes=("a", "b"))}
    assert "q0" not in receivers_of(replace(task, ctx=ctx), "q1", ["q0", "q1"], Networks())


def test_adapted_head_has_the_outputs_of_the_query(ctx: MergeContext) -> None:
    query, donor = ctx.queries["q0"], replace(ctx.queries["q2"], classes=("west", "east"))
    state = ctx.originals["q2"].state_dict()
    found = adapt_state(answered_by(query, donor), donor, ctx.originals["q0"].state_dict(), state)
    assert torch.equal(found["head.weight"], state["head.weight"].flip(0))
    assert torch.equal(found["stem.0.weight"], state["stem.0.weight"])


@pytest.mark.parametrize(
    "name", ["ssdlite320_mobilenet_v3_large", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in names())]
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
        "gemel.merger.methods.substitute._unchanged_ratios",
        lambda task, donor, queries: dict.fromkeys(queries, 0.99 if unchanged else 0.5),
    )
    monkeypatch.setattr(
        "gemel.merger.methods.substitute._try_network",
        lambda task, donor, query: NetworkAttempt(0.97 if query == "q1" else 0.9, {}),
    )
    found = find_networks(task, Networks(), True)
    assert found.donors == ({"q1": "q0", "q2": "q0"} if unchanged else {"q1": "q0"})


def test_network_that_costs_more_computation_serves_nobody(task: MergeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gemel.merger.methods.substitute._unchanged_ratios", lambda task, donor, queries: dict.fromkeys(queries, 0.99)
    )
    queries = {name: replace(query, keep_architecture=name != "q0") for name, query in task.ctx.queries.items()}
    task.ctx.queries = {**queries, "q0": replace(queries["q0"], fps=50.0)}
    task.ctx.judged = ["q0", "q1"]
    assert find_networks(task, Networks(), True) == Networks()


def test_unchanged_network_serves_first_and_is_kept(task: MergeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gemel.merger.methods.substitute._unchanged_ratios",
        lambda task, donor, queries: {query: 0.99 if query == "q1" else 0.5 for query in queries},
    )
    first = find_networks(task, Networks(), False)
    assert first.donors == {"q1": "q0"}
    monkeypatch.setattr(
        "gemel.merger.methods.substitute._try_network",
        lambda task, donor, query: NetworkAttempt(0.99, {}),
    )
    assert find_networks(task, first, True).donors == {"q1": "q0", "q2": "q0"}
    steps = [(row["query"], row["step"], row["taken"]) for row in task.checkpoint.log if "step" in row]
    assert ("q1", Change.NETWORK.value, True) in steps and ("q2", Change.NETWORK_TRAINED.value, True) in steps


def test_substitute_merge_names_the_network_in_the_bundle(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", options=SUBSTITUTION)
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
    report = merge(load, tmp_path / "b.safetensors", options=SUBSTITUTION)
    assert report.queries[1].network is None


def test_trunk_serves_all_and_saves_more_than_their_layers(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", options=TRUNK)
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
    report = merge(workload, tmp_path / "b.safetensors", options=TRUNK)
    assert not any(query.network for query in report.queries) and report.saved_fraction < 0.01


def test_trunk_is_weighed_by_what_its_receivers_could_save(task: MergeTask) -> None:
    possible = network_bytes(task, ["q0", "q1", "q2"])
    assert possible > task.plan.saved_bytes(task.ctx.layers)
    related = replace(task, kin=frozenset({("q0", "q1"), ("q1", "q0")}))
    assert network_bytes(related, ["q0", "q1", "q2"]) == possible


def test_kin_of_one_network_are_not_answered_by_each_other(ctx: MergeContext, task: MergeTask) -> None:
    states = {query: dict(ctx.originals[query].state_dict()) for query in ("q0", "q2")}
    assert not kin_pairs(ctx.layers, states, 0.2)
    states["q2"] = {**states["q2"], **{key: tensor for key, tensor in states["q0"].items() if "head" not in key}}
    assert kin_pairs(ctx.layers, states, 0.2) == {("q0", "q2"), ("q2", "q0")}
    related = replace(task, kin=frozenset({("q0", "q2"), ("q2", "q0")}))
    assert "q2" not in receivers_of(related, "q0", ["q0", "q1", "q2"], Networks())


@pytest.mark.parametrize("payer_holds", [True, False])
def test_trunk_without_the_query_that_pays_for_another_does_not_serve_that(
    task: MergeTask, monkeypatch: pytest.MonkeyPatch, payer_holds: bool
) -> None:
    extra = {"q0": 1.0, "q1": -5.0, "q2": 3.0}
    monkeypatch.setattr("gemel.merger.methods.substitute._extra_flops", lambda ctx, query, donor: extra[query])

    def train(task: MergeTask, tied: MergeCandidate) -> tuple[MergeCandidate, MergeCandidate]:
        ratios = {**dict.fromkeys(tied.ratios, 1.0), **({} if payer_holds else {"q1": 0.1})}
        return replace(tied, ratios=ratios), MergeCandidate(SharingPlan(), {})

    monkeypatch.setattr(trunk, "train_together", train)
    served = train_network(task, ["q0", "q1", "q2"])
    assert served.plan.queries() == ({"q0", "q1", "q2"} if payer_holds else set())
    assert len(served.networks) == (2 if payer_holds else 0)
