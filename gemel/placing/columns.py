"""Sets of queries for all boxes together: column generation, whose bound no placement can pass (Gilmore and Gomory
1961; the bound of each round is that of Lasdon 1970, so that it holds wherever time ends).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, linprog, milp

from gemel.placing.filling import worthy
from gemel.placing.needs import Counts, Needs
from gemel.placing.rooms import TIGHT, Filled, Room, best_set, left_out

STEADY = 0.6
"""How much of the worths that gave the best bound are in those that are tried: worths alone jump from round to round
(Wentges 1997).
"""
TRIES, NOISE = 4, 0.2
"""Sets that are put together quickly for each room before the best is asked for, and by how much they differ."""
INTEGER_SHARE = 0.3
"""Of the time, for the best placement of the sets that were found."""


@dataclass(frozen=True)
class Aim:
    """What is to be as little as possible: the cost of each box that is used, less `per_frame` for every frame a second
    that it has time for, and `unplaced` for each query that has no place.
    """

    per_box: bool
    per_frame: float
    unplaced: float

    def of_box(self, needs: Needs, room: Room, counts: Counts) -> float:
        """What one box comes to."""
        cost = room.cost if self.per_box else 0.0
        return cost - (self.per_frame * room.frames(needs, counts) if self.per_frame else 0.0)

    def of(self, needs: Needs, rooms: Sequence[Room], filled: Iterable[Filled]) -> float:
        """What a placement comes to."""
        filled = list(filled)
        total = sum(self.of_box(needs, rooms[one.room], one.counts) for one in filled)
        return total + self.unplaced * int(left_out(needs, filled).sum())


@dataclass
class Columns:
    """The sets found so far for each room, and the bound."""

    needs: Needs
    rooms: Sequence[Room]
    aim: Aim
    bound: float = -math.inf
    found: list[Filled] = field(default_factory=list)
    _costs: list[float] = field(default_factory=list)
    _known: set[tuple[int, bytes]] = field(default_factory=set)
    _steady: np.ndarray | None = None

    def add(self, filled: Iterable[Filled]) -> bool:
        """Take sets in; whether any was new."""
        before = len(self.found)
        for one in filled:
            key = one.room, one.counts.tobytes()
            if key not in self._known:
                self._known.add(key)
                self.found.append(one)
                self._costs.append(self.aim.of_box(self.needs, self.rooms[one.room], one.counts))
        return len(self.found) > before

    def generate(self, seconds: float, enough: Callable[[float], bool]) -> None:
        """Find sets until none would help, the bound is `enough`, or the time is over."""
        ends, rng = time.monotonic() + seconds, random.Random(0)
        while time.monotonic() < ends and not enough(self.bound):
            worth, scarce = self._prices()
            quick = [
                Filled(at, worthy(self.needs, room, worth, rng, NOISE * tried))
                for at, room in enumerate(self.rooms) for tried in range(TRIES)
            ]  # fmt: skip
            if self.add(one for one in quick if self._gain(one, worth, scarce) > TIGHT):
                continue
            for prices in (worth,) if self._steady is None else (STEADY * self._steady + (1 - STEADY) * worth, worth):
                new = self._priced(prices, ends)
                if new is None:
                    return
                if self.add(new) and any(self._gain(one, worth, scarce) > TIGHT for one in new):
                    break
            else:
                return

    def _gain(self, one: Filled, worth: np.ndarray, scarce: np.ndarray) -> float:
        """What a set would improve the best mixture by."""
        cost = self.aim.of_box(self.needs, self.rooms[one.room], one.counts)
        return float(worth @ one.counts) - cost - float(scarce[one.room])

    def _priced(self, worth: np.ndarray, ends: float) -> list[Filled] | None:
        """The set that is worth most in each room, and the bound that follows; None once the time is over.

        Where the cost of boxes is the aim, worths that no set passes by more than a factor are a bound once they are
        divided by it, however many boxes there are (Farley 1990).
        """
        total, lacking, factor, new = float(worth @ self.needs.asked), 0.0, 1.0, list[Filled]()
        for at, room in enumerate(self.rooms):
            best = best_set(self.needs, room, worth, self.aim.per_frame, ends - time.monotonic())
            if best is None:
                return None
            lacking += room.count * max(0.0, best.bound - (room.cost if self.aim.per_box else 0.0))
            factor = max(factor, best.bound / room.cost)
            if best.counts.any():
                new.append(Filled(at, best.counts))
        bound = max(total - lacking, total / factor) if self.aim.per_box else total - lacking
        if bound > self.bound:
            self.bound, self._steady = bound, worth
        return new

    def _prices(self) -> tuple[np.ndarray, np.ndarray]:
        """What one more query of each sort is worth in the best mixture of the sets found, and one more box."""
        costs, placed, used = self._matrices()
        sorts = len(self.needs.asked)
        solved = linprog(
            np.concatenate([costs, np.full(sorts, self.aim.unplaced)]),
            A_ub=np.hstack([used, np.zeros((len(self.rooms), sorts))]), b_ub=[room.count for room in self.rooms],
            A_eq=np.hstack([placed, np.eye(sorts)]), b_eq=self.needs.asked, method="highs",
        )  # fmt: skip
        return solved.eqlin.marginals, -solved.ineqlin.marginals

    def best(self, seconds: float) -> list[Filled] | None:
        """The best placement out of the sets found, each query at most once; None where there was no time for one."""
        costs, placed, used = self._matrices()
        sorts, sets = len(self.needs.asked), len(self.found)
        covered = np.inf if self.aim.per_frame == 0 else self.needs.asked
        solved = milp(
            np.concatenate([costs, np.full(sorts, self.aim.unplaced)]),
            integrality=np.ones(sets + sorts), bounds=Bounds(0, np.inf),
            constraints=[
                (np.hstack([placed, np.eye(sorts)]), self.needs.asked, covered),
                (np.hstack([used, np.zeros((len(self.rooms), sorts))]), -np.inf, [room.count for room in self.rooms]),
            ],
            options={"time_limit": max(seconds, 0.5), "mip_rel_gap": TIGHT},
        )  # fmt: skip
        if solved.x is None:
            return None
        times = np.rint(solved.x[:sets]).astype(int)
        return trimmed(self.needs, [one for one, often in zip(self.found, times, strict=True) for _ in range(often)])

    def _matrices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The cost of each set, its counts (sorts, sets), and whose room it is (rooms, sets)."""
        placed = np.array([one.counts for one in self.found]).T.reshape(len(self.needs.asked), -1)
        used = np.zeros((len(self.rooms), len(self.found)))
        for at, one in enumerate(self.found):
            used[one.room, at] = 1
        return np.array(self._costs), placed, used


def trimmed(needs: Needs, filled: Iterable[Filled]) -> list[Filled]:
    """The same boxes, no query placed twice, without those that are empty then."""
    left, kept = needs.asked.copy(), list[Filled]()
    for one in filled:
        counts = np.minimum(one.counts, left)
        left -= counts
        if counts.any():
            kept.append(Filled(one.room, counts))
    return kept
