"""Predictions, labels, and the interface of a task: decoding, metric and evidence."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from gemel.models.files.io import MAX_VALUES
from gemel.models.labels.rle import encode_rle
from gemel.models.measures.evidence import ShownAnswers, find_constant_answer, find_one_answer
from gemel.models.objects.masks import IGNORED, resample
from gemel.models.preprocess import Preprocess

if TYPE_CHECKING:
    from typing_extensions import Self

CHANCE_MARGIN = 0.10


class FrameAnswer:
    """What has no place in the frame."""

    def in_frame(self, left: int, top: int, size: tuple[int, int]) -> Self:
        """The same."""
        return self


@dataclass(frozen=True)
class ClassPrediction(FrameAnswer):
    """One frame's class: the label, its probability, and the probabilities of all classes in order."""

    label: str
    score: float
    probabilities: tuple[float, ...]

    def to_record(self) -> dict[str, Any]:
        """`label` and `score` of a result."""
        return {"label": self.label, "score": self.score}


@dataclass(frozen=True)
class LabelSet:
    """The labels of one frame for multi-label classification."""

    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LabelsPrediction(FrameAnswer):
    """One frame's classes, best first, and their scores."""

    classes: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()

    def to_record(self) -> dict[str, Any]:
        """`labels` of a result."""
        pairs = zip(self.classes, self.scores, strict=True)
        return {"labels": [{"class": name, "score": score} for name, score in pairs]}


Box = tuple[float, float, float, float]
Outline = tuple[tuple[tuple[float, float], ...], ...]
"""The polygons of one object, each of points (x, y) in pixels of the frame; several where a part is hidden."""
OUTLINE_DIGITS = 2
"""Of a pixel, in results."""


@dataclass(frozen=True)
class DetectionPrediction:
    """One frame's objects, best first: classes, scores, and boxes (x0, y0, x1, y1) in pixels of the frame.

    `outlines` are those of their masks, or the corners of rotated boxes; empty where the model finds neither.
    """

    classes: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    boxes: tuple[Box, ...] = ()
    outlines: tuple[Outline, ...] = field(default=(), kw_only=True)

    def in_frame(self, left: int, top: int, size: tuple[int, int]) -> DetectionPrediction:
        """The boxes of a part of a frame, whose corner is at (left, top), in pixels of the whole frame."""
        boxes = tuple((x0 + left, y0 + top, x1 + left, y1 + top) for x0, y0, x1, y1 in self.boxes)
        outlines = tuple(
            tuple(tuple((x + left, y + top) for x, y in polygon) for polygon in outline)
            for outline in self.outlines
        )
        return replace(self, boxes=boxes, outlines=outlines)

    def to_record(self) -> dict[str, Any]:
        """`detections` of a result; `polygons` of each are those of its mask, or one of a rotated box's corners."""
        rows = zip(self.classes, self.scores, self.boxes, strict=True)
        records: list[dict[str, Any]] = [
            {"class": name, "score": score, "box": list(box)} for name, score, box in rows
        ]
        for record, outline in zip(records, self.outlines, strict=False):
            record["polygons"] = [
                [[round(x, OUTLINE_DIGITS), round(y, OUTLINE_DIGITS)] for x, y in polygon]
                for polygon in outline
            ]
        return {"detections": records}


@dataclass(frozen=True)
class BoxLabels:
    """The labels of one frame for detection: classes and boxes (x0, y0, x1, y1) in pixels of that frame.

    `crowds` are regions full of objects of a class: not to be found, and detections in them are not false. `outlines`
    are as those of predictions.
    """

    classes: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    crowds: BoxLabels | None = None
    outlines: tuple[Outline, ...] = field(default=(), kw_only=True)


BOX_SHARE = 0.53
"""Of the box of a person, about the area that the person covers."""
Points = tuple[tuple[float, float, float], ...]
"""Points of one object: x and y in pixels of the frame, and a score, or of labels whether it is labelled (above 0)."""


@dataclass(frozen=True)
class PosePrediction(DetectionPrediction):
    """One frame's objects with their points."""

    points: tuple[Points, ...] = ()

    def in_frame(self, left: int, top: int, size: tuple[int, int]) -> PosePrediction:
        """As of a detection; the points move, too."""
        points = tuple(
            tuple((x + left, y + top, score) for x, y, score in pose) for pose in self.points
        )
        moved = super().in_frame(left, top, size)
        return PosePrediction(moved.classes, moved.scores, moved.boxes, points)

    def to_record(self) -> dict[str, Any]:
        """`detections` of a result, each with `points`: x, y and score."""
        rows = zip(super().to_record()["detections"], self.points, strict=True)
        return {
            "detections": [{**row, "points": [list(point) for point in pose]} for row, pose in rows]
        }


