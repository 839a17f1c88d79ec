"""The workload file: the queries and cameras of one box, checked key by key."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

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
from gemel.models.plugins import entry_check
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
    Size,
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

    def __repr__(self) -> str:
        queries = [
            f"{query.id} ({query.task} by {query.model} on {query.camera})"
            for query in self.queries
        ]
        return f"<workload {self.name}: {join_names(queries)}>"

    def query(self, query_id: str) -> Query:
        """The query of that id; InputError when there is none."""
        for query in self.queries:
            if query.id == query_id:
                return query
        ids = join_names([query.id for query in self.queries])
        raise InputError(
            self.path, f"there is no query '{query_id}'", f"the queries are: {ids}", "queries"
        )


MAX_FOOTAGE = 1000
"""Videos and folders of one camera."""
FEWEST_CLASSES = {"classification": 2, "segmentation": 2, "embedding": 0, "tensor": 0}
"""By task; of others one."""


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
_Decoder = Annotated[str, AfterValidator(entry_check("gemel.decoders", "auto"))]


class _PreprocessKeys(_Strict):
    """How frames are prepared; a name stands for a mean and a deviation."""

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in NORMALISATIONS:
            raise ValueError(
                f"give {' or '.join(NORMALISATIONS)}, or keys such as resize, mean and std"
            )
        return NORMALISATIONS[value]

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
        list[ClassName] | dict[ClassName, ClassName | list[ClassName]],
        Field(max_length=MAX_CLASSES),
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
            camera_id,
            _resolve_source(root, str(camera.source)),
            camera.fps,
            _footage(root, camera.footage),
        )
        for camera_id, camera in keys.cameras.items()
    }
    queries = list[Query]()
    errors = _check_names(path, keys)
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
    errors = list[InputError]()
    seen = set[str]()
    for index, query in enumerate(keys.queries):
        if query.id in seen:
            hint = "give each query its own id"
            errors.append(
                InputError(path, f"'{query.id}' occurs twice", hint, f"queries[{index}].id")
            )
        seen.add(query.id)
        if query.camera not in keys.cameras:
            hint = f"use one of: {join_names(keys.cameras)}"
            key = f"queries[{index}].camera ({query.id})"
            errors.append(InputError(path, f"no camera '{query.camera}'", hint, key))
    return errors


def note_shared_footage(queries: Sequence[Query]) -> None:
    """Note footage that queries of another camera name, too: what it proves may not hold on theirs."""
    cameras: dict[Path, str] = {}
    for query in queries:
        for footage in query.footage:
            camera = cameras.setdefault(footage, query.camera)
            if camera != query.camera:
                text = (
                    f"its footage {footage} is that of camera {camera}: agreement is measured there"
                )
                add_note(query.id, text, f"give footage of camera {query.camera}")


def inputs_of(
    workload: Workload, trained: Collection[str] = ()
) -> Iterator[tuple[str, str | Path]]:
    """Description and path of each file that training, merging and evaluating a workload read; it need not exist.

    The weights of the queries `trained` are left out: training writes them.
    """
    yield "the workload", workload.path
    yield from (
        (f"the source of camera {camera.id}", camera.source) for camera in workload.cameras.values()
    )
    for query in workload.queries:
        weights = None if query.id in trained else query.weights
        for description, path in (("the weights", weights), ("the first weights", query.init)):
            if isinstance(path, Path):
                yield f"{description} of {query.id}", path
        if query.data is not None:
            splits = [
                query.data / split
                for split in ("train", "val", "valid", "test")
                if (query.data / split).is_dir()
            ]
            yield from ((f"the data of {query.id}", part) for part in splits or [query.data])
        yield from ((f"the footage of {query.id}", part) for part in query.footage)


@dataclass(frozen=True)
class _QueryPlace:
    """Where a query stands in a workload file: what errors name."""

    path: Path
    index: int
    id: str

    def key(self, name: str) -> str:
        """A key of the query, as errors show it."""
        return f"queries[{self.index}].{name} ({self.id})"

    def fault(self, name: str, problem: str, hint: str) -> InputError:
        """The error of a key."""
        return InputError(self.path, problem, hint, self.key(name))


def _query(path: Path, root: Path, keys: _WorkloadKeys, index: int) -> Query:
    place = _QueryPlace(path, index, keys.queries[index].id)
    query = _complete(place, root, keys.queries[index])
    assert query.task is not None  # _complete has it
    check_name(query.model, query.task, str(path), place.key("model"))
    label_map = _label_map(query.classes, path, place.key("classes"))
    _check_answers(place, query, query.task)
    preprocess = None
    if query.preprocess is not None:
        preprocess = query.preprocess.model_dump(exclude_unset=True, exclude_none=True)
    size = (preprocess or {}).get("size", query.input_size)
    # A file or a hub says the size of its own; a factory has to be told.
    if size is None and not is_external(query.model):
        hint = "give the side of the network's input in pixels, or [height, width]"
        raise place.fault("input_size", "this key is missing", hint)
    sizes = {height_width(value) for value in (size, query.input_size) if value is not None}
    if len(sizes) > 1:
        problem = f"{list(size or ())} is not the query's input_size, {query.input_size}"
        raise place.fault("preprocess.size", problem, "give one of them")
    if query.roi is not None:
        _check_roi(place, query.roi, query.frame_size)

    def resolve(value: str | None) -> Path | None:
        return None if value is None else _absolute(root, value)

    def resolve_weights(name: str, value: str | None) -> Path | Published | None:
        if value is None or not value.startswith(PREFIX):
            return resolve(value)
        return find_published(value, query.model, path, place.key(name))

    camera = keys.cameras.get(query.camera)
    footage = query.footage
    if footage is None and camera is not None:
        footage = camera.footage
    weights = resolve_weights("weights", query.weights)
    if is_model_file(query.model) and weights is None:
        weights = _absolute(root, query.model)
    return Query(
        id=query.id,
        camera=query.camera,
        task=query.task,
        classes=tuple(query.classes),
        model=str(_absolute(root, query.model)) if is_model_file(query.model) else query.model,
        model_args=query.model_args,
        input_size=None if size is None else side_or_sides(height_width(size)),
        weights=weights,
        init=resolve_weights("init", query.init),
        fps=query.fps or (camera and camera.fps),
        sla_ms=query.sla_ms,
        roi=query.roi,
        frame_size=query.frame_size,
        min_score=query.min_score,
        priority=query.priority,
        data=resolve(query.data),
        accuracy_target=query.accuracy_target or keys.accuracy_target,
        file=path.resolve(),
        preprocess=preprocess,
        decoder=query.decoder,
        keep_architecture=query.keep_architecture,
        label_map=label_map,
        agreement=query.agreement,
        multi_label=query.multi_label,
        footage=_footage(root, footage or []),
        agreement_target=query.agreement_target or keys.agreement_target,
        max_flips=query.max_flips or keys.max_flips,
        labels=query.labels,
    )


def _check_answers(place: _QueryPlace, query: _QueryKeys, task: str) -> None:
    """Raise InputError for classes and ways of labels that a task does not have."""
    if len(set(query.classes)) < len(query.classes):
        raise place.fault("classes", "a class occurs twice", "name each class once")
    fewest = FEWEST_CLASSES.get(task, 1)
    if len(query.classes) < fewest:
        problem = f"{task} needs a class or more"
        hint = "name at least one, for instance [person]"
        if fewest == 2:
            problem = f"{task} needs two classes or more"
            hint = "name at least two, for instance [empty, busy]"
        raise place.fault("classes", problem, hint)
    if query.multi_label and task != "classification":
        hint = "take it out, or name `task: classification`"
        raise place.fault("multi_label", f"{task} has one way of labels", hint)
    if task == "tensor" and query.agreement is None:
        hint = "say how outputs compare: argmax, cosine or relative-error"
        raise place.fault("agreement", "this key is missing", hint)
    if task != "tensor" and query.agreement is not None:
        raise place.fault("agreement", f"{task} has its own metric", "take it out")


def _check_roi(place: _QueryPlace, roi: Roi, frame_size: tuple[int, int] | None) -> None:
    """Raise InputError for a region that no frame of the camera has."""
    x0, y0, x1, y1 = roi
    if not (0 <= x0 < x1 < FURTHEST_PIXEL and 0 <= y0 < y1 < FURTHEST_PIXEL):
        problem = f"{list(roi)} is empty or negative, or lies beyond {FURTHEST_PIXEL:,.0f} pixels"
        raise place.fault("roi", problem, "give [x0, y0, x1, y1]")
    if frame_size is not None and (x1 > frame_size[0] or y1 > frame_size[1]):
        problem = f"{list(roi)} reaches beyond frames of {frame_size[0]}x{frame_size[1]} pixels"
        raise place.fault("roi", problem, "correct it, or `frame_size`")
    if max(roi) > 1 and frame_size is None:
        text = f"the roi of query {place.id} is in pixels, and nothing says of which frames"
        hint = "add `frame_size: [width, height]` of its camera, or give fractions"
        add_note(place.path, text, hint)


def _label_map(
    classes: Sequence[str] | Mapping[str, str | Sequence[str]], path: Path, key: str
) -> dict[str, str]:
    """Label of the data -> class, of `{class: label or labels}`; empty for a list of classes."""
    class_of: dict[str, str] = {}
    for name, stated in classes.items() if isinstance(classes, Mapping) else ():
        labels = [stated] if isinstance(stated, str) else stated
        if not labels:
            raise InputError(path, f"'{name}' has no labels", f"write {name}: [{name}]", key)
        for label in labels:
            if class_of.setdefault(label, name) != name:
                raise InputError(
                    path,
                    f"'{label}' is of '{class_of[label]}' and of '{name}'",
                    "name it once",
                    key,
                )
    return class_of


def _complete(place: _QueryPlace, root: Path, query: _QueryKeys) -> _QueryKeys:
    """The keys with what the model's file or hub says where they say nothing."""
    if is_hub_model(query.model):
        return _complete_hub(place, root, query)
    if not is_model_file(query.model):
        if query.task is None:
            check_suffix(query.model, str(place.path), place.key("model"))
            hint = "name the task, for instance detection"
            raise place.fault("task", "this key is missing", hint)
        return query
    if query.weights is not None:
        problem = f"{Path(query.model).name} holds its weights"
        raise place.fault("weights", problem, "take this key out")
    from gemel.models.decoders.files import ModelFile

    source = _absolute(root, query.model)
    classes = tuple(query.classes)
    # A file that training will write is described by the one that it starts from, whose head is made new.
    if query.init is not None and is_model_file(query.init) and not source.exists():
        source = _absolute(root, query.init)
        classes = ()
    file = ModelFile(source, _size_of(query), query.decoder, query.task, classes)
    try:
        file = file.complete()
    except InputError as error:
        faults = [place.fault(error.key or "model", f"{query.model}: {error.problem}", error.hint)]
        # One error names both: the classes, and the preparation of frames.
        if error.key == "classes" and not query.preprocess and not file.preprocess():
            problem = f"{query.model}: nothing says how its frames are prepared"
            faults.append(place.fault("preprocess", problem, UNPREPARED_HINT))
        raise join_errors(faults) from error
    stated = {"task": file.task, "input_size": file.size}
    return query.model_copy(update={**stated, "classes": query.classes or list(file.classes)})


