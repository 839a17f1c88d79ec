"""What became of every set of layers that a merge set out to share: kept, repaired, given up in part, refused, and why.

Derived, after the merge, from the sets its method works with, the rows of its log and the plan it ended with: a pure
function, so a merge that was interrupted accounts as one that was not. The rows end the log, one for each set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.sharing.plan import Member, SharingPlan

KEPT, PARTLY, REFUSED, UNTRIED = "kept", "partly", "refused", "untried"
OUTCOMES = (KEPT, PARTLY, REFUSED, UNTRIED)
LEAVES = "leaves"
NO_TIME = "nothing, its time or work was over"
JOINT = "the joint training"
BACK = "a training with it that saved less"
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Trial:
    """How one set of layers was tried.

    `in_the_way` says of each query that kept it from being whole after what that was so (`after`), and which `ratio`
    on val it had then against what was `required` (None: not judged). `work` (image passes x FLOPs) is that of the
    trainings in which the set was tried; `together` is how many sets were tried in the same ones.
    """

    members: tuple[Member, ...]
    in_the_way: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flops: float = 0.0
    together: int = 1
    tried: bool = True


def outcomes_of(trials: Iterable[Trial], plan: SharingPlan, size: Mapping[Member, int]) -> list[dict[str, Any]]:
    """A row for every set, in the order given.

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
            "outcome": _outcome(trial, kept),
            "kept": [list(member) for member in kept],
            "in_the_way": {q: dict(why) for q, why in trial.in_the_way.items() if q not in sharing},
            "saved_bytes": sum(size[members[0]] * (len(members) - 1) for members in groups),
            "flops": trial.flops,
            "together": trial.together,
        })  # fmt: skip
    return rows


def all_at_once(
    sets: Sequence[tuple[Member, ...]], log: Rows, required: Mapping[str, float], flops: float
) -> list[Trial]:
    """Of sets that were tied at once, whose queries were then repaired one by one; `work` is that of the method.

    A query stands in the way of a set when it left it: with all its layers, or with those that became private copies.
    It did so for what the step before, in order of bytes, could not do.
    """
    joint = [row["flops"] for row in log if "sprint" in row]
    begun = [row["flops"] - row["flops_spent"] for row in log if "flops_spent" in row]
    flops = joint[-1] if joint else min(begun, default=flops)
    repairs: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted((row for row in log if "repair" in row), key=lambda row: row.get("cost_bytes", math.inf)):
        repairs.setdefault(row["query"], []).append(row)
    evaluated = {query: ratio for row in log if "epoch" in row for query, ratio in row["ratios"].items()}
    trials = []
    for members in sets:
        why = {}
        for query, path in members:
            own = repairs.get(query, [])
            until = next((at for at, row in enumerate(own) if _takes_out(row, path)), None)
            if until is not None:
                why[query] = _reached(own[: until + 1], evaluated.get(query), required[query])
        trials.append(Trial(members, why, flops, len(sets)))
    return trials


def one_by_one(sets: Sequence[tuple[Member, ...]], log: Rows, required: Mapping[str, float]) -> list[Trial]:
    """Of sets that a search tried one after the other, each in some attempts.

    In the way stand the queries that were below what is required in the last attempt that lost them, also those that
    are no members but tied to some; where all were above it at one time or another, the one that was nearest.
    """
    trials = []
    for members in sets:
        rows = [row for row in log if "members" in row and set(_members(row["members"])) <= set(members)]
        keeping = {query for row in rows for query, _ in row["kept"]}
        why: dict[str, dict[str, Any]] = {}
        for number, row in enumerate(rows, 1):
            if len(row["kept"]) == len(row["members"]):
                continue
            diverged = ", whose loss was no number any more" if row["diverged"] else ""
            below = {q: ratio for q, ratio in row["ratios"].items() if ratio < required[q] and q not in keeping}
            if not below and not row["kept"]:
                below = dict([min(row["ratios"].items(), key=lambda one: one[1] / required[one[0]])])
            for query, ratio in below.items():
                after = f"attempt {number} of {len(rows)}{diverged}"
                why[query] = {"after": after, "ratio": ratio, "required": required[query]}
        trials.append(Trial(members, why, sum(row["flops_spent"] for row in rows), tried=bool(rows)))
    return trials


def prefixes(families: Sequence[Sequence[tuple[Member, ...]]], log: Rows, required: Mapping[str, float]) -> list[Trial]:
    """Of prefixes: each family's sets, one per layer from the first on.

    A query stands in the way of the layers beyond its prefix, because of the shortest one it could not bear.
    """
    found = {row["query"]: row for row in log if "prefix" in row}
    trials = []
    for sets in families:
        own = [found[query] for query, _ in sets[0]]
        flops = sum(row["flops_spent"] for row in own)
        for index, members in enumerate(sets):
            why = {}
            for query, _ in members:
                prefix, tried = found[query]["prefix"], dict(found[query]["tried"])
                failed = [length for length in tried if length > prefix]
                if prefix <= index:
                    after = f"a prefix of {min(failed)} of {len(sets)} layers" if failed else NO_TIME
                    ratio = tried[min(failed)] if failed else None
                    why[query] = {"after": after, "ratio": ratio, "required": required[query]}
            trials.append(Trial(members, why, flops, len(sets), tried=any(row["tried"] for row in own)))
    return trials


def _takes_out(row: Mapping[str, Any], path: str) -> bool:
    """Whether this step of a repair takes the query's layer out of its set."""
    return row["repair"] == LEAVES or path in row.get("private", ())


def _reached(rows: Rows, evaluated: float | None, required: float) -> dict[str, Any]:
    """What came before the last of a query's rows, with which it left: a sprint, another repair, or neither."""
    *before, last = rows
    if "after" in last:
        return {"after": last["after"], "ratio": last["ratio"], "required": required}
    if not before:
        return {"after": NO_TIME if last["repair"] == LEAVES else JOINT, "ratio": evaluated, "required": required}
    return {"after": before[-1]["repair"], "ratio": before[-1]["ratio"], "required": required}


def _outcome(trial: Trial, kept: Sequence[Member]) -> str:
    if not kept:
        return REFUSED if trial.tried else UNTRIED
    if len(kept) < len(trial.members):
        return PARTLY
    return KEPT


def _groups(members: Sequence[Member], where: Mapping[Member, int]) -> list[tuple[Member, ...]]:
    """The members that share a weight under the plan, two or more, for each such weight."""
    places: dict[int, list[Member]] = {}
    for member in members:
        index = where.get(member)
        if index is not None:
            places.setdefault(index, []).append(member)
    return [tuple(own) for own in places.values() if len(own) > 1]


def _members(value: Iterable[Sequence[str]]) -> Iterator[Member]:
    return ((query, path) for query, path in value)
