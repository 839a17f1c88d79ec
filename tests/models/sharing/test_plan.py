"""Sharing plans, tying, and weights that are equal before any merge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gemel.models.errors import InputError
from gemel.models.sharing.plan import SharingPlan, tie
from gemel.models.sharing.similarity import add_identical, copies, identical_sets, queries_identical

A, B, C = ("a", "conv"), ("b", "conv"), ("c", "other")


@pytest.mark.parametrize("shared", [((A,),), ((A, A),), ((A, B), (B, C))])
def test_plan_with_invalid_sets_is_refused(shared) -> None:
    with pytest.raises(InputError, match="sharing plan"):
        SharingPlan(shared)


def test_with_pairs_extends_the_donors_set() -> None:
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


def test_tie_shares_weights_and_not_biases() -> None:
    models = _models()
    tie(models, SharingPlan(((A, B),)))
    first, second = (models[query].get_submodule("conv") for query in "ab")
    assert first.weight is second.weight
    assert first.bias is not second.bias


def test_tie_of_unequal_shapes_is_refused() -> None:
    models = _models()
    models["b"] = _name_conv(nn.Conv2d(2, 3, 1))
    with pytest.raises(InputError, match="another shape"):
        tie(models, SharingPlan(((A, B),)))


def test_tie_shares_layers_of_one_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1))
    tie({"a": model}, SharingPlan(((("a", "0"), ("a", "2")),)))
    assert model.get_parameter("0.weight") is model.get_parameter("2.weight")


PLAN = SharingPlan(((("a", "x"), ("b", "x"), ("c", "x")), (("a", "y"), ("b", "y")), (("d", "z"), ("e", "z"))))


def states(**numbers: dict[str, float]) -> dict[str, dict[str, Tensor]]:
    return {
        query: {f"{path}.weight": torch.full((2, 2), value) for path, value in own.items()}
        for query, own in numbers.items()
    }


ALL = states(a={"x": 1, "y": 3}, b={"x": 1, "y": 3}, c={"x": 2}, d={"z": 5}, e={"z": 5})


def test_identical_sets_splits_by_equal_weights() -> None:
    equal = identical_sets(PLAN, ALL)
    assert equal.shared == ((("a", "x"), ("b", "x")), (("a", "y"), ("b", "y")), (("d", "z"), ("e", "z")))
    assert not identical_sets(
        PLAN, states(a={"x": 1, "y": 1}, b={"x": 2, "y": 2}, c={"x": 3}, d={"z": 1}, e={"z": 2})
    ).shared


def test_queries_identical_excludes_indirect_sharing() -> None:
    assert queries_identical(PLAN, identical_sets(PLAN, ALL)) == {"d", "e"}
    assert queries_identical(SharingPlan(), SharingPlan()) == set()


def test_add_identical_ties_only_the_given_queries() -> None:
    found = add_identical(SharingPlan(), identical_sets(PLAN, ALL), {"a", "d", "e"})
    assert found.shared == ((("d", "z"), ("e", "z")),)


def test_copies_are_equal_tensor_by_tensor() -> None:
    one, other = torch.ones(2), torch.zeros(1)
    models = {"one": (one, other), "two": (one, one), "three": (one, other), "four": (other, one), "five": (one, other)}
    found = copies({query: {"w": w.clone(), "n": n.clone()} for query, (w, n) in models.items()} | {"six": {"w": one}})
    assert found == {"three": "one", "five": "one"}
