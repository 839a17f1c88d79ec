"""A sample: the picture that a query's model was shown, with what it answered, in one PNG file.

The picture is the part of the decoded frame that the query looks at, resized to its input size: pixel by pixel what the
model was fed, before it was normalised. PNG loses nothing of that. What was answered stands in a text chunk `gemel`
(PNG specification, 11.3.3), as JSON, right behind the picture's head.

What the last drift check found, as it leaves it in the spool for the box to show.

What a box answered beside what another model answers on the same pictures.

Which answers become samples, and which samples make way: decisions, with no clock or disk of their own.

The spool at work: answers are offered while a box serves, and a thread of its own writes those that are sampled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import struct
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from edge_runtime.config import FILE_MODE, FOLDER_MODE, SpoolConfig
from edge_runtime.sinks.base import ERROR, UNREACHABLE, UNWRITABLE, ResultMessage, to_delivery_error
from models.bundle import BundleQuery
from models.errors import InputError
from models.evaluation import ComparedFrames
from models.io import (
    MAX_QUERIES,
    ClassName,
    Exact,
    Name,
    ParseError,
    describe_problem,
    open_atomic,
    parse_json,
    read_bounded,
    read_json,
    validate,
)
from models.pictures import MAX_PICTURE_BYTES, decode_picture
from models.predictions import ClassPrediction, DetectionPrediction, Prediction
from models.preprocess import FURTHEST_PIXEL, crop
from models.tasks import task_of

if TYPE_CHECKING:
    import numpy as np


FORMAT = 1
MIN_EXPECTED = 0.01
SUFFIX = ".png"
SAMPLE_HINT = "remove it"
MAX_HEAD_BYTES = 1 << 20
MAX_DETECTIONS = 1000
"""Detections of one answer; a detector gives 100 at most."""
_SIGNATURE, _KEYWORD = b"\x89PNG\r\n\x1a\n", b"gemel\0"
_FIRST_CHUNKS = len(_SIGNATURE) + 25  # the signature and the chunk IHDR

Fraction = Annotated[float, Field(ge=0, le=1)]
Pixel = Annotated[float, Field(ge=-FURTHEST_PIXEL, le=FURTHEST_PIXEL)]
Box = Annotated[list[Pixel], Field(min_length=4, max_length=4)]
Digits = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]


class SampleDetection(Exact):
    """One detection; its box is in pixels of the whole frame."""

    model_config = ConfigDict(populate_by_name=True)

    name: ClassName = Field(alias="class")
    score: Fraction
    box: Box


class SampleHead(Exact):
    """What a sample says of its picture: when and of what it was taken, and what was answered.

    `size` is (width, height) of the part of the frame that the query looks at, `roi` that part, `threshold` the score
    from which detections count, `expected` the agreement with its original of a model that is right as often (on the
    test split of the merge; 1 where nobody knows), `bundle` the first digits of the SHA-256 of what was served. A
    classification has `label` and `score`, a detection `detections`.
    """

    format: Literal[1]
    run: Annotated[str, Field(max_length=100)]
    query: Name
    camera: Name
    frame: Annotated[int, Field(ge=0, le=1 << 62)]
    captured_at: Annotated[float, Field(ge=0, le=1e11)]
    bundle: Digits
    size: Annotated[list[Annotated[int, Field(ge=1, le=1_000_000)]], Field(min_length=2, max_length=2)]
    roi: Box | None
    threshold: Fraction
    expected: Annotated[float, Field(ge=MIN_EXPECTED, le=1)]
    label: ClassName | None = None
    score: Fraction | None = None
    detections: Annotated[list[SampleDetection], Field(max_length=MAX_DETECTIONS)] | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """A picture, RGB uint8 (S, S, 3), and its head."""

    head: SampleHead
    picture: np.ndarray


def sample_bytes(record: Mapping[str, Any], image: np.ndarray, query: BundleQuery) -> bytes:
    """The file of a sample: a result (`edge_runtime.results.result_record`) of a frame, RGB uint8 (H, W, 3)."""
    import cv2

    part = crop(image, query.roi)
    picture = query.preprocess.resize(part).permute(1, 2, 0).contiguous().numpy()
    head = {
        "format": FORMAT, **{key: record[key] for key in ("run", "query", "camera", "frame", "captured_at", "bundle")},
        "size": [part.shape[1], part.shape[0]], "roi": None if query.roi is None else list(query.roi),
        "threshold": max(query.min_score, query.threshold or 0.0), "expected": expected_agreement(query),
        **{key: record[key] for key in ("label", "score", "detections") if key in record},
    }  # fmt: skip
    text = json.dumps(head, allow_nan=False, separators=(",", ":")).encode()
    encoded, data = cv2.imencode(SUFFIX, cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
    if not encoded:
        raise ValueError(f"a picture of {picture.shape} cannot be written as PNG")
    png = data.tobytes()
    return png[:_FIRST_CHUNKS] + _chunk(_KEYWORD + text) + png[_FIRST_CHUNKS:]


def expected_agreement(query: BundleQuery) -> float:
    """The agreement with its original of a model that is right as often: by labels two that are equally good differ.

    What it was on the test split of the merge, over the ratio there: 1 where the original's answers were the reference.
    """
    evidence: Mapping[str, Any] = query.evidence or {}
    ratio, agreement = evidence.get("ratio"), evidence.get("agreement")
    if not isinstance(agreement, float) or not ratio:
        return 1.0
    return min(1.0, max(MIN_EXPECTED, agreement / ratio))


def sample_name(record: Mapping[str, Any]) -> str:
    """The name of a result's sample; names are in the order of time."""
    return f"{round(1000 * record['captured_at']):015d}-{record['query']}-{record['frame']}{SUFFIX}"


