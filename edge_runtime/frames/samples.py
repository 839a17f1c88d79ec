"""Samples of frames with the answers to them, for a drift check; the spool that writes them; the last drift report.

if TYPE_CHECKING:
    from gemel.models.workload import Query

A sample is one PNG file: the part of the decoded frame that the query looks at, resized to its input size, pixel by
pixel what the model was fed before normalisation. The answer is JSON in a text chunk `gemel` before the pixels.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import queue
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pydantic import ConfigDict, Field

from gemel.edge_runtime.life.config import FILE_MODE, FOLDER_MODE, SpoolConfig
from gemel.edge_runtime.sinks.base import ResultMessage, Undelivered, to_delivery_error
from gemel.models.bundle import BundleQuery
from gemel.models.errors import InputError
from gemel.models.files.documents import ParseError, parse_json
from gemel.models.files.io import (
    MAX_CLASSES,
    MAX_QUERIES,
    ClassName,
    Exact,
    Name,
    describe_problem,
    open_atomic,
    read_bounded,
    read_json,
    validate,
)
from gemel.models.files.pictures import MAX_PICTURE_BYTES, MAX_PIXELS, decode_picture
from gemel.models.labels.rle import decode_rle
from gemel.models.measures.agreement import ComparedFrames
from gemel.models.objects.masks import IGNORED
from gemel.models.predictions import (
    BACKGROUNDS,
    ClassPrediction,
    DetectionPrediction,
    EmbeddingPrediction,
    LabelsPrediction,
    MaskPrediction,
    PosePrediction,
    Prediction,
    TensorPrediction,
    unpack_float16,
)
from gemel.models.preprocess import FURTHEST_PIXEL
from gemel.models.tasks import task_of

if TYPE_CHECKING:
    from gemel.models.workload import Query

FORMAT = 1
MIN_EXPECTED = 0.01
SUFFIX = ".png"
DRIFT_FILE = "drift.json"
SAMPLE_HINT, DRIFT_HINT = "remove it", "run `gemel drift check` again"
MAX_HEAD_BYTES = MAX_DRIFT_BYTES = 1 << 20
MAX_DETECTIONS = 1000
"""Detections of one answer; a detector gives 100 at most."""
COMPARE_BATCH = 32
MAX_QUEUED = 16
"""Samples that wait to be written, each with its frame."""
POLL_INTERVAL_S = 5.0
"""Interval at which the spool looks for a new drift check."""
MIN_CLOCK_S, MAX_CLOCK_S = 1.6e9, 4.1e9
"""Unix seconds, of 2020 and 2099, between which the clock of a box is believed."""
MAX_OUTPUTS, MAX_POINTS, MAX_POLYGONS, MAX_VERTICES = 64, 1000, 1000, 100_000
BUSY, TOO_LARGE, NO_ROOM = "busy", "too_large", "no_room"
"""Reasons of `unsampled` beside those of the disk: the queue is full, one sample exceeds the spool, it leaves room."""
MIN_FREE_FRACTION = 0.05
"""Of its disk: samples are the first to give way to results and updates."""
ANSWER_KEYS = ("labels", "label", "detections", "segments", "embedding", "outputs")
"""The keys of an answer in a result, and in a sample."""
KEYWORD, PNG_LEVEL = "gemel", 1
"""The key of a sample's text, and the level of its compression (of 9)."""

Fraction = Annotated[float, Field(ge=0, le=1)]
Pixel = Annotated[float, Field(ge=-FURTHEST_PIXEL, le=FURTHEST_PIXEL)]
Box = Annotated[list[Pixel], Field(min_length=4, max_length=4)]
Point = Annotated[list[Pixel], Field(min_length=3, max_length=3)]
SamplePolygon = Annotated[
    list[Annotated[list[Pixel], Field(min_length=2, max_length=2)]], Field(min_length=3, max_length=MAX_VERTICES)
]
Digits = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
Ratio = Annotated[float, Field(ge=0, le=1e6)]
Predict = Callable[[np.ndarray, Sequence[tuple[int, int]]], list[Prediction]]
"""A model on pictures, uint8 (N, 3, H, W); boxes are in pixels of the originals, whose (width, height) are given."""

log = logging.getLogger("gemel.run")


class SampleLabel(Exact):
    """One of several classes."""

    model_config = ConfigDict(populate_by_name=True)

    name: ClassName = Field(alias="class")
    score: Fraction


