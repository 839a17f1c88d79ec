"""Time counts once for a whole merge, and what follows the search is reserved from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gemel.merger.budget import Budget, reserve_end
from gemel.merger.checkpoint import Checkpoint
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext
from tests.merger.options import QUICK

MINUTE = replace(QUICK, max_minutes=1.0)


@pytest.mark.parametrize(("passed_s", "over"), [(30.0, False), (90.0, True)])
def test_budget_of_a_later_stage_has_what_earlier_ones_left(
    ctx: MergeContext, tmp_path: Path, passed_s: float, over: bool
) -> None:
    checkpoint = Checkpoint(tmp_path / "work", {}, False)
    checkpoint._opened -= passed_s
    assert Budget.of(ctx, MINUTE, checkpoint).over == over
    assert not Budget.of(ctx, QUICK, checkpoint).over


def test_reserved_end_is_as_long_as_the_originals_took_for_its_frames(ctx: MergeContext) -> None:
    ctx.evaluating_s = 6.0
    left = [reserve_end(ctx, replace(MINUTE, weights=bits)).max_minutes for bits in ("fp32", "int8")]
    assert left[0] is not None and left[1] == left[0] < 1.0  # only what is proven is tried step by step
    ctx.proves = True
    proving = [reserve_end(ctx, replace(MINUTE, weights=bits)).max_minutes for bits in ("fp32", "int8")]
    assert proving[0] is not None and proving[1] is not None and proving[1] < proving[0] < left[0]
    assert reserve_end(ctx, MergeOptions()) == MergeOptions()
