"""What goes into the scheduler and what comes out: plain values, the same on the box and on the virtual clock.

A staleness curve holds the accuracy of a result that is 0, 1, 2... frames old, as it was measured; beyond its end it
stays as it is. Ages are in frames of the query's rate; between two of them the accuracy is interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

from gemel.edge_runtime.scheduler.costs import Costs
from gemel.edge_runtime.scheduler.order import NextUse

Curve = tuple[float, ...]
MAX_AGES = 64
"""Frames of age for which a curve says something, at most."""


def monotone_curve(measured: Sequence[float]) -> Curve:
    """A curve that never rises with age: where a measured one does, that is noise."""
    return tuple(accumulate(measured, min))


def accuracy_at(curve: Curve, frames: float) -> float:
    """The accuracy of an answer so many frames old."""
    young = min(int(frames), len(curve) - 1)
    old = min(young + 1, len(curve) - 1)
    return curve[young] + (frames - young) * (curve[old] - curve[young])


def summed_accuracy(curve: Curve, frames: float) -> float:
    """What an answer brings in all that stands for so many frames: the sum of its accuracies at each."""
    sums = _sums(curve)
    whole = min(int(frames), len(curve))
    return sums[whole] + (frames - whole) * curve[min(whole, len(curve) - 1)]


def staleness_gain(curve: Curve, frames: float) -> float:
    """How much an answer is wanted where the newest is so many frames old: what has been lost since by its age.

    This is the index of a query whose answers grow old (age of information: Kadota et al. 2018, after Whittle 1988):
    the frames times the accuracy lost by now, less what was lost in sum on the way. Where an answer is worth something
    for its own frame alone, (1, 0, 0...), it is 1 for every frame: the number of frames in time.
    """
    return summed_accuracy(curve, frames) - frames * accuracy_at(curve, frames)


def mean_accuracy(
    curve: Curve, fps: float, moments: Sequence[float], answers: Sequence[tuple[float, float]]
) -> float:  # fmt: skip
    """The mean over moments of what the newest answer that is there then is worth at its age; 0 before there is one.

    `answers` are (when it is there, when its frame was captured), in order of time, as `moments` are; both in seconds.
    """
    total, upto, newest = 0.0, 0, 0.0
    for now in moments:
        while upto < len(answers) and answers[upto][0] <= now:
            newest = max(newest, answers[upto][1]) if upto else answers[upto][1]
            upto += 1
        total += accuracy_at(curve, (now - newest) * fps) if upto else 0.0
    return total / max(1, len(moments))


@lru_cache(maxsize=1024)
def _sums(curve: Curve) -> tuple[float, ...]:
    return (0.0, *accumulate(curve))


# Times of one frame are added up in different orders; a difference this small is rounding, not lateness.
CLOCK_SLACK_S = 1e-9


@dataclass(frozen=True, slots=True)
class QuerySpec:
    """What a query asks for: frames per second, and how urgent it is: what its stale results cost against others'
    (1 is usual).

    `staleness` is the accuracy of its answers by their age (`edge_runtime.scheduler.types`), where the objective is
    accuracy over time; empty where it is frames in time.
    """

    fps: float
    urgency: float = 1.0
    staleness: Curve = ()


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """All the schedule may know.

    `waiting` holds captured_at of each query's waiting frames, oldest first; `resident` the tensors in memory and
    `resident_bytes` what they occupy. `recall` is what the policy remembers from its last decision, None at the start.
    `urgency` says what a stale result of a query costs now, where it differs from the plan's demand.
    """

    now: float
    waiting: Mapping[str, Sequence[float]]
    resident: Set[str]
    resident_bytes: int
    policy_state: Any = None
    urgency: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, in this order: drop frames, evict tensors, load tensors, run `count` frames of `query` together.

    `also` holds further (query, frames) that run in the same pass (`Costs.joint`), whose tensors `load` includes.
    `query` is None when there is nothing to do. With `count` 0 tensors of `query` are loaded ahead of its next frame.
    `drop` holds (query, captured_at, reason). The frames to run are the oldest that then wait. `wake_s` says when to
    ask again though nothing has changed by then, None for never. `recall` belongs to the next situation.
    """

    query: str | None = None
    count: int = 0
    evict: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    drop: tuple[tuple[str, float, str], ...] = ()
    wake_s: float | None = None
    policy_state: Any = None
    also: tuple[tuple[str, int], ...] = ()

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """The (query, frames) that run together."""
        return ((self.query, self.count), *self.also) if self.query is not None and self.count else ()


@dataclass(frozen=True, eq=False)
class Plan:
    """What a policy works out before the first frame: the cyclic order, and the largest batch of each query.

    `data` holds what else the policy wants to know later, `next_use` what was worked out once for all decisions.
    """

    order: tuple[str, ...]
    batches: Mapping[str, int]
    budget_bytes: int
    data: Any = None
    next_use: NextUse = field(default_factory=NextUse, repr=False)


@runtime_checkable
class Policy(Protocol):
    """One way to schedule. Pure: no clock, no threads, no device; the same input gives the same output."""

    @property
    def name(self) -> str: ...

    def view(self, costs: Costs) -> Costs:
        """The costs as this policy sees them: which tensors count as shared."""
        ...

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        """Everything that can be settled beforehand. `costs` are those of `view`."""
        ...

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        """The next step; asked where a frame waits.

        Afterwards resident footprints + the workspace of `query` are within the budget.
        """
        ...
