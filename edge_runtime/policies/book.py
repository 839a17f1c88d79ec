"""The book: what `ours` recalls from decision to decision, and what it owes each query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from edge_runtime.policies.shadow import Shadow
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.values import Plan, Situation

# What a query is owed of the frames that the paper's schedule would have brought it in time.
OWED_SHARE = 0.9
# A frame counts this many times as much for each frame that its query is owed, up to so many; what a query is owed
# counts double when it should have had so many frames so far, and less the more they are.
CLAIM, MOST_OWED, FEW_FRAMES = 4.0, 12.0, 10.0


@dataclass(frozen=True, slots=True)
class Book:
    """What `ours` remembers: the shadow, the frames it ran of each query, and the newest of them (captured_at)."""

    shadow: Shadow
    ran: Mapping[str, int] = field(default_factory=dict)
    newest: Mapping[str, float] = field(default_factory=dict)

    def seen(self, situation: Situation, costs: Costs, paper: Plan) -> Book:
        """The book at this moment: the shadow has come as far by the paper's plan."""
        return replace(self, shadow=self.shadow.until(situation.now, situation.waiting, costs, paper))

    def opened(self) -> Book:
        """The same moment with nothing run and nothing owed yet."""
        return replace(self, shadow=self.shadow.cleared(), ran={})

    def owed(self, query: str) -> float:
        """Frames that a query is owed; negative when it had more."""
        return OWED_SHARE * self.shadow.served.get(query, 0) - self.ran.get(query, 0)

    def claim(self, query: str) -> float:
        """How many times as much a frame counts for what its query is owed.

        A query that has had few frames feels each one missed more, and cannot wait until it is owed many.
        """
        owed = self.owed(query)
        if owed <= 0:
            return 1.0
        return CLAIM ** min(MOST_OWED, owed * (1 + FEW_FRAMES / self.shadow.served[query]))

    def with_run(self, query: str, captured: Sequence[float]) -> Book:
        """The book once frames of a query have been run."""
        return replace(
            self,
            ran={**self.ran, query: self.ran.get(query, 0) + len(captured)},
            newest={**self.newest, query: captured[-1]},
        )
