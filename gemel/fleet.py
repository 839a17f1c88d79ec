"""The fleet file (boxes and workloads), and the bytes and time that its queries need of a box."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from edge_runtime.scheduler.costs import parse_memory
from edge_runtime.simulation.device_profiles import PROFILES, DeviceProfile
from gemel.analytic_costs import costs_for, workload_originals
from gemel.conditions import Shared
from gemel.planner import DEFAULT_FPS
from models.errors import InputError, join_names
from models.io import MAX_CAMERAS, MAX_QUERIES, Name, PathText, read_yaml
from models.sharing.layers import Layer, layers_of, model_bytes
from models.workload import Query, Workload, WorkloadCamera, load_workload

MAX_BOXES = 10_000
LARGE_LAYER_BYTES, LARGE_LAYER_FRACTION = 1 << 20, 0.01
"""`--shared predicted`: merges keep layers shared that have these bytes, or this fraction of their model's."""


@dataclass(frozen=True)
class Boxes:
    """`count` equal boxes: `memory_bytes` for weights and workspace, `cost` of using one, and the cameras that they
    reach (None: all).
    """

    id: str
    profile: DeviceProfile
    memory_bytes: int
    count: int
    cost: float
    cameras: frozenset[str] | None

    def names(self) -> list[str]:
        """Their names: the id, with a number where there are several."""
        return [self.id] if self.count == 1 else [f"{self.id}-{number}" for number in range(1, self.count + 1)]

    def reaches(self, query: Query) -> bool:
        """Whether these boxes reach the query's camera."""
        return self.cameras is None or query.camera in self.cameras


@dataclass(frozen=True)
class Fleet:
    """Boxes, and the workloads whose queries are placed on them."""

    name: str
    boxes: tuple[Boxes, ...]
    workloads: tuple[Workload, ...]
    path: Path

    @property
    def queries(self) -> tuple[Query, ...]:
        """The queries of all workloads."""
        return tuple(query for workload in self.workloads for query in workload.queries)

    @property
    def cameras(self) -> dict[str, WorkloadCamera]:
        """The cameras of all workloads by id."""
        return {camera.id: camera for workload in self.workloads for camera in workload.cameras.values()}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _BoxKeys(_Strict):
    id: Name
    device: str
    memory: str | int
    count: Annotated[int, Field(ge=1, le=MAX_BOXES)] = 1
    cost: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    cameras: Annotated[list[Name], Field(min_length=1, max_length=MAX_CAMERAS)] | None = None


class _FleetKeys(_Strict):
    name: Name
    boxes: Annotated[list[_BoxKeys], Field(min_length=1, max_length=1000)]
    workloads: Annotated[list[PathText], Field(min_length=1, max_length=1000)]


def load_fleet(path: str | Path) -> Fleet:
    """Read a fleet file and its workload files; weights and footage need not exist.

    Raises InputError, naming the file and the key, for a bad value, for a query id that occurs twice, and for a camera
    whose source differs between workloads.
    """
    path = Path(path)
    keys = read_yaml(path, _FleetKeys, "fleet file", "`name:`, `boxes:` and `workloads:`")
    root = path.resolve().parent
    workloads = tuple(load_workload(root / name) for name in keys.workloads)
    _check_unique_ids(path, workloads)
    fleet = Fleet(keys.name, tuple(_boxes(path, at, box) for at, box in enumerate(keys.boxes)), workloads, path)
    _check_boxes(fleet)
    return fleet


def _boxes(path: Path, at: int, keys: _BoxKeys) -> Boxes:
    where = f"boxes[{at}]"
    if keys.device not in PROFILES:
        hint = f"choose one of: {', '.join(PROFILES)}"
        raise InputError(path, f"there is no profile '{keys.device}'", hint, f"{where}.device ({keys.id})")
    nbytes = parse_memory(keys.memory, str(path), f"{where}.memory ({keys.id})")
    cameras = None if keys.cameras is None else frozenset(keys.cameras)
    return Boxes(keys.id, PROFILES[keys.device], nbytes, keys.count, keys.cost, cameras)


