"""`gemel place`: which queries of a fleet run on which box, as one mixed-integer program that HiGHS solves.

The program counts the queries of each kind on each box: a box holds their private bytes, the pieces that its kinds
share once, and the largest workspace. Of every objective a score is minimised: the cost of the boxes used (`boxes`),
minus the frames a second in time (`frames`), or the largest load of a box, at least 1 (`fair`).
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
from pydantic import BaseModel, Field
from scipy.optimize import Bounds, linear_sum_assignment, milp
from scipy.sparse import coo_array

from gemel.analytic_costs import ceiling_costs
from gemel.conditions import DEFAULT_PLACEMENT, Objective, PlacementOptions
from gemel.edge_runtime.policies import policy_named
from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.simulation.simulator import simulate
from gemel.fleet import MAX_BOXES, Boxes, Counts, Demands, Fleet, FleetNeeds, measure_needs, shareable_layers
from gemel.models.errors import InputError, join_names
from gemel.models.files.io import Name, cannot_be_written, check_apart, is_path, open_atomic, read_json, validate
from gemel.models.process import without_native_output
from gemel.models.sharing.flop_rates import FlopRates, layers_by_query, whole_prefix_rates
from gemel.models.stages import Progress, Stages, silent
from gemel.models.workload import Query, inputs_of
from gemel.models.zoo.user_models import is_model_file
from gemel.planner import DEFAULT_FPS, draw_arrivals, note_default_fps
from gemel.text import percent, size, table

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
    "watts": "watts of the boxes used",
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
        """Whether a box has the memory and the time for these queries."""
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


@dataclass(frozen=True)
class PlacementProblem:
    """Queries, boxes, and what is optimised."""

    demands: Demands
    groups: Sequence[BoxGroup]
    objective: Objective
    before: tuple[Counts, ...] = ()
    """The queries of each single box, of which `max_moves` may leave it; empty where all may."""
    max_moves: int = 0

    def fits(self, group: BoxGroup) -> np.ndarray:
        """Which kinds a box of this group can hold alone, bool (kinds,)."""
        alone = np.eye(len(self.demands.queries), dtype=np.int64)
        return np.array([group.can_hold(self.demands, counts) for counts in alone])

    def score(self, boxes: Sequence[FilledBox]) -> float:
        """What is minimised."""
        if self.objective == "boxes":
            return float(sum(self.groups[box.group].cost for box in boxes))
        if self.objective == "frames":
            return -sum(self.groups[box.group].frames(self.demands, box.counts) for box in boxes)
        return max([1.0, *(self.groups[box.group].load(self.demands, box.counts) for box in boxes)])

    def value(self, score: float) -> float:
        """The value of the objective that belongs to a score."""
        return {"boxes": score, "frames": -score, "fair": 1 / max(1.0, score)}[self.objective]

    def rank(self, boxes: Sequence[FilledBox]) -> tuple[float, float]:
        """Sort key of placements, best first: `frames` counts frames before queries without a box."""
        missing, score = -count_queries(boxes), self.score(boxes)
        return (score, missing) if self.objective == "frames" else (missing, score)


def count_queries(boxes: Sequence[FilledBox]) -> int:
    """How many queries have a box."""
    return sum(int(box.counts.sum()) for box in boxes)


def fill_greedily(
    problem: PlacementProblem, boxes: Sequence[FilledBox] = (), noise: np.ndarray | float = 1.0
) -> list[FilledBox]:
    """Add the remaining queries, largest first (bytes x `noise` of the kind): to the box that needs the fewest new
    bytes, for other objectives than `boxes` to the one with the least load; a new box is the cheapest for its memory.
    """
    demands, groups, spread = problem.demands, problem.groups, problem.objective != "boxes"
    filled = [FilledBox(box.group, box.counts.copy()) for box in boxes]
    free = [group.count - sum(box.group == index for box in filled) for index, group in enumerate(groups)]
    left = demands.total - sum((box.counts for box in filled), np.zeros_like(demands.total))

    def added_cost(box: FilledBox) -> float:
        if spread:
            return groups[box.group].load(demands, box.counts + one)
        return demands.weight_bytes(box.counts + one) - demands.weight_bytes(box.counts)

    for kind in np.argsort(-demands.own_bytes * noise, kind="stable"):
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
                min(used, key=added_cost).counts[kind] += 1
    return filled


class PlacementProgram:
    """The mixed-integer program over single boxes, of which the first of equal ones are used.

    Variables of a box: counts, presence and frames a second of kinds, presence of pieces, workspace (MiB), use; and
    one for all boxes, the largest load. Each query without a box costs `penalty`.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem, demands, groups = problem, problem.demands, problem.groups
        self.boxes = [index for index, group in enumerate(groups) for _ in range(group.count)]
        self.kinds, pieces = demands.needs_piece.shape
        self.width = 3 * self.kinds + pieces + 2
        self.load = self.width * len(self.boxes)
        self.costs, self.upper, self.integer = np.zeros((3, self.load + 1 + len(problem.before) * self.kinds))
        self.rows = list[tuple[np.ndarray, np.ndarray, float]]()
        allowed = [problem.fits(group) for group in groups]
        max_load = max(1.0, *(group.load(demands, demands.total * np.isfinite(group.frame_s)) for group in groups))
        self.upper[self.load], self.costs[self.load] = max_load, float(problem.objective == "fair")
        all_cost = sum(group.cost * group.count for group in groups)
        self.penalty = {"boxes": 1 + all_cost, "frames": TOLERANCE, "fair": 1 + max_load}[problem.objective]
        for box, index in enumerate(self.boxes):
            self._add_box(box * self.width, groups[index], allowed[index], pieces)
            if box and self.boxes[box - 1] == index:
                use = (box + 1) * self.width - 1
                self._limit(0, (use, 1.0), (use - self.width, -1.0))
        for kind, total in enumerate(demands.total):
            self._limit(total, (kind + self.width * np.arange(len(self.boxes)), 1.0))
        if problem.before:
            self._limit_moves(problem.before, problem.max_moves)

    def _limit_moves(self, before: Sequence[Counts], max_moves: int) -> None:
        """The last variables: queries of each kind that leave a box."""
        moved = self.load + 1 + np.arange(len(before) * self.kinds).reshape(len(before), self.kinds)
        self._limit(max_moves, (moved.ravel(), 1.0))
        for box, counts in enumerate(before):
            self.upper[moved[box]] = counts
            for kind in np.flatnonzero(counts):
                self._limit(-counts[kind], (box * self.width + kind, -1.0), (moved[box, kind], -1.0))

    def _add_box(self, start: int, group: BoxGroup, allowed: np.ndarray, pieces: int) -> None:
        demands, kinds, objective = self.problem.demands, self.kinds, self.problem.objective
        counts, present, rates = start + np.arange(3 * kinds).reshape(3, kinds)
        held = start + 3 * kinds + np.arange(pieces)
        workspace, use = start + self.width - 2, start + self.width - 1
        frame_s = np.where(np.isfinite(group.frame_s), group.frame_s, 0.0)
        self.upper[counts], self.upper[present], self.upper[held] = allowed * demands.total, allowed, 1.0
        self.upper[workspace], self.upper[use] = demands.workspace.max(initial=0) / MIB, 1.0
        self.integer[counts] = self.integer[present] = self.integer[use] = 1
        self.costs[counts] = -self.penalty
        for kind in range(kinds):
            self._limit(0, (counts[kind], 1.0), (present[kind], -demands.total[kind]))
            self._limit(0, (present[kind], 1.0), (use, -1.0))
            self._limit(0, (present[kind], demands.workspace[kind] / MIB), (workspace, -1.0))
            for piece in np.flatnonzero(demands.needs_piece[kind]):
                self._limit(0, (present[kind], 1.0), (held[piece], -1.0))
        stored = (counts, demands.private / MIB), (held, demands.piece_bytes / MIB), (workspace, 1.0)
        self._limit(0, *stored, (use, -group.memory_bytes / MIB))
        if math.isfinite(group.max_load):
            self._limit(group.max_load, (counts, demands.fps * frame_s))
        if objective == "boxes":
            self.costs[use] = group.cost
        elif objective == "fair":
            self._limit(0, (counts, demands.fps * frame_s), (self.load, -1.0))
        else:
            self.upper[rates], self.costs[rates] = allowed * demands.total * demands.fps * (frame_s > 0), -1.0
            self._limit(1.0, (rates, frame_s))
            for kind in range(kinds):
                self._limit(0, (rates[kind], 1.0), (counts[kind], -demands.fps[kind]))

    def _limit(self, limit: float, *terms: tuple[Any, Any]) -> None:
        """Add a row: the sum of all variables (columns) times their factors is at most `limit`."""
        columns, factors = zip(*(np.broadcast_arrays(*map(np.atleast_1d, term)) for term in terms))
        self.rows.append((np.concatenate(columns), np.concatenate(factors), limit))

    def solve(self, seconds: float) -> tuple[list[FilledBox], float]:
        """The boxes that are found in this time (possibly none), and the bound of the score less all penalties."""
        columns, factors, limits = zip(*self.rows)
        rows = np.repeat(np.arange(len(limits)), [len(row) for row in columns])
        shape = (len(limits), self.costs.size)
        matrix = coo_array((np.concatenate(factors), (rows, np.concatenate(columns))), shape=shape)
        lower = np.zeros_like(self.upper)
        lower[self.load] = 1.0
        with without_native_output():
            found = milp(
                self.costs, integrality=self.integer, bounds=Bounds(lower, self.upper),  # type: ignore[arg-type]
                constraints=(matrix.tocsr(), -math.inf, limits), options={"time_limit": max(seconds, 0.1)},
            )  # fmt: skip
        values = (
            np.zeros((len(self.boxes), self.width)) if found.x is None else found.x[: self.load].reshape(-1, self.width)
        )
        filled = []
        for group, counts in zip(self.boxes, np.rint(values[:, : self.kinds]).astype(np.int64), strict=True):
            while counts.any() and not self.problem.groups[group].can_hold(self.problem.demands, counts):
                counts[np.flatnonzero(counts)[-1]] -= 1  # rounded up by the solver
            if counts.any():
                filled.append(FilledBox(group, counts))
        return filled, -math.inf if found.mip_dual_bound is None else float(found.mip_dual_bound)