class SampleDetection(Exact):
    """One detection; its box is in pixels of the whole frame."""

    model_config = ConfigDict(populate_by_name=True)

    name: ClassName = Field(alias="class")
    score: Fraction
    box: Box
    points: Annotated[list[Point], Field(max_length=MAX_POINTS)] | None = None
    polygons: Annotated[list[SamplePolygon], Field(max_length=MAX_POLYGONS)] | None = None


class SampleMask(Exact):
    """A mask as COCO's run lengths: `size` is (height, width) of the frame."""

    size: Annotated[list[Annotated[int, Field(ge=1, le=1_000_000)]], Field(min_length=2, max_length=2)]
    counts: str

    def pixels(self) -> np.ndarray:
        """Boolean (H, W); ValueError where the run lengths do not fill it, or it has too many pixels."""
        if self.size[0] * self.size[1] > MAX_PIXELS:
            raise ValueError(f"a mask of {self.size[1]} x {self.size[0]} pixels")
        return decode_rle(self.counts, (self.size[0], self.size[1]))


class SampleSegment(Exact):
    """The pixels of one class."""

    model_config = ConfigDict(populate_by_name=True)

    name: ClassName = Field(alias="class")
    area: Annotated[int, Field(ge=0, le=MAX_PIXELS)]
    mask: SampleMask


class SampleOutput(Exact):
    """An output of a network as a result holds it (models.predictions.TensorPrediction)."""

    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 30)]], Field(max_length=8)]
    float16: str | None = None
    argmax: Any = None
    sha256: str | None = None

    def values(self) -> np.ndarray:
        """The values, or the places of the largest; ValueError where it holds neither."""
        if self.float16 is not None:
            return unpack_float16(self.float16, self.shape)
        if self.argmax is None:
            raise ValueError("its values are not kept")
        return np.array(self.argmax, np.int64)


class SampleHead(Exact):
    """The origin of a sample's picture, and the answer.

    `size` is (width, height) of the part of the frame that the query looks at, `roi` that part, `threshold` the score
    from which detections count, `expected` the agreement with its original of a model that is right as often (on the
    test split of the merge; 1 where unknown), `bundle` the first digits of the SHA-256 of the bundle. A
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
    segments: Annotated[list[SampleSegment], Field(max_length=IGNORED)] | None = None
    labels: Annotated[list[SampleLabel], Field(max_length=MAX_CLASSES)] | None = None
    embedding: str | None = None
    outputs: Annotated[list[SampleOutput], Field(max_length=MAX_OUTPUTS)] | None = None

    def prediction(self, classes: Sequence[str]) -> Prediction:
        """The answer of the box, places in pixels of the part of the frame that the query looks at.

        ValueError where a mask is none.
        """
        left, top = (0, 0) if self.roi is None else (round(self.roi[0]), round(self.roi[1]))
        if self.label is not None:
            return ClassPrediction(self.label, self.score or 0.0, ())
        if self.labels is not None:
            return LabelsPrediction(*(tuple(getattr(one, key) for one in self.labels) for key in ("name", "score")))
        if self.embedding is not None:
            return EmbeddingPrediction(unpack_float16(self.embedding, (-1,)))
        if self.outputs is not None:
            shapes = tuple(tuple(one.shape) for one in self.outputs)
            return TensorPrediction(tuple(one.values() for one in self.outputs), shapes)
        if self.segments is not None:
            whole_size = (left + self.size[0], top + self.size[1])
            return self._masks(classes, whole_size).in_frame(-left, -top, (self.size[0], self.size[1]))
        found = self.detections or ()
        rows: Any = (
            tuple(one.name for one in found), tuple(one.score for one in found), tuple(tuple(one.box) for one in found),
        )  # fmt: skip
        outlines = tuple(tuple(tuple(map(tuple, part)) for part in one.polygons or ()) for one in found)
        has_outlines = any(one.polygons is not None for one in found)
        whole = DetectionPrediction(*rows, outlines=outlines if has_outlines else ())  # type: ignore[arg-type]
        if any(one.points is not None for one in found):
            whole = PosePrediction(*rows, tuple(tuple(map(tuple, one.points or ())) for one in found))  # type: ignore[arg-type]
        return whole.in_frame(-left, -top, (self.size[0], self.size[1]))

    def _masks(self, classes: Sequence[str], size: tuple[int, int]) -> MaskPrediction:
        """The masks as one; `size` (width, height) is that of a frame without any."""
        rest = next((place for place, name in enumerate(classes) if name.lower() in BACKGROUNDS), IGNORED)
        masks = [(classes.index(one.name), one.mask.pixels()) for one in self.segments or ()]
        if len({mask.shape for _, mask in masks}) > 1:
            raise ValueError("masks of several sizes")
        height, width = masks[0][1].shape if masks else size[::-1]
        whole = np.full((height, width), rest, np.uint8)
        for place, mask in masks:
            whole[mask] = place
        return MaskPrediction(whole, (0.0, 0.0, float(width), float(height)), (width, height), tuple(classes))


@dataclass(frozen=True, eq=False)
class Sample:
    """A picture, RGB uint8 (S, S, 3), and its head."""

    head: SampleHead
    picture: np.ndarray


class QueryDrift(Exact):
    """The agreement of one query (`models.measures.agreement.Agreement`) with its `target`; whether it was reverted.

    `chance_per_year`: how often in a year such a fall is seen by chance at most (`models.measures.sequential`), None
    before any.
    """

    id: Name
    frames: Annotated[int, Field(ge=0, le=1 << 40)]
    ratio: Ratio | None
    target: Fraction
    verdict: Literal["kept", "below", "unsure", "too few", "one answer"]
    chance_per_year: Annotated[float, Field(ge=0)] | None = None
    reverted: bool


class DriftReport(Exact):
    """A drift check: its time (Unix seconds), the first digits of the bundle's SHA-256, and the queries."""

    format: Literal[1] = 1
    checked_at: Annotated[float, Field(ge=0, le=1e11)]
    bundle: Digits
    queries: Annotated[list[QueryDrift], Field(max_length=MAX_QUERIES)]


