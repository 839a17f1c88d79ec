"""`gemel place`: which queries of a fleet run on which box, as one mixed-integer program that HiGHS solves.

Queries with equal models, cameras' reach and rates are one kind, of which a box has a count. A box holds each kind's
private bytes per query, each shared piece of its kinds once, and the largest workspace.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import Field
from scipy.optimize import Bounds, linear_sum_assignment, milp
from scipy.sparse import coo_array

from edge_runtime.policies import policy_named
from edge_runtime.scheduler import QuerySpec
from edge_runtime.simulation.simulator import simulate
from gemel.analytic_costs import ceiling_costs
from gemel.conditions import DEFAULT_PLACEMENT, PlacementOptions
from gemel.fleet import MAX_BOXES, Boxes, Counts, Demands, Fleet, measure_demands, shareable_layers
from gemel.planner import DEFAULT_FPS, draw_arrivals
from gemel.text import percent, size, table
from merger.events import Progress, Stages, silent
from models.errors import InputError
from models.io import Exact, Name, cannot_be_written, check_apart, is_path, open_atomic, read_json, validate
from models.process import without_native_output
from models.workload import Query, inputs_of

FILE = "placement.json"
COUNTING, SOLVING, SIMULATING = "counting bytes and times", "solving the placement", "simulating each box"
SIMULATED_S, MAX_SIMULATED_FRAMES = 20.0, 20_000
TOLERANCE = 1e-6
MIB = 2**20
GREEDY_STARTS, ORDER_NOISE = 24, 0.6
"""Greedy placements in drawn orders, beside the one by size."""
IN_TIME_FRACTION = 0.9
"""Below this the text warns that a box has more frames than time."""
OBJECTIVE_TEXTS = {
    "boxes": "cost of the boxes used",
    "frames": "frames a second in time",
    "fair": "the smallest fraction of its frames that a query has time for",
}


@dataclass(frozen=True)
class BoxGroup:
    """`count` equal boxes: seconds a frame takes by kind, which kinds may run there, and the maximum load."""

    count: int
    cost: float
    memory_bytes: int
    frame_s: np.ndarray
    allowed: np.ndarray
    max_load: float = math.inf

    def can_hold(self, demands: Demands, counts: Counts) -> bool:
        if not self.allowed[counts > 0].all() or demands.box_bytes(counts) > self.memory_bytes:
            return False
        return self.load(demands, counts) <= self.max_load * (1 + TOLERANCE)

    def load(self, demands: Demands, counts: Counts) -> float:
        """The share of a box's time that all frames of these queries take, in their best batches."""
        used = counts > 0
        return float((counts[used] * demands.fps[used] * self.frame_s[used]).sum())

    def frames(self, demands: Demands, counts: Counts) -> float:
        """The most frames a second of these queries that a box has time for: shortest first."""
        free, total = 1.0, 0.0
        for kind in np.argsort(self.frame_s, kind="stable"):
            if counts[kind] and free > 0 and np.isfinite(self.frame_s[kind]):
                served = min(counts[kind] * demands.fps[kind], free / self.frame_s[kind])
                free, total = free - served * self.frame_s[kind], total + served
        return float(total)


@dataclass(frozen=True)
class FilledBox:
    """A box of a group, by the group's index, with its queries."""

    group: int
    counts: Counts


@dataclass(frozen=True)
class Solution:
    """Boxes, the value of the objective, and the bound that no placement of as many queries can pass."""

    boxes: list[FilledBox]
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """Distance of value and bound, as a fraction of the larger one."""
        larger = max(abs(self.value), abs(self.bound))
        return abs(self.value - self.bound) / larger if larger else 0.0


