"""The objectives: as few boxes as can be, as many frames in time, or as large a part of them for every query."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gemel.conditions import Objective
from gemel.placing.columns import INTEGER_SHARE, Aim, Columns
from gemel.placing.filling import evened, filled_up, with_the_rest
from gemel.placing.needs import Needs
from gemel.placing.rooms import TIGHT, Filled, Room, left_out
from models.process import without_native_output

STARTS, NOISE = 24, 0.6
"""Placements that are filled up at random to begin with, and by how much they differ."""
STEPS = 7
"""Halvings of what is not known of the fair fraction, of which each takes an equal part of the time."""


@dataclass(frozen=True)
class Solved:
    """A placement, what it comes to in the objective's own terms, and the bound: no placement comes to better."""

    filled: list[Filled]
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """How far the value may be from the best there is, as a part of the larger of the two."""
        larger = max(abs(self.value), abs(self.bound))
        return abs(self.value - self.bound) / larger if larger else 0.0


def solve(needs: Needs, rooms: Sequence[Room], objective: Objective, seed: int, seconds: float) -> Solved:
    """The best placement found within about so many seconds.

    As many queries as can be have a place first, except that `frames` leaves those for last that bring none.
    """
    needs = _that_fit(needs, rooms)
    with without_native_output():  # the solver talks to its own developers
        return _solved(needs, rooms, objective, seed, seconds)


def _solved(needs: Needs, rooms: Sequence[Room], objective: Objective, seed: int, seconds: float) -> Solved:
    if objective == "boxes":
        return fewest(needs, rooms, seed, seconds)
    return most_frames(needs, rooms, seed, seconds) if objective == "frames" else fairest(needs, rooms, seed, seconds)


def worth_of(needs: Needs, rooms: Sequence[Room], objective: Objective, filled: Sequence[Filled]) -> tuple[int, float]:
    """How many queries a placement leaves out, and what it comes to in the objective's own terms."""
    if objective == "fair":
        value = _fraction(needs, rooms, filled)
    elif objective == "frames":
        value = sum(rooms[one.room].frames(needs, one.counts) for one in filled)
    else:
        value = sum(rooms[one.room].cost for one in filled)
    return _unplaced(needs, filled), value


def fewest(needs: Needs, rooms: Sequence[Room], seed: int, seconds: float) -> Solved:
    """All queries placed, or as many as can be, in boxes that cost as little as can be."""
    total = sum(room.cost * room.count for room in rooms)
    aim = Aim(per_box=True, per_frame=0.0, unplaced=total + 1)
    step = _step(rooms)
    filled, bound = _found(needs, rooms, aim, seed, seconds, step)
    filled = with_the_rest(needs, rooms, filled, saving=True)
    _, value = worth_of(needs, rooms, "boxes", filled)
    missing = aim.of(needs, rooms, filled) - value
    least = math.ceil((bound - missing) / step - TIGHT) * step if step else bound - missing
    return Solved(filled, value, min(value, max(0.0, least)))


def most_frames(needs: Needs, rooms: Sequence[Room], seed: int, seconds: float) -> Solved:
    """As many frames a second in time as can be; what brings none has a place where there is room."""
    aim = Aim(per_box=False, per_frame=1.0, unplaced=0.0)
    filled, bound = _found(needs, rooms, aim, seed, seconds)
    filled = with_the_rest(needs, rooms, filled, saving=False)
    _, value = worth_of(needs, rooms, "frames", filled)
    return Solved(filled, value, max(value, min(-bound, float(needs.asked @ needs.fps))))