def _size_of(query: _QueryKeys) -> Size | None:
    """The size of the network's input, where the query names it."""
    size = (query.preprocess and query.preprocess.size) or query.input_size
    return None if size is None else height_width(size)


def _complete_hub(place: _QueryPlace, root: Path, query: _QueryKeys) -> _QueryKeys:
    try:
        hub = read_hub(query.model, root, _size_of(query))
    except InputError as error:
        problem = f"{query.model}: {error.problem}"
        raise place.fault(error.key or "model", problem, error.hint) from error
    preprocess = dict(hub.preprocess)
    if query.preprocess:
        preprocess |= query.preprocess.model_dump(exclude_unset=True, exclude_none=True)
    model = query.model
    if not model.startswith(TIMM):
        # A folder: its name alone, as a bundle is read where the folder is not.
        model = HF + re.sub(r"\W", "_", Path(model).name)
    return query.model_copy(
        update={
            "model": model,
            "task": query.task or "classification",
            "input_size": _size_of(query) or hub.size,
            "preprocess": _PreprocessKeys(**preprocess),
            "weights": query.weights or (str(hub.weights) if hub.weights else None),
            "model_args": {**hub.model_args, **query.model_args},
        }
    )


def _footage(root: Path, footage: str | Sequence[str]) -> tuple[Path, ...]:
    paths = [footage] if isinstance(footage, str) else footage
    return tuple(_absolute(root, path) for path in paths)


def _absolute(root: Path, path: str) -> Path:
    return Path(os.path.realpath(root / path))


def _resolve_source(root: Path, source: str) -> str:
    return str(_absolute(root, source)) if is_path(source) else source
