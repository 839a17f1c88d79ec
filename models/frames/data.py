"""Labelled and unlabelled frames of a query, cut into train, val and test.

A data file's stem `<unit>__<milliseconds>` tells the clip or track it was cut from and when; units are what the
bootstrap resamples. Without `__` a split counts as ten contiguous blocks, one frame a second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import cv2
import numpy as np

from models.errors import InputError
from models.frames.coco import read_coco
from models.frames.pictures import pictures_in, read_picture
from models.frames.preprocess import crop
from models.frames.video import Video
from models.sizes import size_text
from models.tasks import Truth
from models.workload import Query

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
    """One split of one query. `truths` is None where nobody labelled; `times_s` are seconds into the unit."""

    name: str
    frames: Sequence[np.ndarray]
    truths: tuple[Truth, ...] | None
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
        files = pictures_in(_inside(query, folder, label))
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


def _split(name: str, paths: list[Path], truths: tuple[Truth, ...] | None) -> Split:
    units, times_s = _units_and_times([path.stem for path in paths])
    return Split(name, Frames([_reader(path) for path in paths]), truths, units, times_s)


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
        paths = pictures_in(query.data)
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
