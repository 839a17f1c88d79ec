"""Example frames for the report: what the original and the merged model answered, drawn beside the truth."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from models.frames.data import Split
from models.tasks import Boxes, ClassAnswer, DetectionAnswer, task_of
from models.workload import Query

PANEL_WIDTH, TILE, STRIP, GAP = 640, 200, 24, 8
TILES, TILES_A_ROW = 6, 3
DETECTION_FRAMES = 2
JPEG_QUALITY = 80
# RGB, as in the page: originals orange, merged blue, truth white.
ORIGINAL, MERGED, TRUTH = (240, 163, 74), (122, 165, 255), (255, 255, 255)
GOOD, BAD, PAPER, INK = (94, 203, 140), (255, 120, 110), (27, 29, 33), (236, 236, 234)


def examples(
    query: Query,
    split: Split,
    truths: Sequence[Any],
    original: Sequence[Any],
    merged: Sequence[Any],
    threshold: float,
) -> list[dict[str, Any]]:
    """Pictures of the test frames that merging cost most: {query, caption, lost, pictures: jpegs as base64} each.

    Worst first, `lost` says how much of a frame's own score went (below 0: it gained). Detection: one picture with the
    original's boxes and one with the merged model's, the truth in thin white. Classification: one sheet of frames with
    what each model said.
    """
    lost = _lost(query, truths, original, merged, threshold)
    worst = sorted(range(len(split)), key=lambda index: (-lost[index], index))
    if query.task == "classification":
        chosen = worst[:TILES]
        sheet = _sheet([_tile(split.frames[i], truths[i], original[i], merged[i]) for i in chosen])
        caption = _sheet_caption(chosen, truths, original, merged)
        return [{"query": query.id, "caption": caption, "lost": max(lost), "pictures": [_jpeg(sheet)]}]
    found = []
    for index in worst[:DETECTION_FRAMES]:
        sides = [("original", ORIGINAL, _kept(original[index], threshold))]
        sides += [("merged", MERGED, _kept(merged[index], threshold))]
        counts = ", ".join(f"{len(answer.boxes)} {name}" for name, _, answer in sides)
        where = f"{split.units[index]} at {split.times_s[index]:.1f} s"
        pictures = [
            _jpeg(_drawn(split.frames[index], truths[index], answer, name, colour, several=len(query.classes) > 1))
            for name, colour, answer in sides
        ]
        caption = f"{where}: {len(truths[index].boxes)} in truth (white), {counts}"
        found.append({"query": query.id, "caption": caption, "lost": lost[index], "pictures": pictures})
    return found


def _lost(
    query: Query, truths: Sequence[Any], original: Sequence[Any], merged: Sequence[Any], threshold: float
) -> list[float]:
    """The original's score on each frame alone less the merged model's: the F1, or 1 for the right class."""
    task = task_of(query.task)
    before, after = (task.tallies(side, truths, query.classes, threshold) for side in (original, merged))
    return [task.metric_of(one) - task.metric_of(other) for one, other in zip(before, after, strict=True)]


def _kept(answer: DetectionAnswer, threshold: float) -> DetectionAnswer:
    kept = [index for index, score in enumerate(answer.scores) if score >= threshold]
    classes = tuple(answer.classes[index] for index in kept)
    scores = tuple(answer.scores[index] for index in kept)
    return DetectionAnswer(classes, scores, tuple(answer.boxes[index] for index in kept))


def _drawn(
    frame: np.ndarray, truth: Boxes, answer: DetectionAnswer, name: str, colour: tuple[int, int, int], several: bool
) -> np.ndarray:
    """uint8 RGB: a frame with the boxes of one model, and the truth."""
    scale = PANEL_WIDTH / frame.shape[1]
    panel = cv2.resize(frame, (PANEL_WIDTH, round(frame.shape[0] * scale)), interpolation=cv2.INTER_CUBIC)
    for label, box in zip(answer.classes, answer.boxes, strict=True):
        _box(panel, box, scale, colour, 2)
        if several:
            _text(panel, label, (round(box[0] * scale), max(12, round(box[1] * scale) - 4)), colour, 0.45)
    for box in truth.boxes:
        _box(panel, box, scale, TRUTH, 1)
    _text(panel, name, (10, panel.shape[0] - 12), colour, 0.7)
    return panel


def _tile(frame: np.ndarray, truth: str, before: ClassAnswer, after: ClassAnswer) -> np.ndarray:
    """uint8 RGB: a frame as wide as a tile, and two lines of answers below, green where right."""
    height = min(2 * TILE, max(1, round(frame.shape[0] * TILE / frame.shape[1])))
    tile = np.full((height + 2 * STRIP, TILE, 3), PAPER, np.uint8)
    tile[:height] = cv2.resize(frame, (TILE, height), interpolation=cv2.INTER_CUBIC)
    for line, (name, answer) in enumerate((("original", before), ("merged", after))):
        y = height + line * STRIP + 17
        _text(tile, name, (4, y), ORIGINAL if line == 0 else MERGED, 0.45, outline=False)
        _text(tile, answer.label, (78, y), GOOD if answer.label == truth else BAD, 0.5, outline=False)
    return tile


def _sheet(tiles: Sequence[np.ndarray]) -> np.ndarray:
    """uint8 RGB: tiles in rows."""
    columns = min(TILES_A_ROW, len(tiles))
    rows = -(-len(tiles) // columns)
    height, width = max(tile.shape[0] for tile in tiles), TILE
    sheet = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), PAPER, np.uint8)
    for index, tile in enumerate(tiles):
        y, x = (index // columns) * (height + GAP), (index % columns) * (width + GAP)
        sheet[y : y + tile.shape[0], x : x + width] = tile
    return sheet


def _sheet_caption(chosen: Sequence[int], truths: Sequence[str], original: Sequence[Any], merged: Sequence[Any]) -> str:
    right = [sum(side[i].label == truths[i] for i in chosen) for side in (original, merged)]
    return f"of {len(chosen)} frames, {right[0]} right by the original and {right[1]} merged (green = right)"


def _box(panel: np.ndarray, box: Sequence[float], scale: float, colour: tuple[int, int, int], width: int) -> None:
    x0, y0, x1, y1 = (round(value * scale) for value in box)
    if width > 1:
        cv2.rectangle(panel, (x0, y0), (x1, y1), PAPER, width + 1)
    cv2.rectangle(panel, (x0, y0), (x1, y1), colour, width)


def _text(
    panel: np.ndarray, text: str, at: tuple[int, int], colour: tuple[int, int, int], size: float, outline: bool = True
) -> None:
    if outline:
        cv2.putText(panel, text, at, cv2.FONT_HERSHEY_SIMPLEX, size, PAPER, 5, cv2.LINE_AA)
    cv2.putText(panel, text, at, cv2.FONT_HERSHEY_SIMPLEX, size, colour, 2 if outline else 1, cv2.LINE_AA)


def _jpeg(picture: np.ndarray) -> str:
    """Base64 of the picture (uint8 RGB) as JPEG."""
    _, data = cv2.imencode(".jpg", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return base64.b64encode(data.tobytes()).decode("ascii")