def solve_placement(problem: PlacementProblem, seconds: float = DEFAULT_PLACEMENT.seconds, seed: int = 0) -> Solution:
    """The best of the solver's boxes and greedy placements, with the solver's bound."""
    demands, groups, objective = problem.demands, problem.groups, problem.objective
    placeable = int(demands.total[np.any([problem.fits(group) for group in groups], axis=0)].sum())
    drawn = np.random.default_rng(seed).uniform(1 - ORDER_NOISE, 1 + ORDER_NOISE, (GREEDY_STARTS, len(demands.queries)))
    starts = [fill_greedily(problem, noise=noise) for noise in (1.0, *drawn)]
    if problem.before:
        starts = [fill_greedily(problem, [FilledBox(*one) for one in enumerate(problem.before) if one[1].any()])]
    best = min(starts, key=problem.rank)
    limits = [placeable] * len(groups)  # a box for each query is enough
    if objective == "boxes" and count_queries(best) == placeable and not problem.before:
        limits = [int(problem.score(best) / group.cost + TOLERANCE) for group in groups]  # all that this cost pays for
    fewer = [replace(group, count=min(group.count, most)) for group, most in zip(groups, limits, strict=True)]
    program = PlacementProgram(replace(problem, groups=fewer))
    boxes, bound = program.solve(seconds)
    boxes = min(boxes, best, key=problem.rank)
    score = problem.score(boxes)
    bound += program.penalty * count_queries(boxes)  # for placements of as many queries
    if objective == "frames":
        bound = max(bound, -float(demands.fps @ demands.total))
    elif objective == "boxes" and len({group.cost for group in groups}) == 1 and math.isfinite(bound):
        bound = math.ceil(bound / groups[0].cost - TOLERANCE) * groups[0].cost  # whole boxes
    bound = min(score, max(bound, 0.0) if objective == "boxes" else bound)
    return Solution(boxes, problem.value(score), problem.value(bound))


