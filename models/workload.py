"""The workload file: the queries and cameras of one box, checked key by key."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gemel.models.errors import InputError, join_errors, join_names
from gemel.models.files.io import (
    MAX_CAMERAS,
    MAX_CLASSES,
    MAX_QUERIES,
    Agreement,
    ClassName,
    Fps,
    Name,
    PathText,
    Priority,
    SlaMs,
    is_path,
    read_yaml,
)
from gemel.models.files.published import PREFIX, Published, find_published
from gemel.models.notes import add_note
from gemel.models.preprocess import (
    FURTHEST_PIXEL,
    MAX_SIDE,
    NORMALISATIONS,
    UNPREPARED_HINT,
    Anchor,
    InputSize,
    Preprocess,
    Region,
    Resize,
    Roi,
    height_width,
    side_or_sides,
)
from gemel.models.tasks import TaskName
from gemel.models.zoo.hubs import HF, TIMM, is_hub_model, read_hub
from gemel.models.zoo.user_models import check_name, check_suffix, is_external, is_model_file


@dataclass(frozen=True)
class WorkloadCamera:
    """One camera: `source` is an absolute path, a URL or a device index; `fps` None means the source's own.

    `footage` are videos and folders of it without labels, in order of time.
    """

    id: str
    source: str
    fps: float | None
    footage: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Query:
    """One question on one camera, answered by one model. `accuracy_target` is a fraction of the original's.

    `model` may be an absolute path to a .onnx or .pt2 file, and so its `weights`, too. `weights` are the original's,
    `init` those that its training starts from; `file` is the workload file, in whose folder the query's own factory
    may be.
    `preprocess` (whole, or only the keys given) precedes the model's own: `models.zoo.preprocess_of` is what counts.
    `label_map` gives the class of each label where those of the data have other names. `agreement` says how outputs
    of the task `tensor` are compared, `multi_label` that a frame has any number of the classes. `footage` is its own,
    or its camera's. `labels` is `none` where its data count as footage without labels. `agreement_target` is the part
    of the original's answers that a merged model keeps, `max_flips` that of its right answers that may become wrong.
    """

    id: str
    camera: str
    task: str
    classes: tuple[str, ...]
    model: str
    model_args: dict[str, Any] = field(hash=False)
    input_size: InputSize | None
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
    preprocess: Preprocess | Mapping[str, Any] | None = field(default=None, hash=False)
    decoder: str = "auto"
    keep_architecture: bool = False
    frame_size: tuple[int, int] | None = None
    label_map: dict[str, str] = field(default_factory=dict, hash=False)
    agreement: Agreement | None = None
    multi_label: bool = False
    footage: tuple[Path, ...] = ()
    agreement_target: float | None = None
    max_flips: float | None = None
    labels: Literal["none"] | None = None

    @property
    def region(self) -> Region:
        """The part of its camera's frames that it looks at."""
        return Region(self.roi, self.frame_size)

    @property
    def sources(self) -> dict[str, str]:
        """The query's class of each label that its data hold for it."""
        return self.label_map or {name: name for name in self.classes}


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


