"""Boxes filled one after the other: quick placements to begin with, and a place for what is left."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from gemel.placing.needs import Counts, Needs
from gemel.placing.rooms import TIGHT, Filled, Room, left_out


class Filling:
    """A box in the making: what one more query of each sort would take."""

    def __init__(self, needs: Needs, room: Room, counts: Counts | None = None) -> None:
        self.needs, self.room = needs, room
        self.counts = np.zeros_like(needs.asked) if counts is None else counts.copy()
        self._there = needs.there(self.counts)
        self._weights = needs.weights(self.counts)
        self._workspace = int(needs.workspace[self.counts > 0].max(initial=0))
        self._load = room.load(needs, self.counts)

    def more_bytes(self) -> np.ndarray:
        """Bytes of weights that one more of each sort adds."""
        return self.needs.private + self.needs.member[:, ~self._there] @ self.needs.piece_bytes[~self._there]

    def fitting(self, more: np.ndarray) -> np.ndarray:
        """Of which sorts one more has room."""
        room, needs = self.room, self.needs
        taken = self._weights + more + np.maximum(self._workspace, needs.workspace)
        fits = room.reach & (taken <= room.memory_bytes)
        if np.isfinite(room.most_load):
            fits &= self._load + needs.fps * room.seconds <= room.most_load * (1 + TIGHT)
        return fits

    def fits(self, sort: int) -> bool:
        """Whether one more of a sort has room."""
        return bool(self.fitting(self.more_bytes())[sort])

    def load_with(self, sort: int) -> float:
        """The share of the box's time that is asked for with one more of a sort."""
        return self._load + float(self.needs.fps[sort] * self.room.seconds[sort])

    def add(self, sort: int, more: np.ndarray) -> None:
        """Put one more of a sort there."""
        self.counts[sort] += 1
        self._there |= self.needs.member[sort]
        self._weights += int(more[sort])
        self._workspace = max(self._workspace, int(self.needs.workspace[sort]))
        self._load += float(self.needs.fps[sort] * self.room.seconds[sort])


def worthy(needs: Needs, room: Room, worth: np.ndarray, rng: random.Random, noise: float) -> Counts:
    """A set that may be worth much in a room: whoever is worth most for the bytes that it adds, one after the other."""
    drawn = worth * np.array([1 + noise * rng.random() for _ in worth])

    def best(_: Filling, open_: np.ndarray, more: np.ndarray) -> int:
        return int(np.argmax(drawn[open_] / np.maximum(more[open_], 1)))

    return _filled(needs, room, np.where(worth > 0, needs.asked, 0), best)


def fill(needs: Needs, room: Room, left: Counts, rng: random.Random, noise: float) -> Counts:
    """A box filled with what is left: the largest model first, then whoever adds least of what it weighs alone."""

    def best(filling: Filling, open_: np.ndarray, more: np.ndarray) -> int:
        drawn = np.array([1 + noise * rng.random() for _ in open_])
        adds = -needs.own[open_] if not filling.counts.any() else more[open_] / np.maximum(needs.own[open_], 1)
        return int(np.argmin(adds * drawn))

    return _filled(needs, room, left, best)


def _filled(needs: Needs, room: Room, left: Counts, best: Callable[[Filling, np.ndarray, np.ndarray], int]) -> Counts:
    """One query after the other of what is left, until none has room: of the sorts that do the one that is best."""
    filling, left = Filling(needs, room), left.copy()
    while True:
        more = filling.more_bytes()
        open_ = np.flatnonzero(filling.fitting(more) & (left > 0))
        if not len(open_):
            return filling.counts
        sort = int(open_[best(filling, open_, more)])
        filling.add(sort, more)
        left[sort] -= 1


def filled_up(needs: Needs, rooms: Sequence[Room], rng: random.Random, noise: float = 0.0) -> list[Filled]:
    """A placement: box after box, of the room in which most bytes find a place for what it costs."""
    left, free, found = needs.asked.copy(), [room.count for room in rooms], list[Filled]()
    while left.any():
        tried = [
            Filled(at, fill(needs, room, left, rng, noise)) for at, room in enumerate(rooms) if free[at]
        ]  # fmt: skip
        tried = [one for one in tried if one.counts.any()]
        if not tried:
            break
        best = max(tried, key=lambda one: float(one.counts @ needs.own) / rooms[one.room].cost)
        found.append(best)
        left -= best.counts
        free[best.room] -= 1
    return found


def with_the_rest(needs: Needs, rooms: Sequence[Room], filled: Sequence[Filled], saving: bool) -> list[Filled]:
    """The same placement, and each query that is left where it fits and least is asked of a box's time.

    A box that is empty is taken too, but where boxes are `saving` only if no other has room.
    """
    fillings = [(one.room, Filling(needs, rooms[one.room], one.counts)) for one in filled]
    left = left_out(needs, filled)
    for sort in sorted(np.flatnonzero(left).tolist(), key=lambda sort: -needs.own[sort]):
        for _ in range(int(left[sort])):
            free = [room.count - sum(at == one for one, _ in fillings) for at, room in enumerate(rooms)]
            new = [(at, Filling(needs, room)) for at, room in enumerate(rooms) if free[at]]
            fits = [one for one in fillings if one[1].fits(sort)]
            if not (saving and fits):
                fits += [one for one in new if one[1].fits(sort)]
            if not fits:
                break
            quietest = min(fits, key=lambda one: one[1].load_with(sort))
            if not quietest[1].counts.any():
                fillings.append(quietest)
            quietest[1].add(sort, quietest[1].more_bytes())
    return [Filled(at, one.counts) for at, one in fillings]


def evened(needs: Needs, rooms: Sequence[Room], filled: Sequence[Filled]) -> list[Filled]:
    """The same queries, moved one by one out of the box of which most is asked, where another is asked less even then.

    An empty box is as good as any.
    """
    sets = [(one.room, one.counts.copy()) for one in filled]
    for _ in range(int(needs.asked.sum())):
        loads = [rooms[at].load(needs, counts) for at, counts in sets]
        for full in sorted(range(len(sets)), key=lambda at: -loads[at]):
            move = _relief(needs, rooms, sets, full, loads[full]) if sets[full][1].sum() > 1 else None
            if move is not None:
                break
        else:
            break
        sort, to = move
        sets[full][1][sort] -= 1
        if isinstance(to, int):
            sets[to][1][sort] += 1
        else:
            sets.append((to.kind, np.eye(len(needs.sorts), dtype=np.int64)[sort]))
    return [Filled(at, counts) for at, counts in sets]


def _relief(
    needs: Needs, rooms: Sequence[Room], sets: Sequence[tuple[int, Counts]], full: int, load: float
) -> tuple[int, int | Room] | None:
    """Which sort is to leave a full box, and which set or room it goes to: that which is asked least of then."""
    kind, counts = sets[full]
    empty = [room for at, room in enumerate(rooms) if room.count > sum(at == one for one, _ in sets)]
    others = [(at, Filling(needs, rooms[one], there)) for at, (one, there) in enumerate(sets) if at != full]
    others += [(room, Filling(needs, room)) for room in empty]
    best, least = None, load * (1 - TIGHT)
    for sort in sorted(np.flatnonzero(counts).tolist(), key=lambda sort: -needs.fps[sort] * rooms[kind].seconds[sort]):
        for to, filling in others:
            if filling.load_with(sort) < least and filling.fits(sort):
                best, least = (sort, to), filling.load_with(sort)
        if best is not None:
            return best
    return None
