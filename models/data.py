"""The frames of a query: COCO annotations, the splits train, val and test, and frames resized once.

The stem of a file, `<unit>__<milliseconds>`, names the clip or track and the time in it; the bootstrap resamples units.
Without `__` a split counts as ten contiguous blocks, one frame a second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import cv2
import numpy as np
import torch
from pydantic import BaseModel, Field, StrictInt
from torch import Tensor

from models.device import to_device
from models.errors import InputError, size_text
from models.io import read_json, validate
from models.pictures import list_pictures, read_picture
from models.predictions import BoxLabels, GroundTruth
from models.preprocess import FURTHEST_PIXEL, crop
from models.video import Video
from models.workload import Query
from models.zoo import preprocess_of

MAX_ANNOTATION_BYTES = 2**26
MAX_ANNOTATION_VALUES = 3_000_000
COCO_HINT = "correct the annotations: COCO with images, categories and annotations"
MAX_QUOTED = 60
Box = tuple[float, float, float, float]
Pixel = Annotated[float, Field(ge=-FURTHEST_PIXEL, le=FURTHEST_PIXEL, allow_inf_nan=False)]
Side = Annotated[float, Field(ge=0, le=FURTHEST_PIXEL, allow_inf_nan=False)]


class _CocoImage(BaseModel):
    id: StrictInt
    file_name: Annotated[str, Field(min_length=1)]


class _CocoCategory(BaseModel):
    id: StrictInt
    name: Annotated[str, Field(min_length=1)]


class _CocoAnnotation(BaseModel):
    image_id: StrictInt
    category_id: StrictInt
    bbox: tuple[Pixel, Pixel, Side, Side]


class _Coco(BaseModel):
    images: list[_CocoImage]
    categories: list[_CocoCategory]
    annotations: list[_CocoAnnotation]


def read_coco(path: Path, classes: Sequence[str], query: str) -> list[tuple[PurePosixPath, BoxLabels]]:
    """Each picture's name and its boxes (x0, y0, x1, y1, in pixels) of these classes, in the order of the names.

    Raises InputError for a file that is no valid COCO (unique ids, finite boxes below FURTHEST_PIXEL, names within the
    folder), is too large, or lacks a class.
    """
    coco = validate(path, read_json(path, COCO_HINT, MAX_ANNOTATION_BYTES, MAX_ANNOTATION_VALUES), _Coco)
    labels = _by_id(path, "categories", coco.categories)
    images = _by_id(path, "images", coco.images)
    for image in coco.images:
        name = PurePosixPath(image.file_name)
        if name.is_absolute() or ".." in name.parts or not name.name:
            problem = f"file_name '{image.file_name[:MAX_QUOTED]}' is not within the folder images"
            raise InputError(path, problem, COCO_HINT, f"images (id {image.id})")
    missing = [label for label in classes if label not in {category.name for category in coco.categories}]
    if missing:
        known = ", ".join(category.name for category in coco.categories[:MAX_QUOTED])[: 5 * MAX_QUOTED]
        problem = f"no category '{missing[0][:MAX_QUOTED]}' (query {query})"
        raise InputError(path, problem, f"it has: {known}", "classes")
    found: dict[int, list[tuple[str, Box]]] = {image: [] for image in images}
    for index, one in enumerate(coco.annotations):
        for key, value, ids in (("image_id", one.image_id, images), ("category_id", one.category_id, labels)):
            if value not in ids:
                raise InputError(path, f"there is no {value}", COCO_HINT, f"annotations[{index}].{key}")
        label = labels[one.category_id].name
        if label in classes:
            x, y, width, height = one.bbox
            found[one.image_id].append((label, (x, y, x + width, y + height)))
    rows = [
        (PurePosixPath(image.file_name), BoxLabels(*(tuple(zip(*found[image.id], strict=True)) or ((), ()))))
        for image in coco.images
    ]
    return sorted(rows, key=lambda row: row[0].stem)


def _by_id(path: Path, key: str, entries: Sequence[Any]) -> dict[int, Any]:
    found = {entry.id: entry for entry in entries}
    if len(found) < len(entries):
        raise InputError(path, "an id occurs twice", COCO_HINT, f"{key}.id")
    return found


SPLITS = ("train", "val", "test")
BLOCKS = 10
TRAIN_END, VAL_END = 0.6, 0.8
JPEG_QUALITY = 95
DEFAULT_FPS = 25.0
MAX_VIDEO_BYTES = 2**32
"""Of a video's frames as they are kept."""
LEADING_DIGITS = re.compile("[0-9]{1,15}")


class Frames(Sequence[np.ndarray]):
    """Frames decoded on access: uint8 RGB (H, W, 3)."""

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
        return _load_unlabelled(query, name)
    folder = query.data / name
    if not folder.is_dir():
        raise InputError(folder, f"the split '{name}' is missing (query {query.id})", "add it", "data")
    load = _load_classified if query.task == "classification" else _load_annotated
    split = load(query, folder, name)
    if not len(split):
        raise InputError(folder, f"the split '{name}' is empty (query {query.id})", "add frames to it", "data")
    return split


def _load_classified(query: Query, folder: Path, name: str) -> Split:
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


def _load_annotated(query: Query, folder: Path, name: str) -> Split:
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


def _load_unlabelled(query: Query, name: str) -> Split:
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
    cropped = [(lambda load=load: _crop_frame(query, load())) for load in loaders[chosen]]
    return Split(name, Frames(cropped), None, units[chosen], times_s[chosen])


def _crop_frame(query: Query, frame: np.ndarray) -> np.ndarray:
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
                encoded.append(_encode_jpeg(frame))
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
    return [lambda data=data: _decode_jpeg(data) for data in encoded], tuple(times_s)


def _encode_jpeg(frame: np.ndarray) -> np.ndarray:
    turned = cv2.cvtColor(frame, cv2.COLOR_RGB2BGR)
    return cv2.imencode(".jpg", turned, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1]


def _decode_jpeg(encoded: np.ndarray) -> np.ndarray:
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
        for index, _ in enumerate(self._decode_frames(range(len(self)))):
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
            return torch.stack(list(self._decode_frames(indices)))
        for _ in self._decode_frames([index for index in indices if self._sizes[index] is None]):
            pass
        return self._images.index_select(0, to_device(torch.tensor(indices), self._images.device))

    def _decode_frames(self, indices: Sequence[int]) -> Iterator[Tensor]:
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
