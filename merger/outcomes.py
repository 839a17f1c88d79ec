"""What became of every set of layers that a merge set out to share, and which query kept it from being whole.

A pure function of the method's sets, its log and its final plan, so an interrupted merge reports the same. The rows
end the log, one for each set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from merger.checkpoint import Row
from merger.events import Repair
from models.sharing.layers import SetOutcome
from models.sharing.plan import Member, SharingPlan

JOINT_TRAINING = "the joint training"
LIGHT_LAYERS, NOTHING = "light layers stay private", "nothing"


@dataclass(frozen=True)
class Obstacle:
    """A query that left a set: `after` which step, with which ratio on val against the required one (None: unknown)."""

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


def explain_joint(
    sets: Sequence[tuple[Member, ...]], log: Sequence[Row], required: Mapping[str, float], flops: float
) -> list[SetTrial]:
    """Of sets that were tied at once, whose queries were then repaired one by one; `flops` is that of the method."""
    ratios = {query: ratio for row in log if row.get("epoch") for query, ratio in row["ratios"].items()}
    light = {(q, path) for row in log for q, paths in row.get("private_layers", {}).items() for path in paths}
    repairs: dict[str, list[Row]] = {}
    for row in log:
        if "repair" in row:
            repairs.setdefault(row["query"], []).append(row)

    def obstacle(query: str, path: str) -> Obstacle:
        own = [row for row in repairs.get(query, []) if row["repair"] != Repair.ORIGINAL.value]
        if own:
            return Obstacle(own[-1]["repair"], own[-1]["ratio"], required[query])
        if (query, path) in light:
            return Obstacle(LIGHT_LAYERS, ratios.get(query), required[query])
        if query in ratios:
            return Obstacle(JOINT_TRAINING, ratios[query], required[query])
        return Obstacle(NOTHING, None, required[query])

    tried = ratios.keys() | repairs.keys()
    return [
        SetTrial(
            members,
            {query: obstacle(query, path) for query, path in members},
            flops,
            len(sets),
            any(query in tried for query, _ in members),
        )
        for members in sets
    ]


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


def explain_prefixes(
    families: Sequence[Sequence[tuple[Member, ...]]], log: Sequence[Row], required: Mapping[str, float]
) -> list[SetTrial]:
    """Of prefixes, one set for each layer: a query stays out of the layers beyond its own prefix because of the
    shortest prefix that failed."""
    found = {row["query"]: row for row in log if "prefix" in row and "tried" in row}
    trials = []
    for sets in families:
        own = [found[query] for query, _ in sets[0]]
        flops = sum(row["flops_spent"] for row in own)
        for index, members in enumerate(sets):
            obstacles = {}
            for query, _ in members:
                prefix, tried = found[query]["prefix"], dict(found[query]["tried"])
                failed = [length for length in tried if length > prefix]
                if prefix <= index:
                    after = f"a prefix of {min(failed)} of {len(sets)} layers" if failed else NOTHING
                    obstacles[query] = Obstacle(after, tried[min(failed)] if failed else None, required[query])
            trials.append(SetTrial(members, obstacles, flops, len(sets), any(row["tried"] for row in own)))
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
