"""What is equal before a merge: which sets, who shares nothing else, and what could be saved of copies."""

from __future__ import annotations

import torch
from torch import Tensor

from models.sharing.plan import SharingPlan
from models.sharing.similarity import add_identical, copies, identical_sets, queries_identical

PLAN = SharingPlan(((("a", "x"), ("b", "x"), ("c", "x")), (("a", "y"), ("b", "y")), (("d", "z"), ("e", "z"))))


def states(**numbers: dict[str, float]) -> dict[str, dict[str, Tensor]]:
    return {
        query: {f"{path}.weight": torch.full((2, 2), value) for path, value in own.items()}
        for query, own in numbers.items()
    }


ALL = states(a={"x": 1, "y": 3}, b={"x": 1, "y": 3}, c={"x": 2}, d={"z": 5}, e={"z": 5})


def test_a_set_is_split_into_those_that_are_equal() -> None:
    equal = identical_sets(PLAN, ALL)
    assert equal.shared == ((("a", "x"), ("b", "x")), (("a", "y"), ("b", "y")), (("d", "z"), ("e", "z")))
    assert not identical_sets(
        PLAN, states(a={"x": 1, "y": 1}, b={"x": 2, "y": 2}, c={"x": 3}, d={"z": 1}, e={"z": 2})
    ).shared


def test_settled_is_who_shares_nothing_that_differs_not_even_through_others() -> None:
    assert queries_identical(PLAN, identical_sets(PLAN, ALL)) == {"d", "e"}, (
        "b has its y from a, and both have x with c"
    )
    assert queries_identical(SharingPlan(), SharingPlan()) == set()


def test_equal_weights_of_those_who_are_in_no_set_are_tied_too() -> None:
    found = add_identical(SharingPlan(), identical_sets(PLAN, ALL), {"a", "d", "e"})
    assert found.shared == ((("d", "z"), ("e", "z")),), "a has nobody left to be equal to"


def test_a_copy_is_a_model_that_is_another_tensor_by_tensor() -> None:
    one, other = torch.ones(2), torch.zeros(1)
    models = {"one": (one, other), "two": (one, one), "three": (one, other), "four": (other, one), "five": (one, other)}
    found = copies({query: {"w": w.clone(), "n": n.clone()} for query, (w, n) in models.items()} | {"six": {"w": one}})
    assert found == {"three": "one", "five": "one"}
