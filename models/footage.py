"""Footage of a query without labels: one part trains, one part proves, and nothing else sees that.

Footage is cut in time. Frames are taken about once a second and lie in blocks of some seconds, which belong to one
clip each. Answers within a block are alike, so chance is counted by block.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from gemel.models.data import (
    Frames,
    PreparedFrames,
    Split,
    crop_frame,
    decode_jpeg,
    encode_jpeg,
    read_units_and_times,
)
from gemel.models.errors import InputError
from gemel.models.files.pictures import SAMPLE_NAME, list_all_pictures, read_picture
from gemel.models.files.video import RateGate, Video, decode_shot
from gemel.models.notes import add_note
from gemel.models.workload import Query

Load = Callable[[], np.ndarray]
HINT = "give videos, folders of frames, or the spool of a box"


@dataclass(frozen=True)
class FootageConfig:
    """How footage is sampled and cut."""

    block_s: float = 20.0
    """Length of a block."""
    rate: float = 1.0
    """Frames a second at most; neighbours in time add little."""
    min_block_frames: int = 4
    """Frames of a block on average below which a video's key frames are too few, so that all are decoded."""
    max_frames: int = 4000
    """Frames of a query; of longer footage every second one is taken, or fewer."""
    training_part: float = 0.2
    """Part of the blocks that trains, the first in time; a block between is left out."""
    min_training_blocks: int = 40
    """Blocks below which all of them prove."""
    thumb: int = 32
    """Side of the grey thumbnails that tell frames apart."""
    scene_difference: float = 0.75
    """Root mean square of the difference of two thumbnails, of 255, below which frames are one scene."""
    same_view: float = 0.3
    """Correlation of two mean thumbnails below which they show two views: of 253 pairs of clips of a street camera, by
    day and night, no one is below it; of 377 pairs of clips of two cameras 91 % are."""
    uniform: float = 3.0
    """Of a spool: gaps longer than so many median ones; more than a tenth of them, and it was not sampled evenly."""


FOOTAGE = FootageConfig()


@dataclass(frozen=True)
class FootageClip:
    """Frames of one clip in order of time, and seconds into it; `is_cut`: they show the query's part alone."""

    name: str
    frames: Sequence[Load]
    times_s: Sequence[float]
    is_cut: bool = False


@dataclass(frozen=True)
class FootageCut:
    """The frames that train and those that prove, with the block of each of the latter."""

    training: Split | None
    proof: Split
    blocks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ProofFrames:
    """The frames that prove: the `places` of `frames` that count, and the block of each, from 0 on, in order of time.

    `digest` tells footage apart by content; `problem` says why it is no evidence, empty where it is.
    """

    frames: PreparedFrames
    places: tuple[int, ...]
    blocks: tuple[int, ...]
    digest: str
    problem: str = ""

    @property
    def count(self) -> int:
        """The number of blocks."""
        return max(self.blocks, default=-1) + 1

    @property
    def seconds(self) -> float:
        """Of all blocks."""
        return self.count * FOOTAGE.block_s


