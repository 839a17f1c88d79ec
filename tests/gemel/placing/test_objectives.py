"""Placements against all that there are, where these can be counted out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from gemel.placing.columns import Aim, Columns
from gemel.placing.filling import evened, filled_up, with_the_rest
from gemel.placing.needs import Needs
from gemel.placing.objectives import Objective, solve, worth_of
from gemel.placing.rooms import Filled, Room, best_set
from models.process import without_native_output
from tests.exhaustive import every
from tests.gemel.placing.fleets import made_up

SEEDS = range(12)


def _sound(needs: Needs, rooms: Sequence[Room], filled: Sequence[Filled]) -> None:
    """Every box holds what it has, no query stands twice, no box is used that is not there."""
    assert all(rooms[one.room].holds(needs, one.counts) and one.counts.any() for one in filled)
    placed = sum((one.counts for one in filled), np.zeros_like(needs.asked))
    assert (placed <= needs.asked).all()
    assert all(sum(one.room == at for one in filled) <= room.count for at, room in enumerate(rooms))


def _all_placements(needs: Needs, rooms: Sequence[Room]) -> Iterator[list[Filled]]:
    boxes = [at for at, room in enumerate(rooms) for _ in range(room.count)]
    queries = [sort for sort, count in enumerate(needs.asked) for _ in range(count)]
    for chosen in product(range(-1, len(boxes)), repeat=len(queries)):
        sets = np.zeros((len(boxes), len(needs.sorts)), dtype=np.int64)
        for sort, box in zip(queries, chosen, strict=True):
            if box >= 0:
                sets[box, sort] += 1
        filled = [Filled(at, counts) for at, counts in zip(boxes, sets, strict=True) if counts.any()]
        if all(rooms[one.room].holds(needs, one.counts) for one in filled):
            yield filled


def _best(needs: Needs, rooms: Sequence[Room], objective: Objective) -> tuple[int, float]:
    """How few queries must be left out, and the best value then; for `frames` the best value whoever is left out."""
    sign = 1 if objective == "boxes" else -1
    worths = [worth_of(needs, rooms, objective, filled) for filled in _all_placements(needs, rooms)]
    if objective == "frames":
        return 0, max(value for _, value in worths)
    unplaced, value = min((unplaced, sign * value) for unplaced, value in worths)
    return unplaced, sign * value


@pytest.mark.parametrize("objective", ["boxes", "frames", "fair"])
@pytest.mark.parametrize("seed", every(SEEDS, [0, 1, 2, 3]))
def test_the_best_placement_is_found_and_the_bound_holds(seed: int, objective: Objective) -> None:
    needs, rooms = made_up(seed, queries=5, rooms=2)
    solved = solve(needs, rooms, objective, seed=0, seconds=20.0)
    _sound(needs, rooms, solved.filled)
    unplaced, best = _best(needs, rooms, objective)
    found_unplaced, value = worth_of(needs, rooms, objective, solved.filled)
    assert value == pytest.approx(solved.value)
    if objective == "boxes":
        assert (found_unplaced, value) == (unplaced, pytest.approx(best)) and solved.bound <= best + 1e-6
    elif objective == "frames":
        assert best * 0.95 <= value <= best * (1 + 1e-6) and solved.bound >= best * (1 - 1e-6)
    else:
        assert found_unplaced == unplaced and value >= best * 0.98 and solved.bound >= best * (1 - 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_set_that_is_worth_most_is_found(seed: int) -> None:
    needs, rooms = made_up(seed, queries=6, rooms=1)
    worth = np.random.default_rng(seed).uniform(-0.2, 1, len(needs.sorts))
    for per_frame in (0.0, 0.05):
        with without_native_output():
            found = best_set(needs, rooms[0], worth, per_frame, seconds=10.0)
        assert found is not None and rooms[0].holds(needs, found.counts)

        def value(counts: np.ndarray, per_frame: float = per_frame) -> float:
            return float(worth @ counts) + per_frame * rooms[0].frames(needs, counts)

        sets = (np.array(counts) for counts in product(*(range(count + 1) for count in needs.asked)))
        best = max(value(counts) for counts in sets if rooms[0].holds(needs, counts))
        assert best * (1 - 0.004) <= value(found.counts) <= best + 1e-6 and found.bound >= best - 1e-6


@pytest.mark.parametrize("seed", SEEDS)
def test_filling_up_and_evening_keep_everyone_in_a_box_that_has_room(seed: int) -> None:
    import random

    needs, rooms = made_up(seed, queries=12, rooms=2)
    first = filled_up(needs, rooms, random.Random(seed), noise=0.5)
    _sound(needs, rooms, first)
    whole = with_the_rest(needs, rooms, first[:1], saving=False)
    _sound(needs, rooms, whole)
    even = evened(needs, rooms, whole)
    _sound(needs, rooms, even)
    assert sum(one.counts.sum() for one in even) == sum(one.counts.sum() for one in whole)

    def most(filled: Sequence[Filled]) -> float:
        return max(rooms[one.room].load(needs, one.counts) for one in filled)

    assert most(even) <= most(whole) + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_the_worths_no_placement_passes_the_bound(seed: int) -> None:
    needs, rooms = made_up(seed, queries=4, rooms=2)
    total = sum(room.cost * room.count for room in rooms)
    for aim in (Aim(True, 0.0, total + 1), Aim(False, 1.0, 0.0), Aim(False, 0.0, 1.0)):
        best = min(aim.of(needs, rooms, filled) for filled in _all_placements(needs, rooms))
        rng = np.random.default_rng(seed)
        for _ in range(4):
            columns = Columns(needs, rooms, aim)
            worth = rng.uniform(-1, 1, len(needs.sorts)) * (total if aim.per_box else 1)
            with without_native_output():
                columns._priced(np.minimum(worth, aim.unplaced), time.monotonic() + 20)
            assert columns.bound <= best + 1e-6


def test_more_room_never_makes_a_bound_worse_than_what_is_found() -> None:
    needs, rooms = made_up(3, queries=10, rooms=2)
    roomy = [replace(room, memory_bytes=2 * room.memory_bytes, count=5) for room in rooms]
    narrow, wide = (solve(needs, one, "boxes", 0, 20.0) for one in ([replace(r, count=5) for r in rooms], roomy))
    assert wide.value <= narrow.value and wide.bound <= wide.value and narrow.bound <= narrow.value