def write_drift(spool: Path, report: DriftReport) -> None:
    """Write a report into the spool; InputError where that fails."""
    with open_atomic(spool / DRIFT_FILE, overwrite=True) as file:
        file.write(json.dumps(report.model_dump(), allow_nan=False).encode())


def read_drift(spool: Path) -> DriftReport:
    """The last report in the spool; InputError where there is none, or it is damaged."""
    path = spool / DRIFT_FILE
    return validate(path, read_json(path, DRIFT_HINT, MAX_DRIFT_BYTES), DriftReport, hint=DRIFT_HINT)


def sample_bytes(record: Mapping[str, Any], image: np.ndarray, query: BundleQuery) -> bytes:
    """The file of a sample: a result (`edge_runtime.frames.results.result_record`) of a frame, RGB uint8 (H, W, 3)."""
    part = query.region.crop(image)
    edges = query.region.pixels((image.shape[1], image.shape[0]))
    picture = np.ascontiguousarray(query.preprocess.resize_frame(part).transpose(1, 2, 0))
    head = {
        "format": FORMAT, **{key: record[key] for key in ("run", "query", "camera", "frame", "captured_at", "bundle")},
        "size": [part.shape[1], part.shape[0]], "roi": None if query.roi is None else list(edges),
        "threshold": max(query.least_score, query.threshold or 0.0), "expected": expected_agreement(query),
        **{key: record[key] for key in ("score", *ANSWER_KEYS) if key in record},
    }  # fmt: skip
    text = PngInfo()
    text.add_text(KEYWORD, json.dumps(head, allow_nan=False, separators=(",", ":")))
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", pnginfo=text, compress_level=PNG_LEVEL)
    return file.getvalue()


def expected_agreement(query: BundleQuery) -> float:
    """The agreement with its original of a model that is right as often: by labels two equally good models differ.

    The agreement on the test split of the merge, over the ratio there; 1 where the original's answers were the
    reference.
    """
    evidence: Mapping[str, Any] = query.evidence or {}
    ratio, agreement = evidence.get("ratio"), evidence.get("agreement")
    if not isinstance(agreement, float) or not ratio:
        return 1.0
    return min(1.0, max(MIN_EXPECTED, agreement / ratio))


def sample_name(record: Mapping[str, Any]) -> str:
    """The name of a result's sample; names sort by time."""
    return f"{round(1000 * record['captured_at']):015d}-{record['query']}-{record['frame']}{SUFFIX}"


def read_head(path: Path) -> SampleHead:
    """The head of a sample; its picture is not decoded. InputError where the file is none."""
    return _parse_head(path, read_bounded(path, MAX_PICTURE_BYTES, SAMPLE_HINT))


def read_sample(path: Path) -> Sample:
    """A sample; InputError where the file is none, or damaged."""
    data = read_bounded(path, MAX_PICTURE_BYTES, SAMPLE_HINT)
    return Sample(_parse_head(path, data), decode_picture(data, path))


