"""The newest frame of each camera with what its queries last said of it, drawn when somebody looks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


STALE_S = 2.0
"""A result older than this by the frame's time is not drawn into it."""
QUALITY = 80
COLOURS = ((255, 176, 0), (0, 158, 255), (122, 224, 122), (255, 110, 180), (190, 150, 255), (64, 224, 208))
"""RGB, readable on day and night pictures; queries of a camera take them in turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A camera's newest frame: its number, when it was captured (Unix seconds), the image (RGB uint8, H, W, 3) and the
    newest results of the camera's queries (`edge_runtime.results.result_record`).
    """

    frame: int
    captured_at: float
    image: np.ndarray
    results: tuple[Mapping[str, Any], ...]

    @property
    def answered_at(self) -> float | None:
        """When the newest of the results was there, Unix seconds; None without any."""
        return max((float(one["finished_at"]) for one in self.results), default=None)

    def to_json(self) -> dict[str, Any]:
        """All but the image; of each query's newest result the words: its label and score, or how many of which class
        it saw.
        """
        results = [{"query": str(one["query"]), "says": _words(one)} for one in self.results]
        return {"frame": self.frame, "captured_at": self.captured_at, "answered_at": self.answered_at,
                "results": results}  # fmt: skip

    def jpeg(self) -> bytes:
        """The image with the results drawn into it."""
        fresh = [one for one in self.results if self.captured_at - float(one["captured_at"]) <= STALE_S]
        return draw_results(self.image, fresh)


class Snapshots:
    """Keeps what pictures are made of, one frame for each camera; safe between threads."""

    def __init__(self, queries: Mapping[str, str]) -> None:
        """`queries` maps each query to its camera."""
        self._cameras = dict(queries)
        self._frames: dict[str, tuple[int, float, np.ndarray]] = {}
        self._results: dict[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()

    def change(self, queries: Mapping[str, str]) -> None:
        """Other queries are served; what is known of those that stay is kept."""
        with self._lock:
            cameras = set(queries.values())
            self._frames = {camera: frame for camera, frame in self._frames.items() if camera in cameras}
            self._results = {
                query: result for query, result in self._results.items() if self._cameras[query] == queries.get(query)
            }
            self._cameras = dict(queries)

    def saw(self, camera: str, frame: int, captured_unix: float, image: np.ndarray) -> None:
        """A frame came."""
        with self._lock:
            self._frames[camera] = (frame, captured_unix, image)

    def answered(self, record: Mapping[str, Any]) -> None:
        """A query said something of a frame."""
        with self._lock:
            self._results[str(record["query"])] = record

    def picture(self, camera: str) -> Snapshot | None:
        """The newest of this camera; None before its first frame. KeyError where there is no such camera."""
        with self._lock:
            if camera not in self._cameras.values():
                raise KeyError(camera)
            if camera not in self._frames:
                return None
            frame, captured_at, image = self._frames[camera]
            results = [self._results[query] for query, at in self._cameras.items()
                       if at == camera and query in self._results]  # fmt: skip
        return Snapshot(frame, captured_at, image, tuple(results))


def _words(result: Mapping[str, Any]) -> str:
    if "label" in result:
        return f"{result['label']} {float(result['score']):.2f}"
    counts = Counter(str(found["class"]) for found in result["detections"])
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"


def draw_results(image: np.ndarray, results: Iterable[Mapping[str, Any]]) -> bytes:
    """A JPEG of a frame (RGB uint8, H, W, 3) with the results of its queries: boxes with class and score, or a line for
    each classification.
    """
    import cv2

    drawn = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
    size = max(0.4, min(drawn.shape[:2]) / 500)
    lines = 0
    for index, result in enumerate(results):
        colour = COLOURS[index % len(COLOURS)][::-1]
        if "label" in result:
            text = f"{result['query']}: {result['label']} {float(result['score']):.2f}"
            lines += 1
            _text(drawn, text, (6, lines * (round(22 * size) + 10)), size, colour)
            continue
        for found in result["detections"]:
            left, top, right, bottom = (round(float(value)) for value in found["box"])
            cv2.rectangle(drawn, (left, top), (right, bottom), colour, max(1, round(2 * size)))
            _text(drawn, f"{found['class']} {float(found['score']):.2f}", (left, max(12, top - 4)), size, colour)
    encoded, data = cv2.imencode(".jpg", drawn, (cv2.IMWRITE_JPEG_QUALITY, QUALITY))
    if not encoded:
        raise ValueError(f"a frame of {drawn.shape} cannot be written as JPEG")
    return data.tobytes()


def _text(image: np.ndarray, text: str, at: tuple[int, int], size: float, colour: Sequence[int]) -> None:
    import cv2

    plain = text.encode("ascii", "replace").decode()  # what OpenCV's letters can show
    (width, height), below = cv2.getTextSize(plain, cv2.FONT_HERSHEY_SIMPLEX, size, 1)
    left, base = at
    cv2.rectangle(image, (left - 2, base - height - 3), (left + width + 2, base + below), (24, 24, 24), cv2.FILLED)
    cv2.putText(image, plain, at, cv2.FONT_HERSHEY_SIMPLEX, size, tuple(colour), 1, cv2.LINE_AA)