class PlacementProgram:
    """The mixed-integer program over single boxes.

    Variables of a box: counts and presence of kinds, presence of pieces, workspace, use, frames a second of kinds;
    and one for all boxes: the largest load. Objective, smaller is better: a penalty for each query without a box, and
    the cost of used boxes, minus the frames, or the largest load (at least 1), whose inverse is the fair fraction.
    """

    def __init__(self, demands: Demands, groups: Sequence[BoxGroup], objective: str) -> None:
        self.demands, self.groups, self.objective = demands, groups, objective
        self.boxes = [index for index, group in enumerate(groups) for _ in range(group.count)]
        kinds, pieces = len(demands.kinds), len(demands.pieces)
        self.width = 3 * kinds + pieces + 2
        self.size = self.width * len(self.boxes) + 1
        self.costs = np.zeros(self.size)
        self.upper = np.zeros(self.size)
        self.integer = np.zeros(self.size)
        self._rows = list[tuple[np.ndarray, np.ndarray, float, float]]()
        max_load = max(1.0, *(group.load(demands, np.where(_meets_sla(group), demands.total, 0)) for group in groups))
        self.penalty = {
            "boxes": 1.0 + sum(group.cost * group.count for group in groups), "frames": TOLERANCE, "fair": max_load + 1
        }[objective]  # fmt: skip
        self.upper[-1] = max_load
        if objective == "fair":
            self.costs[-1] = 1.0
            self._add_row([-1], [1.0], 1.0, math.inf)
        for box, index in enumerate(self.boxes):
            self._add_box(box * self.width, groups[index])
            if box and self.boxes[box - 1] == index:  # of equal boxes the first are used
                use = (box + 1) * self.width - 1
                self._add_row([use - self.width, use], [1.0, -1.0], 0.0, math.inf)
        for kind, total in enumerate(demands.total):
            columns = kind + self.width * np.arange(len(self.boxes))
            self._add_row(columns, np.ones(len(columns)), -math.inf, float(total))

    def _add_box(self, start: int, group: BoxGroup) -> None:
        demands, kinds, pieces = self.demands, len(self.demands.kinds), len(self.demands.pieces)
        counts, present = start + np.arange(kinds), start + kinds + np.arange(kinds)
        held, rates = start + 2 * kinds + np.arange(pieces), start + 2 * kinds + pieces + np.arange(kinds)
        workspace, use = start + self.width - 2, start + self.width - 1
        limit = np.where(group.allowed, demands.total, 0)
        timed = _meets_sla(group)
        self.upper[counts], self.upper[present], self.upper[held] = limit, group.allowed, 1.0
        self.upper[workspace], self.upper[use] = demands.workspace.max(initial=0) / MIB, 1.0
        self.integer[counts] = self.integer[present] = self.integer[use] = 1
        self.costs[counts] = -self.penalty
        for kind in range(kinds):
            self._add_row([counts[kind], present[kind]], [1.0, -demands.total[kind]], -math.inf, 0.0)
            self._add_row([present[kind], use], [1.0, -1.0], -math.inf, 0.0)
            self._add_row([present[kind], workspace], [demands.workspace[kind] / MIB, -1.0], -math.inf, 0.0)
            for piece in np.flatnonzero(demands.needs_piece[kind]):
                self._add_row([present[kind], held[piece]], [1.0, -1.0], -math.inf, 0.0)
        memory = np.concatenate([demands.private / MIB, demands.piece_bytes / MIB, [1.0, -group.memory_bytes / MIB]])
        self._add_row(np.concatenate([counts, held, [workspace, use]]), memory, -math.inf, 0.0)
        frame_s = np.where(timed, group.frame_s, 0.0)
        if math.isfinite(group.max_load):
            self._add_row(counts, demands.fps * frame_s, -math.inf, group.max_load)
        if self.objective == "boxes":
            self.costs[use] = group.cost
        elif self.objective == "fair":
            self._add_row([*counts, self.size - 1], [*(demands.fps * frame_s), -1.0], -math.inf, 0.0)
        else:
            self.upper[rates], self.costs[rates] = np.where(timed, limit * demands.fps, 0), -1.0
            self._add_row(rates, frame_s, -math.inf, 1.0)
            for kind in range(kinds):
                self._add_row([rates[kind], counts[kind]], [1.0, -demands.fps[kind]], -math.inf, 0.0)

    def _add_row(self, columns: Any, factors: Any, low: float, high: float) -> None:
        columns = np.asarray(columns) % self.size
        self._rows.append((columns, np.asarray(factors, dtype=float), low, high))

    def solve(self, seconds: float) -> tuple[list[FilledBox], float]:
        """The boxes that are found in this time (possibly none), and the bound of the program's objective."""
        lengths = [len(columns) for columns, _, _, _ in self._rows]
        rows = np.repeat(np.arange(len(self._rows)), lengths)
        columns = np.concatenate([columns for columns, _, _, _ in self._rows])
        factors = np.concatenate([factors for _, factors, _, _ in self._rows])
        matrix = coo_array((factors, (rows, columns)), shape=(len(self._rows), self.size)).tocsr()
        limits = np.array([(low, high) for _, _, low, high in self._rows])
        with without_native_output():
            found = milp(
                self.costs, integrality=self.integer, bounds=Bounds(0, self.upper),  # type: ignore[arg-type]
                constraints=(matrix, limits[:, 0], limits[:, 1]), options={"time_limit": max(seconds, 0.1)},
            )  # fmt: skip
        bound = found.mip_dual_bound
        bound = -math.inf if bound is None or not math.isfinite(bound) else bound
        boxes = []
        values = found.x if found.x is not None else np.zeros(self.size)
        for box, group in enumerate(self.boxes):
            counts = np.rint(values[box * self.width :][: len(self.demands.kinds)]).astype(np.int64)
            while counts.any() and not self.groups[group].can_hold(self.demands, counts):  # rounded up by the solver
                counts[np.flatnonzero(counts)[-1]] -= 1
            if counts.any():
                boxes.append(FilledBox(group, counts))
        return boxes, bound + self.penalty * int(self.demands.total.sum())


