"""The schedule: which query runs next, what is loaded for it, what makes room. Pure: no clock, no threads, no device.

GEMEL's schedule (Padmanabhan et al., NSDI 2023, section 5.4, edge inference): queries take turns in a fixed order in
which those that share most bytes are neighbours; only the missing tensors are loaded; the most recently run query is
evicted first, since in a cycle its next turn is furthest away; a frame that would miss its deadline is not started.
The simulator and the daemon both call `decide`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from edge_runtime.costs import Costs, footprint_bytes
from edge_runtime.ledger import DEADLINE, MEMORY

# Times of one frame are added up in different orders; a difference this small is rounding, not lateness.
CLOCK_SLACK_S = 1e-9
# Frames of one query passed over as too late before it is loaded ahead. 0, a load at every turn, spends on loads the
# time in which other queries' frames would have made it; never, and a query slow to load is never run.
PATIENCE = 2


@dataclass(frozen=True, slots=True)
class Turns:
    """Whose turn it has been: queries by their last turn, most recent first.

    `loaded` is the query just loaded ahead, whose run is still due; `passed` counts each query's frames that were
    passed over as too late since its last turn.
    """

    recent: tuple[str, ...] = ()
    loaded: str | None = None
    passed: Mapping[str, int] = field(default_factory=dict)

    def after(self, decision: Decision) -> Turns:
        """The turns once a decision has been carried out."""
        late = {query for query, reason in decision.drop if reason == DEADLINE}
        passed = {**self.passed, **{query: self.passed.get(query, 0) + 1 for query in late}}
        if decision.turn is None:
            return Turns(self.recent, passed=passed)
        passed.pop(decision.turn, None)
        recent = (decision.turn, *(query for query in self.recent if query != decision.turn))
        return Turns(recent, None if decision.run else decision.turn, passed)


@dataclass(frozen=True, slots=True)
class Situation:
    """All the schedule may know: the time, captured_at of the newest waiting frame per query, what is resident."""

    now: float
    pending: Mapping[str, float]
    resident: Set[str]
    turns: Turns = field(default_factory=Turns)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, in this order: drop frames, evict tensors, load tensors, run one frame of `turn`.

    `turn` is None when there is nothing to do. With `run` False the tensors of `turn` are loaded ahead of its next
    frame. `drop` holds (query, reason).
    """

    turn: str | None = None
    run: bool = False
    evict: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    drop: tuple[tuple[str, str], ...] = ()


def decide(situation: Situation, costs: Costs, budget_bytes: int, order: Sequence[str]) -> Decision:
    """The next step. Afterwards resident footprints + the workspace of `turn` are within the budget.

    The first query in cyclic order whose waiting frame can finish in time takes the turn. A frame that cannot is
    dropped and its query passed over. A query passed over PATIENCE times for want of its tensors takes its turn all
    the same: it is loaded ahead, and its next frame finds it resident; otherwise one whose load alone takes longer
    than its SLA would never run.
    """
    drop: list[tuple[str, str]] = []
    for query in _candidates(situation, order):
        cost = costs.queries[query]
        missing = tuple(name for name in dict.fromkeys(cost.tensors) if name not in situation.resident)
        load_s = costs.load_s(costs.moved_bytes(missing))
        in_time = situation.now + load_s + cost.run_s <= situation.pending[query] + cost.sla_s + CLOCK_SLACK_S
        passed = situation.turns.passed.get(query, 0)
        load_ahead = bool(missing) and cost.run_s <= cost.sla_s and passed >= PATIENCE
        if not in_time:
            drop.append((query, DEADLINE))
            if not load_ahead:
                continue
        evict = _room(situation, costs, budget_bytes, order, query, missing)
        if evict is None:
            if in_time:
                drop.append((query, MEMORY))
            continue
        return Decision(query, in_time, evict, missing, tuple(drop))
    return Decision(drop=tuple(drop))


def _candidates(situation: Situation, order: Sequence[str]) -> list[str]:
    """Queries with a waiting frame: the one loaded ahead, then round the cycle from the last turn on."""
    recent, loaded = situation.turns.recent, situation.turns.loaded
    start = order.index(recent[0]) + 1 if recent else 0
    cycle = [*order[start:], *order[:start]]
    if loaded is not None:
        cycle = [loaded, *(query for query in cycle if query != loaded)]
    return [query for query in cycle if query in situation.pending]


def _room(situation: Situation, costs: Costs, budget_bytes: int, order: Sequence[str], query: str,
          missing: Sequence[str]) -> tuple[str, ...] | None:
    """The tensors to evict so that the query fits, as few as the eviction order allows; None if it never fits."""
    cost = costs.queries[query]
    excess = (costs.resident_bytes(situation.resident) + costs.resident_bytes(missing) + cost.workspace_bytes
              - budget_bytes)
    if excess <= 0:
        return ()
    evict: list[str] = []
    for name in _eviction_order(situation, costs, order):
        if name in cost.needed:
            continue
        evict.append(name)
        excess -= footprint_bytes(costs.tensor_bytes[name])
        if excess <= 0:
            return tuple(evict)
    return None


def _eviction_order(situation: Situation, costs: Costs, order: Sequence[str]) -> list[str]:
    """Resident tensors, first to go first: the most recently run query's, last loaded layers first.

    A tensor several queries share goes with the last of them. Queries that have had no turn come next in the
    cycle, so theirs go last; tensors no query uses (of an older bundle) go first.
    """
    recent = situation.turns.recent
    queries = [*recent, *(query for query in reversed(order) if query not in recent)]
    placed: dict[str, None] = {}
    for query in reversed(queries):
        for name in costs.queries[query].tensors:
            if name in situation.resident:
                placed.setdefault(name)
    unused = sorted(name for name in situation.resident if name not in placed)
    return [*unused, *reversed(placed)]


def share_order(costs: Costs) -> tuple[str, ...]:
    """The cyclic order of turns: neighbours share as many bytes as a greedy chain with 2-opt exchanges finds.

    Deterministic: ties go to the query listed first. Starts with the query listed first.
    """
    queries = list(costs.queries)
    shared = {(a, b): costs.moved_bytes(costs.queries[a].needed & costs.queries[b].needed)
              for i, a in enumerate(queries) for b in queries[i + 1:]}
    shared.update({(b, a): nbytes for (a, b), nbytes in shared.items()})
    chain, left = queries[:1], queries[1:]
    while left:
        following = max(left, key=lambda query: shared[chain[-1], query])
        left.remove(following)
        chain.append(following)
    return tuple(_two_opt(chain, shared))


def _two_opt(cycle: list[str], shared: Mapping[tuple[str, str], int], passes: int = 20) -> list[str]:
    """Reverse stretches of the cycle as long as that puts more shared bytes side by side (Croes, 1958)."""
    size = len(cycle)
    for _ in range(passes if size > 3 else 0):
        improved = False
        for i in range(size - 2):
            for j in range(i + 2, size - (i == 0)):
                a, b, c, d = cycle[i], cycle[i + 1], cycle[j], cycle[(j + 1) % size]
                if shared[a, c] + shared[b, d] > shared[a, b] + shared[c, d]:
                    cycle[i + 1:j + 1] = reversed(cycle[i + 1:j + 1])
                    improved = True
        if not improved:
            break
    return cycle
