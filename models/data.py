"""The frames of a query: COCO annotations, the splits train, val and test, and frames resized once.

The stem of a file, `<unit>__<milliseconds>`, names the clip or track and the time in it; the bootstrap resamples units.
Without `__` a split counts as ten contiguous blocks, one frame a second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from models.device import to_device
from models.errors import InputError, size_text
from models.io import read_json
from models.pictures import list_pictures, read_picture
from models.predictions import Boxes, GroundTruth
from models.preprocess import FURTHEST_PIXEL, crop
from models.video import Video
from models.workload import Query
from models.zoo import preprocess_of

MAX_ANNOTATION_BYTES = 2**26
MAX_VALUES = 3_000_000
COCO_HINT = "add COCO annotations with images, categories and annotations"
MAX_QUOTED = 60


def read_coco(path: Path, classes: Sequence[str], query: str) -> list[tuple[PurePosixPath, Boxes]]:
    """Each picture's name and its boxes (x0, y0, x1, y1, in pixels) of these classes, in the order of the names.

    Raises InputError for a file that is no valid COCO (unique ids, finite boxes below FURTHEST_PIXEL, names within the
    folder), is too large, or lacks a class.
    """
    reader = _CocoReader(path, query)
    document = read_json(path, COCO_HINT, MAX_ANNOTATION_BYTES, MAX_VALUES)
    labels: dict[int, str] = {}
    for key, entry in reader.entries(document, "categories"):
        labels[reader.new_id(key, entry, labels)] = reader.text(key, entry, "name")
    names: dict[int, PurePosixPath] = {}
    for key, entry in reader.entries(document, "images"):
        names[reader.new_id(key, entry, names)] = reader.file_name(key, entry)
    found: dict[int, list[tuple[str, tuple[float, float, float, float]]]] = {image: [] for image in names}
    wanted = frozenset(classes)
    for key, entry in reader.entries(document, "annotations"):
        image, category = reader.known(key, entry, "image_id", names), reader.known(key, entry, "category_id", labels)
        box = reader.box(key, entry)
        if labels[category] in wanted:
            found[image].append((labels[category], box))
    missing = [label for label in classes if label not in labels.values()]
    if missing:
        remedy = f"it has: {', '.join(list(labels.values())[:MAX_QUOTED])[: 5 * MAX_QUOTED]}"
        raise InputError(path, f"no category '{missing[0][:MAX_QUOTED]}' (query {query})", remedy, "classes")
    rows = [
        (name, Boxes(tuple(label for label, _ in found[image]), tuple(box for _, box in found[image])))
        for image, name in names.items()
    ]
    return sorted(rows, key=lambda row: row[0].stem)


class _CocoReader:
    """Typed values of a COCO file; raises InputError with the key of any other."""

    def __init__(self, path: Path, query: str) -> None:
        self._path, self._query = path, query

    def entries(self, document: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        listed = document.get(key)
        if not isinstance(listed, list):
            raise self._error(key, "is no list" if key in document else "is missing")
        for index, entry in enumerate(listed):
            if not isinstance(entry, dict):
                raise self._error(f"{key}[{index}]", "is no mapping")
            yield f"{key}[{index}]", entry

    def new_id(self, key: str, entry: dict[str, Any], known: Collection[int]) -> int:
        value = self._number(key, entry, "id")
        if value in known:
            raise self._error(f"{key}.id", f"{value} occurs twice")
        return value

    def known(self, key: str, entry: dict[str, Any], name: str, known: Collection[int]) -> int:
        value = self._number(key, entry, name)
        if value not in known:
            raise self._error(f"{key}.{name}", f"there is no {value}")
        return value

    def text(self, key: str, entry: dict[str, Any], name: str) -> str:
        value = entry.get(name)
        if not isinstance(value, str) or not value:
            raise self._error(f"{key}.{name}", f"{_shown(value)} is no name")
        return value

    def file_name(self, key: str, entry: dict[str, Any]) -> PurePosixPath:
        name = PurePosixPath(self.text(key, entry, "file_name"))
        if name.is_absolute() or ".." in name.parts or not name.name:
            raise self._error(f"{key}.file_name", f"{_shown(str(name))} does not lie in the folder images")
        return name

    def box(self, key: str, entry: dict[str, Any]) -> tuple[float, float, float, float]:
        box: Any = entry.get("bbox")
        is_box = type(box) is list and len(box) == 4 and all(type(value) in (int, float) for value in box)
        if not is_box or max(map(abs, box)) > FURTHEST_PIXEL or min(box[2:]) < 0:
            wanted = f"[x, y, width, height] in pixels, none beyond {FURTHEST_PIXEL:,.0f}, no side below 0"
            raise self._error(f"{key}.bbox", f"{_shown(box)} is not {wanted}")
        x, y, width, height = box
        return float(x), float(y), float(x + width), float(y + height)

    def _number(self, key: str, entry: dict[str, Any], name: str) -> int:
        value = entry.get(name)
        if type(value) is not int:
            raise self._error(f"{key}.{name}", "is missing" if name not in entry else f"{_shown(value)} is no integer")
        return value

    def _error(self, key: str, problem: str) -> InputError:
        return InputError(self._path, f"is not COCO: {problem} (query {self._query})", "correct the annotations", key)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


SPLITS = ("train", "val", "test")
BLOCKS = 10
TRAIN_END, VAL_END = 0.6, 0.8
JPEG_QUALITY = 95
DEFAULT_FPS = 25.0
MAX_VIDEO_BYTES = 2**32
"""Of a video's frames as they are kept."""
LEADING_DIGITS = re.compile("[0-9]{1,15}")


