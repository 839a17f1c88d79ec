"""Example frames for the report: what the original and the merged model answered, drawn beside the truth."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from models.data import Split
from models.tasks import Boxes, ClassAnswer, DetectionAnswer
from models.workload import Query

PANEL_WIDTH, TILE, STRIP, GAP = 480, 160, 22, 8
TILES, TILES_A_ROW = 8, 4
DETECTION_FRAMES = 2
JPEG_QUALITY = 82
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
    seed: int = 0,
) -> list[dict[str, str]]:
    """Pictures of a few test frames drawn from the seed: {query, caption, jpeg as base64} each.

    Detection: frames with something in them, the original's boxes on the left and the merged model's on the
    right, the truth in thin white. Classification: one sheet of frames with what each model said.
    """
    rng = random.Random(f"{seed}/{query.id}/frames")
    if query.task == "classification":
        chosen = sorted(rng.sample(range(len(split)), min(TILES, len(split))))
        sheet = _sheet([_tile(split.frames[i], truths[i], original[i], merged[i]) for i in chosen])
        return [{"query": query.id, "caption": _sheet_caption(chosen, truths, original, merged), "jpeg": _jpeg(sheet)}]
    filled = [index for index in range(len(split)) if truths[index].boxes] or list(range(len(split)))
    found = []
    for index in sorted(rng.sample(filled, min(DETECTION_FRAMES, len(filled)))):
        before, after = (_kept(side[index], threshold) for side in (original, merged))
        caption = (
            f"{split.units[index]} at {split.times_s[index]:.1f} s: {len(truths[index].boxes)} in truth, "
            f"{len(before.boxes)} by the original (left), {len(after.boxes)} merged (right)"
        )
        picture = _pair(split.frames[index], truths[index], before, after, several=len(query.classes) > 1)
        found.append({"query": query.id, "caption": caption, "jpeg": _jpeg(picture)})
    return found


def _kept(answer: DetectionAnswer, threshold: float) -> DetectionAnswer:
    kept = [index for index, score in enumerate(answer.scores) if score >= threshold]
    classes = tuple(answer.classes[index] for index in kept)
    scores = tuple(answer.scores[index] for index in kept)
    return DetectionAnswer(classes, scores, tuple(answer.boxes[index] for index in kept))


def _pair(
    frame: np.ndarray, truth: Boxes, before: DetectionAnswer, after: DetectionAnswer, several: bool
) -> np.ndarray:
    """uint8 RGB: two panels of one frame, side by side."""
    scale = PANEL_WIDTH / frame.shape[1]
    shown = cv2.resize(frame, (PANEL_WIDTH, round(frame.shape[0] * scale)), interpolation=cv2.INTER_CUBIC)
    panels = []
    for answer, colour, name in ((before, ORIGINAL, "original"), (after, MERGED, "merged")):
        panel = shown.copy()
        for box in truth.boxes:
            _box(panel, box, scale, TRUTH, 1)
        for label, score, box in zip(answer.classes, answer.scores, answer.boxes, strict=True):
            _box(panel, box, scale, colour, 2)
            text = f"{label} {score:.2f}" if several else f"{score:.2f}"
            _text(panel, text, (round(box[0] * scale), max(11, round(box[1] * scale) - 3)), colour, 0.4)
        _text(panel, name, (8, panel.shape[0] - 10), colour, 0.55)
        panels += [panel, np.full((panel.shape[0], GAP, 3), PAPER, np.uint8)]
    return np.hstack(panels[:-1])


def _tile(frame: np.ndarray, truth: str, before: ClassAnswer, after: ClassAnswer) -> np.ndarray:
    """uint8 RGB: a frame fitted into a square, and two lines of answers below, green where right."""
    tile = np.full((TILE + 2 * STRIP, TILE, 3), PAPER, np.uint8)
    scale = TILE / max(frame.shape[:2])
    width, height = (max(1, round(side * scale)) for side in (frame.shape[1], frame.shape[0]))
    fitted = cv2.resize(frame, (width, height), interpolation=cv2.INTER_CUBIC)
    top, left = (TILE - height) // 2, (TILE - width) // 2
    tile[top : top + height, left : left + width] = fitted
    for line, (name, answer) in enumerate((("orig", before), ("merged", after))):
        y = TILE + line * STRIP + 16
        _text(tile, name, (2, y), ORIGINAL if line == 0 else MERGED, 0.4, outline=False)
        text = f"{answer.label} {answer.score:.2f}"
        _text(tile, text, (52, y), GOOD if answer.label == truth else BAD, 0.38, outline=False)
    return tile


def _sheet(tiles: Sequence[np.ndarray]) -> np.ndarray:
    """uint8 RGB: tiles in rows."""
    columns = min(TILES_A_ROW, len(tiles))
    rows = -(-len(tiles) // columns)
    height, width = tiles[0].shape[:2]
    sheet = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), PAPER, np.uint8)
    for index, tile in enumerate(tiles):
        y, x = (index // columns) * (height + GAP), (index % columns) * (width + GAP)
        sheet[y : y + height, x : x + width] = tile
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
        cv2.putText(panel, text, at, cv2.FONT_HERSHEY_SIMPLEX, size, PAPER, 3, cv2.LINE_AA)
    cv2.putText(panel, text, at, cv2.FONT_HERSHEY_SIMPLEX, size, colour, 1, cv2.LINE_AA)


def _jpeg(picture: np.ndarray) -> str:
    """Base64 of the picture (uint8 RGB) as JPEG."""
    _, data = cv2.imencode(".jpg", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return base64.b64encode(data.tobytes()).decode("ascii")
