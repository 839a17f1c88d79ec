"""The frames of a query: the splits train, val and test, and frames resized once.

The stem of a file, `<unit>__<milliseconds>`, names the clip or track and the time in it; chance is counted by unit.
Without `__` a split counts as ten contiguous blocks, one frame a second.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, zip_longest
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor

from gemel.models.device import to_device
from gemel.models.errors import InputError, size_text
from gemel.models.files.pictures import list_all_pictures, read_picture
from gemel.models.files.video import RateGate, Video, decode_shot
from gemel.models.labels.data_notes import (
    UNIT_AND_TIME,
    note_clipped_roi,
    note_copies,
    note_names,
    note_shapes,
)
from gemel.models.labels.layouts import SPLITS, find_layout, find_splits
from gemel.models.labels.split_overlap import note_overlap
from gemel.models.notes import add_note
from gemel.models.predictions import GroundTruth
from gemel.models.workload import Query
from gemel.models.zoo import preprocess_of

BLOCKS, MAX_BLOCKS, BLOCK_FRAMES, BLOCK = 10, 30, 10, "block-"
"""Frames without names of clips are cut into ten blocks, or into more of ten frames each, up to thirty."""
TRAIN_END, VAL_END = 0.6, 0.8
JPEG_QUALITY = 95
VIDEO_SUFFIXES = (".mp4", ".mkv", ".avi", ".mov", ".ts", ".webm", ".m4v")
MAX_VIDEO_BYTES = 2**32
"""Of a video's frames as they are kept."""


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
    """One split of one query. `labels` is None without labels; `times_s` are seconds into the unit.

    `overlap` says why it is not apart from earlier splits, empty where it is.
    """

    name: str
    frames: Sequence[np.ndarray]
    labels: tuple[GroundTruth, ...] | None
    units: tuple[str, ...]
    times_s: tuple[float, ...]
    overlap: str = ""

    def __len__(self) -> int:
        return len(self.frames)

    def at(self, places: Sequence[int]) -> Split:
        """These frames alone."""
        chosen = Frames([partial(self.frames.__getitem__, place) for place in places])
        labels = None if self.labels is None else tuple(self.labels[place] for place in places)
        units = tuple(self.units[place] for place in places)
        times_s = tuple(self.times_s[place] for place in places)
        return Split(self.name, chosen, labels, units, times_s, self.overlap)

    def name_of(self, place: int) -> str:
        """A frame as people find it: its clip and second, or its number."""
        return (
            f"{self.units[place]} {self.times_s[place]:g} s"
            if self.has_named_units
            else f"frame {place}"
        )

    @property
    def has_clips(self) -> bool:
        """Whether the frames are of several clips or tracks that file names tell apart."""
        return len(set(self.units)) > 1 and self.has_named_units

    @property
    def has_named_units(self) -> bool:
        """Whether file names tell the clip or track of each frame."""
        return bool(self.units) and not self.units[0].startswith(BLOCK)


def load_split(query: Query, name: str) -> Split:
    """The frames of one split; InputError names the query, the path and what is missing."""
    if query.data is None:
        hint = "add `data:` with labelled or unlabelled frames"
        raise InputError(query.file or query.id, "has no data", hint, f"data ({query.id})")
    if not os.path.exists(query.data):
        raise InputError(
            query.data, f"does not exist (query {query.id})", "correct `data:`", "data"
        )
    layout = find_layout(query)
    if layout is None:
        return _load_unlabelled(query, name)
    pictures = layout.read(name)
    if not pictures:
        problem = f"the split '{name}' is empty (query {query.id})"
        raise InputError(layout.where, problem, "add frames to it", "data")
    if query.task == "classification" and not query.multi_label:
        shown = {picture.label for picture in pictures}
        if missing := [label for label in query.classes if label not in shown]:
            problem = f"no frames of class '{missing[0]}' in the split '{name}' (query {query.id})"
            raise InputError(
                layout.where, problem, "add frames of it, or take it out of `classes`", "data"
            )
    where = layout.where / name if layout.where.is_dir() else layout.where
    note_copies(where, pictures)
    paths = [picture.path for picture in pictures]
    overlap = ""
    if layout.has_splits:
        earlier = [
            path for split in SPLITS[: SPLITS.index(name)] for path in layout.list_files(split)
        ]
        overlap = note_overlap(where, name, paths, earlier)
    units, times_s = read_units_and_times(paths, [picture.unit for picture in pictures])
    labels = tuple(picture.label for picture in pictures)
    return Split(
        name, Frames([picture.read for picture in pictures]), labels, units, times_s, overlap
    )