@dataclass(frozen=True)
class PoseLabels(BoxLabels):
    """The labels of one frame for keypoints. An object has the area (pixels) that its file gives, else one by its box.

    Objects without a labelled point are among the `crowds`: neither to be found, nor false.
    """

    points: tuple[Points, ...] = ()
    areas: tuple[float, ...] | None = None


BACKGROUNDS = ("background", "__background__")
"""Names of the class whose pixels are in no segment."""


@dataclass(frozen=True, eq=False)
class MaskLabels:
    """The labels of one frame for segmentation: `mask` uint8 (h, w), positions of classes or IGNORED.

    `extent` is what the mask covers, in pixels of the frame: the part of it that the network takes.
    """

    mask: np.ndarray
    extent: Box

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, MaskLabels) and self.extent == other.extent
        return same and np.array_equal(self.mask, other.mask)  # type: ignore[union-attr]

    def __hash__(self) -> int:
        return hash((self.mask.tobytes(), self.extent))


@dataclass(frozen=True, eq=False)
class MaskPrediction:
    """One frame's classes, pixel by pixel: `mask`, `extent` as in MaskLabels; `size` is the frame's (width, height)."""

    mask: np.ndarray
    extent: Box
    size: tuple[int, int]
    classes: tuple[str, ...]

    def in_frame(self, left: int, top: int, size: tuple[int, int]) -> MaskPrediction:
        """The mask of a part of a frame, whose corner is at (left, top), in a frame of this (width, height)."""
        x0, y0, x1, y1 = self.extent
        return replace(self, extent=(x0 + left, y0 + top, x1 + left, y1 + top), size=size)

    def frame_mask(self) -> np.ndarray:
        """uint8 (H, W): the class of each pixel of the frame, IGNORED where the network saw nothing."""
        width, height = self.size
        return resample(
            self.mask, self.extent, (height, width), (0.0, 0.0, float(width), float(height))
        )

    def to_record(self) -> dict[str, Any]:
        """`segments` of a result: of each class but the background that is in the frame its mask as COCO's RLE."""
        whole = self.frame_mask()
        areas = np.bincount(whole.ravel(), minlength=IGNORED + 1)
        shown = [
            place
            for place, name in enumerate(self.classes)
            if areas[place] and name.lower() not in BACKGROUNDS
        ]
        masks = {
            place: {"size": list(whole.shape), "counts": encode_rle(whole == place)}
            for place in shown
        }
        return {
            "segments": [
                {"class": self.classes[place], "area": int(areas[place]), "mask": mask}
                for place, mask in masks.items()
            ]
        }


@dataclass(frozen=True)
class IdentityLabel:
    """The labels of one frame for embeddings: who or what it shows, and the clip or track it is of."""

    identity: str
    unit: str


@dataclass(frozen=True, eq=False)
class EmbeddingPrediction(FrameAnswer):
    """One frame's vector, f32 (D,) of length 1."""

    vector: np.ndarray

    def to_record(self) -> dict[str, Any]:
        """`embedding` of a result: the vector as base64 of float16, little-endian."""
        return {"embedding": pack_float16(self.vector)}


@dataclass(frozen=True, eq=False)
class TensorPrediction(FrameAnswer):
    """One frame's outputs: values, or the places of the largest ones (int64), and the `shapes` of the outputs."""

    values: tuple[np.ndarray, ...]
    shapes: tuple[tuple[int, ...], ...]

    def to_record(self) -> dict[str, Any]:
        """`outputs` of a result: of each its shape, and `argmax`, or the values as `float16` in base64.

        Of more than MAX_VALUES values there is the SHA-256 of the float32 ones instead.
        """
        return {
            "outputs": [
                self._describe(*pair) for pair in zip(self.values, self.shapes, strict=True)
            ]
        }

    def _describe(self, values: np.ndarray, shape: tuple[int, ...]) -> dict[str, Any]:
        if values.size > MAX_VALUES:
            return {
                "shape": list(shape),
                "sha256": hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest(),
            }
        if values.dtype == np.int64:
            return {"shape": list(shape), "argmax": values.tolist()}
        return {"shape": list(shape), "float16": pack_float16(values)}


def pack_float16(values: np.ndarray) -> str:
    """Base64 of the values as float16, little-endian, in row-major order; those beyond its range are its largest."""
    largest = float(np.finfo(np.float16).max)
    return base64.b64encode(values.clip(-largest, largest).astype("<f2").tobytes()).decode()


def unpack_float16(text: str, shape: Sequence[int]) -> np.ndarray:
    """The values (float32) of such a text; ValueError where they do not fill the shape (-1: any length)."""
    return (
        np.frombuffer(base64.b64decode(text, validate=True), "<f2")
        .astype(np.float32)
        .reshape(shape)
    )


Prediction = (
    ClassPrediction
    | LabelsPrediction
    | DetectionPrediction
    | MaskPrediction
    | EmbeddingPrediction
    | TensorPrediction
)
GroundTruth = (
    str | LabelSet | BoxLabels | MaskLabels | IdentityLabel | EmbeddingPrediction | TensorPrediction
)


