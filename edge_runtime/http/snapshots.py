"""The newest frame of each camera with the results of its queries, drawn on request; and the observer of a box."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_runtime.drawing import draw_results
from edge_runtime.http.metrics import Metrics

if TYPE_CHECKING:
    import numpy as np

    from edge_runtime.executor import TurnTiming
    from edge_runtime.queues import Frame
    from edge_runtime.sinks.base import ResultMessage
    from models.bundle import Bundle

STALE_S = 2.0
"""A result older than this by the frame's time is not drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A camera's newest frame: its number, capture time (Unix seconds), image (RGB uint8, H, W, 3), and the newest
    result records of the camera's queries.
    """

    frame: int
    captured_at: float
    image: np.ndarray
    results: tuple[Mapping[str, Any], ...]

    @property
    def answered_at(self) -> float | None:
        """When the newest of the results was ready, Unix seconds; None without any."""
        return max((float(result["finished_at"]) for result in self.results), default=None)

    def to_json(self) -> dict[str, Any]:
        """All but the image, with each query's newest result as text."""
        results = [{"query": str(result["query"]), "text": _format_result(result)} for result in self.results]
        return {"frame": self.frame, "captured_at": self.captured_at, "answered_at": self.answered_at,
                "results": results}  # fmt: skip

    def jpeg(self) -> bytes:
        """The image with the recent results drawn in."""
        recent = [one for one in self.results if self.captured_at - float(one["captured_at"]) <= STALE_S]
        return draw_results(self.image, recent)


class Snapshots:
    """Keeps the newest frame and results of each camera; thread-safe. `queries` maps each query to its camera."""

    def __init__(self, queries: Mapping[str, str]) -> None:
        self._cameras = dict(queries)
        self._frames: dict[str, tuple[int, float, np.ndarray]] = {}
        self._results: dict[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()

    def change(self, queries: Mapping[str, str]) -> None:
        """Serve these queries; what is known of those that stay is kept."""
        with self._lock:
            cameras = set(queries.values())
            self._frames = {camera: frame for camera, frame in self._frames.items() if camera in cameras}
            self._results = {
                query: result for query, result in self._results.items() if self._cameras[query] == queries.get(query)
            }
            self._cameras = dict(queries)

    def add_frame(self, camera: str, frame: int, captured_unix: float, image: np.ndarray) -> None:
        """The newest frame of a camera."""
        with self._lock:
            self._frames[camera] = (frame, captured_unix, image)

    def add_result(self, record: Mapping[str, Any]) -> None:
        """The newest result of a query."""
        with self._lock:
            self._results[str(record["query"])] = record

    def newest(self, camera: str) -> Snapshot | None:
        """The snapshot of this camera; None before its first frame. KeyError where there is no such camera."""
        with self._lock:
            if camera not in self._cameras.values():
                raise KeyError(camera)
            if camera not in self._frames:
                return None
            frame, captured_at, image = self._frames[camera]
            results = [self._results[query] for query, at in self._cameras.items()
                       if at == camera and query in self._results]  # fmt: skip
        return Snapshot(frame, captured_at, image, tuple(results))


class Observer:
    """Records frames, results and turns of a running box for HTTP; each call costs microseconds."""

    def __init__(self, bundle: Bundle) -> None:
        self._cameras = {query.id: query.camera for query in bundle.queries}
        self.snapshots, self.metrics = Snapshots(self._cameras), Metrics(self._cameras)

    def change(self, bundle: Bundle) -> None:
        """Serve the queries of this bundle; what is known of those that stay is kept."""
        self._cameras = {query.id: query.camera for query in bundle.queries}
        self.snapshots.change(self._cameras)
        self.metrics.change(self._cameras)

    def add_frame(self, query: str, frame: Frame) -> None:
        """A frame for a query."""
        if frame.image is not None:
            self.snapshots.add_frame(self._cameras[query], frame.index, frame.captured_unix, frame.image)

    def add_result(self, message: ResultMessage) -> None:
        """A result."""
        self.snapshots.add_result(message.record)
        self.metrics.observe_age(message.record["query"], message.record["age_ms"] / 1000)

    def add_turn(self, query: str, timing: TurnTiming) -> None:
        """A turn of a query."""
        if timing.load_s is not None and timing.moved_bytes:
            self.metrics.observe_load(query, timing.load_s)
        if timing.run_s is not None:
            self.metrics.observe_run(query, timing.run_s)


def _format_result(result: Mapping[str, Any]) -> str:
    if "label" in result:
        return f"{result['label']} {float(result['score']):.2f}"
    counts = Counter(str(found["class"]) for found in result["detections"])
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"
