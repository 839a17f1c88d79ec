"""Labelled and unlabelled frames of a query, cut into train, val and test.

A data file's stem `<unit>__<milliseconds>` tells the clip or track it was cut from and when; units are what the
bootstrap resamples. Without `__` a split counts as ten contiguous blocks, one frame a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from models.errors import InputError
from models.frames.preprocess import crop
from models.tasks import Boxes, Truth
from models.workload import Query

SPLITS = ("train", "val", "test")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
BLOCKS = 10
TRAIN_END, VAL_END = 0.6, 0.8
JPEG_QUALITY = 95


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
        raise InputError(query.id, "has no data", "add `data:` with labelled or unlabelled frames", "data")
    if not query.data.exists():
        raise InputError(query.data, f"does not exist (query {query.id})", "correct `data:`", "data")
    if query.data.is_file() or not any((query.data / split).is_dir() for split in SPLITS):
        return _unlabelled(query, name)
    folder = query.data / name
    if not folder.is_dir():
        raise InputError(folder, f"the split '{name}' is missing (query {query.id})", "add it", "data")
    split = _classified(query, folder, name) if query.task == "classification" else _annotated(query, folder, name)
    if not len(split):
        raise InputError(folder, f"the split '{name}' is empty (query {query.id})", "add frames to it", "data")
    return split


def read_image(path: Path) -> np.ndarray:
    """uint8 RGB (H, W, 3); InputError when the file does not decode."""
    try:
        image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
    except (OSError, cv2.error):
        image = None
    if image is None:
        raise InputError(path, "is not an image that decodes", "replace or remove it")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def _classified(query: Query, folder: Path, name: str) -> Split:
    found: list[tuple[Path, str]] = []
    for label in query.classes:
        files = _images(folder / label)
        if not files:
            remedy = "add frames of it, or take it out of `classes`"
            raise InputError(folder / label, f"no frames of class '{label}' (query {query.id})", remedy, "data")
        found += [(path, label) for path in files]
    found.sort(key=lambda item: item[0].stem)
    paths = [path for path, _ in found]
    return _split(name, paths, tuple(label for _, label in found))


def _annotated(query: Query, folder: Path, name: str) -> Split:
    path = folder / "annotations.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        categories = {int(entry["id"]): str(entry["name"]) for entry in document["categories"]}
        images = sorted(document["images"], key=lambda image: Path(image["file_name"]).stem)
        rows: dict[int, list[tuple[str, tuple[float, float, float, float]]]] = {int(i["id"]): [] for i in images}
        for entry in document["annotations"]:
            x, y, width, height = (float(value) for value in entry["bbox"])
            label = categories[int(entry["category_id"])]
            if label in query.classes:
                rows[int(entry["image_id"])].append((label, (x, y, x + width, y + height)))
        paths = [folder / "images" / image["file_name"] for image in images]
    except OSError as error:
        raise InputError(path, f"cannot be read (query {query.id})", "add COCO annotations", "data") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(path, f"is not COCO: {error!r} (query {query.id})", "correct the annotations") from error
    missing = [label for label in query.classes if label not in categories.values()]
    if missing:
        remedy = f"it has: {', '.join(categories.values())}"
        raise InputError(path, f"no category '{missing[0]}' (query {query.id})", remedy, "classes")
    truths = tuple(
        Boxes(tuple(label for label, _ in found), tuple(box for _, box in found))
        for found in (rows[int(image["id"])] for image in images)
    )
    return _split(name, paths, truths)


def _split(name: str, paths: list[Path], truths: tuple[Truth, ...] | None) -> Split:
    units, times_s = _units_and_times([path.stem for path in paths])
    return Split(name, Frames([_reader(path) for path in paths]), truths, units, times_s)


def _reader(path: Path) -> Callable[[], np.ndarray]:
    return lambda: read_image(path)


def _units_and_times(stems: Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Clip or track, and seconds into it, of each file stem in order."""
    if stems and all("__" in stem for stem in stems):
        pairs = [stem.split("__", 1) for stem in stems]
        digits = ["".join(_leading_digits(rest)) for _, rest in pairs]
        if all(digits):
            return tuple(unit for unit, _ in pairs), tuple(int(text) / 1000 for text in digits)
    blocks = min(BLOCKS, len(stems))
    return tuple(f"block-{index * blocks // len(stems)}" for index in range(len(stems))), tuple(
        float(index) for index in range(len(stems))
    )


def _leading_digits(text: str) -> Iterator[str]:
    for character in text:
        if not character.isdigit():
            return
        yield character


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)


def _unlabelled(query: Query, name: str) -> Split:
    """A video or a folder of frames, cut 60 / 20 / 20 in time; the query's roi applies."""
    assert query.data is not None
    if query.data.is_dir():
        paths = _images(query.data)
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
    cropped = [(lambda load=load: crop(load(), query.roi)) for load in loaders[chosen]]
    return Split(name, Frames(cropped), None, units[chosen], times_s[chosen])


def _video_frames(path: Path, fps: float | None) -> tuple[list[Callable[[], np.ndarray]], tuple[float, ...]]:
    """All frames of a video thinned to `fps`, held as JPEG so that an hour fits in memory."""
    video = cv2.VideoCapture(str(path))
    own_fps = video.get(cv2.CAP_PROP_FPS) or 25.0
    step = 1.0 if fps is None else max(1.0, own_fps / fps)
    encoded: list[np.ndarray] = []
    times_s: list[float] = []
    index = 0
    while True:
        decoded, frame = video.read()
        if not decoded:
            break
        if index >= len(encoded) * step:
            encoded.append(cv2.imencode(".jpg", frame, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1])
            times_s.append(index / own_fps)
        index += 1
    video.release()
    if not encoded:
        raise InputError(path, "is not a video with frames", "give a video that decodes", "data")
    return [lambda data=data: _decode(data) for data in encoded], tuple(times_s)


def _decode(encoded: np.ndarray) -> np.ndarray:
    image = cv2.imdecode(encoded, cv2.IMREAD_COLOR)
    assert image is not None
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
