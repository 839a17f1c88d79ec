"""The contest: the paper's schedule rehearsed beside the one that no answer of an original is ever ahead of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge_runtime.policies.accuracy.account import Account, by_turns
from edge_runtime.policies.against.expected import expected
from edge_runtime.policies.against.virtual import Answer, Decide, VirtualBox
from edge_runtime.policies.trying import HORIZON_S, LEAD_S
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import Decision, Plan, SchedulerState, mean_accuracy

# So much more accuracy over time the paper's schedule must bring, in the mean, and so much less a query may have than
# its original.
MORE, LESS = 0.002, 0.015


@dataclass(slots=True)
class Given:
    """The answers that a box gave: of each query when they were there, and of which frames."""

    answers: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def see(self, answers: Mapping[str, Answer]) -> None:
        """Note each query's newest answer, where it is another one."""
        for query, answer in answers.items():
            known, one = self.answers.setdefault(query, []), (answer.finishes, answer.captured)
            if not known or known[-1] != one:
                known.append(one)


class Contest:
    """Begun in a situation, and played a few decisions at a time, so that no real one waits long for it.

    What is owed is done for LEAD_S, as it is on the real box meanwhile. From then on, `begins`, both go on for
    HORIZON_S with the frames that are expected: so, and in the paper's turns. It is played as far as it was ever asked
    for, and says the same whenever it is asked with as many steps. `costs` are those that it was begun with.
    """

    def __init__(self, state: SchedulerState, account: Account, costs: Costs, plan: Plan) -> None:
        self.costs, self.begins = costs, state.now + LEAD_S
        self._plan, self._urgency = plan, state.urgency
        self._ends, self._steps = self.begins + HORIZON_S, 0
        self._frames = expected(account.originals.newest, plan.detail.demands, state.now, self._ends)
        self._owed = VirtualBox(
            state.now, account, frozenset(state.resident), state.resident_bytes,
            {query: tuple(captured) for query, captured in state.waiting.items()}, urgency=state.urgency,
            answers={query: Answer(captured, state.now) for query, captured in account.answered.items()},
        )  # fmt: skip
        self._owed.expect(self._frames)
        self._by_turns: VirtualBox | None = None
        self._of_owed, self._of_turns, self._of_originals = Given(), Given(), Given()
        self._of_originals.see(account.originals.answers)
        self._won: bool | None = None

    def passed(self, steps: int) -> bool | None:
        """Whether the paper's schedule brings more, and no query less than its original; None where more steps are
        needed to tell.
        """
        while self._won is None and self._steps < steps:
            self._step()
            self._steps += 1
        return None if self._steps > steps else self._won

    def _step(self) -> None:
        if self._by_turns is None:
            if self._owed.now < self.begins:
                self._play(self._owed, self.begins, self._decide_owed, self._of_owed)
                return
            self._by_turns = self._owed.copied()
            self._by_turns.policy_state = None
            self._of_turns.see(self._by_turns.answers)
        if self._owed.now < self._ends:
            self._play(self._owed, self._ends, self._decide_owed, self._of_owed)
        elif self._by_turns.now < self._ends:
            self._play(self._by_turns, self._ends, self._decide_by_turns, self._of_turns)
        else:
            self._won = self._judged()

    def _play(self, box: VirtualBox, until: float, decide: Decide, given: Given) -> None:
        box.step(until, self.costs, decide)
        given.see(box.answers)

    def _decide_owed(self, state: SchedulerState) -> Decision:
        account: Account = state.policy_state.until(state, self.costs, self._plan)
        self._of_originals.see(account.originals.answers)
        decision = account.owed(state, self.costs, self._plan)
        return replace(decision, policy_state=account.after(decision, state))

    def _decide_by_turns(self, state: SchedulerState) -> Decision:
        return by_turns(state, self.costs, self._plan, state.policy_state)

    def _judged(self) -> bool:
        queries = [query for query, demand in self._plan.detail.demands.items() if demand.staleness]
        owed, turns, originals = (
            {query: self._accuracy(given, query) for query in queries}
            for given in (self._of_owed, self._of_turns, self._of_originals)
        )
        weights = {query: self._urgency.get(query, self._plan.detail.demands[query].urgency) for query in queries}
        more = sum(weight * (turns[query] - owed[query]) for query, weight in weights.items())
        return more > MORE * sum(weights.values()) and all(
            turns[one] >= originals[one] - LESS and self._answers(one) for one in queries
        )

    def _answers(self, query: str) -> bool:
        """Whether turns answer a query at all, if its frames come and it can be in time: whom they starve they starve
        for good, while the original may come to it yet.
        """
        cost = self.costs.queries[query]
        never = query in self._plan.detail.unfit or cost.run_s > cost.sla_s
        silent = never or all(name != query for _, name in self._frames)
        return silent or any(finished_at > self.begins for finished_at, _ in self._of_turns.answers.get(query, ()))

    def _accuracy(self, given: Given, query: str) -> float:
        demand = self._plan.detail.demands[query]
        moments = [at for at, name in self._frames if name == query and at >= self.begins]
        return mean_accuracy(demand.staleness, demand.fps, moments, given.answers.get(query, ()))
