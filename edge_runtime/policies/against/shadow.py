"""The shadow: what the reference would have made of the same frames, on a clock of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.policies.against.reference import Reference
from edge_runtime.policies.against.virtual import VirtualBox
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import Decision, SchedulerState


@dataclass(frozen=True, slots=True)
class Shadow:
    """A box that goes by the reference in thought, and of each query the newest frame that it was told of.

    Fair queueing measures each flow against an ideal server that gets the same packets (Demers, Keshav and Shenker
    1989); here the server to be measured against is, as a rule, the paper's. The box is never changed: time goes on in
    a copy.
    """

    box: VirtualBox
    newest: Mapping[str, float] = field(default_factory=dict)

    @property
    def served(self) -> Mapping[str, float]:
        """The frames in time of each query that had any."""
        return self.box.served

    @property
    def policy_state(self) -> Any:
        """What the reference remembers by now."""
        return self.box.policy_state

    def cleared(self) -> Shadow:
        """The same box, which has served nothing yet."""
        return Shadow(self.box.recounted(), self.newest)

    def until(self, now: float, waiting: Mapping[str, Sequence[float]], costs: Costs, reference: Reference) -> Shadow:
        """The shadow at `now`, having been given the frames that wait on the real box and that it has not seen, and
        those that were pushed out there meanwhile.
        """
        box = self.box.copied()
        newest = box.told(waiting, self.newest, reference.demands)

        def decide(state: SchedulerState) -> Decision:
            return reference.decide(state, costs)

        while box.now < now:
            box.step(now, costs, decide)
        return Shadow(box, newest)