def fairest(needs: Needs, rooms: Sequence[Room], seed: int, seconds: float) -> Solved:
    """All queries placed, or as many as can be, and the least part of its frames that any has time for as large as can
    be: a box of which more than its time is asked gives all of its queries the same part.
    """
    aim = Aim(per_box=False, per_frame=0.0, unplaced=1.0)
    each = seconds / (STEPS + 1)
    best = with_the_rest(needs, rooms, _found(needs, rooms, aim, seed, each, step=1.0)[0], saving=False)
    goal = _unplaced(needs, best)
    low, high = _fraction(needs, rooms, best), _alone(needs, rooms)
    for step in range(STEPS):
        if high - low <= 0.01 * high:
            break
        part = high if step == 0 else (low + high) / 2
        tight = [replace(room, most_load=min(room.most_load, 1 / part)) for room in rooms]
        found, bound = _found(needs, tight, aim, seed, each, step=1.0)
        found = with_the_rest(needs, tight, found, saving=False)
        if _unplaced(needs, found) <= goal:
            best, low = found, max(low, part, _fraction(needs, rooms, found))
        elif bound > goal + TIGHT:  # not even in parts
            high = part
        elif step:
            break  # not known either way, in the time there was
    best = evened(needs, rooms, best)
    value = _fraction(needs, rooms, best)
    return Solved(best, value, max(value, high))


def _found(
    needs: Needs, rooms: Sequence[Room], aim: Aim, seed: int, seconds: float, step: float = 0.0
) -> tuple[list[Filled], float]:
    """The best placement for an aim, and its bound."""
    started, rng = time.monotonic(), random.Random(seed)
    starts = list[list[Filled]]()
    for start in range(STARTS):
        starts.append(filled_up(needs, rooms, rng, NOISE if start else 0.0))
        if time.monotonic() - started > INTEGER_SHARE * seconds:
            break
    columns = Columns(needs, rooms, aim, _once(needs, rooms) if aim.per_box else -math.inf)
    for one in starts:
        columns.add(one)
    best = min(starts, key=lambda one: aim.of(needs, rooms, one))
    value = aim.of(needs, rooms, best)

    def enough(bound: float) -> bool:
        return value - bound < (step or TIGHT) * (1 - TIGHT)

    columns.generate((1 - INTEGER_SHARE) * seconds - (time.monotonic() - started), enough)
    if not enough(columns.bound):
        found = columns.best(max(INTEGER_SHARE * seconds, seconds - (time.monotonic() - started)))
        if found is not None and aim.of(needs, rooms, found) < value - TIGHT:
            best = found
    return best, columns.bound


def _that_fit(needs: Needs, rooms: Sequence[Room]) -> Needs:
    """Without the queries that no box has room for, even alone."""
    each = np.eye(len(needs.sorts), dtype=np.int64)
    fit = [any(room.holds(needs, alone) for room in rooms) for alone in each]
    return replace(needs, sorts=tuple(
        sort if fits else replace(sort, queries=()) for sort, fits in zip(needs.sorts, fit, strict=True)
    ))  # fmt: skip


def _once(needs: Needs, rooms: Sequence[Room]) -> float:
    """What boxes cost at least to hold everything once: a bound that is there at once."""
    least = int(needs.workspace[needs.asked > 0].min(initial=0))
    if not needs.asked.any():
        return 0.0
    return needs.weights(needs.asked) * min(room.cost / max(room.memory_bytes - least, 1) for room in rooms)


def _step(rooms: Sequence[Room]) -> float:
    """What all costs are whole multiples of: what a bound may be rounded up to; 0 where there is no such number."""
    costs = {room.cost for room in rooms}
    if all(cost == int(cost) for cost in costs):
        return float(math.gcd(*(int(cost) for cost in costs)))
    return costs.pop() if len(costs) == 1 else 0.0


def _unplaced(needs: Needs, filled: Sequence[Filled]) -> int:
    return int(left_out(needs, filled).sum())


def _alone(needs: Needs, rooms: Sequence[Room]) -> float:
    """The least part of its frames that any query has time for with a box of its own."""
    each = np.eye(len(needs.sorts), dtype=np.int64)[needs.asked > 0]
    best = [max(room.fraction(needs, one) for room in rooms if room.holds(needs, one)) for one in each]
    return min(best, default=1.0)


def _fraction(needs: Needs, rooms: Sequence[Room], filled: Sequence[Filled]) -> float:
    return min((rooms[one.room].fraction(needs, one.counts) for one in filled), default=1.0)