def load_footage(query: Query) -> FootageCut | None:
    """The footage of a query, cut; None where it names none. InputError for files that are no footage."""
    clips = [clip for path in query.footage for clip in _read_clips(query, path)]
    if not clips:
        return None
    every = -(-sum(len(clip.frames) for clip in clips) // FOOTAGE.max_frames)
    frames = list[Load]()
    units = list[str]()
    times_s = list[float]()
    blocks = list[int]()
    short = []
    for clip in clips:
        numbers = number_blocks(clip.times_s, 1 + max(blocks, default=-1))
        if not any(number is not None for number in numbers):
            short.append(clip.name)
        for place in range(0, len(clip.frames), every):
            number = numbers[place]
            if number is not None:
                load = clip.frames[place]
                frames.append(load if clip.is_cut else partial(crop_frame, query, load))
                units.append(clip.name)
                times_s.append(clip.times_s[place])
                blocks.append(number)
    if short:
        text = f"{len(short)} clips are shorter than half a block of {FOOTAGE.block_s:g} s"
        add_note(query.id, f"{text} and prove nothing: {short[0]}", "give longer ones")
    if not frames:
        return None
    last = training_blocks(1 + blocks[-1])
    total = len(frames)
    trains = [place for place in range(total) if blocks[place] < last]
    proves = [place for place in range(total) if blocks[place] > last or last == 0]
    whole = Split("footage", Frames(frames), None, tuple(units), tuple(times_s))
    numbers = tuple(np.unique([blocks[place] for place in proves], return_inverse=True)[1].tolist())
    return FootageCut(whole.at(trains) if trains else None, whole.at(proves), numbers)


def training_blocks(count: int) -> int:
    """How many of so many blocks train; the next one is the gap. 0 where all prove."""
    return int(FOOTAGE.training_part * count) if count >= FOOTAGE.min_training_blocks else 0


def number_blocks(times_s: Sequence[float], first: int = 0) -> list[int | None]:
    """The block of each frame of a clip; None in a rest of less than half a block."""
    numbers = list[int | None]()
    interval = float(np.median(np.diff(times_s))) if len(times_s) > 1 else FOOTAGE.block_s
    start = times_s[0] if times_s else 0.0
    number = first
    for time_s in times_s:
        if time_s - start >= FOOTAGE.block_s - 1e-6:
            start = time_s
            number = number + 1
        numbers.append(number)
    last = [place for place, block in enumerate(numbers) if block == number]
    if last and times_s[last[-1]] - times_s[last[0]] + interval < FOOTAGE.block_s / 2 - 1e-6:
        for place in last:
            numbers[place] = None
    return numbers


def footage_of(split: Split) -> FootageCut:
    """A split without labels as footage that proves alone."""
    places = list[int]()
    numbers = list[int]()
    units = split.units if split.has_named_units else ("",) * len(split)
    for unit in dict.fromkeys(units):
        within = [place for place, name in enumerate(units) if name == unit]
        blocks = number_blocks(
            [split.times_s[place] for place in within], 1 + max(numbers, default=-1)
        )
        for place, number in zip(within, blocks, strict=True):
            if number is not None:
                places.append(place)
                numbers.append(number)
    return FootageCut(None, split.at(places), tuple(numbers))


def prepare_proof(
    query: Query, cut: FootageCut, seen: Sequence[PreparedFrames], val: PreparedFrames | None = None
) -> ProofFrames:
    """The frames that prove, without blocks that show a scene a second time, or what training has `seen`, or `val`.

    A note names footage that shows another view than val: agreement is measured there.
    """
    frames = PreparedFrames(query, cut.proof).load()
    if not cut.blocks:
        return ProofFrames(frames, (), (), "", "the footage is shorter than a block")
    thumbs = read_thumbs(frames)
    blocks = np.array(cut.blocks)
    digest = hashlib.sha256(thumbs.tobytes()).hexdigest()
    earlier_thumbs = [read_thumbs(earlier) for earlier in (*seen, *([val] if val else []))]
    is_known = find_alike(
        thumbs, np.concatenate([np.empty((0, FOOTAGE.thumb**2), np.uint8), *earlier_thumbs])
    )
    if val and (likeness := compare_views(thumbs, earlier_thumbs[-1])) < FOOTAGE.same_view:
        text = (
            f"its footage looks like that of another camera than val (correlation {likeness:.2f})"
        )
        add_note(
            query.id, f"{text}: agreement is measured there", "give footage of this query's camera"
        )
    repeated = np.zeros(len(thumbs), bool)
    for number in range(1, int(blocks.max()) + 1):
        within = blocks == number
        repeated[within] = find_alike(thumbs[within], thumbs[blocks < number])
    trained = {
        number
        for number in range(int(blocks.max()) + 1)
        if is_known[blocks == number].mean() >= 0.5
    }
    again = {
        number for number in range(int(blocks.max()) + 1) if repeated[blocks == number].all()
    } - trained
    problem = ""
    if len(trained) == blocks.max() + 1:
        problem = "the footage is what the models were trained on"
    elif len(again) == blocks.max():
        problem = "all blocks of the footage show one scene"
    elif trained or again:
        text = f"{len(trained)} blocks of footage show train frames, {len(again)} a scene that was there before"
        add_note(query.id, f"{text}: they do not count", "give other footage")
    places = [place for place in range(len(thumbs)) if blocks[place] not in trained | again]
    numbers = np.unique(blocks[places], return_inverse=True)[1].tolist() if places else []
    return ProofFrames(frames, tuple(places), tuple(numbers), digest, problem)


def read_thumbs(frames: PreparedFrames) -> np.ndarray:
    """Grey thumbnails of all frames, uint8 (N, side * side)."""
    side = (FOOTAGE.thumb, FOOTAGE.thumb)
    thumbs = []
    for start in range(0, len(frames), 64):
        batch = np.asarray(frames.batch(range(start, min(start + 64, len(frames)))).cpu()).mean(
            axis=1
        )
        thumbs += [
            cv2.resize(grey.astype(np.float32), side, interpolation=cv2.INTER_AREA)
            for grey in batch
        ]
    return np.round(np.array(thumbs)).astype(np.uint8).reshape(len(frames), -1)


def compare_views(thumbs: np.ndarray, earlier: np.ndarray) -> float:
    """The correlation of the mean thumbnails (N, P) and (M, P): what does not move tells a camera; 1 of even ones."""
    first, second = (side.astype(float).mean(axis=0) for side in (thumbs, earlier))
    return float(np.corrcoef(first, second)[0, 1]) if first.std() * second.std() > 0 else 1.0


def find_alike(thumbs: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """Which of these frames (N, P) show the scene of any other (M, P): bool (N,)."""
    is_alike = np.zeros(len(thumbs), bool)
    right = earlier.astype(np.float32)
    squares = (right**2).sum(1)
    for start in range(0, len(thumbs) if len(earlier) else 0, 256):
        batch = thumbs[start : start + 256].astype(np.float32)
        squared_distances = (batch**2).sum(1)[:, None] - 2 * batch @ right.T + squares
        is_alike[start : start + 256] = (
            squared_distances.min(axis=1) <= FOOTAGE.scene_difference**2 * thumbs.shape[1]
        )
    return is_alike


def _read_clips(query: Query, path: Path) -> list[FootageClip]:
    if not path.exists():
        raise InputError(
            path, f"does not exist (query {query.id})", "correct `footage:`", "footage"
        )
    if not path.is_dir():
        return [_read_video(path)]
    if (path / "samples").is_dir():
        return _read_spool(query, path / "samples")
    paths = list_all_pictures(path, nested=True)
    if not paths:
        raise InputError(path, f"holds no frames (query {query.id})", HINT, "footage")
    units, times_s = read_units_and_times(paths)
    by_unit: dict[str, list[int]] = {}
    for place, unit in enumerate(
        units if any("__" in picture.stem for picture in paths[:1]) else [path.name] * len(paths)
    ):
        by_unit.setdefault(unit, []).append(place)
    return [
        FootageClip(
            unit,
            [partial(read_picture, paths[place]) for place in places],
            [times_s[place] for place in places],
        )
        for unit, places in by_unit.items()
    ]


def _read_video(path: Path) -> FootageClip:
    """A video's frames, about one a second: its key frames, or where these are too rare those of all."""
    for keys_only in (True, False):
        frames = list[Load]()
        times_s = list[float]()
        seconds = 0.0
        with contextlib.closing(Video(str(path), lambda *_: None, keys_only=keys_only)) as video:
            gate = RateGate(FOOTAGE.rate)
            while video.advance():
                seconds = video.time_s
                if gate.passes(seconds) and (frame := decode_shot(video.shot())) is not None:
                    frames.append(partial(decode_jpeg, encode_jpeg(frame)))
                    times_s.append(seconds)
        if (
            len(frames) * FOOTAGE.block_s >= FOOTAGE.min_block_frames * max(seconds, 1.0)
            and len(frames) > 1
        ):
            break
    if not frames:
        raise InputError(path, "is not a video with frames", "give a video that decodes", "footage")
    return FootageClip(path.stem, frames, times_s)


def _read_spool(query: Query, folder: Path) -> list[FootageClip]:
    """The samples of a query that a box took, if it took them evenly."""
    names = [(path, SAMPLE_NAME.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    samples = [(int(name[1]) / 1000, path) for path, name in names if name and name[2] == query.id]
    if not samples:
        raise InputError(folder, f"holds no samples of query {query.id}", HINT, "footage")
    times_s = [time_s for time_s, _ in samples]
    gaps = np.diff(times_s)
    if len(gaps) and float(np.mean(gaps > FOOTAGE.uniform * np.median(gaps))) > 0.1:
        text = f"the samples of {query.id} were not taken at even times"
        add_note(folder, f"{text}: they prove nothing", "sample without motion gating and hours")
        return []
    return [
        FootageClip(
            "spool", [partial(read_picture, path) for _, path in samples], times_s, is_cut=True
        )
    ]
