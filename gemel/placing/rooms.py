"""What one box of a fleet has room for, the sets of queries that are worth most there, and the frames they bring."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, milp
from scipy.sparse import coo_array

from gemel.placing.needs import Counts, Needs

MIB = 2**20
TIGHT = 1e-6
NEAR = 0.003
"""How near to the best a set must be; what it may lack counts against the bound."""


@dataclass(frozen=True)
class Room:
    """One box of several equal ones: `seconds` a frame takes there by sort, `most_load` of its time that may be asked.

    `reach` says which sorts may be there at all.
    """

    kind: int
    count: int
    cost: float
    memory_bytes: int
    seconds: np.ndarray
    reach: np.ndarray
    most_load: float = math.inf

    def holds(self, needs: Needs, counts: Counts) -> bool:
        """Whether it has room for these queries together."""
        fits = needs.taken(counts) <= self.memory_bytes and bool(self.reach[counts > 0].all())
        return fits and self.load(needs, counts) <= self.most_load * (1 + TIGHT)

    def load(self, needs: Needs, counts: Counts) -> float:
        """The share of its time that these queries ask for, were every frame run in its best batch."""
        there = counts > 0
        return float((counts[there] * needs.fps[there] * self.seconds[there]).sum())

    def fraction(self, needs: Needs, counts: Counts) -> float:
        """The part of each of these queries' frames that it has time for, where all give way alike."""
        return min(1.0, 1 / max(self.load(needs, counts), TIGHT))

    def frames(self, needs: Needs, counts: Counts) -> float:
        """The most frames a second of these queries that it has time for: the quickest go first."""
        left, total = 1.0, 0.0
        for sort in np.argsort(self.seconds, kind="stable"):
            if counts[sort] and left > 0 and np.isfinite(self.seconds[sort]):
                asked = counts[sort] * needs.fps[sort]
                served = min(asked, left / self.seconds[sort])
                left, total = left - served * self.seconds[sort], total + served
        return float(total)


class Filled(NamedTuple):
    """A box of a room, by its number, with these queries."""

    room: int
    counts: Counts


def left_out(needs: Needs, filled: Iterable[Filled]) -> Counts:
    """How many queries of each sort a placement leaves out."""
    return needs.asked - sum((one.counts for one in filled), np.zeros_like(needs.asked))


class Best(NamedTuple):
    """A set of queries, and what no set is worth more than."""

    counts: Counts
    bound: float


def best_set(needs: Needs, room: Room, worth: np.ndarray, per_frame: float, seconds: float) -> Best | None:
    """The set of queries that is worth most in a room: `worth` for each, by sort, and `per_frame` for every frame a
    second; None where the time was over before anything was known.

    A mixed integer program: how many of each sort, whether there are any, which pieces that needs, the largest
    workspace, and with `per_frame` the frames a second of each sort.
    """
    program = _Program(needs, room, per_frame > 0)
    gain = np.concatenate([worth, np.zeros(program.width - len(worth))])
    if per_frame:
        gain[program.rates] = per_frame
    found = milp(
        -gain, integrality=program.integrality, bounds=program.bounds, constraints=program.constraints,
        options={"time_limit": max(seconds, 0.1), "mip_rel_gap": NEAR},
    )  # fmt: skip
    if found.x is None or found.mip_dual_bound is None or not math.isfinite(found.mip_dual_bound):
        return None
    counts = np.rint(found.x[: len(worth)]).astype(np.int64)
    while counts.any() and not room.holds(needs, counts):  # what rounding made too large by a little
        counts[np.flatnonzero(counts)[np.argmin(worth[counts > 0])]] -= 1
    return Best(counts, -found.mip_dual_bound)


class _Program:
    """The program of one room. Variables: counts, presence, pieces of two sorts or more, workspace, rates."""

    def __init__(self, needs: Needs, room: Room, rated: bool) -> None:
        sorts = len(needs.sorts)
        several = np.flatnonzero(needs.member.sum(0) > 1)
        self.counts, self.presence = np.arange(sorts), np.arange(sorts, 2 * sorts)
        self.pieces = np.arange(2 * sorts, 2 * sorts + len(several))
        self.space = 2 * sorts + len(several)
        self.rates = np.arange(self.space + 1, self.space + 1 + (sorts if rated else 0))
        self.width = self.space + 1 + len(self.rates)
        most = np.where(room.reach, needs.asked, 0)
        timed = np.isfinite(room.seconds)
        self.upper = np.concatenate([
            most, room.reach.astype(float), np.ones(len(several)), [needs.workspace.max() / MIB],
            np.where(timed, most * needs.fps, 0)[: len(self.rates)],
        ])  # fmt: skip
        self.integrality = np.zeros(self.width)
        self.integrality[: 2 * sorts] = 1
        self._rows = list[tuple[np.ndarray, np.ndarray, float]]()
        for sort in range(sorts):
            self._most(0, (self.counts[sort], 1), (self.presence[sort], -needs.asked[sort]))
            self._most(0, (self.presence[sort], needs.workspace[sort] / MIB), (self.space, -1))
            for at in np.flatnonzero(needs.member[sort, several]):
                self._most(0, (self.presence[sort], 1), (self.pieces[at], -1))
        only = needs.member[:, needs.member.sum(0) == 1] @ needs.piece_bytes[needs.member.sum(0) == 1]
        memory = [
            *zip(self.counts, needs.private / MIB, strict=True), *zip(self.presence, only / MIB, strict=True),
            *zip(self.pieces, needs.piece_bytes[several] / MIB, strict=True), (self.space, 1.0),
        ]  # fmt: skip
        self._most(room.memory_bytes / MIB, *memory)
        loads = np.where(timed, needs.fps * room.seconds, 0)
        if math.isfinite(room.most_load):
            self._most(room.most_load, *zip(self.counts, loads, strict=True))
        if rated:
            self._most(1, *zip(self.rates, np.where(timed, room.seconds, 0), strict=True))
            for sort in range(sorts):
                self._most(0, (self.rates[sort], 1), (self.counts[sort], -needs.fps[sort]))

    def _most(self, most: float, *terms: tuple[Any, Any]) -> None:
        """A sum of terms (variable, factor) is at most this."""
        self._rows.append((np.array([at for at, _ in terms]), np.array([by for _, by in terms], dtype=float), most))

    @property
    def bounds(self) -> Bounds:
        return Bounds(0, self.upper)  # type: ignore  # its stubs know numbers alone

    @property
    def constraints(self) -> tuple[Any, Any, Any]:
        at = np.concatenate([np.full(len(columns), row) for row, (columns, _, _) in enumerate(self._rows)])
        columns = np.concatenate([columns for columns, _, _ in self._rows])
        values = np.concatenate([values for _, values, _ in self._rows])
        matrix = coo_array((values, (at, columns)), shape=(len(self._rows), self.width)).tocsr()
        return matrix, -np.inf, np.array([most for _, _, most in self._rows])
