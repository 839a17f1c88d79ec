"""When another way of deciding is tried: how soon, how often, and after what has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import CLOCK_SLACK_S, QuerySpec

# The first trial waits until every query should have been heard of once, between these.
SETTLE_S, SETTLE_MOST_S = 1.0, 10.0
# Decisions of a trial that are played beside every real one.
STEPS = 8
# From a trial that failed to the next, twice as long each time, up to a limit; so many times as long where what was
# tried passed and then broke the promise. From one that passed to the next, if costs have changed, as those of short
# runs always do.
AGAIN_S, AGAIN_MOST_S, BROKEN_TIMES = 20.0, 300.0, 3
# How far ahead of the present what is tried is to begin, so that as a rule the trial is over by then; and how long it
# is rehearsed from there.
LEAD_S, HORIZON_S = 5.0, 10.0
# A change of a run time or of the rate of copying by this share calls for another trial.
DRIFT_SHARE = 0.25


def first_trial(now: float, demands: Mapping[str, QuerySpec]) -> float:
    """When the first trial is due on a box that begins now."""
    longest_s = max(1 / demand.fps for demand in demands.values())
    return now + min(SETTLE_MOST_S, max(SETTLE_S, longest_s))


class Rehearsed(Protocol):
    """What is played a few decisions at a time, from the moment on, `begins`, at which it would begin."""

    begins: float

    def passed(self, steps: int) -> bool | None:
        """Whether it passed, once that is known."""
        ...


def verdict(trial: Rehearsed, steps: int, now: float) -> bool | None:
    """Whether what is tried begins now, or has failed; None where that is not known yet, or its time has not come."""
    passed = trial.passed(steps)
    return None if passed and now < trial.begins - CLOCK_SLACK_S else passed


def longer(wait_s: float) -> float:
    """How long to wait for the trial after the next, where the next comes after `wait_s`."""
    return min(AGAIN_MOST_S, 2 * wait_s)


def changed(before: Costs, now: Costs) -> bool:
    """Whether runs or copies take so much longer, or less long, that a trial says nothing any more."""
    pairs = [(before.copy_bytes_per_s, now.copy_bytes_per_s)]
    pairs += [(cost.run_s, now.queries[query].run_s) for query, cost in before.queries.items()]
    return any(abs(new - old) > DRIFT_SHARE * old for old, new in pairs)
