"""The book: what `adaptive` recalls from decision to decision, and what it owes each query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from edge_runtime.policies.against.reference import Reference
from edge_runtime.policies.against.shadow import Shadow
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import SchedulerState

# What a query is owed of the frames that the paper's schedule would have brought it in time.
OWED_SHARE = 0.9
# A frame counts this many times as much for each frame that its query is owed, up to so many; what a query is owed
# counts double when it should have had so many frames so far, and less the more they are.
CLAIM, MAX_OWED, MIN_FRAMES = 4.0, 12.0, 10.0


@dataclass(frozen=True, slots=True)
class Book:
    """What `adaptive` remembers: the shadow, how many frames it ran of each query, and when the newest was captured."""

    shadow: Shadow
    ran: Mapping[str, int] = field(default_factory=dict)
    captured: Mapping[str, float] = field(default_factory=dict)

    def seen(self, state: SchedulerState, costs: Costs, reference: Reference) -> Book:
        """The book at this moment: the shadow has come as far."""
        return replace(self, shadow=self.shadow.until(state.now, state.waiting, costs, reference))

    def opened(self) -> Book:
        """The same moment with nothing run and nothing owed yet."""
        return replace(self, shadow=self.shadow.cleared(), ran={})

    def of(self, query: str) -> int:
        """The frames of the query that were run."""
        return self.ran.get(query, 0)

    def newest(self, query: str, now: float) -> float:
        """When the query's newest frame that was run was captured; `now` where there was none."""
        return self.captured.get(query, now)

    def owed(self, query: str) -> float:
        """Frames that a query is owed; negative when it had more."""
        return OWED_SHARE * self.shadow.served.get(query, 0) - self.of(query)

    def claim(self, query: str) -> float:
        """How many times as much a frame counts for what its query is owed.

        A query that has had few frames feels each one missed more, and cannot wait until it is owed many.
        """
        owed = self.owed(query)
        if owed <= 0:
            return 1.0
        return CLAIM ** min(MAX_OWED, owed * (1 + MIN_FRAMES / self.shadow.served.get(query, 0)))

    def with_run(self, query: str, captured: Sequence[float]) -> Book:
        """The book once frames of a query have been run."""
        ran = {**self.ran, query: self.ran.get(query, 0) + len(captured)}
        return replace(self, ran=ran, captured={**self.captured, query: captured[-1]})
