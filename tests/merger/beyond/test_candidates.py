"""Candidates past the ceiling: what repeats, and what a step does to plan, weights and bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from merger.bench.merged import Merged
from merger.bench.sizes import stored_bytes
from merger.bench.workbench import Workbench
from merger.beyond.candidates import inside, steps_between, units
from merger.beyond.risk import applied, inputs_of
from models.sharing.groups import ceiling_bytes
from models.sharing.plan import SharingPlan, tie
from tests.merger.beyond.tries import ladder_of


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
    ladder = ladder_of("wide", bench, merged)
    assert [one.rank for one in ladder] == sorted({one.rank for one in ladder})
    after = applied(bench, merged, ladder[-1], inputs_of(bench, merged, ladder))
    models = bench.models(bench.queries, after.states, after.plan)
    tie(models, after.plan)
    assert models["q0"].get_parameter("wide.a.weight") is models["q1"].get_parameter("wide.a.weight")
    assert models["q0"].get_parameter("wide.b.bias") is not models["q1"].get_parameter("wide.b.bias")
    assert stored_bytes(bench, merged.plan) - stored_bytes(bench, after.plan) == ladder[-1].saved_bytes
    assert after.plan.without("q0").low_rank == {"q1": {"wide": ladder[-1].rank}}
    assert SharingPlan.from_json(json.loads(json.dumps(after.plan.to_json()))) == after.plan


def test_factors_of_a_convolution_take_its_place(bench: Workbench, merged: Merged) -> None:
    ladder = ladder_of("stem.0", bench, merged)
    after = applied(bench, merged, ladder[-1], inputs_of(bench, merged, ladder))
    models = bench.models(bench.queries, after.states, after.plan)
    tie(models, after.plan)
    assert models["q0"].get_parameter("stem.0.a.weight") is models["q1"].get_parameter("stem.0.a.weight")
    assert models["q0"].get_parameter("stem.0.b.weight").shape[1] == ladder[-1].rank
    assert stored_bytes(bench, merged.plan) - stored_bytes(bench, after.plan) == ladder[-1].saved_bytes