MAX_FOOTAGE = 1000
"""Videos and folders of one camera."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


_Target = Annotated[float, Field(gt=0, le=1)]
_Footage = PathText | Annotated[list[PathText], Field(max_length=MAX_FOOTAGE)]


class _CameraKeys(_Strict):
    source: PathText | int
    fps: Fps | None = None
    footage: _Footage = []


_FrameSide = Annotated[int, Field(ge=1, le=100_000)]
_Side = Annotated[int, Field(ge=16, le=MAX_SIDE)]
_Deviation = Annotated[float, Field(gt=0)]
_Decoder = Literal[
    "auto",
    "yolo",
    "yolov5",
    "yolox",
    "nanodet",
    "fastestdet",
    "yolo-end2end",
    "yolo-pose",
    "yolo-seg",
    "yolo-obb",
    "detr",
    "ssd",
    "classifier",
]


class _PreprocessKeys(_Strict):
    """How frames are prepared; a name stands for a mean and a deviation."""

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if given not in NORMALISATIONS:
            raise ValueError(f"give {' or '.join(NORMALISATIONS)}, or keys such as resize, mean and std")
        return NORMALISATIONS[given]

    resize: Resize = "stretch"
    size: tuple[_Side, _Side] | None = None
    crop_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    pad: Annotated[int, Field(ge=0, le=255)] = 114
    scale: Literal[1, 255] = 1
    mean: tuple[float, float, float] | None = None
    std: tuple[_Deviation, _Deviation, _Deviation] | None = None
    channels: Literal["rgb", "bgr"] = "rgb"
    anchor: Anchor = "centre"
    antialias: bool = True


class _QueryKeys(_Strict):
    id: Name
    camera: str
    task: TaskName | None = None
    classes: Annotated[
        list[ClassName] | dict[ClassName, ClassName | list[ClassName]], Field(max_length=MAX_CLASSES)
    ] = []
    model: PathText
    model_args: dict[str, Any] = {}
    input_size: _Side | tuple[_Side, _Side] | None = None
    preprocess: _PreprocessKeys | None = None
    decoder: _Decoder = "auto"
    keep_architecture: bool = False
    agreement: Agreement | None = None
    multi_label: bool = False
    weights: PathText | None = None
    init: PathText | None = None
    fps: Fps | None = None
    sla_ms: SlaMs = 1000.0
    roi: Roi | None = None
    frame_size: tuple[_FrameSide, _FrameSide] | None = None
    min_score: Annotated[float, Field(ge=0, le=1)] = 0.0
    priority: Priority = 1
    data: PathText | None = None
    accuracy_target: _Target | None = None
    footage: _Footage | None = None
    agreement_target: _Target | None = None
    max_flips: Annotated[float, Field(gt=0, lt=1)] | None = None
    labels: Literal["none"] | None = None


class _WorkloadKeys(_Strict):
    name: Name = "workload"
    accuracy_target: _Target = 0.95
    agreement_target: _Target | None = None
    max_flips: Annotated[float, Field(gt=0, lt=1)] | None = None
    cameras: Annotated[dict[Name, _CameraKeys], Field(min_length=1, max_length=MAX_CAMERAS)]
    queries: Annotated[list[_QueryKeys], Field(min_length=1, max_length=MAX_QUERIES)]


def load_workload(path: str | Path) -> Workload:
    """Read a workload file; weights and footage need not exist yet.

    Raises InputError, naming the file and the key, for anything that does not fit, with all further faults.
    """
    path = Path(path)
    keys = read_yaml(path, _WorkloadKeys, "workload file", "`name:`, `cameras:` and `queries:`")
    root = path.resolve().parent
    cameras = {
        camera_id: WorkloadCamera(
            camera_id, _resolve_source(root, str(camera.source)), camera.fps, _footage(root, camera.footage)
        )
        for camera_id, camera in keys.cameras.items()
    }
    queries, errors = list[Query](), _check_names(path, keys)
    for index in range(len(keys.queries)):
        try:
            queries.append(_query(path, root, keys, index))
        except InputError as error:
            errors.append(error)
    if errors:
        raise join_errors(errors)
    note_shared_footage(queries)
    return Workload(keys.name, keys.accuracy_target, cameras, tuple(queries), path.resolve())


def _check_names(path: Path, keys: _WorkloadKeys) -> list[InputError]:
    """Ids that occur twice, and cameras that there are not."""
    errors, seen = list[InputError](), set[str]()
    for index, query in enumerate(keys.queries):
        if query.id in seen:
            hint = "give each query its own id"
            errors.append(InputError(path, f"'{query.id}' occurs twice", hint, f"queries[{index}].id"))
        seen.add(query.id)
        if query.camera not in keys.cameras:
            hint, key = f"use one of: {join_names(keys.cameras)}", f"queries[{index}].camera ({query.id})"
            errors.append(InputError(path, f"no camera '{query.camera}'", hint, key))
    return errors


def note_shared_footage(queries: Sequence[Query]) -> None:
    """Note footage that queries of another camera name, too: what it proves may not hold on theirs."""
    cameras: dict[Path, str] = {}
    for query in queries:
        for footage in query.footage:
            camera = cameras.setdefault(footage, query.camera)
            if camera != query.camera:
                text = f"its footage {footage} is that of camera {camera}: agreement is measured there"
                add_note(query.id, text, f"give footage of camera {query.camera}")


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
            splits = [
                query.data / split for split in ("train", "val", "valid", "test") if (query.data / split).is_dir()
            ]
            yield from ((f"the data of {query.id}", part) for part in splits or [query.data])
        yield from ((f"the footage of {query.id}", part) for part in query.footage)


def _query(path: Path, root: Path, keys: _WorkloadKeys, index: int) -> Query:
    where = f"queries[{index}]"
    given = _complete(path, root, keys.queries[index], where)
    assert given.task is not None  # _complete has it
    check_name(given.model, given.task, str(path), f"{where}.model ({given.id})")
    label_map = _label_map(given.classes, path, f"{where}.classes ({given.id})")
    if len(set(given.classes)) < len(given.classes):
        raise InputError(path, "a class occurs twice", "name each class once", f"{where}.classes ({given.id})")
    fewest = {"classification": 2, "segmentation": 2, "embedding": 0, "tensor": 0}.get(given.task, 1)
    if len(given.classes) < fewest:
        counted = "two classes or more" if fewest == 2 else "a class or more"
        remedy = f"name at least {'two, for instance [empty, busy]' if fewest == 2 else 'one, for instance [person]'}"
        raise InputError(path, f"{given.task} needs {counted}", remedy, f"{where}.classes ({given.id})")
    if given.multi_label and given.task != "classification":
        key = f"{where}.multi_label ({given.id})"
        raise InputError(
            path, f"{given.task} has one way of labels", "take it out, or name `task: classification`", key
        )
    if (given.agreement is None) == (given.task == "tensor"):
        fault = "this key is missing" if given.agreement is None else f"{given.task} has its own metric"
        remedy = "take it out" if given.agreement else "say how outputs compare: argmax, cosine or relative-error"
        raise InputError(path, fault, remedy, f"{where}.agreement ({given.id})")
    preprocess = (
        None if given.preprocess is None else given.preprocess.model_dump(exclude_unset=True, exclude_none=True)
    )
    size = (preprocess or {}).get("size", given.input_size)
    if size is None and not is_external(given.model):
        fault, remedy = "this key is missing", "give the side of the network's input in pixels, or [height, width]"
        raise InputError(path, fault, remedy, f"{where}.input_size ({given.id})")
    if size is not None and given.input_size is not None and height_width(size) != height_width(given.input_size):
        fault = f"{list(size)} is not the query's input_size, {given.input_size}"
        raise InputError(path, fault, "give one of them", f"{where}.preprocess.size ({given.id})")
    roi = given.roi
    if roi is not None and not (0 <= roi[0] < roi[2] < FURTHEST_PIXEL and 0 <= roi[1] < roi[3] < FURTHEST_PIXEL):
        fault = f"{list(roi)} is empty or negative, or lies beyond {FURTHEST_PIXEL:,.0f} pixels"
        raise InputError(path, fault, "give [x0, y0, x1, y1]", f"{where}.roi ({given.id})")
    camera_size = given.frame_size or (FURTHEST_PIXEL, FURTHEST_PIXEL)
    if roi is not None and (roi[2] > camera_size[0] or roi[3] > camera_size[1]):
        fault = f"{list(roi)} reaches beyond frames of {camera_size[0]}x{camera_size[1]} pixels"
        raise InputError(path, fault, "correct it, or `frame_size`", f"{where}.roi ({given.id})")
    if roi is not None and max(roi) > 1 and given.frame_size is None:
        text = f"the roi of query {given.id} is in pixels, and nothing says of which frames"
        add_note(path, text, "add `frame_size: [width, height]` of its camera, or give fractions")

    def resolve(value: str | None) -> Path | None:
        return None if value is None else _absolute(root, value)

    def resolve_weights(name: str, value: str | None) -> Path | Published | None:
        if value is None or not value.startswith(PREFIX):
            return resolve(value)
        return find_published(value, given.model, path, f"{where}.{name} ({given.id})")

    camera = keys.cameras.get(given.camera)
    footage = given.footage if given.footage is not None or camera is None else camera.footage
    weights = resolve_weights("weights", given.weights)
    if is_model_file(given.model) and weights is None:
        weights = _absolute(root, given.model)
    return Query(
        id=given.id, camera=given.camera, task=given.task, classes=tuple(given.classes),
        model=str(_absolute(root, given.model)) if is_model_file(given.model) else given.model,
        model_args=given.model_args, input_size=None if size is None else side_or_sides(height_width(size)),
        weights=weights, init=resolve_weights("init", given.init),
        fps=given.fps or (keys.cameras[given.camera].fps if given.camera in keys.cameras else None),
        sla_ms=given.sla_ms, roi=roi, frame_size=given.frame_size,
        min_score=given.min_score, priority=given.priority, data=resolve(given.data),
        accuracy_target=given.accuracy_target or keys.accuracy_target, file=path.resolve(),
        preprocess=preprocess, decoder=given.decoder, keep_architecture=given.keep_architecture,
        label_map=label_map, agreement=given.agreement, multi_label=given.multi_label,
        footage=_footage(root, footage or []), agreement_target=given.agreement_target or keys.agreement_target,
        max_flips=given.max_flips or keys.max_flips, labels=given.labels,
    )  # fmt: skip


def _label_map(classes: Sequence[str] | Mapping[str, str | Sequence[str]], path: Path, key: str) -> dict[str, str]:
    """Label of the data -> class, of `{class: label or labels}`; empty for a list of classes."""
    found: dict[str, str] = {}
    for name, given in classes.items() if isinstance(classes, Mapping) else ():
        labels = [given] if isinstance(given, str) else given
        if not labels:
            raise InputError(path, f"'{name}' has no labels", f"write {name}: [{name}]", key)
        for label in labels:
            if found.setdefault(label, name) != name:
                raise InputError(path, f"'{label}' is of '{found[label]}' and of '{name}'", "name it once", key)
    return found


def _complete(path: Path, root: Path, given: _QueryKeys, where: str) -> _QueryKeys:
    """The keys with what the model's file or hub says where they say nothing."""
    if is_hub_model(given.model):
        return _complete_hub(path, root, given, where)
    if not is_model_file(given.model):
        if given.task is None:
            check_suffix(given.model, str(path), f"{where}.model ({given.id})")
            remedy = "name the task, for instance detection"
            raise InputError(path, "this key is missing", remedy, f"{where}.task ({given.id})")
        return given
    if given.weights is not None:
        fault = f"{Path(given.model).name} holds its weights"
        raise InputError(path, fault, "take this key out", f"{where}.weights ({given.id})")
    from gemel.models.decoders.files import ModelFile

    size = (given.preprocess.size if given.preprocess else None) or given.input_size
    source = _absolute(root, given.model)
    init = given.init if given.init is not None and is_model_file(given.init) and not source.exists() else None
    if init is not None:  # what it will be trained from, its head made for the query's classes
        source = _absolute(root, init)
    file = ModelFile(
        source, None if size is None else height_width(size), given.decoder, given.task,
        tuple(given.classes) if init is None else (),
    )  # fmt: skip
    try:
        file = file.complete()
    except InputError as error:
        key = f"{where}.{error.key or 'model'} ({given.id})"
        named = InputError(path, f"{given.model}: {error.problem}", error.hint, key)
        unprepared = (
            []
            if error.key != "classes" or given.preprocess or file.preprocess()
            else [
                InputError(
                    path,
                    f"{given.model}: nothing says how its frames are prepared",
                    UNPREPARED_HINT,
                    f"{where}.preprocess ({given.id})",
                )
            ]
        )
        raise join_errors([named, *unprepared]) from error
    return given.model_copy(
        update={"task": file.task, "classes": given.classes or list(file.classes), "input_size": file.size}
    )


