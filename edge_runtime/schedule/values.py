"""What goes into a schedule and what comes out: plain values, the same on the box and on the virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.next_use import NextUse
from edge_runtime.schedule.staleness import Curve

# Times of one frame are added up in different orders; a difference this small is rounding, not lateness.
CLOCK_SLACK_S = 1e-9


@dataclass(frozen=True, slots=True)
class Demand:
    """What a query asks for: frames per second, and how urgent it is: what its stale results cost against others'
    (1 is usual).

    `staleness` is the accuracy of its answers by their age (`edge_runtime.schedule.staleness`), where the objective is
    accuracy over time; empty where it is frames in time.
    """

    fps: float
    urgency: float = 1.0
    staleness: Curve = ()


@dataclass(frozen=True, slots=True)
class Situation:
    """All the schedule may know.

    `waiting` holds captured_at of each query's waiting frames, oldest first; `resident` the tensors in memory and
    `resident_bytes` what they occupy. `recall` is what the policy remembers from its last decision, None at the start.
    `urgency` says what a stale result of a query costs now, where it differs from the plan's demand.
    """

    now: float
    waiting: Mapping[str, Sequence[float]]
    resident: Set[str]
    resident_bytes: int
    recall: Any = None
    urgency: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, in this order: drop frames, evict tensors, load tensors, run `count` frames of `turn` together.

    `turn` is None when there is nothing to do. With `count` 0 tensors of `turn` are loaded ahead of its next frame.
    `drop` holds (query, captured_at, reason). The frames to run are the oldest that then wait. `wake_s` says when to
    ask again though nothing has changed by then, None for never. `recall` belongs to the next situation.
    """

    turn: str | None = None
    count: int = 0
    evict: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    drop: tuple[tuple[str, float, str], ...] = ()
    wake_s: float | None = None
    recall: Any = None


@dataclass(frozen=True, eq=False)
class Plan:
    """What a policy works out before the first frame: the cyclic order, and the largest batch of each query.

    `detail` holds what else the policy wants to know later, `next_use` what was worked out once for all decisions.
    """

    order: tuple[str, ...]
    batches: Mapping[str, int]
    budget_bytes: int
    detail: Any = None
    next_use: NextUse = field(default_factory=NextUse, repr=False)


class Policy(Protocol):
    """One way to schedule. Pure: no clock, no threads, no device; the same input gives the same output."""

    @property
    def name(self) -> str: ...

    def view(self, costs: Costs) -> Costs:
        """The costs as this policy sees them: which tensors count as shared."""
        ...

    def plan(self, costs: Costs, demands: Mapping[str, Demand], budget_bytes: int) -> Plan:
        """Everything that can be settled beforehand. `costs` are those of `view`."""
        ...

    def decide(self, situation: Situation, costs: Costs, plan: Plan) -> Decision:
        """The next step. Afterwards resident footprints + the workspace of `turn` are within the budget."""
        ...
