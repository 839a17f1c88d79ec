"""Compares detections of imported files with each family's own preparation and postprocessing, on real frames.

The family's way is written here from its authors' code, in NumPy and ONNX Runtime. Its detections are compared twice:
of the input as this project prepares it, so that network and decoder alone count, and of its own.

Usage: python -m benchmarks.models.decoders [--data FOLDER] [--frames N] [--record FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import av
import cv2
import numpy as np
import torch
from torchvision.ops import batched_nms, box_iou

from gemel.models.decoders.files import load_file

ROOT = Path(__file__).resolve().parents[2]
CLIPS = ("tfl_jc1/jc1.mp4", "intel_pbc/*.mp4", "intel_car/*.mp4", "ozlu_street/*", "pinto_street3/*")
MIN_SCORE, MIN_IOU = 0.3, 0.5
STRIDES = (8, 16, 32)
MMDET_MEAN, MMDET_STD = (103.53, 116.28, 123.675), (57.375, 57.12, 58.395)


class Found(NamedTuple):
    """Detections of one frame: corners in its pixels (K, 4), scores (K,), labels (K,)."""

    boxes: torch.Tensor
    scores: torch.Tensor
    labels: torch.Tensor


@dataclass
class Row:
    """One file: detections of the family, and how far ours are at most, with the same input and with its own."""

    file: str
    frames: int = 0
    detections: int = 0
    unmatched: int = 0
    box_px: float = 0.0
    score: float = 0.0
    own_detections: int = 0
    own_unmatched: int = 0
    own_box_px: float | None = None
    own_score: float | None = None


@dataclass(frozen=True)
class Family:
    """How a family prepares a frame of its own, and what it makes of the outputs in pixels of the input."""

    prepare: Callable[[np.ndarray, tuple[int, int]], np.ndarray]
    decode: Callable[[list[np.ndarray], tuple[int, int]], tuple[np.ndarray, np.ndarray]]
    overlap: float
    letterbox: bool = False


def resize(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bilinear, by OpenCV."""
    return cv2.resize(frame, size[::-1]).astype(np.float32)