def read_head(path: Path) -> SampleHead:
    """What a sample says of itself; its picture is not decoded. InputError where it is none."""
    return _head(path, read_bounded(path, MAX_PICTURE_BYTES, SAMPLE_HINT))


def read_sample(path: Path) -> Sample:
    """A sample, whoever wrote it; InputError where it is none, or damaged."""
    data = read_bounded(path, MAX_PICTURE_BYTES, SAMPLE_HINT)
    return Sample(_head(path, data), decode_picture(data, path))


def _head(path: Path, data: bytes) -> SampleHead:
    try:
        said = parse_json(_text(data))
    except ParseError as fault:
        raise InputError(path, f"is no sample: {fault}", SAMPLE_HINT) from fault
    head = validate(path, said, SampleHead, hint=SAMPLE_HINT)
    if (head.label is None) == (head.detections is None) or (head.label is None) != (head.score is None):
        raise InputError(path, "has no answer: a label with its score, or detections", SAMPLE_HINT)
    return head


def _text(data: bytes) -> bytes:
    """The JSON that stands in the text chunk of a PNG file."""
    start = _FIRST_CHUNKS
    if data[: len(_SIGNATURE)] != _SIGNATURE or data[start + 4 : start + 8] != b"tEXt":
        raise ParseError("there is no text chunk at its beginning")
    length = int.from_bytes(data[start : start + 4], "big")
    body = data[start + 8 : start + 8 + length]
    if length > MAX_HEAD_BYTES or data[start : start + 12 + length] != _chunk(body):
        raise ParseError("its text chunk is damaged or too long")
    if not body.startswith(_KEYWORD):
        raise ParseError("its text chunk is of something else")
    return body.removeprefix(_KEYWORD)


def _chunk(body: bytes) -> bytes:
    """A text chunk of a PNG file: length, kind, body, checksum."""
    kind = b"tEXt"
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


DRIFT_FILE = "drift.json"
MAX_DRIFT_BYTES = 1 << 20

Ratio = Annotated[float, Field(ge=0, le=1e6)]


class QueryDrift(Exact):
    """One query, as `models.evaluation.Agreement` says, by its `target`; whether it was reverted."""

    id: Name
    frames: Annotated[int, Field(ge=0, le=1 << 40)]
    ratio: Ratio | None
    ci95: Annotated[list[Ratio], Field(min_length=2, max_length=2)] | None
    target: Fraction
    verdict: Literal["kept", "below", "unsure", "too few"]
    reverted: bool


class DriftReport(Exact):
    """A drift check: when (Unix seconds), of which bundle (the first digits of its SHA-256), and what of each query."""

    format: Literal[1] = 1
    checked_at: Annotated[float, Field(ge=0, le=1e11)]
    bundle: Digits
    queries: Annotated[list[QueryDrift], Field(max_length=MAX_QUERIES)]


def write_drift(spool: Path, found: DriftReport) -> None:
    """Leave in the spool what was found; InputError where that cannot be."""
    with open_atomic(spool / DRIFT_FILE, overwrite=True) as file:
        file.write(json.dumps(found.model_dump(), allow_nan=False).encode())


def read_drift(spool: Path) -> DriftReport:
    """What the last check left, whoever wrote it; InputError where that is nothing, or damaged."""
    path, remedy = spool / DRIFT_FILE, "run `gemel drift check` again"
    return validate(path, read_json(path, remedy, MAX_DRIFT_BYTES), DriftReport, hint=remedy)


BATCH = 32
Predict = Callable[[Tensor, Sequence[tuple[int, int]]], list[Prediction]]
"""Answers of a model to pictures, uint8 (N, 3, S, S), boxes in pixels of what they were resized from, whose (width,
height) are given.
"""