@dataclass(frozen=True)
class PlacedBox:
    """A used box: its queries, their bytes, the bytes that sharing saves, the fraction of frames in time, and FLOPs a
    second, alone and with the longest prefixes that its cameras' queries could have in common."""

    id: str
    boxes: Boxes
    queries: tuple[str, ...]
    nbytes: int
    shared_bytes: int
    frames_fraction: float
    flops: FlopRates


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
    moves: int

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel place --json`."""
        boxes = [
            {"id": one.id, "device": one.boxes.profile.name, "memory_bytes": one.boxes.memory_bytes,
             "cost": one.boxes.cost, "queries": list(one.queries), "bytes": one.nbytes,
             "shared_bytes": one.shared_bytes, "frames_fraction": one.frames_fraction, **one.flops.to_json()}
            for one in self.boxes
        ]  # fmt: skip
        return {
            "fleet": self.fleet.name, "asked": self.options.objective, "shared": self.options.shared,
            "min_frames": self.options.min_frames, "boxes": boxes, "unplaced": list(self.unplaced),
            "reasons": dict(self.unplaced), "objective": self.objective, "bound": self.bound, "gap": self.gap,
            "seconds": self.seconds, "moved_bytes": self.moved_bytes, "moves": self.moves,
        }  # fmt: skip

    def to_text(self) -> str:
        """A table of the boxes, the objective with its bound, and what the numbers hide."""
        rows = [
            (one.id, one.boxes.profile.name, size(one.nbytes), size(one.boxes.memory_bytes), size(one.shared_bytes),
             percent(one.frames_fraction, 0), f"{one.flops.alone / 1e9:.3g}", f"{one.flops.with_prefix / 1e9:.3g}",
             ", ".join(one.queries))
            for one in self.boxes
        ]  # fmt: skip
        total = sum(entry.count for entry in self.fleet.boxes)
        placed = sum(len(one.queries) for one in self.boxes)
        optimal = "optimal" if self.gap <= TOLERANCE else f"within {percent(self.gap)} of the optimum"
        lines = [
            table(
                (
                    "box",
                    "device",
                    "needs",
                    "of",
                    "sharing saves",
                    "frames in time",
                    "GFLOP/s",
                    "common prefixes",
                    "queries",
                ),
                rows,
            ),
            "",
            f"{placed} of {len(self.fleet.queries)} queries on {len(self.boxes)} of {total} boxes (sharing: "
            f"{self.options.shared}); {OBJECTIVE_TEXTS[self.options.objective]}: {self.objective:.6g}, bound "
            f"{self.bound:.6g}: {optimal}; {size(self.moved_bytes)} of weights have to be shipped, and {self.moves} "
            "queries leave their box",
        ]
        for entry in self.fleet.boxes:
            if entry.memory_bytes > entry.profile.memory_bytes:
                memory = size(entry.profile.memory_bytes)
                lines.append(f"{entry.id}: {entry.profile.title} has only {memory} for everything on it")
        if not self.options.timed and any(one.frames_fraction < IN_TIME_FRACTION for one in self.boxes):
            lines.append("some boxes have more frames than time; --min-frames 0.9 or --objective fair uses more boxes")
        return "\n".join([*lines, *(f"{query} has no box: {reason}" for query, reason in self.unplaced.items())])

    __repr__ = to_text

    def write(self, folder: str | Path) -> Path:
        """Write `placement.json` and BOX.yaml, a workload file for `gemel merge`, for each box.

        Workload files that an earlier placement wrote here and that are no longer used are removed. Raises InputError
        where the folder cannot be written, or holds other files of these names.
        """
        folder = Path(folder)
        old = reserve_folder(folder, self.fleet)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            documents = {f"{box.id}.yaml": self._workload_file(box, folder.resolve()) for box in self.boxes}
            for name, text in {**documents, FILE: json.dumps(self.to_json(), indent=1)}.items():
                with open_atomic(folder / name, overwrite=True) as file:
                    file.write(text.encode())
            for name in {f"{box}.yaml" for box in old} - documents.keys():
                (folder / name).unlink(missing_ok=True)
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
    note_default_fps(fleet.path, fleet.queries)
    needs = measure_needs(fleet, options.shared, options.timed)
    demands, max_load = needs.demands, 1 / options.min_frames if options.min_frames else math.inf
    by_watts = options.objective == "watts"
    if by_watts and (unknown := [boxes.id for boxes in fleet.boxes if boxes.watts is None]):
        problem = f"no watts are known of {join_names(unknown)}"
        raise InputError(fleet.path, problem, "give each its `watts`", "boxes")
    groups = [
        BoxGroup(boxes.count, (boxes.watts or 1.0) if by_watts else boxes.cost, boxes.memory_bytes, frame_s,
                 reached & np.isfinite(frame_s) if options.timed else reached, max_load)
        for boxes, frame_s, reached in zip(fleet.boxes, needs.frame_s, needs.reached, strict=True)
    ]  # fmt: skip
    stages.begin(SOLVING)
    problem = PlacementProblem(demands, groups, "boxes" if by_watts else options.objective)
    if options.max_moves is not None:
        now = tuple(demands.counts(before.get(boxes.id, ())) for boxes in fleet.boxes)
        problem = replace(problem, before=now, max_moves=options.max_moves)
    solution = solve_placement(problem, options.seconds, options.seed)
    if before:
        kept = _keep_before(problem, fleet, before)
        if all(mine <= best + TOLERANCE for mine, best in zip(problem.rank(kept), problem.rank(solution.boxes))):
            solution = Solution(kept, problem.value(problem.score(kept)), solution.bound)
    placed = _assign_names(demands, fleet, solution.boxes, before)
    stages.begin(SIMULATING, len(placed))
    boxes = _simulate_boxes(fleet, demands, placed, options, stages)
    everywhere = {query for queries in placed.values() for query in queries}
    unplaced = {
        query.id: _find_reason(needs, problem, demands.kind_of[query.id])
        for query in fleet.queries
        if query.id not in everywhere
    }
    moved = count_moved_bytes(demands, placed, before)
    names = {name for entry in fleet.boxes for name in entry.names()}
    moves = sum(len({*queries} - {*placed.get(box, ())}) for box, queries in before.items() if box in names)
    seconds = time.monotonic() - started
    return Placement(
        fleet, options, boxes, unplaced, solution.value, solution.bound, solution.gap, seconds, moved, moves
    )


def _keep_before(problem: PlacementProblem, fleet: Fleet, before: Mapping[str, Sequence[str]]) -> list[FilledBox]:
    """The placement before, as far as it still fits, completed with the new queries."""
    kept, demands = list[FilledBox](), problem.demands
    for index, entry in enumerate(fleet.boxes):
        for name in entry.names():
            counts = np.zeros_like(demands.total)
            for query in before.get(name, ()):
                more = counts + demands.counts([query])
                counts = more if problem.groups[index].can_hold(demands, more) else counts
            if counts.any():
                kept.append(FilledBox(index, counts))
    return fill_greedily(problem, kept)


def _assign_names(
    demands: Demands, fleet: Fleet, boxes: Sequence[FilledBox], before: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """The queries of each box by name, chosen so that few bytes move: Hungarian method within a group of boxes."""
    left = {kind: list(queries) for kind, queries in enumerate(demands.queries)}
    counts_of = dict[str, Counts]()
    for index, entry in enumerate(fleet.boxes):
        filled = [box.counts for box in boxes if box.group == index]
        names = sorted(entry.names(), key=lambda name: name not in before)[: len(before) + len(filled)]
        olds = [demands.counts(before.get(name, ())) for name in names]
        moved = np.array([[_new_bytes(demands, had, counts) for had in olds] for counts in filled])
        if filled:
            for row, column in zip(*linear_sum_assignment(moved), strict=True):
                counts_of[names[int(column)]] = filled[int(row)]
    placed = {name: list[str]() for entry in fleet.boxes for name in entry.names() if name in counts_of}
    for stay in (True, False):  # first the queries that stay, then the others
        for name, queries in placed.items():
            for kind, lacking in enumerate(counts_of[name] - demands.counts(queries)):
                chosen = [query for query in left[kind] if not stay or query in before.get(name, ())][:lacking]
                queries += chosen
                left[kind] = [query for query in left[kind] if query not in chosen]
    order = {query: index for index, query in enumerate(demands.kind_of)}
    return {name: sorted(queries, key=order.__getitem__) for name, queries in placed.items()}


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
        had, has = demands.pieces_of(demands.counts(old)), demands.pieces_of(demands.counts(queries))
        total += int(demands.counts(set(queries) - old) @ demands.private + (has & ~had) @ demands.piece_bytes)
    return total


def _find_reason(needs: FleetNeeds, problem: PlacementProblem, kind: int) -> str:
    demands, alone = needs.demands, needs.demands.counts(needs.demands.queries[kind][:1])
    if not needs.reached[:, kind].any():
        return "no box reaches its camera"
    allowed = [group for group in problem.groups if group.allowed[kind]]
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
    entries = {name: entry for entry in fleet.boxes for name in entry.names()}
    fractions, boxes = dict[tuple, float](), []
    layers, rates = layers_by_query(fleet.queries), {query.id: query.fps or DEFAULT_FPS for query in fleet.queries}
    for name, here in placed.items():
        stages.add()
        entry, counts = entries[name], demands.counts(here)
        needs = ((demands.kind_of[one], queries[one]) for one in here)
        key = entry.id, *sorted((kind, one.fps or 0.0, one.sla_ms, one.priority) for kind, one in needs)
        if key not in fractions:  # equal boxes with equal queries have equal fractions
            fractions[key] = _fraction_in_time(entry, [queries[one] for one in here], options)
        shared_bytes = int(counts @ demands.own_bytes) - demands.weight_bytes(counts)
        flops = whole_prefix_rates([queries[one] for one in here], rates, layers)
        nbytes = demands.box_bytes(counts)
        boxes.append(PlacedBox(name, entry, tuple(here), nbytes, shared_bytes, fractions[key], flops))
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


class _BoxRow(BaseModel):
    id: Name
    queries: list[Name]


class _PlacementKeys(BaseModel):
    boxes: Annotated[list[_BoxRow], Field(max_length=MAX_BOXES)]


def read_placement(folder: str | Path) -> dict[str, list[str]]:
    """The queries of each box that `write` left in a folder; InputError where there is no placement."""
    path, hint = Path(folder) / FILE, "name a folder that `gemel place -o` has written"
    if not Path(folder).is_dir():
        raise InputError(folder, "there is no such folder", hint, "--from")
    return {row.id: row.queries for row in validate(path, read_json(path, hint), _PlacementKeys, hint=hint).boxes}


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

    labels = {name: [one for one, own in query.label_map.items() if own == name] for name in query.classes}
    keys = {
        "id": query.id, "camera": query.camera, "task": query.task,
        "classes": labels if query.label_map else list(query.classes),
        "model": query.model, "model_args": query.model_args or None, "input_size": query.input_size,
        "preprocess": query.preprocess, "decoder": None if query.decoder == "auto" else query.decoder,
        "keep_architecture": query.keep_architecture or None,
        "weights": None if is_model_file(query.model) else locate(query.weights), "init": locate(query.init),
        "fps": query.fps, "sla_ms": query.sla_ms,
        "roi": None if query.roi is None else list(query.roi),
        "frame_size": query.frame_size and list(query.frame_size), "min_score": query.min_score or None,
        "priority": query.priority, "data": locate(query.data), "accuracy_target": query.accuracy_target,
    }  # fmt: skip
    return {key: value for key, value in keys.items() if value is not None}
