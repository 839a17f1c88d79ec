"""The originals' box: what time-sharing makes of the same frames in the same memory where nothing is shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_runtime.policies.against.virtual import Answer, VirtualBox
from edge_runtime.policies.time_sharing import TimeSharingPolicy
from edge_runtime.scheduler.costs import Costs, stored_name
from edge_runtime.scheduler.types import Decision, Plan, QuerySpec, SchedulerState

TIME_SHARING = TimeSharingPolicy()


class Pace:
    """How time-sharing decides for the originals; their costs are worked out anew only where these are others."""

    def __init__(self, costs: Costs, demands: Mapping[str, QuerySpec], budget_bytes: int) -> None:
        self._shared, self._apart, self.demands = costs, TIME_SHARING.view(costs), demands
        self._plan: Plan = TIME_SHARING.plan(self._apart, demands, budget_bytes)

    def apart(self, costs: Costs) -> Costs:
        """The costs with nothing shared."""
        if costs is not self._shared:
            if costs.tensor_bytes is self._shared.tensor_bytes:
                self._apart = self._apart.timed_as(costs)
            else:
                self._apart = TIME_SHARING.view(costs)
            self._shared = costs
        return self._apart

    def decide(self, state: SchedulerState) -> Decision:
        """The next step of the originals' box."""
        return TIME_SHARING.decide(state, self._apart, self._plan)


@dataclass(frozen=True, slots=True)
class Originals:
    """The originals' box as far as its clock has come, and of each query the newest frame that it was told of.

    The box is never changed: time goes on in a copy. What it has begun counts as done at its end, `box.now`.
    """

    box: VirtualBox
    newest: Mapping[str, float] = field(default_factory=dict)

    def until(self, now: float, waiting: Mapping[str, Sequence[float]], costs: Costs, pace: Pace) -> Originals:
        """The box at this moment, its decision included if it is to take one now."""
        box, apart = self.box.copied(), pace.apart(costs)
        newest = box.told(waiting, self.newest, pace.demands)
        took_turn = True

        def decide(there: SchedulerState) -> Decision:
            nonlocal took_turn
            decision = pace.decide(there)
            took_turn = decision.query is not None
            return decision

        while box.now < now:
            box.step(now, apart, decide)
        while box.now <= now and took_turn:
            took_turn = False
            box.step(now, apart, decide)
        return Originals(box, newest)

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Each query's newest answer, what is being run included: which frame's, and when it is or was there."""
        return self.box.answers

    @property
    def loaded(self) -> str | None:
        """The query that had the last turn."""
        return (
            self.box.policy_state.recent[0]
            if self.box.policy_state is not None and self.box.policy_state.recent
            else None
        )

    def held(self) -> frozenset[str]:
        """What is in memory there, by the names of what is shared."""
        return frozenset(map(stored_name, self.box.resident))
