"""The fleet file: the boxes there are and the workloads to be placed on them, checked key by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from edge_runtime.scheduler.costs import parse_memory
from edge_runtime.simulation.device_profiles import PROFILES, DeviceProfile
from models.errors import InputError, join_names
from models.io import MAX_CAMERAS, MAX_QUERIES, Name, PathText, read_yaml
from models.workload import Query, Workload, WorkloadCamera, load_workload

MAX_BOXES = 10_000


@dataclass(frozen=True)
class Boxes:
    """`count` equal boxes: `memory_bytes` for weights and workspace, `cost` of using one.

    `cameras` are those that they reach, None where that is all.
    """

    id: str
    profile: DeviceProfile
    memory_bytes: int
    count: int
    cost: float
    cameras: frozenset[str] | None

    def names(self) -> list[str]:
        """What each of them is called: by the id, numbered where there are several."""
        return [self.id] if self.count == 1 else [f"{self.id}-{number}" for number in range(1, self.count + 1)]

    def reaches(self, query: Query) -> bool:
        """Whether a query's camera can be had there."""
        return self.cameras is None or query.camera in self.cameras


@dataclass(frozen=True)
class Fleet:
    """Boxes, and the workloads whose queries are to be placed on them."""

    name: str
    boxes: tuple[Boxes, ...]
    workloads: tuple[Workload, ...]
    path: Path

    @property
    def queries(self) -> tuple[Query, ...]:
        """Those of all workloads."""
        return tuple(query for workload in self.workloads for query in workload.queries)

    @property
    def cameras(self) -> dict[str, WorkloadCamera]:
        """Those of all workloads, by id."""
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

    Raises InputError, naming the file and the key, for anything that does not fit DESIGN's format, for a query id that
    stands twice, and for a camera that two workloads mean otherwise.
    """
    path = Path(path)
    keys = read_yaml(path, _FleetKeys, "fleet file", "`name:`, `boxes:` and `workloads:`")
    root = path.resolve().parent
    workloads = tuple(load_workload(root / name) for name in keys.workloads)
    _check_together(path, workloads)
    fleet = Fleet(keys.name, tuple(_boxes(path, at, box) for at, box in enumerate(keys.boxes)), workloads, path)
    _check_boxes(fleet)
    return fleet


def _boxes(path: Path, at: int, keys: _BoxKeys) -> Boxes:
    where = f"boxes[{at}]"
    if keys.device not in PROFILES:
        remedy = f"choose one of: {', '.join(PROFILES)}"
        raise InputError(path, f"there is no profile '{keys.device}'", remedy, f"{where}.device ({keys.id})")
    nbytes = parse_memory(keys.memory, str(path), f"{where}.memory ({keys.id})")
    cameras = None if keys.cameras is None else frozenset(keys.cameras)
    return Boxes(keys.id, PROFILES[keys.device], nbytes, keys.count, keys.cost, cameras)


def _check_together(path: Path, workloads: Sequence[Workload]) -> None:
    """Queries and cameras of several workloads mean one thing each."""
    first = dict[str, Workload]()
    cameras = dict[str, tuple[WorkloadCamera, Workload]]()
    for at, workload in enumerate(workloads):
        for query in workload.queries:
            other = first.setdefault(query.id, workload)
            if other is not workload:
                fault = f"query '{query.id}' stands in {other.path} too"
                raise InputError(path, fault, "give each query of a fleet its own id", f"workloads[{at}]")
        for camera in workload.cameras.values():
            known, other = cameras.setdefault(camera.id, (camera, workload))
            if known.source != camera.source:
                fault = f"camera '{camera.id}' is another in {other.path}"
                raise InputError(path, fault, "give each camera of a fleet its own id", f"workloads[{at}]")
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