def _parse_head(path: Path, data: bytes) -> SampleHead:
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
            text = str(picture.info[KEYWORD]).encode()
    except Exception as error:  # a damaged picture can fail in any way
        problem = f"is no sample: no PNG picture with a text `{KEYWORD}`, or damaged"
        raise InputError(path, problem, SAMPLE_HINT) from error
    try:
        document = parse_json(text[:MAX_HEAD_BYTES])
    except ParseError as error:
        raise InputError(path, f"is no sample: {error}", SAMPLE_HINT) from error
    head = validate(path, document, SampleHead, hint=SAMPLE_HINT)
    given = [key for key in ANSWER_KEYS if getattr(head, key) is not None]
    if len(given) != 1 or (head.label is None) != (head.score is None):
        raise InputError(
            path, f"has no answer, or several, of {', '.join(ANSWER_KEYS)} (a label with its score)", SAMPLE_HINT
        )
    return head


def compare_samples(
    query: BundleQuery | Query,
    paths: Sequence[Path],
    predict: Predict,
    on_progress: Callable[[int], object] = lambda _: None,
) -> ComparedFrames:
    """The box's answers in these samples against those of another model, which count as true, in order of the paths.

    `on_progress` gets the number of further samples. A file that this query could not have left is unusable.
    """
    task = task_of(query)
    counts: list[np.ndarray] = []
    expected = 1.0
    for start in range(0, len(paths), COMPARE_BATCH):
        chunk = paths[start : start + COMPARE_BATCH]
        usable = [found for path in chunk if (found := _usable_sample(path, query)) is not None]
        if usable:
            batch = np.stack([sample.picture.transpose(2, 0, 1) for sample, _ in usable])
            predictions = predict(batch, [(sample.head.size[0], sample.head.size[1]) for sample, _ in usable])
            for (sample, given), prediction in zip(usable, predictions, strict=True):
                expected, threshold = sample.head.expected, sample.head.threshold
                truth = task.labels_of(prediction, threshold)
                counts.append(task.tallies([given], [truth], query.classes, threshold)[0])
        on_progress(len(chunk))
    return ComparedFrames(np.array(counts), expected, len(paths) - len(counts))


def _usable_sample(path: Path, query: BundleQuery | Query) -> tuple[Sample, Prediction] | None:
    try:
        sample = read_sample(path)
        given = sample.head.prediction(query.classes)
    except (InputError, ValueError, TypeError, OverflowError):
        return None
    if isinstance(query, BundleQuery):
        preprocess = query.preprocess
    else:
        from gemel.models.zoo import preprocess_of

        preprocess = preprocess_of(query)
    fits = sample.picture.shape == (*preprocess.size, 3)
    return (
        (sample, given)
        if fits and getattr(sample.head, "labels" if query.multi_label else task_of(query).answer) is not None
        else None
    )


def lacks_room(folder: Path, nbytes: int) -> bool:
    """Whether so many bytes more would take what samples leave to all else on their disk."""
    disk = shutil.disk_usage(folder)
    return disk.free - nbytes < MIN_FREE_FRACTION * disk.total


def believe_clock(captured_at: float, uptime_s: float) -> float:
    """The time of a sample: Unix seconds, or those since the start while the clock of the box is absurd."""
    return captured_at if MIN_CLOCK_S <= captured_at <= MAX_CLOCK_S else max(0.0, uptime_s)


