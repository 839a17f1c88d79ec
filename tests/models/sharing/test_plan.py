"""Sharing plans as values, and what tying does to models."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from models.errors import InputError
from models.sharing.plan import SharingPlan, tie

A, B, C = ("a", "conv"), ("b", "conv"), ("c", "other")


def test_a_plan_survives_json() -> None:
    plan = SharingPlan(((A, B),))
    assert SharingPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("shared", [((A,),), ((A, A),), ((A, B), (B, C))])
def test_sets_of_one_with_a_layer_twice_or_overlapping_are_refused(shared) -> None:
    with pytest.raises(InputError, match="sharing plan"):
        SharingPlan(shared)


@pytest.mark.parametrize("value", [{}, {"shared": 1}, {"shared": [[["a"]]]}])
def test_malformed_json_is_refused(value) -> None:
    with pytest.raises(InputError, match="malformed"):
        SharingPlan.from_json(value)


def test_who_took_a_layer_may_give_it_and_all_of_them_are_one_set() -> None:
    assert SharingPlan().with_pairs([(A, B), (B, C)]) == SharingPlan(((A, B, C),))
    assert SharingPlan(((A, B),)).with_pairs([(B, C)]) == SharingPlan(((A, B, C),))


def test_tied_to_follows_chains() -> None:
    plan = SharingPlan(((A, B), (("b", "x"), ("c", "x")), (("d", "y"), ("e", "y"))))
    assert plan.tied_to(["a"]) == {"a", "b", "c"}
    assert plan.tied_to(["d"]) == {"d", "e"}
    assert plan.tied_to(["z"]) == {"z"}


def _models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {query: _name_conv(nn.Conv2d(2, 2, 1)) for query in "ab"}


def _name_conv(layer: nn.Module) -> nn.Module:
    holder = nn.Module()
    holder.add_module("conv", layer)
    return holder


def test_tied_layers_use_one_parameter_and_private_biases() -> None:
    models = _models()
    tie(models, SharingPlan(((A, B),)))
    first, second = (models[query].get_submodule("conv") for query in "ab")
    assert first.weight is second.weight
    assert first.bias is not second.bias


def test_unequal_shapes_are_refused() -> None:
    models = _models()
    models["b"] = _name_conv(nn.Conv2d(2, 3, 1))
    with pytest.raises(InputError, match="another shape"):
        tie(models, SharingPlan(((A, B),)))


def test_layers_of_one_model_share_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1))
    tie({"a": model}, SharingPlan(((("a", "0"), ("a", "2")),)))
    assert model.get_parameter("0.weight") is model.get_parameter("2.weight")
