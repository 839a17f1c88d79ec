"""Snapshots: the frame of a result as a JPEG, with its boxes and labels drawn in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_runtime.sinks.base import ResultMessage

if TYPE_CHECKING:
    import numpy as np


JPEG_QUALITY = 85
COLOUR, PAPER = (80, 220, 60), (0, 0, 0)  # blue, green, red


def draw_snapshot(parcel: ResultMessage) -> bytes | None:
    """The JPEG of a parcel; None of one that carries no picture."""
    import cv2

    if parcel.image is None:
        return None
    picture = cv2.cvtColor(parcel.image, cv2.COLOR_RGB2BGR)
    record = parcel.record
    if "label" in record:
        _write(picture, _said(record["label"], record["score"]), 2, 2)
    for found in record.get("detections", ()):
        x0, y0, x1, y1 = (round(edge) for edge in found["box"])
        cv2.rectangle(picture, (x0, y0), (x1, y1), COLOUR, _thickness(picture))
        _write(picture, _said(found["class"], found["score"]), x0, y0)
    return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()


def _said(name: str, score: float) -> str:
    return f"{name} {score:.2f}"


def _thickness(picture: np.ndarray) -> int:
    return max(1, picture.shape[0] // 400)


def _write(picture: Any, text: str, x: int, y: int) -> None:
    """A text whose upper left corner is at (x, y), or as near as the picture allows."""
    import cv2

    scale, thick = max(0.4, picture.shape[0] / 1200), _thickness(picture)
    (width, height), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, thick)
    x, y = max(0, min(x, picture.shape[1] - width)), max(0, min(y, picture.shape[0] - height - below))
    cv2.rectangle(picture, (x, y), (x + width, y + height + below), PAPER, -1)
    cv2.putText(picture, text, (x, y + height), cv2.FONT_HERSHEY_SIMPLEX, scale, COLOUR, thick, cv2.LINE_AA)