def _meets_sla(group: BoxGroup) -> np.ndarray:
    return np.isfinite(group.frame_s)


def evaluate_boxes(
    demands: Demands, groups: Sequence[BoxGroup], objective: str, boxes: Sequence[FilledBox]
) -> tuple[int, float]:
    """How many queries have no box, and the value of the objective."""
    missing = int(demands.total.sum() - sum(int(box.counts.sum()) for box in boxes))
    if objective == "boxes":
        return missing, float(sum(groups[box.group].cost for box in boxes))
    if objective == "frames":
        return missing, sum(groups[box.group].frames(demands, box.counts) for box in boxes)
    loads = [groups[box.group].load(demands, box.counts) for box in boxes]
    return missing, 1 / max(1.0, *loads) if boxes else 0.0


def fill_greedily(
    demands: Demands,
    groups: Sequence[BoxGroup],
    boxes: Sequence[FilledBox] = (),
    spread: bool = False,
    noise: np.ndarray | None = None,
) -> list[FilledBox]:
    """Add the remaining queries, largest first (bytes x `noise` of the kind): to the box that needs the fewest new
    bytes, or (`spread`) has the least load; a new box is the cheapest one for its memory.
    """
    filled = [FilledBox(box.group, box.counts.copy()) for box in boxes]
    free = [group.count - sum(box.group == index for box in filled) for index, group in enumerate(groups)]
    left = demands.total - sum((box.counts for box in filled), np.zeros_like(demands.total))
    own_bytes = (demands.private + demands.needs_piece @ demands.piece_bytes) * (1.0 if noise is None else noise)
    for kind in np.argsort(-own_bytes, kind="stable"):
        one = np.zeros_like(demands.total)
        one[kind] = 1
        for _ in range(int(left[kind])):
            used = [box for box in filled if groups[box.group].can_hold(demands, box.counts + one)]
            unused = [index for index, group in enumerate(groups) if free[index] and group.can_hold(demands, one)]
            if unused and (spread or not used):
                index = min(unused, key=lambda index: groups[index].cost / groups[index].memory_bytes)
                filled.append(FilledBox(index, one.copy()))
                free[index] -= 1
            elif used:
                best = min(used, key=lambda box: _added_cost(demands, groups[box.group], box.counts, one, spread))
                best.counts[kind] += 1
    return filled