def read_units_and_times(
    paths: Sequence[Path], table_units: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Clip or track, and seconds into it, of each picture in order; a table may have `table_units` the clips."""
    matches = [match for path in paths if (match := UNIT_AND_TIME.match(path.stem))]
    if paths and len(matches) == len(paths):
        units = tuple(
            table_unit or match[1]
            for table_unit, match in zip_longest(table_units, matches, fillvalue="")
        )
        return units, tuple(int(match[2]) / 1000 for match in matches)
    if table_units and all(table_units):
        clocks: dict[str, count[int]] = defaultdict(count)
        return tuple(table_units), tuple(float(next(clocks[unit])) for unit in table_units)
    if matches:
        note_names(paths, len(matches))
    return units_without_names(len(paths)), tuple(map(float, range(len(paths))))


def units_without_names(frames: int) -> tuple[str, ...]:
    """The unit of each frame of a split without units."""
    count = min(frames, max(BLOCKS, min(MAX_BLOCKS, frames // BLOCK_FRAMES)))
    return tuple(f"{BLOCK}{index * count // frames}" for index in range(frames))


def _load_unlabelled(query: Query, name: str) -> Split:
    """A video or a folder of frames, cut 60 / 20 / 20 in time; the query's roi applies."""
    assert query.data is not None
    loaders: Sequence[Callable[[], np.ndarray]]
    if query.data.is_dir():
        splits = find_splits(query.data)
        if splits and name not in splits:
            raise InputError(
                query.data / name,
                f"the split '{name}' is missing (query {query.id})",
                "add it",
                "data",
            )
        paths = list_all_pictures(splits.get(name, query.data), nested=True)
        if not paths:
            clips = [
                path
                for path in sorted(query.data.rglob("*"))
                if path.suffix.lower() in VIDEO_SUFFIXES
            ]
            if clips:
                problem = f"holds clips, as {clips[0].name}, and no frames (query {query.id})"
                raise InputError(
                    query.data, problem, "name one clip in `data`, and all in `footage`", "data"
                )
            hint = f"give the splits {', '.join(SPLITS)}, or a folder of frames"
            raise InputError(
                query.data, f"has neither splits nor frames (query {query.id})", hint, "data"
            )
        loaders = [partial(read_picture, path) for path in paths]
        units, times_s = read_units_and_times(paths)
        if splits:
            return Split(
                name,
                Frames([partial(crop_frame, query, load) for load in loaders]),
                None,
                units,
                times_s,
            )
        cuts = [round(end * len(loaders)) for end in (TRAIN_END, VAL_END)]
    else:
        loaders, times_s = _video_frames(query.data, query.fps)
        cuts = [bisect_right(times_s, end * times_s[-1]) for end in (TRAIN_END, VAL_END)]
        units = units_without_names(len(loaders))
    bounds = [0, *cuts, len(loaders)]
    index = SPLITS.index(name)
    chosen = slice(bounds[index], bounds[index + 1])
    if not loaders[chosen]:
        raise InputError(
            query.data,
            f"too few frames for the split '{name}' (query {query.id})",
            "add footage",
            "data",
        )
    cropped = [partial(crop_frame, query, load) for load in loaders[chosen]]
    return Split(name, Frames(cropped), None, units[chosen], times_s[chosen])


def crop_frame(query: Query, load: Callable[[], np.ndarray]) -> np.ndarray:
    """The part of a frame that a query looks at; InputError where the frame does not hold it."""
    frame = load()
    size = (frame.shape[1], frame.shape[0])
    if problem := query.region.find_problem(size):
        text = f"has a frame that does not fit: query {query.id} {problem}"
        raise InputError(
            query.data or query.id, text, "correct `roi`, or take that frame out", "data"
        )
    note_clipped_roi(query.id, query.region, size)
    return query.region.crop(frame)


def _video_frames(
    path: Path, fps: float | None
) -> tuple[list[Callable[[], np.ndarray]], tuple[float, ...]]:
    """The frames of a video, thinned to `fps` where its mean rate is higher, and their times.

    They are held as JPEG, so that an hour fits in memory.
    """
    encoded: list[Future[np.ndarray]] = []
    times_s: list[float] = []
    sizes: dict[tuple[int, ...], float] = {}
    total = thinned = 0
    with (
        contextlib.closing(Video(str(path), partial(add_note, path))) as video,
        ThreadPoolExecutor(1) as pool,
    ):
        gate = RateGate(None if fps and video.fps and video.fps <= fps else fps)
        while video.advance():
            if not gate.passes(video.time_s):
                thinned += 1
            elif (frame := decode_shot(video.shot())) is not None:
                sizes.setdefault(frame.shape, video.time_s)
                # One is encoded while the next is decoded.
                total += encoded[-1].result().nbytes if encoded else 0
                encoded.append(pool.submit(encode_jpeg, frame))
                times_s.append(video.time_s)
                if total > MAX_VIDEO_BYTES:
                    problem = f"its frames take more than {size_text(MAX_VIDEO_BYTES)}"
                    raise InputError(path, problem, "cut it, or set a lower `fps`", "data")
    if not encoded:
        raise InputError(path, "is not a video with frames", "give a video that decodes", "data")
    if thinned:
        text = f"{len(encoded)} of {len(encoded) + thinned} frames are used, thinned to {fps:g} a second"
        add_note(path, text, "set `fps` to the rate that the query shall have on the box")
    if len(sizes) > 1:
        changes = ", ".join(
            f"{width} x {height} from {at_s:.1f} s" for (height, width, _), at_s in sizes.items()
        )
        add_note(path, f"its frames change their size: {changes}")
    return [partial(decode_jpeg, future.result()) for future in encoded], tuple(times_s)


def encode_jpeg(frame: np.ndarray) -> np.ndarray:
    """A frame as the bytes of a JPEG file."""
    turned = cv2.cvtColor(frame, cv2.COLOR_RGB2BGR)
    return cv2.imencode(".jpg", turned, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1]


def decode_jpeg(encoded: np.ndarray) -> np.ndarray:
    """The frame of such bytes."""
    image = cv2.imdecode(encoded, cv2.IMREAD_COLOR)
    assert image is not None
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


MAX_CACHED_BYTES = 2 << 30
MAX_DECODERS = 8


class PreparedFrames:
    """A split as uint8 batches (N, 3, H, W), cached up to 2 GiB, decoded each time above that.

    The cache is in CPU memory or on a device (`keep_on`), and batches are on the same.
    """

    def __init__(self, query: Query, split: Split) -> None:
        self.split = split
        self._query = query
        self._preprocess = preprocess_of(query)
        height, width = self._preprocess.size
        cached = len(split) * 3 * height * width <= MAX_CACHED_BYTES
        with torch.inference_mode(False):  # the threads that fill it are not in inference mode
            self._images = (
                torch.empty((len(split), 3, height, width), dtype=torch.uint8) if cached else None
            )
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
        sizes = {size for size in self._sizes if size}
        note_shapes(self._query, self._preprocess, sizes, is_cut_out=self.split.labels is not None)
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
        """uint8 (N, 3, H, W) of these frames, on the device of the cache."""
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
        image = torch.from_numpy(self._preprocess.resize_frame(frame))
        if self._images is not None:
            self._images[index] = image
        # Last: it marks the frame as decoded for other threads.
        self._sizes[index] = (
            frame.shape[1],
            frame.shape[0],
        )
        return image