def join_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    """Shapes of outputs as text."""
    return " and ".join(map(str, shapes)) or "no tensor"


class TaskQuery(Protocol):
    """A query of a workload or of a bundle."""

    @property
    def task(self) -> str: ...

    @property
    def multi_label(self) -> bool: ...

    @property
    def agreement(self) -> str | None: ...


class Task:
    """One kind of question.

    `metric` is measured against labels, `agreement` against the original's own answers. `has_threshold`: answers have
    scores, of which one is chosen from which they count: on labels, or without them the query's `min_score`, or
    `unlabelled_threshold`. `has_background`: factories count it among the classes. `has_boxes`: answers are objects in
    boxes. `has_label`: each is one class. `has_decoder`: a decoder explains the outputs of imported networks. `answer`
    is the key of one in a result, `layout` how labels lie: a name of `models.labels.layouts.FINDERS`, "" for none.
    `footage` says in words what evidence needs 20 of.
    """

    name: ClassVar[str]
    metric: str
    agreement: str
    has_threshold: bool = False
    unlabelled_threshold: float = 0.0
    has_background: bool = False
    has_boxes: bool = False
    has_label: bool = False
    has_decoder: bool = False
    answer: str = "label"
    layout: str = ""
    footage: str = "frames of each of two answers"

    @classmethod
    def of_query(cls, query: TaskQuery) -> Task:
        """The task of a query that names this one."""
        return cls()

    def predictions(
        self,
        reader: Any,
        outputs: Any,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
        preprocess: Preprocess | None = None,
    ) -> list[Any]:
        """Outputs as predictions, one per frame, places as in the frame.

        `outputs` are arrays f32, whose rows are frames: one, or several in a tuple. `reader` is a detector's
        `models.objects.candidates.BoxReader`; other tasks have none. `sizes` are the (width, height) of each frame
        before resizing; `preprocess` None squeezes the whole frame.
        """
        raise NotImplementedError

    def tallies(
        self,
        predictions: Sequence[Any],
        labels: Sequence[Any],
        classes: Sequence[str],
        threshold: float = 0.0,
    ) -> np.ndarray:
        """Counts of each frame (N, ...), additive over frames; a prediction None means that there was none."""
        raise NotImplementedError

    def metric_of(self, total: np.ndarray) -> float:
        """The task's metric, 0..1, from summed counts."""
        raise NotImplementedError

    def one_error(self, labels: Sequence[Any], classes: Sequence[str]) -> float:
        """The resolution of the metric on these frames: what one wrong prediction can cost."""
        return 1 / max(1, len(labels))

    def choose_threshold(self, predictions: Sequence[Any], labels: Sequence[Any]) -> float:
        """The score from which an answer counts, chosen on val for the original and kept for the merged model."""
        return 0.0

    def labels_of(self, prediction: Any, threshold: float, label: Any = None) -> Any:
        """The prediction of an original as labels; `label` is the frame's own, where it has one."""
        raise NotImplementedError

    def as_prediction(self, label: Any, size: tuple[int, int], classes: Sequence[str]) -> Any:
        """A label of a frame (width, height) as a prediction, to be drawn; None where it has no place in the frame."""
        return None

    def chance(self, classes: Sequence[str]) -> float:
        """The metric of a constant prediction."""
        return 0.0

    def answers(self, label: Any, classes: Sequence[str]) -> tuple[str, ...]:
        """The answers or objects of a label, by name: what evidence counts."""
        raise NotImplementedError

    def find_gap(
        self, labels: Sequence[Any], classes: Sequence[str], shown: ShownAnswers, target: float
    ) -> str:
        """Why these labels, or the original's answers, are no evidence for this target; empty where they are."""
        return find_one_answer(shown)

    def is_competent(self, reached: float, classes: Sequence[str]) -> bool:
        """Whether an original of this quality allows any conclusion."""
        return reached >= self.chance(classes) + CHANCE_MARGIN

    def find_misfit(self, shapes: Sequence[tuple[int, ...]], width: int) -> str:
        """Why outputs of these shapes for a batch of one frame are not this task's, for `width` classes; empty where
        they may be.
        """
        return ""

    def constant_gap(
        self, constant: Any, labels: Sequence[Any], shown: ShownAnswers, target: float
    ) -> str:
        """Why labels with which this constant answer agrees are no evidence; empty where it does not reach `target`."""
        agreement = (
            self.metric_of(self.tallies([constant] * len(labels), labels, ()).sum(axis=0))
            if labels
            else 1.0
        )
        return find_constant_answer(shown, agreement, target)

    def metric_name(self, is_labelled: bool) -> str:
        """The name of the metric against labels, or against the original's answers."""
        return self.metric if is_labelled else self.agreement
