"""The shadow: what the paper's schedule would have made of the same frames, on a clock of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_runtime.frames.mailbox import DEPTH
from edge_runtime.policies.paper import Paper, Turns
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.values import Plan, Situation

PAPER = Paper()


@dataclass(frozen=True, slots=True)
class Shadow:
    """A box that runs the paper's schedule in thought: its clock, memory and queues, and frames in time per query.

    Fair queueing measures each flow against an ideal server that gets the same packets (Demers, Keshav and Shenker
    1989); here the server to be measured against is the paper's.
    """

    now: float
    turns: Turns = field(default_factory=Turns)
    resident: frozenset[str] = frozenset()
    resident_bytes: int = 0
    waiting: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    coming: tuple[tuple[float, str], ...] = ()
    newest: Mapping[str, float] = field(default_factory=dict)
    served: Mapping[str, int] = field(default_factory=dict)

    def until(self, now: float, waiting: Mapping[str, Sequence[float]], costs: Costs, plan: Plan) -> Shadow:
        """The shadow at `now`, having been given the frames that wait on the real box and that it has not seen."""
        newest, coming = dict(self.newest), list(self.coming)
        for query, captured in waiting.items():
            known = newest.get(query, float("-inf"))
            if captured[-1] > known:
                coming += [(one, query) for one in captured if one > known]
                newest[query] = captured[-1]
        if self.now >= now:
            return Shadow(
                self.now,
                self.turns,
                self.resident,
                self.resident_bytes,
                self.waiting,
                tuple(coming),
                newest,
                self.served,
            )
        coming.sort()
        clock, turns, resident, resident_bytes = self.now, self.turns, self.resident, self.resident_bytes
        queues, served = dict(self.waiting), dict(self.served)
        while clock < now:
            while coming and coming[0][0] <= clock:
                captured_at, query = coming.pop(0)
                queues[query] = (*queues.get(query, ()), captured_at)[-DEPTH:]
            if not queues:
                clock = coming[0][0] if coming else now
                continue
            decision = PAPER.decide(Situation(clock, queues, resident, resident_bytes, turns), costs, plan)
            turns = decision.recall
            for query, captured_at, _ in decision.drop:
                _take(queues, query, queues[query].index(captured_at), 1)
            if decision.turn is None:
                clock = coming[0][0] if coming else now
                continue
            if decision.load or decision.evict:
                resident = resident.difference(decision.evict).union(decision.load)
                resident_bytes += costs.resident_bytes(decision.load) - costs.resident_bytes(decision.evict)
                clock += costs.load_s(costs.moved_bytes(decision.load))
            if decision.count:
                clock += costs.queries[decision.turn].run_of(decision.count)
                _take(queues, decision.turn, 0, decision.count)
                served[decision.turn] = served.get(decision.turn, 0) + decision.count
        return Shadow(clock, turns, resident, resident_bytes, queues, tuple(coming), newest, served)


def _take(queues: dict[str, tuple[float, ...]], query: str, place: int, count: int) -> None:
    left = queues[query][:place] + queues[query][place + count :]
    if left:
        queues[query] = left
    else:
        del queues[query]
