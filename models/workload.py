"""The workload file: the queries and cameras of one box, checked key by key."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from models.errors import InputError, join_names
from models.io import (
    MAX_CAMERAS,
    MAX_CLASSES,
    MAX_QUERIES,
    ClassName,
    Fps,
    Name,
    PathText,
    Priority,
    SlaMs,
    is_path,
    read_yaml,
)
from models.preprocess import FURTHEST_PIXEL, Roi
from models.published import PREFIX, Published, find_published
from models.zoo.user_models import check_name


@dataclass(frozen=True)
class WorkloadCamera:
    """One camera: `source` is an absolute path, a URL or a device index; `fps` None means the source's own."""

    id: str
    source: str
    fps: float | None


@dataclass(frozen=True)
class Query:
    """One question on one camera, answered by one model. `accuracy_target` is a fraction of the original's.

    `weights` are the original's, `init` those that its training starts from; `file` is the workload file, in whose
    folder the query's own factory may be.
    """

    id: str
    camera: str
    task: str
    classes: tuple[str, ...]
    model: str
    model_args: dict[str, Any] = field(hash=False)
    input_size: int
    weights: Path | Published | None
    init: Path | Published | None
    fps: float | None
    sla_ms: float
    roi: Roi | None
    min_score: float
    priority: int
    data: Path | None
    accuracy_target: float
    file: Path | None = None


@dataclass(frozen=True)
class Workload:
    """The queries and cameras of one box, with every path made absolute."""

    name: str
    accuracy_target: float
    cameras: dict[str, WorkloadCamera] = field(hash=False)
    queries: tuple[Query, ...]
    path: Path

    def query(self, query_id: str) -> Query:
        """The query of that id; InputError when there is none."""
        for query in self.queries:
            if query.id == query_id:
                return query
        known = join_names([query.id for query in self.queries])
        raise InputError(self.path, f"there is no query '{query_id}'", f"the queries are: {known}", "queries")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


_Target = Annotated[float, Field(gt=0, le=1)]


class _CameraKeys(_Strict):
    source: PathText | int
    fps: Fps | None = None


class _QueryKeys(_Strict):
    id: Name
    camera: str
    task: Literal["classification", "detection"]
    classes: Annotated[list[ClassName], Field(min_length=1, max_length=MAX_CLASSES)]
    model: PathText
    model_args: dict[str, Any] = {}
    input_size: Annotated[int, Field(ge=16, le=4096)]
    weights: PathText | None = None
    init: PathText | None = None
    fps: Fps | None = None
    sla_ms: SlaMs = 1000.0
    roi: Roi | None = None
    min_score: Annotated[float, Field(ge=0, le=1)] = 0.0
    priority: Priority = 1
    data: PathText | None = None
    accuracy_target: _Target | None = None


class _WorkloadKeys(_Strict):
    name: Name
    accuracy_target: _Target = 0.95
    cameras: Annotated[dict[Name, _CameraKeys], Field(min_length=1, max_length=MAX_CAMERAS)]
    queries: Annotated[list[_QueryKeys], Field(min_length=1, max_length=MAX_QUERIES)]


def load_workload(path: str | Path) -> Workload:
    """Read a workload file; weights and footage need not exist yet.

    Raises InputError, naming the file and the key, for anything that does not fit.
    """
    path = Path(path)
    keys = read_yaml(path, _WorkloadKeys, "workload file", "`name:`, `cameras:` and `queries:`")
    root = path.resolve().parent
    cameras = {
        camera_id: WorkloadCamera(camera_id, _resolve_source(root, str(camera.source)), camera.fps)
        for camera_id, camera in keys.cameras.items()
    }
    queries = tuple(_query(path, root, keys, index) for index in range(len(keys.queries)))
    seen: set[str] = set()
    for index, query in enumerate(queries):
        if query.id in seen:
            raise InputError(path, f"'{query.id}' occurs twice", "give each query its own id", f"queries[{index}].id")
        seen.add(query.id)
        if query.camera not in cameras:
            known = join_names(cameras)
            raise InputError(
                path, f"no camera '{query.camera}'", f"use one of: {known}", f"queries[{index}].camera ({query.id})"
            )
    return Workload(keys.name, keys.accuracy_target, cameras, queries, path.resolve())


def inputs_of(workload: Workload, trained: Collection[str] = ()) -> Iterator[tuple[str, str | Path]]:
    """Description and path of each file that training, merging and evaluating a workload read; it need not exist.

    The weights of the queries `trained` are left out: training writes them.
    """
    yield "the workload", workload.path
    yield from ((f"the source of camera {camera.id}", camera.source) for camera in workload.cameras.values())
    for query in workload.queries:
        weights = None if query.id in trained else query.weights
        for what, path in (("the weights", weights), ("the first weights", query.init)):
            if isinstance(path, Path):
                yield f"{what} of {query.id}", path
        if query.data is not None:
            splits = [query.data / split for split in ("train", "val", "test") if (query.data / split).is_dir()]
            yield from ((f"the data of {query.id}", part) for part in splits or [query.data])


def _query(path: Path, root: Path, keys: _WorkloadKeys, index: int) -> Query:
    given = keys.queries[index]
    where = f"queries[{index}]"
    check_name(given.model, given.task, str(path), f"{where}.model ({given.id})")
    if len(set(given.classes)) < len(given.classes):
        raise InputError(path, "a class occurs twice", "name each class once", f"{where}.classes ({given.id})")
    if given.task == "classification" and len(given.classes) < 2:
        remedy = "name at least two, for instance [empty, busy]"
        raise InputError(path, "classification needs two classes or more", remedy, f"{where}.classes ({given.id})")
    roi = given.roi
    if roi is not None and not (0 <= roi[0] < roi[2] < FURTHEST_PIXEL and 0 <= roi[1] < roi[3] < FURTHEST_PIXEL):
        fault = f"{list(roi)} is empty or negative, or lies beyond {FURTHEST_PIXEL:,.0f} pixels"
        raise InputError(path, fault, "give [x0, y0, x1, y1]", f"{where}.roi ({given.id})")

    def resolve(value: str | None) -> Path | None:
        return None if value is None else _absolute(root, value)

    def resolve_weights(name: str, value: str | None) -> Path | Published | None:
        if value is None or not value.startswith(PREFIX):
            return resolve(value)
        return find_published(value, given.model, path, f"{where}.{name} ({given.id})")

    return Query(
        id=given.id, camera=given.camera, task=given.task, classes=tuple(given.classes), model=given.model,
        model_args=given.model_args, input_size=given.input_size,
        weights=resolve_weights("weights", given.weights), init=resolve_weights("init", given.init),
        fps=given.fps or (keys.cameras[given.camera].fps if given.camera in keys.cameras else None),
        sla_ms=given.sla_ms, roi=roi, min_score=given.min_score, priority=given.priority, data=resolve(given.data),
        accuracy_target=given.accuracy_target or keys.accuracy_target, file=path.resolve(),
    )  # fmt: skip


def _absolute(root: Path, path: str) -> Path:
    return Path(os.path.realpath(root / path))


def _resolve_source(root: Path, source: str) -> str:
    return str(_absolute(root, source)) if is_path(source) else source