class Frames(Sequence[np.ndarray]):
    """Frames decoded when asked for: uint8 RGB (H, W, 3)."""

    def __init__(self, loaders: Sequence[Callable[[], np.ndarray]]) -> None:
        self._loaders = loaders

    def __len__(self) -> int:
        return len(self._loaders)

    def __getitem__(self, index):  # type: ignore[override]
        return Frames(self._loaders[index]) if isinstance(index, slice) else self._loaders[index]()

    def __iter__(self) -> Iterator[np.ndarray]:
        return (load() for load in self._loaders)


@dataclass(frozen=True)
class Split:
    """One split of one query. `labels` is None without labels; `times_s` are seconds into the unit."""

    name: str
    frames: Sequence[np.ndarray]
    labels: tuple[GroundTruth, ...] | None
    units: tuple[str, ...]
    times_s: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.frames)


def load_split(query: Query, name: str) -> Split:
    """The frames of one split; InputError names the query, the path and what is missing."""
    if query.data is None:
        remedy = "add `data:` with labelled or unlabelled frames"
        raise InputError(query.file or query.id, "has no data", remedy, f"data ({query.id})")
    if not os.path.exists(query.data):
        raise InputError(query.data, f"does not exist (query {query.id})", "correct `data:`", "data")
    if not any((query.data / split).is_dir() for split in SPLITS):
        return _unlabelled(query, name)
    folder = query.data / name
    if not folder.is_dir():
        raise InputError(folder, f"the split '{name}' is missing (query {query.id})", "add it", "data")
    split = _classified(query, folder, name) if query.task == "classification" else _annotated(query, folder, name)
    if not len(split):
        raise InputError(folder, f"the split '{name}' is empty (query {query.id})", "add frames to it", "data")
    return split


def _classified(query: Query, folder: Path, name: str) -> Split:
    found: list[tuple[Path, str]] = []
    for label in query.classes:
        files = list_pictures(_inside(query, folder, label))
        if not files:
            remedy = "add frames of it, or take it out of `classes`"
            raise InputError(folder / label, f"no frames of class '{label}' (query {query.id})", remedy, "data")
        found += [(path, label) for path in files]
    found.sort(key=lambda item: item[0].stem)
    paths = [path for path, _ in found]
    return _split(name, paths, tuple(label for _, label in found))