class Spool:
    """Writes a sample of each query now and then, in a thread, into a folder that never exceeds its size.

    Failures of the disk are counted in `unsampled` and logged once; `offer` never waits. `queries` are those that are
    served, `drift` is the last drift report, `free_bytes` what its disk has left.
    """

    def __init__(self, config: SpoolConfig, queries: Mapping[str, BundleQuery]) -> None:
        self.queries = queries
        self.drift: DriftReport | None = None
        self.samples, self.unsampled = 0, Counter[str]()
        self._config = config
        self._started_at = time.monotonic()
        self._due_at: dict[str, float] = {}
        self._files: deque[tuple[str, int]] = deque()
        self._nbytes = 0
        self.free_bytes: int | None = None
        self._queue: queue.Queue[tuple[ResultMessage, BundleQuery] | None] = queue.Queue(MAX_QUEUED)
        self._stopping, self._drift_stamp = False, (0, 0)
        self._problem: Undelivered | None = None
        self._thread = threading.Thread(target=self._work, name="spool", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def offer(self, message: ResultMessage) -> None:
        """A result with its frame, sampled if its query is due; call it from one thread. Takes microseconds."""
        name, now = str(message.record["query"]), time.monotonic()
        if now < self._due_at.get(name, now) or message.image is None:
            return
        self._due_at[name] = now + self._config.every_s
        captured_at = believe_clock(float(message.record["captured_at"]), now - self._started_at)
        message = replace(message, record={**message.record, "captured_at": captured_at})
        try:
            self._queue.put_nowait((message, self.queries[name]))
        except queue.Full:
            self.unsampled[BUSY] += 1

    def stop(self) -> None:
        """Write what waits, and end."""
        self._stopping = True
        with contextlib.suppress(queue.Full):  # then the thread is awake
            self._queue.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join()

    def to_json(self) -> dict[str, Any]:
        """Samples written, `unsampled` by reason, and the `bytes` of all samples in the folder."""
        return {"samples": self.samples, "unsampled": dict(sorted(self.unsampled.items())), "bytes": self._nbytes}

    def _work(self) -> None:
        self._attempt(self._scan_folder)
        polled_at = -math.inf
        while not (self._stopping and self._queue.empty()):
            if time.monotonic() >= polled_at + POLL_INTERVAL_S:
                polled_at = time.monotonic()
                self._poll_drift()
                with contextlib.suppress(OSError):
                    self.free_bytes = shutil.disk_usage(self._config.path).free
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=POLL_INTERVAL_S)
                if item is not None and (reason := self._attempt(partial(self._write, *item))) is not None:
                    self.unsampled[reason] += 1

    def _attempt(self, action: Callable[[], object]) -> str | None:
        """Do it; the reason of a failure, logged when it changes, or None."""
        try:
            action()
        except Exception as error:
            reason, text = to_delivery_error(error).reason, str(error) or type(error).__name__
            if reason != self._problem:  # the text names another file for each sample
                log.error("spool: %s", text)
            self._problem = reason
            return str(Undelivered.UNWRITABLE if reason is Undelivered.UNREACHABLE else reason)
        if self._problem is not None:
            log.info("spool: samples are written again")
            self._problem = None
        return None

    def _scan_folder(self) -> None:
        """Count the samples that are there; remove temporary files of a killed process."""
        folder = self._prepare_folder()
        with describe_problem(folder):
            for path in folder.glob(".*.tmp"):
                path.unlink()
            self._files.extend((path.name, path.lstat().st_size) for path in sorted(folder.glob(f"*{SUFFIX}")))
        self._nbytes = sum(size for _, size in self._files)

    def _write(self, message: ResultMessage, query: BundleQuery) -> None:
        assert message.image is not None
        data = sample_bytes(message.record, message.image, query)
        if len(data) > self._config.max_bytes:
            self.unsampled[TOO_LARGE] += 1
            return
        folder = self._prepare_folder()
        if not self._evict_samples(folder, len(data)):
            self.unsampled[NO_ROOM] += 1
            return
        path = folder / sample_name(message.record)
        with open_atomic(path, overwrite=True) as file:
            os.fchmod(file.fileno(), FILE_MODE)
            file.write(data)
        self._files.append((path.name, len(data)))
        self._nbytes += len(data)
        self.samples += 1

    def _evict_samples(self, folder: Path, nbytes: int) -> bool:
        """Remove the oldest samples until so many bytes more fit, in the folder and on its disk; whether they do."""
        while self._nbytes + nbytes > self._config.max_bytes or lacks_room(folder, nbytes):
            if not self._files:
                return False
            name, size = self._files[0]
            with describe_problem(folder):
                (folder / name).unlink(missing_ok=True)
            self._files.popleft()
            self._nbytes -= size
        return True

    def _prepare_folder(self) -> Path:
        """The folder of the samples, private to its owner; made where it is missing."""
        folder = self._config.samples
        with describe_problem(folder):
            folder.mkdir(exist_ok=True)
            folder.chmod(FOLDER_MODE)
        return folder

    def _poll_drift(self) -> None:
        """Read the drift report when its file has changed."""
        try:
            found = os.stat(self._config.path / DRIFT_FILE)
            if self._drift_stamp == (stamp := (found.st_mtime_ns, found.st_ino)):
                return
            self._drift_stamp, self.drift = stamp, None
            self.drift = read_drift(self._config.path)
        except OSError:  # there is none
            self.drift = None
        except InputError as error:
            log.warning("%s", error)