def prepare_yolox(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """preproc of yolox/data/data_augment.py."""
    ratio = min(size[0] / frame.shape[0], size[1] / frame.shape[1])
    small = resize(frame, (int(frame.shape[0] * ratio), int(frame.shape[1] * ratio)))
    canvas = np.full((*size, 3), 114, np.float32)
    canvas[: small.shape[0], : small.shape[1]] = small
    return canvas[..., ::-1].transpose(2, 0, 1)[None]


def prepare_nanodet(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """ShapeTransform without keep_ratio, and color_aug_and_norm."""
    values = (resize(frame, size)[..., ::-1] - MMDET_MEAN) / MMDET_STD
    return values.transpose(2, 0, 1)[None].astype(np.float32)


def prepare_fastestdet(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """test.py of FastestDet."""
    return (resize(frame, size)[..., ::-1] / 255).transpose(2, 0, 1)[None].astype(np.float32)


def grids(size: tuple[int, int], strides: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Column and row of each cell (A, 2), and its stride (A, 1)."""
    places, steps = [], []
    for stride in strides:
        rows, columns = math.ceil(size[0] / stride), math.ceil(size[1] / stride)
        y, x = np.mgrid[:rows, :columns]
        places.append(np.stack([x, y], axis=-1).reshape(-1, 2))
        steps.append(np.full((rows * columns, 1), stride))
    return np.concatenate(places), np.concatenate(steps)


def to_corners(centre: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Corners of boxes given by centre and sides."""
    return np.concatenate([centre - sides / 2, centre + sides / 2], axis=-1)


def decode_yolox(outputs: list[np.ndarray], size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """demo_postprocess of yolox/utils/demo_utils.py."""
    rows, (places, steps) = outputs[0][0], grids(size, STRIDES)
    boxes = to_corners((rows[:, :2] + places) * steps, np.exp(rows[:, 2:4]) * steps)
    return boxes, rows[:, 4:5] * rows[:, 5:]


def decode_nanodet(outputs: list[np.ndarray], size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """get_bboxes of gfl_head.py; scores have 80 columns, distances 32."""
    places, steps = grids(size, STRIDES)
    by_rows = sorted((one.reshape(-1, one.shape[-1]) for one in outputs), key=lambda one: -len(one))
    scores = np.concatenate([one for one in by_rows if one.shape[1] == 80])
    bins = np.exp(np.concatenate([one for one in by_rows if one.shape[1] == 32]).reshape(-1, 4, 8))
    distance = bins / bins.sum(axis=2, keepdims=True) @ np.arange(8) * steps
    centre = (places + 0.5) * steps
    return np.concatenate([centre - distance[:, :2], centre + distance[:, 2:]], axis=1), scores


def decode_fastestdet(outputs: list[np.ndarray], size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """handle_preds of utils/tool.py."""
    rows, (places, steps) = outputs[0][0].reshape(outputs[0].shape[1], -1).T, grids(size, (16,))
    sides = 1 / (1 + np.exp(-rows[:, 3:5])) * [size[1], size[0]]
    return to_corners((np.tanh(rows[:, 1:3]) + places) * steps, sides), rows[:, :1] ** 0.6 * rows[:, 5:] ** 0.4


FAMILIES = {
    "yolox_nano_416": Family(prepare_yolox, decode_yolox, 0.45, letterbox=True),
    "nanodet_m_320": Family(prepare_nanodet, decode_nanodet, 0.6),
    "FastestDet": Family(prepare_fastestdet, decode_fastestdet, 0.45),
}


class Rival:
    """A family's own way through a published file."""

    def __init__(self, path: Path, family: Family) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.family, given = family, self.session.get_inputs()[0]
        self.name, self.size = given.name, (int(given.shape[2]), int(given.shape[3]))

    def detect(self, frame: np.ndarray, given: np.ndarray | None = None, least_score: float = MIN_SCORE) -> Found:
        """Detections from `least_score` on, of the frame as the family prepares it, or of an input that is given."""
        family, (height, width) = self.family, frame.shape[:2]
        values = family.prepare(frame, self.size) if given is None else given
        outputs = [np.asarray(one) for one in self.session.run(None, {self.name: np.ascontiguousarray(values)})]
        boxes, scores = family.decode(outputs, self.size)
        ratio = min(self.size[0] / height, self.size[1] / width)
        scale = np.array([ratio, ratio] if family.letterbox else [self.size[1] / width, self.size[0] / height])
        boxes = np.clip(boxes / np.tile(scale, 2), 0, [width, height] * 2)
        rows, labels = np.nonzero(scores >= least_score)
        found = Found(*(torch.from_numpy(one) for one in (boxes[rows], scores[rows, labels], labels)))
        kept = batched_nms(found.boxes.float(), found.scores.float(), found.labels, family.overlap)
        return Found(*(part[kept] for part in found))


def read_frames(folder: Path, count: int) -> Iterator[np.ndarray]:
    """Frames of several clips, spread over each; uint8 RGB (H, W, 3)."""
    clips = [path for pattern in CLIPS for path in sorted((folder / "videos").glob(pattern))[:1]]
    for clip in clips:
        with av.open(str(clip)) as file:
            frames = [one.to_ndarray(format="rgb24") for one, _ in zip(file.decode(video=0), range(300))]
        each = math.ceil(count / len(clips))
        yield from frames[:: max(1, len(frames) // each)][:each]


def compare(mine: Found, theirs: Found) -> tuple[list[float], list[float], int]:
    """Of each of the family's detections: the greatest difference of a corner, of its score; and how many have none."""
    boxes, scores, missing = [], [], 0
    overlaps = box_iou(theirs.boxes.float(), mine.boxes.float()) * (theirs.labels[:, None] == mine.labels)
    for place, row in enumerate(overlaps):
        if not len(row) or row.max() < MIN_IOU:
            missing += 1
            continue
        other = int(row.argmax())
        boxes.append(float((theirs.boxes[place] - mine.boxes[other]).abs().max()))
        scores.append(float((theirs.scores[place] - mine.scores[other]).abs()))
    return boxes, scores, missing


def check_file(path: Path, family: Family, frames: list[np.ndarray]) -> Row:
    """Compare one published file on all frames."""
    model: Any = load_file(path, (), None, "auto", None, MIN_SCORE / 2)
    rival, row = Rival(path, family), Row(path.name, len(frames))
    own: tuple[list[float], list[float]] = ([], [])
    for frame in frames:
        found = model.predict(frame)
        labels = torch.tensor([model.classes.index(name) for name in found.classes], dtype=torch.int64)
        mine = Found(torch.tensor(found.boxes).reshape(-1, 4), torch.tensor(found.scores), labels)
        same = rival.detect(frame, model.preprocess(frame).numpy())
        boxes, scores, missing = compare(mine, same)
        row.detections, row.unmatched = row.detections + len(same.scores), row.unmatched + missing
        row.box_px, row.score = max([row.box_px, *boxes]), max([row.score, *scores])
        theirs = rival.detect(frame)
        boxes, scores, missing = compare(mine, theirs)
        row.own_detections, row.own_unmatched = row.own_detections + len(theirs.scores), row.own_unmatched + missing
        own[0].extend(boxes)
        own[1].extend(scores)
    if own[0]:
        row.own_box_px, row.own_score = max(own[0]), max(own[1])
    return row


def main() -> None:
    """Compare every file and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    frames = list(read_frames(arguments.data, arguments.frames))
    rows = []
    for name, family in FAMILIES.items():
        rows.append(check_file(arguments.data / "models" / f"{name}.onnx", family, frames))
        print(json.dumps(asdict(rows[-1])), flush=True)
    if arguments.record:
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        arguments.record.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