def _complete_hub(path: Path, root: Path, given: _QueryKeys, where: str) -> _QueryKeys:
    size = (given.preprocess.size if given.preprocess else None) or given.input_size
    try:
        hub = read_hub(given.model, root, None if size is None else height_width(size))
    except InputError as error:
        key = f"{where}.{error.key or 'model'} ({given.id})"
        raise InputError(path, f"{given.model}: {error.problem}", error.hint, key) from error
    own = given.preprocess.model_dump(exclude_unset=True, exclude_none=True) if given.preprocess else {}
    return given.model_copy(
        update={
            "model": given.model if given.model.startswith(TIMM) else HF + re.sub(r"\W", "_", Path(given.model).name),
            "task": given.task or "classification",
            "input_size": size or hub.size,
            "preprocess": _PreprocessKeys(**{**hub.preprocess, **own}),
            "weights": given.weights or (str(hub.weights) if hub.weights else None),
            "model_args": {**hub.model_args, **given.model_args},
        }
    )


def _footage(root: Path, given: str | Sequence[str]) -> tuple[Path, ...]:
    paths = [given] if isinstance(given, str) else given
    return tuple(_absolute(root, path) for path in paths)


def _absolute(root: Path, path: str) -> Path:
    return Path(os.path.realpath(root / path))


def _resolve_source(root: Path, source: str) -> str:
    return str(_absolute(root, source)) if is_path(source) else source