def _check_unique_ids(path: Path, workloads: Sequence[Workload]) -> None:
    """Query ids are unique, and a camera id has one source."""
    first = dict[str, Workload]()
    cameras = dict[str, tuple[WorkloadCamera, Workload]]()
    for at, workload in enumerate(workloads):
        for query in workload.queries:
            other = first.setdefault(query.id, workload)
            if other is not workload:
                problem = f"query '{query.id}' is in {other.path} too"
                raise InputError(path, problem, "give each query of a fleet its own id", f"workloads[{at}]")
        for camera in workload.cameras.values():
            known, other = cameras.setdefault(camera.id, (camera, workload))
            if known.source != camera.source:
                problem = f"camera '{camera.id}' has another source in {other.path}"
                raise InputError(path, problem, "give each camera of a fleet its own id", f"workloads[{at}]")
    if sum(len(workload.queries) for workload in workloads) > 10 * MAX_QUERIES:
        raise InputError(path, f"more than {10 * MAX_QUERIES:,} queries", "split the fleet", "workloads")


def _check_boxes(fleet: Fleet) -> None:
    names = [name for boxes in fleet.boxes for name in boxes.names()]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise InputError(fleet.path, f"two boxes are called '{twice}'", "give each its own id", "boxes")
    if len(names) > MAX_BOXES:
        raise InputError(fleet.path, f"more than {MAX_BOXES:,} boxes", "lower the counts", "boxes")
    known = fleet.cameras
    for at, boxes in enumerate(fleet.boxes):
        for camera in sorted(boxes.cameras or ()):
            if camera not in known:
                key = f"boxes[{at}].cameras ({boxes.id})"
                raise InputError(fleet.path, f"no camera '{camera}'", f"use one of: {join_names(known)}", key)


Counts = np.ndarray
"""Queries of each kind on a box, int64 (kinds,)."""


@dataclass(frozen=True)
class QueryKind:
    """Queries with equal needs; `frame_s` by device is the shortest time a frame takes, infinite beyond the SLA."""

    queries: tuple[str, ...]
    private_bytes: int
    workspace_bytes: int
    fps: float
    frame_s: Mapping[str, float]
    reachable: tuple[bool, ...]


@dataclass(frozen=True)
class Piece:
    """Bytes that a box holds once if it has a query of any of these kinds."""

    nbytes: int
    kinds: frozenset[int]


@dataclass(frozen=True)
class Demands:
    """All kinds of a fleet's queries and the pieces that they share, also as arrays by kind."""

    kinds: tuple[QueryKind, ...]
    pieces: tuple[Piece, ...]

    @cached_property
    def total(self) -> Counts:
        return np.array([len(kind.queries) for kind in self.kinds])

    @cached_property
    def private(self) -> np.ndarray:
        return np.array([kind.private_bytes for kind in self.kinds])

    @cached_property
    def workspace(self) -> np.ndarray:
        return np.array([kind.workspace_bytes for kind in self.kinds])

    @cached_property
    def fps(self) -> np.ndarray:
        return np.array([kind.fps for kind in self.kinds])

    @cached_property
    def piece_bytes(self) -> np.ndarray:
        return np.array([piece.nbytes for piece in self.pieces], dtype=np.int64)

    @cached_property
    def needs_piece(self) -> np.ndarray:
        """Whether a kind needs a piece, bool (kinds, pieces)."""
        needed = np.zeros((len(self.kinds), len(self.pieces)), dtype=bool)
        for index, piece in enumerate(self.pieces):
            needed[sorted(piece.kinds), index] = True
        return needed

    @cached_property
    def kind_of(self) -> dict[str, int]:
        return {query: index for index, kind in enumerate(self.kinds) for query in kind.queries}

    def counts(self, queries: Iterable[str]) -> Counts:
        """How many of these queries are of each kind; unknown ones do not count."""
        known = [self.kind_of[query] for query in queries if query in self.kind_of]
        return np.bincount(np.array(known, dtype=np.int64), minlength=len(self.kinds))

    def pieces_of(self, counts: Counts) -> np.ndarray:
        """Whether these queries need a piece, bool (pieces,)."""
        return np.logical_or.reduce(self.needs_piece[counts > 0], axis=0)

    def weight_bytes(self, counts: Counts) -> int:
        """Bytes of the unique tensors of these queries."""
        return int(counts @ self.private + self.pieces_of(counts) @ self.piece_bytes)

    def box_bytes(self, counts: Counts) -> int:
        """Bytes that a box needs for these queries: unique tensors and the largest workspace."""
        return self.weight_bytes(counts) + int(self.workspace[counts > 0].max(initial=0))


