"""The originals' pace: what time-sharing would run if nothing were shared, run no later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from edge_runtime.frames.ledger import DEADLINE
from edge_runtime.policies.against.virtual import VirtualBox
from edge_runtime.policies.time_sharing import TimeSharing
from edge_runtime.schedule.batches import too_late
from edge_runtime.schedule.costs import Costs, stored_name
from edge_runtime.schedule.values import Decision, Demand, Plan, Situation

TIME_SHARING = TimeSharing()


@dataclass(frozen=True, slots=True)
class Step:
    """A step that the originals' box has begun: the frames run, none where a query is only loaded; and what is in
    memory then, by the names of what is shared.
    """

    query: str
    captured: tuple[float, ...]
    resident: frozenset[str]


@dataclass(frozen=True, slots=True)
class Pace:
    """The originals' box: where its clock stands, the newest frame of each query that it was told of, what it dropped
    of those that may still wait here, and the steps that it has begun and this box has not.
    """

    box: VirtualBox
    newest: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[tuple[str, float], str] = field(default_factory=dict)
    begun: tuple[Step, ...] = ()
    recent: tuple[str, ...] = ()


class Views:
    """The costs with nothing shared, worked out anew only when the costs are others."""

    def __init__(self) -> None:
        self._of: tuple[Costs, Costs] | None = None

    def of(self, costs: Costs) -> Costs:
        """`TimeSharing.view` of these."""
        if self._of is None or self._of[0] is not costs:
            self._of = costs, TIME_SHARING.view(costs)
        return self._of[1]


@dataclass(frozen=True, slots=True)
class AsOriginals:
    """What time-sharing would do with the originals in the same memory, step by step, each begun as soon as there.

    By induction no frame is answered later than the originals' would be: a step begins here when it begins there or,
    if this box is still busy, at once after the one before, which began no later; it takes no longer, since what is
    in memory there is in memory here, and what is shared is copied once. So no query has less than its original.
    """

    name: str = "as-originals"

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, demands: Mapping[str, Demand], budget_bytes: int) -> Plan:
        apart = TIME_SHARING.plan(TIME_SHARING.view(costs), demands, budget_bytes)
        return replace(apart, detail=Views())

    def decide(self, situation: Situation, costs: Costs, plan: Plan) -> Decision:
        pace: Pace = _until(situation, plan.detail.of(costs), plan)
        drop = [(query, captured_at, reason) for (query, captured_at), reason in pace.dropped.items()]
        waiting = {
            query: [one for one in captured if (query, one) not in pace.dropped]
            for query, captured in situation.waiting.items()
        }
        left = list(pace.begun)
        while left:
            step = left.pop(0)
            missing = tuple(name for name in costs.queries[step.query].tensors if name not in situation.resident)
            captured, late = _in_time(step, waiting.get(step.query, []), missing, situation.now, costs)
            drop += [(step.query, captured_at, DEADLINE) for captured_at in late]
            waiting[step.query] = [one for one in waiting.get(step.query, []) if one not in late]
            if not captured and not (missing and not step.captured):
                continue
            evict = _room(step, missing, len(captured), situation, costs, plan.budget_bytes)
            if evict is None:
                continue
            recall = replace(pace, dropped={}, begun=tuple(left))
            return Decision(step.query, len(captured), evict, missing, tuple(drop), recall=recall)
        busy_until = pace.box.now if pace.box.now > situation.now else None
        return Decision(drop=tuple(drop), wake_s=busy_until, recall=replace(pace, dropped={}, begun=()))


def _until(situation: Situation, apart: Costs, plan: Plan) -> Pace:
    """The originals' box at this moment, its decision included if it is to take one now."""
    known: Pace = situation.recall or Pace(VirtualBox(situation.now))
    box, now = known.box.copied(), situation.now
    newest = box.told(situation.waiting, known.newest)
    begun, dropped = list(known.begun), dict(known.dropped)

    def decide(there: Situation) -> Decision:
        decision = TIME_SHARING.decide(there, apart, plan)
        gone = {(query, captured_at): reason for query, captured_at, reason in decision.drop}
        dropped.update(gone)
        if decision.turn is not None:
            query, count = decision.turn, decision.count
            captured = tuple(one for one in there.waiting[query] if (query, one) not in gone)[:count]
            resident = (set(there.resident) - set(decision.evict)) | set(decision.load)
            begun.append(Step(query, captured, frozenset(map(stored_name, resident))))
        return decision

    while box.now < now:
        box.step(now, apart, decide)
    steps = -1
    while box.now <= now and steps != len(begun):
        steps = len(begun)
        box.step(now, apart, decide)
    still = {query: set(captured) for query, captured in situation.waiting.items()}
    dropped = {at: reason for at, reason in dropped.items() if at[1] in still.get(at[0], ())}
    recent = (begun[-1].query,) if begun else known.recent
    return Pace(box, newest, dropped, tuple(begun), recent)


def _in_time(
    step: Step, waiting: Sequence[float], missing: Sequence[str], now: float, costs: Costs
) -> tuple[list[float], list[float]]:
    """Of the frames to run: those that still wait and are in time, and all to drop so that they are the oldest."""
    captured = [one for one in step.captured if one in waiting]
    if not captured:
        return [], []
    start = now + costs.load_s(costs.moved_bytes(missing))
    captured = captured[too_late(captured, start, costs.queries[step.query], len(captured)) :]
    last = captured[-1] if captured else step.captured[-1]
    return captured, [one for one in waiting if one <= last and one not in captured]


def _room(
    step: Step, missing: Sequence[str], count: int, situation: Situation, costs: Costs, budget_bytes: int
) -> tuple[str, ...] | None:
    """What to evict so that the query fits: first what the originals' box does not hold either, the largest first."""
    cost = costs.queries[step.query]
    excess = situation.resident_bytes + costs.resident_bytes(missing) + cost.workspace_of(max(1, count)) - budget_bytes
    evict: list[str] = []
    others = [name for name in situation.resident if name not in cost.needed]
    for name in sorted(others, key=lambda name: (name in step.resident, -costs.footprints[name], name)):
        if excess <= 0:
            break
        evict.append(name)
        excess -= costs.footprints[name]
    return tuple(evict) if excess <= 0 else None
