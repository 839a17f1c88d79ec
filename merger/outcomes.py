"""What became of every set of layers that a merge set out to share, and which query kept it from being whole.

A pure function of the method's sets, its log and its final plan, so an interrupted merge reports the same. The rows
end the log, one for each set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gemel.merger.checkpoint import Row
from gemel.merger.events import Change
from gemel.models.sharing.layers import SetOutcome
from gemel.models.sharing.plan import Member, SharingPlan

NOTHING = "nothing"
NETWORKS = (Change.NETWORK, Change.NETWORK_TRAINED)
"""Steps that try no sets of layers."""


@dataclass(frozen=True)
class Obstacle:
    """A query that left a set: `after` which step, with which ratio against the required one (None: unknown)."""

    after: str
    ratio: float | None
    required: float


@dataclass(frozen=True)
class SetTrial:
    """How one set of layers was tried.

    `flops` is the cost of the trainings in which the set took part; `together` is the number of sets in the same ones.
    """

    members: tuple[Member, ...]
    in_the_way: Mapping[str, Obstacle] = field(default_factory=dict)
    flops: float = 0.0
    together: int = 1
    tried: bool = True


def outcome_rows(trials: Iterable[SetTrial], plan: SharingPlan, size: Mapping[Member, int]) -> list[Row]:
    """A log row for every set, in the order given.

    `size` are the bytes of the layers' weights in float32, whatever they are stored in. `kept` is the largest part of
    the set that shares one weight under the plan; `saved_bytes` counts it and smaller parts that share another weight.
    """
    where = {member: index for index, members in enumerate(plan.shared) for member in members}
    rows = []
    for trial in trials:
        groups = _groups(trial.members, where)
        kept = max(groups, key=len, default=())
        sharing = {query for query, _ in kept}
        rows.append({
            "set": [list(member) for member in trial.members],
            "bytes": size[trial.members[0]],
            "outcome": _outcome(trial, kept).value,
            "kept": [list(member) for member in kept],
            "in_the_way": {q: dict(why.__dict__) for q, why in trial.in_the_way.items() if q not in sharing},
            "saved_bytes": sum(size[members[0]] * (len(members) - 1) for members in groups),
            "flops": trial.flops,
            "together": trial.together,
        })  # fmt: skip
    return rows


def explain_steps(
    sets: Sequence[tuple[Member, ...]], log: Sequence[Row], required: Mapping[str, float], flops: float
) -> list[SetTrial]:
    """Of sets that were tied at once: the last step of each query; `flops` is that of the method."""
    rows = [row for row in log if "query" in row and row.get("step") not in (None, *NETWORKS)]
    last = {row["query"]: row for row in rows}

    def obstacle(query: str) -> Obstacle:
        if query not in last:
            return Obstacle(NOTHING, None, required[query])
        return Obstacle(last[query]["step"], last[query]["ratio"], last[query]["required"])

    return [
        SetTrial(
            members, {query: obstacle(query) for query, _ in members if query in required}, flops, len(sets),
            any(query in last for query, _ in members),
        )
        for members in sets
    ]  # fmt: skip


def explain_attempts(
    sets: Sequence[tuple[Member, ...]], log: Sequence[Row], required: Mapping[str, float]
) -> list[SetTrial]:
    """Of sets that a search tried one after the other: the queries below their requirement in the last attempt that
    lost them, members or tied to members; if none was, the one nearest to it."""
    trials = []
    for members in sets:
        rows = [row for row in log if "members" in row and set(map(tuple, row["members"])) <= set(members)]
        keeping = {query for row in rows for query, _ in row["kept"]}
        obstacles: dict[str, Obstacle] = {}
        for number, row in enumerate(rows, 1):
            if len(row["kept"]) == len(row["members"]):
                continue
            below = {q: ratio for q, ratio in row["ratios"].items() if ratio < required[q] and q not in keeping}
            if not below and not row["kept"]:
                below = dict([min(row["ratios"].items(), key=lambda one: one[1] / required[one[0]])])
            diverged = ", which diverged" if row["diverged"] else ""
            for query, ratio in below.items():
                obstacles[query] = Obstacle(f"attempt {number} of {len(rows)}{diverged}", ratio, required[query])
        trials.append(SetTrial(members, obstacles, sum(row["flops_spent"] for row in rows), tried=bool(rows)))
    return trials


def _outcome(trial: SetTrial, kept: Sequence[Member]) -> SetOutcome:
    if not kept:
        return SetOutcome.REFUSED if trial.tried else SetOutcome.UNTRIED
    return SetOutcome.PARTLY if len(kept) < len(trial.members) else SetOutcome.KEPT


def _groups(members: Sequence[Member], where: Mapping[Member, int]) -> list[tuple[Member, ...]]:
    """The members that share a weight under the plan, two or more, for each such weight."""
    places: dict[int, list[Member]] = {}
    for member in members:
        index = where.get(member)
        if index is not None:
            places.setdefault(index, []).append(member)
    return [tuple(own) for own in places.values() if len(own) > 1]