class SampledQuery(Protocol):
    """What a query of a workload, or of a bundle, says of its answers."""

    @property
    def task(self) -> str: ...
    @property
    def classes(self) -> Sequence[str]: ...
    @property
    def input_size(self) -> int: ...


def compare_samples(
    query: SampledQuery, paths: Sequence[Path], answering: Predict, told: Callable[[int], object] = lambda frames: None
) -> ComparedFrames:
    """The box's answers in these samples beside those of another model, which are their truth, in the order of the
    paths.

    `told` hears how many more were looked at. What is no sample that this query could have left is unusable.
    """
    task = task_of(query.task)
    counts: list[np.ndarray] = []
    expected = 1.0
    for start in range(0, len(paths), BATCH):
        chunk = paths[start : start + BATCH]
        samples = [sample for path in chunk if (sample := _usable(path, query)) is not None]
        if samples:
            batch = torch.stack([torch.from_numpy(one.picture).permute(2, 0, 1) for one in samples])
            answers = answering(batch, [(one.head.size[0], one.head.size[1]) for one in samples])
            for sample, answer in zip(samples, answers, strict=True):
                threshold, expected = sample.head.threshold, sample.head.expected
                truth = task.labels_of(answer, threshold)
                counts.append(task.tallies([sample_prediction(sample.head)], [truth], query.classes, threshold)[0])
        told(len(chunk))
    return ComparedFrames(np.array(counts, np.int64), expected, len(paths) - len(counts))


def sample_prediction(head: SampleHead) -> Prediction:
    """What the box answered, boxes in pixels of the part of the frame that the query looks at."""
    if head.detections is None:
        assert head.label is not None and head.score is not None
        return ClassPrediction(head.label, head.score, ())
    left, top = (0, 0) if head.roi is None else (round(head.roi[0]), round(head.roi[1]))
    found = [(one.name, one.score, one.box) for one in head.detections]
    boxes = tuple((x0 - left, y0 - top, x1 - left, y1 - top) for _, _, (x0, y0, x1, y1) in found)
    return DetectionPrediction(tuple(name for name, _, _ in found), tuple(score for _, score, _ in found), boxes)


def _usable(path: Path, query: SampledQuery) -> Sample | None:
    """A sample that this query may have left; None for every other."""
    try:
        sample = read_sample(path)
    except InputError:
        return None
    fits = sample.picture.shape == (query.input_size, query.input_size, 3)
    return sample if fits and (sample.head.detections is None) == (query.task == "classification") else None


RETRY_S = 1.0
"""A sample for which there is no room now is tried again so much later."""


class SampleDecision(Enum):
    """What becomes of an answer: it is no sample, it is one, or it should be and there is no room."""

    PASS = "pass"
    TAKE = "take"
    NO_ROOM = "no room"


@dataclass(frozen=True, slots=True)
class SamplingState:
    """One sample of each query every `every_s` seconds; `due_at` says from when on the next one of a query is due.

    A query that is not in it was never sampled: its first answer is. Seconds are of any clock that does not go back.
    """

    every_s: float
    due_at: Mapping[str, float] = field(default_factory=dict)


def decide_sample(state: SamplingState, query: str, has_room: bool, now: float) -> tuple[SamplingState, SampleDecision]:
    """What follows from an answer of a query at this time, and what becomes of it."""
    if now < state.due_at.get(query, now):
        return state, SampleDecision.PASS
    wait_s = state.every_s if has_room else min(RETRY_S, state.every_s)
    after = replace(state, due_at={**state.due_at, query: now + wait_s})
    return after, SampleDecision.TAKE if has_room else SampleDecision.NO_ROOM


def count_evictions(sizes: Sequence[int], coming: int, most: int) -> int | None:
    """How many samples, the oldest first, go before one of `coming` bytes, so that all take `most` bytes at most.

    `sizes` are the bytes of those that are there, the oldest first. None: it is too large whatever goes.
    """
    if coming > most:
        return None
    total, gone = sum(sizes) + coming, 0
    while total > most:
        total -= sizes[gone]
        gone += 1
    return gone


WAITING = 16
"""Samples that wait to be written, each with its frame."""
POLL_INTERVAL_S = 5.0
"""How often the thread looks whether there was a drift check."""
BUSY, TOO_LARGE = "busy", "too_large"
"""Why an answer that was due is no sample, beside what the disk says: too many wait, one takes more than all may."""

log = logging.getLogger("gemel.run")