def _added_cost(demands: Demands, group: BoxGroup, counts: Counts, one: Counts, spread: bool) -> float:
    if spread:
        return group.load(demands, counts + one)
    return demands.weight_bytes(counts + one) - demands.weight_bytes(counts)


def solve_placement(demands: Demands, groups: Sequence[BoxGroup], options: PlacementOptions) -> Solution:
    """The best of the solver's boxes and a greedy placement, with the solver's bound."""
    objective, demands = options.objective, _drop_unplaceable(demands, groups)
    total = int(demands.total.sum())
    spread, rng = objective != "boxes", np.random.default_rng(options.seed)
    orders = [None, *rng.uniform(1 - ORDER_NOISE, 1 + ORDER_NOISE, (GREEDY_STARTS, len(demands.kinds)))]
    starts = [fill_greedily(demands, groups, spread=spread, noise=noise) for noise in orders]
    best = min(starts, key=lambda found: _rank(demands, groups, objective, found))
    if objective == "boxes":  # a cheaper placement has no more boxes of a group than this cost pays for
        missing, cost = evaluate_boxes(demands, groups, objective, best)
        limits = [int(cost / group.cost + TOLERANCE) if not missing else group.count for group in groups]
    else:  # a box for each query is enough
        limits = [total for _ in groups]
    program_groups = [
        BoxGroup(min(group.count, limit), group.cost, group.memory_bytes, group.frame_s, group.allowed, group.max_load)
        for group, limit in zip(groups, limits, strict=True)
    ]
    program = PlacementProgram(demands, program_groups, objective)
    boxes, bound = program.solve(options.seconds)

    boxes = min(boxes, best, key=lambda found: _rank(demands, groups, objective, found))
    missing, value = evaluate_boxes(demands, groups, objective, boxes)
    left = bound - program.penalty * missing  # of the objective, for placements of as many queries
    if objective == "boxes":
        if len({group.cost for group in groups}) == 1:  # whole boxes
            left = math.ceil(left / groups[0].cost - TOLERANCE) * groups[0].cost if math.isfinite(left) else 0.0
        proved = min(value, max(0.0, left))
    elif objective == "frames":
        proved = max(value, min(-left, float(demands.fps @ demands.total)))
    else:
        proved = max(value, 1 / max(1.0, left))
    return Solution(boxes, value, proved)


def _rank(
    demands: Demands, groups: Sequence[BoxGroup], objective: str, boxes: Sequence[FilledBox]
) -> tuple[float, float]:
    """Sort key of placements, best first: `frames` counts frames before queries without a box."""
    missing, value = evaluate_boxes(demands, groups, objective, boxes)
    return (-value, missing) if objective == "frames" else (missing, value if objective == "boxes" else -value)


def _drop_unplaceable(demands: Demands, groups: Sequence[BoxGroup]) -> Demands:
    """The demands without queries that fit no box even alone."""
    alone = np.eye(len(demands.kinds), dtype=np.int64)
    kinds = [
        kind if any(group.can_hold(demands, counts) for group in groups) else replace(kind, queries=())
        for kind, counts in zip(demands.kinds, alone, strict=True)
    ]
    return Demands(tuple(kinds), demands.pieces)


@dataclass(frozen=True)
class PlacedBox:
    """A used box: its queries, their bytes, the bytes that sharing saves, and the fraction of frames in time."""

    id: str
    boxes: Boxes
    queries: tuple[str, ...]
    nbytes: int
    shared_bytes: int
    frames_fraction: float


