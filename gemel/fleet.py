"""The fleet file (boxes and workloads), and the bytes and time that its queries need of a box."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from gemel.analytic_costs import find_profile, workload_originals
from gemel.conditions import Shared
from gemel.edge_runtime.scheduler.costs import parse_memory
from gemel.edge_runtime.simulation.device_profiles import DeviceProfile, costs_for
from gemel.models.errors import InputError, join_names
from gemel.models.files.io import MAX_CAMERAS, Name, PathText, read_yaml
from gemel.models.sharing.layers import Layer, layers_of, model_bytes
from gemel.models.workload import Query, Workload, WorkloadCamera, load_workload
from gemel.planner import DEFAULT_FPS

MAX_BOXES = 10_000
LARGE_LAYER_BYTES, LARGE_LAYER_FRACTION = 1 << 20, 0.01
"""`--shared predicted`: merges keep layers shared that have these bytes, or this fraction of their model's."""

Counts = np.ndarray
"""Queries of each kind on a box, int64 (kinds,)."""


@dataclass(frozen=True)
class Boxes:
    """`count` equal boxes: `memory_bytes` for weights and workspace, `cost` and `watts` of using one (None: unknown),
    and the cameras that they reach (None: all).
    """

    id: str
    profile: DeviceProfile
    memory_bytes: int
    count: int
    cost: float
    cameras: frozenset[str] | None
    watts: float | None = None

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


