"""Obliged: one decision that gives each query what its original has, no later, and what time is left to who gains most.

As in slack stealing (Lehoczky and Ramos-Thuel 1992) what must be done has a time by which it must be, and anything
else is done before it as long as that leaves it enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from edge_runtime.policies.accuracy.worth import wanted
from edge_runtime.policies.against.originals import Originals
from edge_runtime.policies.free import Dropped, hopeless
from edge_runtime.queues import REPLACED
from edge_runtime.scheduler.batches import too_late
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import CLOCK_SLACK_S, Decision, Plan, QuerySpec, SchedulerState


@dataclass(frozen=True, slots=True)
class Absent:
    """What of a query is not in memory, in load order, and the seconds to load it and to run one frame then."""

    names: tuple[str, ...]
    load_s: float
    seconds: float


class Obliged:
    """What is owed and what could run in one situation.

    `answered` holds the frame of each query's newest answer here (captured_at). A query is owed an answer where its
    original has, or is at, one to a newer frame; it is due when that one is there.
    """

    def __init__(
        self, state: SchedulerState, costs: Costs, plan: Plan, originals: Originals,
        answered: Mapping[str, float],
    ) -> None:  # fmt: skip
        self._state, self._costs, self._plan = state, costs, plan
        self._originals, self._answered = originals, answered
        self._held = originals.held()
        self._demands: Mapping[str, QuerySpec] = plan.detail.demands
        self._drop, waiting = hopeless(state, costs, plan.detail.unfit)
        replaced = [(query, one, REPLACED) for query, captured in waiting.items() for one in captured[:-1]]
        self._drop: tuple[Dropped, ...] = (*self._drop, *replaced)
        self._newest = {query: captured[-1] for query, captured in waiting.items()}
        self._known: dict[str, Absent] = {}
        self._busy = originals.box.now > state.now + CLOCK_SLACK_S

    def decision(self) -> Decision:
        """The next step, without what is to be recalled."""
        now, wake_s, due, earlier = self._state.now, math.inf, self._due(), frozenset[str]()
        until = self._free_until(due)
        for _, query in due:
            cost, absent = self._costs.queries[query], self._absent(query)
            runs = self._in_time(query)
            if runs or (absent.names and cost.run_s <= cost.sla_s):
                # Ahead of a frame nothing drives out what another waits with: both would go on for ever.
                evict = self._room(query, frozenset() if runs else earlier)
                earlier |= cost.needed
                if evict is None:
                    continue
                other = self._other(min(wake_s, until), query) if runs else None
                return other or self._step(query, int(runs), evict)
            earlier |= cost.needed
            comes = self._comes(query)
            if cost.run_s <= cost.sla_s and comes is not None and comes > now + CLOCK_SLACK_S:
                wake_s = min(wake_s, comes)  # its next frame is run at once
        ahead = self._load_as_there([query for _, query in due]) if wake_s == math.inf else None
        other = ahead or self._other(min(wake_s, until))
        if other is not None:
            return other
        wake_s = min(wake_s, self._originals.box.now if self._busy else math.inf)
        return Decision(drop=self._drop, wake_s=wake_s if wake_s < math.inf else None)

    def _free_until(self, due: Sequence[tuple[float, str]]) -> float:
        """Until when time is free: what is due can still be done, one after the other, and the originals' box begins
        nothing before.
        """
        found = self._originals.box.now if self._busy else self._next_frame()
        seconds = 0.0
        for due_s, query in due:
            seconds += self._absent(query).seconds
            found = min(found, due_s - seconds)
        return found

    def _due(self) -> list[tuple[float, str]]:
        """The queries that are owed an answer, by when it is due."""
        return sorted(
            (theirs.finishes, query)
            for query, theirs in self._originals.answers.items()
            if theirs.captured > self._mine(query)
        )

    def _mine(self, query: str) -> float:
        return self._answered.get(query, -math.inf)

    def _comes(self, query: str) -> float | None:
        """When the query's next frame is to come; None where none has come yet."""
        newest = self._originals.newest.get(query)
        return None if newest is None else newest + 1 / self._demands[query].fps

    def _absent(self, query: str) -> Absent:
        if query not in self._known:
            cost, resident = self._costs.queries[query], self._state.resident
            names = () if cost.needed <= resident else tuple(name for name in cost.tensors if name not in resident)
            load_s = self._costs.load_s(self._costs.moved_bytes(names))
            self._known[query] = Absent(names, load_s, load_s + cost.run_s)
        return self._known[query]

    def _in_time(self, query: str) -> bool:
        """Whether the query's newest frame would be in time if it were loaded and run now."""
        captured, starts_s = self._newest.get(query), self._state.now + self._absent(query).load_s
        return captured is not None and not too_late((captured,), starts_s, self._costs.queries[query], 1)

    def _next_frame(self) -> float:
        """When a frame is to come that the originals' box, idle now, may begin with."""
        coming = (self._comes(query) for query in self._originals.newest)
        return min((at for at in coming if at is not None and at > self._state.now), default=math.inf)

    def _load_as_there(self, owed: Sequence[str]) -> Decision | None:
        """What the originals' box has loaded ahead of a frame must be in memory here when that comes; what is `owed`
        and waits for a frame stays, or each would drive out the other for ever.
        """
        query = self._originals.loaded
        if query is None or not self._absent(query).names or not self._costs.queries[query].needed <= self._held:
            return None
        spared = frozenset[str]().union(*(self._costs.queries[one].needed for one in owed))
        evict = self._room(query, spared)
        return None if evict is None else self._step(query, 0, evict)

    def _other(self, until: float, owed: str | None = None) -> Decision | None:
        """The run that gains most for its time and is done by `until`.

        What the originals' box has in memory stays, since what that box will begin next is not known: brought back
        later it would take time that is not there. So does what `owed` needs, for which there is just time afterwards.
        """
        best, most = None, 0.0
        spared = self._held | (self._costs.queries[owed].needed if owed is not None else frozenset())
        for query, captured in self._newest.items():
            seconds = self._absent(query).seconds
            if query == owed or captured <= self._mine(query) or self._state.now + seconds > until + CLOCK_SLACK_S:
                continue
            density = self._gain(query, captured) / max(seconds, CLOCK_SLACK_S)
            if density <= most or not self._in_time(query):
                continue
            evict = self._room(query, spared)
            if evict is not None:
                best, most = self._step(query, 1, evict), density
        return best

    def _gain(self, query: str, captured: float) -> float:
        """What an answer to this frame brings."""
        demand = self._demands[query]
        urgency = self._state.urgency.get(query, demand.urgency)
        return urgency * wanted(demand, self._answered.get(query), captured)

    def _room(self, query: str, spared: Set[str]) -> tuple[str, ...] | None:
        """What to evict so that the query fits: first what the originals' box has not either, the largest first."""
        costs, cost, held = self._costs, self._costs.queries[query], self._held
        missing: Sequence[str] = self._absent(query).names
        needed = costs.resident_bytes(missing) + cost.workspace_bytes
        excess = self._state.resident_bytes + needed - self._plan.budget_bytes
        if excess <= 0:
            return ()
        evict: list[str] = []
        others = [name for name in self._state.resident if name not in cost.needed and name not in spared]
        for name in sorted(others, key=lambda name: (name in held, -costs.footprints[name], name)):
            evict.append(name)
            excess -= costs.footprints[name]
            if excess <= 0:
                return tuple(evict)
        return None

    def _step(self, query: str, count: int, evict: tuple[str, ...]) -> Decision:
        return Decision(query, count, evict, self._absent(query).names, self._drop)
