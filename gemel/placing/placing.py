"""`gemel place`: which queries of a fleet go on which box, and what comes of that."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from edge_runtime.policies import policy_named
from edge_runtime.scheduler import QuerySpec
from edge_runtime.simulation.simulator import simulate
from gemel.analytic_costs import ceiling_costs
from gemel.conditions import DEFAULT_PLACEMENT, Objective, PlacementOptions, Shared
from gemel.fleet import Boxes, Fleet, load_fleet
from gemel.placing.filling import with_the_rest
from gemel.placing.moving import as_before, by_name, moved_bytes
from gemel.placing.needs import Needs, needs_of, shared_layers
from gemel.placing.objectives import Solved, solve, worth_of
from gemel.placing.placement import PlacedBox, Placement
from gemel.placing.rooms import TIGHT, Room
from gemel.planner import DEFAULT_FPS, draw_arrivals
from merger.events import Progress, Stages, silent
from models.workload import Query

COUNTING = "counting what the queries need"
LOOKING = "looking for the best placement"
PLAYING = "playing each box on the virtual clock"
PLAYED_S, MAX_PLAYED = 20.0, 20_000
"""Of the virtual clock that says what part of a box's frames are in time, and frames played at most."""


def place_fleet(
    source: str | Path | Fleet,
    asked: PlacementOptions = DEFAULT_PLACEMENT,
    before: Mapping[str, Sequence[str]] | None = None,
    progress: Progress = silent,
) -> Placement:
    """Place the queries of a fleet, or of a fleet file, on its boxes; with the same seed, and time to end, the same.

    `before` are the queries of each box as they are placed now: of placements that are as good the one that moves
    fewest bytes is taken. Raises InputError for a bad file.
    """
    started, before = time.monotonic(), before or {}
    fleet = source if isinstance(source, Fleet) else load_fleet(source)
    stages = Stages(progress)
    stages.announce([COUNTING, LOOKING, PLAYING])
    stages.begin(COUNTING)
    needs = needs_of(fleet, asked.shared, asked.timed)
    rooms = [_room(needs, at, boxes, asked) for at, boxes in enumerate(fleet.boxes)]
    stages.begin(LOOKING)
    solved = solve(needs, rooms, asked.objective, asked.seed, asked.seconds)
    if before:
        solved = _staying(needs, fleet, rooms, asked.objective, solved, before)
    placed = by_name(needs, fleet, solved.filled, before)
    everyone = {query for queries in placed.values() for query in queries}
    stages.begin(PLAYING, len(placed))
    boxes = _boxes(fleet, needs, placed, asked, stages)
    return Placement(
        fleet=fleet,
        asked=asked,
        boxes=boxes,
        unplaced={query.id: _why(needs, rooms, query.id) for query in fleet.queries if query.id not in everyone},
        objective=solved.value,
        bound=solved.bound,
        gap=solved.gap,
        seconds=time.monotonic() - started,
        moved_bytes=moved_bytes(needs, placed, before),
    )


def _room(needs: Needs, at: int, boxes: Boxes, asked: PlacementOptions) -> Room:
    """Where time counts, a query is not placed where one run takes longer than its SLA."""
    seconds = needs.seconds(boxes.profile.name)
    reach = np.array([sort.reach[at] for sort in needs.sorts])
    if asked.timed:
        reach &= np.isfinite(seconds)
    most_load = 1 / asked.min_frames if asked.min_frames else math.inf
    return Room(at, boxes.count, boxes.cost, boxes.memory_bytes, seconds, reach, most_load)


def _staying(
    needs: Needs, fleet: Fleet, rooms: Sequence[Room], objective: Objective, solved: Solved,
    before: Mapping[str, Sequence[str]],
) -> Solved:  # fmt: skip
    """The placement before, with those who are new, where that is as good."""
    filled = with_the_rest(needs, rooms, as_before(needs, fleet, rooms, before), saving=objective == "boxes")
    unplaced, value = worth_of(needs, rooms, objective, filled)
    best_unplaced, best = worth_of(needs, rooms, objective, solved.filled)
    as_good = value <= best + TIGHT if objective == "boxes" else value >= best - TIGHT
    return Solved(filled, value, solved.bound) if unplaced <= best_unplaced and as_good else solved


def _why(needs: Needs, rooms: Sequence[Room], query: str) -> str:
    """Why a query has no place, in words."""
    at, alone = needs.sort_of[query], needs.counts([query])
    if not any(needs.sorts[at].reach):
        return "no box reaches its camera"
    if not any(room.reach[at] for room in rooms):
        return "one run takes longer than its SLA on every box that reaches its camera"
    if not any(room.reach[at] and needs.taken(alone) <= room.memory_bytes for room in rooms):
        return f"it needs {needs.taken(alone):,} bytes alone, more than any box has that reaches its camera"
    if not any(room.holds(needs, alone) for room in rooms):
        return "it asks for more time alone than `--min-frames` leaves on every box that reaches its camera"
    return "every box that it could be on is full"


def _boxes(
    fleet: Fleet, needs: Needs, placed: Mapping[str, Sequence[str]], asked: PlacementOptions, stages: Stages
) -> tuple[PlacedBox, ...]:
    queries = {query.id: query for query in fleet.queries}
    sort_of = needs.sort_of
    fractions = dict[tuple, float]()
    found = []
    for entry in fleet.boxes:
        for name in entry.names():
            if name not in placed:
                continue
            stages.add()
            there = [queries[query] for query in placed[name]]
            counts = needs.counts(placed[name])
            # Equal boxes with equal queries play alike.
            alike = entry.id, *sorted((sort_of[one.id], one.fps or 0.0, one.sla_ms, one.priority) for one in there)
            if alike not in fractions:
                fractions[alike] = _in_time(entry, there, asked.shared, asked.seed)
            weights = needs.weights(counts)
            found.append(PlacedBox(
                name, entry, tuple(placed[name]), needs.taken(counts), int(counts @ needs.own) - weights,
                fractions[alike],
            ))  # fmt: skip
    return tuple(found)


def _in_time(entry: Boxes, queries: Sequence[Query], shared: Shared, seed: int) -> float:
    """The part of these queries' frames that the box's own schedule has ready in time, on the virtual clock."""
    layers = [layer for query in queries for layer in shared_layers(query, shared)]
    costs = ceiling_costs(entry.profile, queries, layers)
    demands = {query.id: QuerySpec(query.fps or DEFAULT_FPS, float(query.priority)) for query in queries}
    asked = sum(demand.fps for demand in demands.values())
    frames = draw_arrivals(demands, min(PLAYED_S, MAX_PLAYED / asked), seed)
    rows = simulate(costs, frames, entry.memory_bytes, policy_named("adaptive"), demands).per_query()
    received = sum(row["received"] for row in rows)
    return sum(row["processed"] - row["late"] for row in rows) / received if received else 1.0