class Spool:
    """Keeps a picture with the answer of each query now and then, in a folder that never grows beyond its bound.

    What is in the way of that, a full disk or one that hangs, is counted in `unsampled` and told once; it holds up
    nobody who offers. `queries` are those that are served. `checked` is what the last drift check found.
    """

    def __init__(self, config: SpoolConfig, queries: Mapping[str, BundleQuery]) -> None:
        self.queries = queries
        self.checked: DriftReport | None = None
        self.samples, self.unsampled = 0, Counter[str]()
        self._config, self._sampling = config, SamplingState(config.every_s)
        self._kept: deque[tuple[str, int]] = deque()
        self._nbytes = 0
        self._waiting: queue.Queue[tuple[ResultMessage, BundleQuery] | None] = queue.Queue(WAITING)
        self._stopping, self._look_at, self._seen = False, -math.inf, (0, 0)
        self._trouble: str | None = None
        self._reason = ERROR
        self._thread = threading.Thread(target=self._work, name="spool", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def offer(self, parcel: ResultMessage) -> None:
        """An answer, with the frame it was given to; call it from one thread. It takes microseconds."""
        name = str(parcel.record["query"])
        self._sampling, choice = decide_sample(self._sampling, name, not self._waiting.full(), time.monotonic())
        if choice is SampleDecision.NO_ROOM:
            self.unsampled[BUSY] += 1
        elif choice is SampleDecision.TAKE and parcel.image is not None:
            self._waiting.put_nowait((parcel, self.queries[name]))

    def stop(self) -> None:
        """Write what waits, and end."""
        self._stopping = True
        with contextlib.suppress(queue.Full):  # then it is awake
            self._waiting.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join()

    def to_json(self) -> dict[str, Any]:
        """How many `samples` were written, `unsampled` by reason, and the `bytes` of all that are kept."""
        return {"samples": self.samples, "unsampled": dict(sorted(self.unsampled.items())), "bytes": self._nbytes}

    def _work(self) -> None:
        self._attempt(self._find)
        while not (self._stopping and self._waiting.empty()):
            self._look(time.monotonic())
            with contextlib.suppress(queue.Empty):
                item = self._waiting.get(timeout=POLL_INTERVAL_S)
                if item is not None and not self._attempt(partial(self._keep, *item)):
                    self.unsampled[self._reason] += 1

    def _attempt(self, what: Callable[[], object]) -> bool:
        """Do it; whether that went well. What went wrong is told where it is news."""
        try:
            what()
        except Exception as error:
            reason, said = to_delivery_error(error).reason, str(error) or type(error).__name__
            self._reason = UNWRITABLE if reason == UNREACHABLE else reason
            if said != self._trouble:
                log.error("spool: %s", said)
            self._trouble = said
            return False
        if self._trouble is not None:
            log.info("spool: samples are written again")
            self._trouble = None
        return True

    def _find(self) -> None:
        """What is there already; what was being written when a box was killed goes."""
        folder = self._own_folder()
        with describe_problem(folder):
            found = [(one.name, one.stat(follow_symlinks=False).st_size) for one in os.scandir(folder)]
        for name, _ in found:
            if name.startswith(".") and name.endswith(".tmp"):
                with describe_problem(folder / name):
                    os.unlink(folder / name)
        self._kept.extend(sorted(one for one in found if one[0].endswith(SUFFIX)))
        self._nbytes = sum(size for _, size in self._kept)

    def _keep(self, parcel: ResultMessage, query: BundleQuery) -> None:
        assert parcel.image is not None
        data = sample_bytes(parcel.record, parcel.image, query)
        gone = count_evictions([size for _, size in self._kept], len(data), self._config.max_bytes)
        if gone is None:
            self.unsampled[TOO_LARGE] += 1
            return
        folder = self._own_folder()
        for _ in range(gone):
            with describe_problem(folder), contextlib.suppress(FileNotFoundError):
                os.unlink(folder / self._kept[0][0])
            self._nbytes -= self._kept.popleft()[1]
        path = folder / sample_name(parcel.record)
        with open_atomic(path, overwrite=True) as file:
            os.fchmod(file.fileno(), FILE_MODE)
            file.write(data)
        self._kept.append((path.name, len(data)))
        self._nbytes += len(data)
        self.samples += 1

    def _own_folder(self) -> Path:
        """The folder of the samples, which nobody else looks into; made where it is not there."""
        folder = self._config.samples
        with describe_problem(folder):
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchmod(opened, FOLDER_MODE)
            finally:
                os.close(opened)
        return folder

    def _look(self, now: float) -> None:
        """Read what a drift check left, where it is another than before."""
        if now < self._look_at:
            return
        self._look_at = now + POLL_INTERVAL_S
        try:
            found = os.stat(self._config.path / DRIFT_FILE)
            if self._seen == (seen := (found.st_mtime_ns, found.st_ino)):
                return
            self._seen, self.checked = seen, None
            self.checked = read_drift(self._config.path)
        except OSError:  # there was none
            self.checked = None
        except InputError as error:
            log.warning("%s", error)
