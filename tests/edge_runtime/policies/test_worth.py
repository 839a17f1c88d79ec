"""What a newer answer is worth where accuracy over time is the objective."""

from __future__ import annotations

import pytest

from edge_runtime.policies.accuracy.worth import MIN_GAIN, wanted
from edge_runtime.scheduler import QuerySpec

QUICK = (1.0, 0.4, 0.2, 0.1)


def test_a_frame_is_wanted_the_more_the_older_the_newest_answer():
    demand = QuerySpec(10.0, staleness=QUICK)
    assert wanted(demand, 0.0, 0.1) < wanted(demand, 0.0, 0.2) < wanted(demand, None, 0.1)
    assert wanted(QuerySpec(1.0, staleness=(1.0, 1.0)), 0.0, 9.0) == MIN_GAIN, "as good as the one before"


def test_queries_count_alike_however_many_frames_they_ask_for():
    # Of either query an answer that is one second old is replaced.
    slow, quick = (QuerySpec(fps, staleness=(1.0,) + (0.5,) * 63) for fps in (2.0, 20.0))
    assert wanted(slow, 0.0, 1.0) == pytest.approx(0.5 / 2.0) and wanted(quick, 0.0, 1.0) == pytest.approx(0.5 / 20.0)
