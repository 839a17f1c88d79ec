"""Repairs of several queries: the same beside each other as one after the other."""

from __future__ import annotations

import pytest

from merger.mending.several import combined
from models.sharing.plan import SharingPlan

pytestmark = pytest.mark.slow


def test_what_queries_change_of_a_plan_is_put_together() -> None:
    first, second = (("a", "x"), ("b", "x"), ("c", "x")), (("a", "y"), ("b", "y"), ("c", "y"))
    plan = SharingPlan((first, second))
    after = {"a": plan.with_private("a", ["y"]), "b": plan.with_private("b", ["x"])}
    assert set(combined(plan, after).shared) == {(first[0], first[2]), second[1:]}
    assert combined(plan, {"a": plan.without("a"), "b": plan.without("b")}).shared == ()