@dataclass(frozen=True)
class Placement:
    """Which queries run on which box. `objective`, `bound` and `gap` are of `options.objective`; `unplaced` has the
    reason for each query without a box.
    """

    fleet: Fleet
    options: PlacementOptions
    boxes: tuple[PlacedBox, ...]
    unplaced: Mapping[str, str]
    objective: float
    bound: float
    gap: float
    seconds: float
    moved_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel place --json`."""
        boxes = [
            {"id": one.id, "device": one.boxes.profile.name, "memory_bytes": one.boxes.memory_bytes,
             "cost": one.boxes.cost, "queries": list(one.queries), "bytes": one.nbytes,
             "shared_bytes": one.shared_bytes, "frames_fraction": one.frames_fraction}
            for one in self.boxes
        ]  # fmt: skip
        return {
            "fleet": self.fleet.name, "asked": self.options.objective, "shared": self.options.shared,
            "min_frames": self.options.min_frames, "boxes": boxes, "unplaced": list(self.unplaced),
            "reasons": dict(self.unplaced), "objective": self.objective, "bound": self.bound, "gap": self.gap,
            "seconds": self.seconds, "moved_bytes": self.moved_bytes,
        }  # fmt: skip

    def to_text(self) -> str:
        rows = [
            (one.id, one.boxes.profile.name, size(one.nbytes), size(one.boxes.memory_bytes), size(one.shared_bytes),
             percent(one.frames_fraction, 0), ", ".join(one.queries))
            for one in self.boxes
        ]  # fmt: skip
        total = sum(entry.count for entry in self.fleet.boxes)
        placed = sum(len(one.queries) for one in self.boxes)
        optimal = "optimal" if self.gap <= TOLERANCE else f"within {percent(self.gap)} of the optimum"
        lines = [
            table(("box", "device", "needs", "of", "sharing saves", "frames in time", "queries"), rows),
            "",
            f"{placed} of {len(self.fleet.queries)} queries on {len(self.boxes)} of {total} boxes (sharing: "
            f"{self.options.shared}); {OBJECTIVE_TEXTS[self.options.objective]}: {self.objective:.6g}, bound "
            f"{self.bound:.6g}: {optimal}; {size(self.moved_bytes)} of weights have to be shipped",
        ]
        for entry in self.fleet.boxes:
            if entry.memory_bytes > entry.profile.memory_bytes:
                memory = size(entry.profile.memory_bytes)
                lines.append(f"{entry.id}: {entry.profile.title} has only {memory} for everything on it")
        if not self.options.timed and any(one.frames_fraction < IN_TIME_FRACTION for one in self.boxes):
            lines.append("some boxes have more frames than time; --min-frames 0.9 or --objective fair uses more boxes")
        return "\n".join([*lines, *(f"{query} has no box: {reason}" for query, reason in self.unplaced.items())])

    def write(self, folder: str | Path) -> Path:
        """Write `placement.json` and BOX.yaml, a workload file for `gemel merge`, for each box.

        Workload files that an earlier placement wrote here and that are no longer used are removed. Raises InputError
        where the folder cannot be written, or holds somebody else's files of these names.
        """
        folder = Path(folder)
        old = reserve_folder(folder, self.fleet)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for box in self.boxes:
                with open_atomic(folder / f"{box.id}.yaml", overwrite=True) as file:
                    file.write(self._workload_file(box, folder.resolve()).encode())
            with open_atomic(folder / FILE, overwrite=True) as file:
                file.write(json.dumps(self.to_json(), indent=1).encode())
            for name in set(old) - {one.id for one in self.boxes}:
                (folder / f"{name}.yaml").unlink(missing_ok=True)
        except OSError as error:
            raise cannot_be_written(folder, error) from error
        return folder / FILE

    def _workload_file(self, box: PlacedBox, folder: Path) -> str:
        queries = [query for query in self.fleet.queries if query.id in set(box.queries)]
        cameras = {}
        for camera in (self.fleet.cameras[query.camera] for query in queries):
            source = os.path.relpath(camera.source, folder) if is_path(camera.source) else camera.source
            cameras[camera.id] = {"source": source} | ({} if camera.fps is None else {"fps": camera.fps})
        document = {"name": box.id, "cameras": cameras, "queries": [_query_keys(query, folder) for query in queries]}
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def find_placement(
    fleet: Fleet,
    options: PlacementOptions = DEFAULT_PLACEMENT,
    before: Mapping[str, Sequence[str]] | None = None,
    progress: Progress = silent,
) -> Placement:
    """Place a fleet's queries. `before` has the queries of each box now; equally good placements move few bytes."""
    started, before, stages = time.monotonic(), before or {}, Stages(progress)
    stages.announce([COUNTING, SOLVING, SIMULATING])
    stages.begin(COUNTING)
    demands = measure_demands(fleet, options.shared, options.timed)
    groups = [_box_group(demands, index, boxes, options) for index, boxes in enumerate(fleet.boxes)]
    stages.begin(SOLVING)
    solution = solve_placement(demands, groups, options)
    if before:
        solution = _prefer_before(demands, fleet, groups, options, solution, before)
    placed = _assign_names(demands, fleet, solution.boxes, before)
    stages.begin(SIMULATING, len(placed))
    boxes = _simulate_boxes(fleet, demands, placed, options, stages)
    everywhere = {query for queries in placed.values() for query in queries}
    unplaced = [query.id for query in fleet.queries if query.id not in everywhere]
    return Placement(
        fleet, options, boxes, {query: _reason(demands, groups, query) for query in unplaced}, solution.value,
        solution.bound, solution.gap, time.monotonic() - started, count_moved_bytes(demands, placed, before),
    )  # fmt: skip


def _box_group(demands: Demands, index: int, boxes: Boxes, options: PlacementOptions) -> BoxGroup:
    frame_s = np.array([kind.frame_s[boxes.profile.name] for kind in demands.kinds])
    allowed = np.array([kind.reachable[index] for kind in demands.kinds])
    if options.timed:
        allowed &= np.isfinite(frame_s)
    max_load = 1 / options.min_frames if options.min_frames else math.inf
    return BoxGroup(boxes.count, boxes.cost, boxes.memory_bytes, frame_s, allowed, max_load)


def _prefer_before(
    demands: Demands, fleet: Fleet, groups: Sequence[BoxGroup], options: PlacementOptions, solution: Solution,
    before: Mapping[str, Sequence[str]],
) -> Solution:  # fmt: skip
    """The placement before, completed with the new queries, if it is as good as the solution."""
    kept, seen = list[FilledBox](), set[str]()
    for index, entry in enumerate(fleet.boxes):
        for name in entry.names():
            counts = np.zeros_like(demands.total)
            for query in before.get(name, ()):
                more = counts + demands.counts([query])
                if query in demands.kind_of and query not in seen and groups[index].can_hold(demands, more):
                    seen.add(query)
                    counts = more
            if counts.any():
                kept.append(FilledBox(index, counts))
    boxes = fill_greedily(demands, groups, kept, spread=options.objective != "boxes")
    missing, value = evaluate_boxes(demands, groups, options.objective, boxes)
    best_missing, best = evaluate_boxes(demands, groups, options.objective, solution.boxes)
    good = value <= best + TOLERANCE if options.objective == "boxes" else value >= best - TOLERANCE
    return Solution(boxes, value, solution.bound) if missing <= best_missing and good else solution


def _assign_names(
    demands: Demands, fleet: Fleet, boxes: Sequence[FilledBox], before: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """The queries of each box by name, chosen so that few bytes move: Hungarian method within a group of boxes."""
    old = {box: [query for query in queries if query in demands.kind_of] for box, queries in before.items()}
    counts_of = dict[str, Counts]()
    for index, entry in enumerate(fleet.boxes):
        filled = [box.counts for box in boxes if box.group == index]
        names = sorted(entry.names(), key=lambda name: not old.get(name))[: len(old) + len(filled)]
        olds = [demands.counts(old.get(name, ())) for name in names]
        moved = [[_new_bytes(demands, had, counts) for had in olds] for counts in filled]
        if filled:
            for row, column in zip(*linear_sum_assignment(np.array(moved, dtype=float)), strict=True):
                counts_of[names[int(column)]] = filled[int(row)]
    left = {kind: list(one.queries) for kind, one in enumerate(demands.kinds)}
    placed = {name: list[str]() for name in counts_of}
    for stay in (True, False):  # first the queries that stay, then the others
        for name, counts in counts_of.items():
            for kind in np.flatnonzero(counts).tolist():
                lacking = int(counts[kind]) - sum(demands.kind_of[query] == kind for query in placed[name])
                chosen = [query for query in left[kind] if not stay or query in old.get(name, ())][:lacking]
                placed[name] += chosen
                left[kind] = [query for query in left[kind] if query not in chosen]
    names = [name for entry in fleet.boxes for name in entry.names() if name in placed]
    order = {query: index for index, query in enumerate(demands.kind_of)}
    return {name: sorted(placed[name], key=order.__getitem__) for name in names}


def _new_bytes(demands: Demands, old: Counts, new: Counts) -> float:
    pieces = (demands.pieces_of(new) & ~demands.pieces_of(old)) @ demands.piece_bytes
    return float(np.maximum(new - old, 0) @ demands.private + pieces)


def count_moved_bytes(
    demands: Demands, placed: Mapping[str, Sequence[str]], before: Mapping[str, Sequence[str]]
) -> int:
    """Bytes that the boxes lack: private ones of new queries, and pieces that no query there needed."""
    total = 0
    for box, queries in placed.items():
        old = set(before.get(box, ()))
        total += sum(demands.kinds[demands.kind_of[query]].private_bytes for query in queries if query not in old)
        had, has = demands.pieces_of(demands.counts(old)), demands.pieces_of(demands.counts(queries))
        total += int((has & ~had) @ demands.piece_bytes)
    return total


def _reason(demands: Demands, groups: Sequence[BoxGroup], query: str) -> str:
    kind, alone = demands.kind_of[query], demands.counts([query])
    if not any(demands.kinds[kind].reachable):
        return "no box reaches its camera"
    allowed = [group for group in groups if group.allowed[kind]]
    if not allowed:
        return "one run takes longer than its SLA on every box that reaches its camera"
    if all(demands.box_bytes(alone) > group.memory_bytes for group in allowed):
        return f"it needs {demands.box_bytes(alone):,} bytes alone, more than any box has that reaches its camera"
    if not any(group.can_hold(demands, alone) for group in allowed):
        return "it needs more time alone than `--min-frames` leaves on every box that reaches its camera"
    return "every box that it could run on is full"


def _simulate_boxes(
    fleet: Fleet, demands: Demands, placed: Mapping[str, Sequence[str]], options: PlacementOptions, stages: Stages
) -> tuple[PlacedBox, ...]:
    queries = {query.id: query for query in fleet.queries}
    own_bytes = demands.private + demands.needs_piece @ demands.piece_bytes
    fractions, boxes = dict[tuple, float](), []
    for entry in fleet.boxes:
        for name in (name for name in entry.names() if name in placed):
            stages.add()
            here, counts = [queries[query] for query in placed[name]], demands.counts(placed[name])
            rates = sorted((demands.kind_of[one.id], one.fps or 0.0, one.sla_ms, one.priority) for one in here)
            key = entry.id, *rates
            if key not in fractions:  # equal boxes with equal queries have equal fractions
                fractions[key] = _fraction_in_time(entry, here, options)
            shared = int(counts @ own_bytes) - demands.weight_bytes(counts)
            nbytes = demands.box_bytes(counts)
            boxes.append(PlacedBox(name, entry, tuple(placed[name]), nbytes, shared, fractions[key]))
    return tuple(boxes)


def _fraction_in_time(entry: Boxes, queries: Sequence[Query], options: PlacementOptions) -> float:
    """The fraction of these queries' frames that the box's own scheduler has ready in time, on the virtual clock."""
    layers = [layer for query in queries for layer in shareable_layers(query, options.shared)]
    specs = {query.id: QuerySpec(query.fps or DEFAULT_FPS, float(query.priority)) for query in queries}
    duration_s = min(SIMULATED_S, MAX_SIMULATED_FRAMES / sum(spec.fps for spec in specs.values()))
    arrivals = draw_arrivals(specs, duration_s, options.seed)
    costs = ceiling_costs(entry.profile, queries, layers)
    rows = simulate(costs, arrivals, entry.memory_bytes, policy_named("adaptive"), specs).per_query()
    received = sum(row["received"] for row in rows)
    return sum(row["processed"] - row["late"] for row in rows) / received if received else 1.0


class _BoxRow(Exact):
    id: Name
    queries: list[Name]


class _PlacementKeys(Exact):
    boxes: Annotated[list[_BoxRow], Field(max_length=MAX_BOXES)]


def read_placement(folder: str | Path) -> dict[str, list[str]]:
    """The queries of each box that `write` left in a folder; InputError where there is no placement."""
    path, hint = Path(folder) / FILE, "name a folder that `gemel place -o` has written"
    if not Path(folder).is_dir():
        raise InputError(folder, "there is no such folder", hint, "--from")
    rows = read_json(path, hint).get("boxes")
    if isinstance(rows, list):
        rows = [{key: row[key] for key in ("id", "queries") if key in row} if isinstance(row, dict) else row
                for row in rows]  # fmt: skip
    written = validate(path, {"boxes": rows}, _PlacementKeys, hint=hint)
    for what, names in (
        ("box", [row.id for row in written.boxes]),
        ("query", [query for row in written.boxes for query in row.queries]),
    ):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(path, f"the {what} '{twice}' occurs twice", hint, "boxes")
    return {row.id: row.queries for row in written.boxes}


def reserve_folder(folder: str | Path, fleet: Fleet) -> list[str]:
    """Check that a placement can be written to a folder; returns the boxes of an earlier placement there.

    Raises InputError where the folder is a file, or where a file would be overwritten that no placement wrote or that
    the fleet is read from.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(folder, "is a file", "name a folder", "-o")
    old = list(read_placement(folder)) if (folder / FILE).exists() else []
    names = {name for entry in fleet.boxes for name in entry.names()}
    inputs = [("the fleet", fleet.path), *(one for workload in fleet.workloads for one in inputs_of(workload))]
    check_apart([("-o", folder / f"{name}.yaml") for name in sorted(names | {*old})], inputs)
    for name in names - {*old}:
        if (folder / f"{name}.yaml").exists():
            problem = "exists already, and is of no earlier placement"
            raise InputError(folder / f"{name}.yaml", problem, "move it away, or name another folder", "-o")
    return old


def _query_keys(query: Query, folder: Path) -> dict[str, Any]:
    """A query as a workload file in this folder has it."""

    def locate(value: object) -> str | None:
        return os.path.relpath(str(value), folder) if isinstance(value, Path) else None if value is None else str(value)

    keys = {
        "id": query.id, "camera": query.camera, "task": query.task, "classes": list(query.classes),
        "model": query.model, "model_args": query.model_args or None, "input_size": query.input_size,
        "weights": locate(query.weights), "init": locate(query.init), "fps": query.fps, "sla_ms": query.sla_ms,
        "roi": None if query.roi is None else list(query.roi), "min_score": query.min_score or None,
        "priority": query.priority, "data": locate(query.data), "accuracy_target": query.accuracy_target,
    }  # fmt: skip
    return {key: value for key, value in keys.items() if value is not None}
