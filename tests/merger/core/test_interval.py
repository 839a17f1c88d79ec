"""What is required on val: a margin, or the lower end of an interval, which is wide where val is small."""

from __future__ import annotations

import pytest

from merger import MergeOptions
from merger.core.context import MergeContext


def test_without_a_margin_the_target_is_required_of_the_lower_end(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ctx.queries["q0"].accuracy_target
    assert MergeOptions().required(ctx)["q0"] == target < MergeOptions(margin=0.5).required(ctx)["q0"]
    model, wrong = ctx.models(["q0"])["q0"], ctx.references["q0"].tallies.copy()
    wrong[:3, 0, 0] -= 1
    monkeypatch.setattr("merger.core.context.tallies_by_unit", lambda *_: wrong)
    plain = ctx.ratio("q0", model)
    ctx.interval = True
    assert ctx.ratio("q0", model) < plain < 1


def test_one_error_more_is_not_held_against_a_model(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = ctx.references["q0"]
    wrong = reference.tallies.copy()
    wrong[0, 0, 0] -= 1
    monkeypatch.setattr("merger.core.context.tallies_by_unit", lambda *_: wrong)
    ctx.interval = True
    assert ctx.ratio("q0", ctx.models(["q0"])["q0"]) >= 1 - reference.one_error
    wrong[0, 0, 0] -= 1
    assert ctx.ratio("q0", ctx.models(["q0"])["q0"]) < 1 - 2 * reference.one_error
