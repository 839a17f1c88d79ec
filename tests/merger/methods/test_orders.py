"""The paper's other orders run the same search over another queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import merger.methods.orders as orders_module
from merger import METHODS, merge
from merger.core.attempt import extended
from merger.core.context import MergeContext
from merger.methods.orders import one_by_one
from merger.methods.paper import _to_try, worthwhile
from models.sharing.groups import Group
from models.sharing.plan import SharingPlan
from models.workload import Workload
from tests.merger.options import QUICK

A, B, C = ("a", "conv"), ("b", "conv"), ("c", "conv")


@pytest.fixture
def queues(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Group]]:
    """The queue that each order hands to the search."""
    ctx, taken = MergeContext(workload), {}

    def note(ctx: MergeContext, options: Any, checkpoint: Any, queue: list[Group]) -> str:
        return taken.setdefault(name, queue)

    monkeypatch.setattr(orders_module, "search", note)
    for name in ("earliest", "latest", "random", "one-model"):
        METHODS[name](ctx, QUICK, None)  # type: ignore[arg-type]
    return taken | {"gemel": worthwhile(ctx, QUICK)}


def _first_paths(queue: list[Group]) -> list[str]:
    return [group.members[0][1] for group in queue]


def test_orders_go_by_the_place_in_the_network(queues: dict[str, list[Group]]) -> None:
    assert _first_paths(queues["gemel"]) == ["last.0", "body.0", "stem.0"]
    assert _first_paths(queues["earliest"]) == ["stem.0", "body.0", "last.0"]
    assert _first_paths(queues["latest"]) == ["last.0", "body.0", "stem.0"]


def test_every_order_tries_the_same_groups(queues: dict[str, list[Group]]) -> None:
    groups = {group.members for group in queues["gemel"]}
    assert all({group.members for group in queues[name]} == groups for name in ("earliest", "latest", "random"))
    assert {group.members for group in queues["one-model"] if len(group.members) == 3} == groups


def test_one_model_joins_after_the_other() -> None:
    queue = [Group("x", (C, A, B), 10), Group("y", (("b", "fc"), ("c", "fc")), 5)]
    joined = one_by_one(queue, ["a", "b", "c"])
    assert [group.members for group in joined] == [(A, B), (A, B, C), (("b", "fc"), ("c", "fc"))]


def test_a_set_that_was_accepted_is_extended_by_the_model_that_joins() -> None:
    group = Group("x", (A, B, C), 10)
    assert _to_try(SharingPlan(((A, B),)), group) == ((A, B, C), True)
    assert _to_try(SharingPlan(), group) == ((A, B, C), False)
    assert _to_try(SharingPlan(((A, C),)), Group("x", (A, B, C, ("d", "conv")), 10)) == ((A, C, ("d", "conv")), True)


def test_a_larger_set_takes_the_place_of_the_one_within_it() -> None:
    plan = SharingPlan(((A, B), (("a", "fc"), ("b", "fc"))))
    assert extended(plan, (A, B, C)).shared == ((("a", "fc"), ("b", "fc")), (A, B, C))
    assert extended(plan, (A, B, C), (A, C)).shared == ((("a", "fc"), ("b", "fc")), (A, C))


@pytest.mark.parametrize("method", ["earliest", "random", "one-model"])
def test_other_orders_save_bytes_and_keep_targets_too(workload: Workload, tmp_path: Path, method: str) -> None:
    report = merge(workload, tmp_path / "b.safetensors", method, options=QUICK)
    assert report.method == method and report.saved_fraction > 0
    assert all(query.ratio >= 0.9 for query in report.queries)