def shareable_layers(query: Query, shared: Shared) -> list[Layer]:
    """The layers whose weights other queries of the box can use: all (`ceiling`), large ones (`predicted`), or none.

    Merges mostly take back small, early layers (docs/fleet.md).
    """
    layers = [layer for layer in layers_of(query) if not layer.head]
    if shared == "predicted":
        minimum = min(LARGE_LAYER_BYTES, LARGE_LAYER_FRACTION * model_bytes(query))
        return [layer for layer in layers if layer.bytes >= minimum]
    return layers if shared == "ceiling" else []


def measure_demands(fleet: Fleet, shared: Shared, timed: bool) -> Demands:
    """The kinds of a fleet's queries; unless `timed`, queries that differ only in rate or SLA are one kind."""
    groups = defaultdict[tuple, list[Query]](list)
    for query in fleet.queries:
        model_args = json.dumps(query.model_args, sort_keys=True, default=str)
        folder = None if query.file is None or ":" not in query.model else query.file.parent
        reachable = tuple(boxes.reaches(query) for boxes in fleet.boxes)
        rate = (query.fps, query.sla_ms) if timed else ()
        key = (query.model, model_args, len(query.classes), query.input_size, query.task, folder, reachable, rate)
        groups[key].append(query)
    firsts = [queries[0] for queries in groups.values()]
    models = workload_originals(firsts)
    profiles = {boxes.profile.name: boxes.profile for boxes in fleet.boxes}
    costs = {name: costs_for(profile, models).queries for name, profile in profiles.items()}
    workspaces = next(iter(costs.values()))
    kinds, layers = list[QueryKind](), list[list[Layer]]()
    for key, queries in groups.items():
        first = queries[0]
        layers.append(shareable_layers(first, shared))
        private = model_bytes(first) - sum(layer.bytes for layer in layers[-1])
        frame_s = {name: _frame_seconds(by_query[first.id]) for name, by_query in costs.items()}
        ids = tuple(query.id for query in queries)
        workspace = workspaces[first.id].workspace_bytes
        kinds.append(QueryKind(ids, private, workspace, first.fps or DEFAULT_FPS, frame_s, key[-2]))
    return Demands(tuple(kinds), _find_pieces(layers))


def _frame_seconds(cost: Any) -> float:
    if cost.run_s > cost.sla_s:
        return math.inf
    return min(cost.run_of(count) / count for count in range(1, cost.largest + 1))


def _find_pieces(layers: Sequence[Sequence[Layer]]) -> tuple[Piece, ...]:
    """The k-th layer of a signature is held once for all kinds that have it k times or more (models.sharing.groups)."""
    nbytes, occurrences = dict[str, int](), defaultdict[str, dict[int, int]](dict)
    for kind, of_kind in enumerate(layers):
        for signature, count in Counter(layer.wide for layer in of_kind).items():
            occurrences[signature][kind] = count
        nbytes |= {layer.wide: layer.bytes for layer in of_kind}
    pieces = Counter[frozenset[int]]()
    for signature, counts in occurrences.items():
        for level in range(1, max(counts.values()) + 1):
            pieces[frozenset(kind for kind, count in counts.items() if count >= level)] += nbytes[signature]
    return tuple(Piece(total, kinds) for kinds, total in pieces.items())