class _BoxKeys(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: Name
    device: str
    memory: str | int
    count: Annotated[int, Field(ge=1, le=MAX_BOXES)] = 1
    cost: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    watts: Annotated[float, Field(gt=0, le=1e6)] | None = None
    cameras: Annotated[list[Name], Field(min_length=1, max_length=MAX_CAMERAS)] | None = None


class _FleetKeys(BaseModel):
    model_config = ConfigDict(extra="forbid")
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
    workloads = tuple(load_workload(path.resolve().parent / name) for name in keys.workloads)
    owners, cameras = dict[str, Workload](), dict[str, tuple[WorkloadCamera, Workload]]()
    for at, workload in enumerate(workloads):
        hint = "give each query and camera of a fleet its own id"
        for query in workload.queries:
            other = owners.setdefault(query.id, workload)
            if other is not workload:
                raise InputError(path, f"query '{query.id}' is in {other.path} too", hint, f"workloads[{at}]")
        for camera in workload.cameras.values():
            known, other = cameras.setdefault(camera.id, (camera, workload))
            if known.source != camera.source:
                problem = f"camera '{camera.id}' has another source in {other.path}"
                raise InputError(path, problem, hint, f"workloads[{at}]")
    boxes = tuple(_read_boxes(path, at, box, cameras) for at, box in enumerate(keys.boxes))
    name, count = Counter(name for one in boxes for name in one.names()).most_common(1)[0]
    if count > 1:
        raise InputError(path, f"two boxes are called '{name}'", "give each its own id", "boxes")
    return Fleet(keys.name, boxes, workloads, path)


def _read_boxes(path: Path, at: int, keys: _BoxKeys, known_cameras: Collection[str]) -> Boxes:
    def key(name: str) -> str:
        return f"boxes[{at}].{name} ({keys.id})"

    for camera in keys.cameras or ():
        if camera not in known_cameras:
            raise InputError(path, f"no camera '{camera}'", f"use one of: {join_names(known_cameras)}", key("cameras"))
    profile = find_profile(keys.device, path, key("device"))
    nbytes = parse_memory(keys.memory, str(path), key("memory"))
    cameras = None if keys.cameras is None else frozenset(keys.cameras)
    return Boxes(keys.id, profile, nbytes, keys.count, keys.cost, cameras, keys.watts)


def lose_boxes(fleet: Fleet, lost: Collection[str]) -> Fleet:
    """The fleet without these boxes, each of the others an entry of its own; InputError for a name that it lacks."""
    names = [name for boxes in fleet.boxes for name in boxes.names()]
    if unknown := [name for name in lost if name not in names]:
        raise InputError(fleet.path, f"no box '{unknown[0]}'", f"the boxes are: {join_names(names)}", "--lost")
    left = [replace(boxes, id=name, count=1) for boxes in fleet.boxes for name in boxes.names() if name not in lost]
    if not left:
        raise InputError(fleet.path, "no box is left", "leave at least one", "--lost")
    return replace(fleet, boxes=tuple(left))


@dataclass(frozen=True)
class Demands:
    """The kinds of a fleet's queries, those with equal needs, as arrays by kind; the pieces that kinds share by piece.

    A box holds the private bytes of each query, each piece once that a query of it needs, and the largest workspace.
    `needs_piece` is (kinds, pieces).
    """

    queries: tuple[tuple[str, ...], ...]
    private: np.ndarray
    workspace: np.ndarray
    fps: np.ndarray
    piece_bytes: np.ndarray
    needs_piece: np.ndarray

    @cached_property
    def total(self) -> Counts:
        """All queries."""
        return np.array([len(queries) for queries in self.queries])

    @cached_property
    def own_bytes(self) -> np.ndarray:
        """Bytes of a query's model by kind."""
        return self.private + self.needs_piece @ self.piece_bytes

    @cached_property
    def kind_of(self) -> dict[str, int]:
        """The kind of each query."""
        return {query: kind for kind, queries in enumerate(self.queries) for query in queries}

    def counts(self, queries: Iterable[str]) -> Counts:
        """How many of these queries are of each kind; unknown ones do not count."""
        known = [self.kind_of[query] for query in queries if query in self.kind_of]
        return np.bincount(np.array(known, dtype=np.int64), minlength=len(self.queries))

    def pieces_of(self, counts: Counts) -> np.ndarray:
        """Whether these queries need a piece, bool (pieces,)."""
        return np.any(self.needs_piece[counts > 0], axis=0)

    def weight_bytes(self, counts: Counts) -> int:
        """Bytes of the unique tensors of these queries."""
        return int(counts @ self.private + self.pieces_of(counts) @ self.piece_bytes)

    def box_bytes(self, counts: Counts) -> int:
        """Bytes that a box needs for these queries: unique tensors and the largest workspace."""
        return self.weight_bytes(counts) + int(self.workspace[counts > 0].max(initial=0))


@dataclass(frozen=True)
class FleetNeeds:
    """The demands of a fleet, and for each of its boxes, by kind: seconds of a frame in the best batch (infinite beyond
    the SLA), and whether they reach the camera. (boxes, kinds).
    """

    demands: Demands
    frame_s: np.ndarray
    reached: np.ndarray


def measure_needs(fleet: Fleet, shared: Shared, timed: bool) -> FleetNeeds:
    """What a fleet's queries need; unless `timed`, queries that differ only in rate or SLA are one kind."""
    groups = defaultdict[tuple, list[Query]](list)
    for query in fleet.queries:
        model_args = json.dumps(query.model_args, sort_keys=True, default=str)
        folder = None if query.file is None or ":" not in query.model else query.file.parent
        reached = tuple(boxes.reaches(query) for boxes in fleet.boxes)
        rate = (query.fps, query.sla_ms) if timed else ()
        key = (query.model, model_args, len(query.classes), query.input_size, query.task, folder, reached, rate)
        groups[key].append(query)
    firsts = [queries[0] for queries in groups.values()]
    models, profiles = workload_originals(firsts), {boxes.profile.name: boxes.profile for boxes in fleet.boxes}
    costs = {name: costs_for(profile, models).queries for name, profile in profiles.items()}
    any_costs = next(iter(costs.values()))
    layers = [shareable_layers(query, shared) for query in firsts]
    piece_bytes, needs_piece = _find_pieces(layers)
    demands = Demands(
        tuple(tuple(query.id for query in queries) for queries in groups.values()),
        np.array([model_bytes(query) - sum(one.bytes for one in own) for query, own in zip(firsts, layers)]),
        np.array([any_costs[query.id].workspace_bytes for query in firsts]),
        np.array([query.fps or DEFAULT_FPS for query in firsts]),
        piece_bytes,
        needs_piece,
    )
    frame_s = [
        [cost.frame_s if cost.run_s <= cost.sla_s else math.inf for cost in costs[boxes.profile.name].values()]
        for boxes in fleet.boxes
    ]
    return FleetNeeds(
        demands, np.array(frame_s), np.array([[b.reaches(query) for query in firsts] for b in fleet.boxes])
    )


def shareable_layers(query: Query, shared: Shared) -> list[Layer]:
    """The layers whose weights other queries of the box can use: all (`ceiling`), large ones (`predicted`), or none.

    Merges mostly take back small, early layers (docs/fleet.md).
    """
    layers = [layer for layer in layers_of(query) if not layer.head]
    if shared == "predicted":
        minimum = min(LARGE_LAYER_BYTES, LARGE_LAYER_FRACTION * model_bytes(query))
        return [layer for layer in layers if layer.bytes >= minimum]
    return layers if shared == "ceiling" else []


def _find_pieces(layers: Sequence[Sequence[Layer]]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of each piece, and which kinds need it.

    The k-th layer of a signature is held once for all kinds that have it k times or more (models.sharing.groups).
    """
    nbytes = {layer.wide: layer.bytes for of_kind in layers for layer in of_kind}
    counts = [Counter(layer.wide for layer in of_kind) for of_kind in layers]
    pieces = Counter[tuple[bool, ...]]()
    for signature, one_bytes in nbytes.items():
        for level in range(1, max(count[signature] for count in counts) + 1):
            pieces[tuple(count[signature] >= level for count in counts)] += one_bytes
    needed = np.array(list(pieces), dtype=bool).reshape(len(pieces), len(layers)).T
    return np.array(list(pieces.values()), dtype=np.int64), needed