def _inside(query: Query, folder: Path, label: str) -> Path:
    """The folder of a class; InputError for a name that leads elsewhere."""
    if PurePosixPath(label).name != label:
        fault = f"the class '{label}' is no name of a folder (query {query.id})"
        raise InputError(query.file or folder, fault, "call it otherwise", "classes")
    return folder / label


def _annotated(query: Query, folder: Path, name: str) -> Split:
    rows = read_coco(folder / "annotations.json", query.classes, query.id)
    return _split(name, [folder / "images" / image for image, _ in rows], tuple(boxes for _, boxes in rows))


def _split(name: str, paths: list[Path], labels: tuple[GroundTruth, ...] | None) -> Split:
    units, times_s = _units_and_times([path.stem for path in paths])
    return Split(name, Frames([_reader(path) for path in paths]), labels, units, times_s)


def _reader(path: Path) -> Callable[[], np.ndarray]:
    return lambda: read_picture(path)


def _units_and_times(stems: Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Clip or track, and seconds into it, of each file stem in order."""
    if stems and all("__" in stem for stem in stems):
        pairs = [stem.split("__", 1) for stem in stems]
        digits = [LEADING_DIGITS.match(rest) for _, rest in pairs]
        if all(digits):
            return tuple(unit for unit, _ in pairs), tuple(int(found[0]) / 1000 for found in digits if found)
    blocks = min(BLOCKS, len(stems))
    return tuple(f"block-{index * blocks // len(stems)}" for index in range(len(stems))), tuple(
        float(index) for index in range(len(stems))
    )


def _unlabelled(query: Query, name: str) -> Split:
    """A video or a folder of frames, cut 60 / 20 / 20 in time; the query's roi applies."""
    assert query.data is not None
    if query.data.is_dir():
        paths = list_pictures(query.data)
        if not paths:
            remedy = f"give the splits {', '.join(SPLITS)}, or a folder of frames"
            raise InputError(query.data, f"has neither splits nor frames (query {query.id})", remedy, "data")
        loaders = [_reader(path) for path in paths]
        units, times_s = _units_and_times([path.stem for path in paths])
    else:
        loaders, times_s = _video_frames(query.data, query.fps)
        units, _ = _units_and_times([str(index) for index in range(len(loaders))])
    start, end = {
        "train": (0.0, TRAIN_END), "val": (TRAIN_END, VAL_END), "test": (VAL_END, 1.0),
    }[name]  # fmt: skip
    chosen = slice(round(start * len(loaders)), round(end * len(loaders)))
    if not loaders[chosen]:
        raise InputError(query.data, f"too few frames for the split '{name}' (query {query.id})", "add footage", "data")
    cropped = [(lambda load=load: _cropped(query, load())) for load in loaders[chosen]]
    return Split(name, Frames(cropped), None, units[chosen], times_s[chosen])


def _cropped(query: Query, frame: np.ndarray) -> np.ndarray:
    part = crop(frame, query.roi)
    if not part.size:
        height, width = frame.shape[:2]
        fault = f"has a frame of {width} x {height} pixels, in which nothing lies at the roi of query {query.id}"
        raise InputError(query.data or query.id, fault, "correct `roi`, or take that frame out", "data")
    return part


def _video_frames(path: Path, fps: float | None) -> tuple[list[Callable[[], np.ndarray]], tuple[float, ...]]:
    """All frames of a video thinned to `fps`, held as JPEG so that an hour fits in memory."""
    video = Video(str(path))
    own_fps = video.fps or DEFAULT_FPS
    step = 1.0 if fps is None else max(1.0, own_fps / fps)
    encoded: list[np.ndarray] = []
    times_s: list[float] = []
    index = total = 0
    try:
        while video.advance():
            if index >= len(encoded) * step and (frame := video.image()) is not None:
                encoded.append(_encoded(frame))
                times_s.append(index / own_fps)
                total += encoded[-1].nbytes
                if total > MAX_VIDEO_BYTES:
                    fault = f"its frames take more than {size_text(MAX_VIDEO_BYTES)}"
                    raise InputError(path, fault, "cut it, or set a lower `fps`", "data")
            index += 1
    finally:
        video.close()
    if not encoded:
        raise InputError(path, "is not a video with frames", "give a video that decodes", "data")
    return [lambda data=data: _decoded(data) for data in encoded], tuple(times_s)


def _encoded(frame: np.ndarray) -> np.ndarray:
    turned = cv2.cvtColor(frame, cv2.COLOR_RGB2BGR)
    return cv2.imencode(".jpg", turned, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1]


def _decoded(encoded: np.ndarray) -> np.ndarray:
    image = cv2.imdecode(encoded, cv2.IMREAD_COLOR)
    assert image is not None
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


MAX_CACHED_BYTES = 2 << 30
MAX_DECODERS = 8


class PreparedFrames:
    """A split as uint8 batches (N, 3, S, S), cached up to 2 GiB, decoded each time above that.

    The cache is in CPU memory or on a device (`keep_on`), and batches are on the same.
    """

    def __init__(self, query: Query, split: Split) -> None:
        self.split = split
        self._preprocess = preprocess_of(query.model, query.input_size)
        size = query.input_size
        cached = len(split) * 3 * size * size <= MAX_CACHED_BYTES
        with torch.inference_mode(False):  # the threads that fill it are not in inference mode
            self._images = torch.empty((len(split), 3, size, size), dtype=torch.uint8) if cached else None
        self._sizes: list[tuple[int, int] | None] = [None] * len(split)

    def __len__(self) -> int:
        return len(self.split)

    @property
    def nbytes(self) -> int:
        """Memory its frames take."""
        return 0 if self._images is None else self._images.nbytes

    def load(self, progress: Callable[[float], None] = lambda done: None) -> PreparedFrames:
        """Decode every frame now, so that a damaged frame is found before any training.

        `progress` is called with the decoded fraction after each frame.
        """
        for index, _ in enumerate(self._decoded(range(len(self)))):
            progress((index + 1) / len(self))
        return self

    def keep_on(self, device: torch.device) -> bool:
        """Decode now and move the cached frames to this device; returns whether its memory was enough."""
        if self._images is None:
            return True
        try:
            self.load()
            self._images = self._images.to(device)
        except torch.OutOfMemoryError:
            return False
        return True

    def batch(self, indices: Sequence[int]) -> Tensor:
        """uint8 (N, 3, S, S) of these frames, on the device of the cache."""
        if self._images is None:
            return torch.stack(list(self._decoded(indices)))
        for _ in self._decoded([index for index in indices if self._sizes[index] is None]):
            pass
        return self._images.index_select(0, to_device(torch.tensor(indices), self._images.device))

    def _decoded(self, indices: Sequence[int]) -> Iterator[Tensor]:
        """These frames in order, several decoded at a time; raises for the first that does not decode."""
        threads = min(MAX_DECODERS, os.cpu_count() or 1, len(indices))
        if threads < 2:
            yield from map(self._image, indices)
            return
        with ThreadPoolExecutor(threads, "decode") as pool:
            yield from pool.map(self._image, indices)

    def sizes(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """(width, height) of these frames before resizing."""
        for index in indices:
            if self._sizes[index] is None:
                self._image(index)
        return [size for index in indices if (size := self._sizes[index]) is not None]

    def _image(self, index: int) -> Tensor:
        if self._images is not None and self._sizes[index] is not None:
            return self._images[index]
        frame = self.split.frames[index]
        image = self._preprocess.resize(frame)
        if self._images is not None:
            self._images[index] = image
        self._sizes[index] = (frame.shape[1], frame.shape[0])  # last: it marks the frame as decoded for other threads
        return image
