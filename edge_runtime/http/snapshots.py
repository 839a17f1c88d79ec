"""The observer of a box: the newest frame of each camera with the results of its queries, drawn on request."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemel.edge_runtime.events.zones import Polygon
from gemel.edge_runtime.frames.drawing import draw_results
from gemel.edge_runtime.http.metrics import Metrics

if TYPE_CHECKING:
    from gemel.edge_runtime.frames.queues import Frame
    from gemel.edge_runtime.life.executor import TurnTiming

STALE_S = 2.0
"""A result older than this by the frame's time is not drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A camera's newest frame, the newest result records of its queries, and its zones and lines, in fractions."""

    frame: Frame
    results: tuple[Mapping[str, Any], ...]
    zones: tuple[tuple[str, Polygon], ...] = ()

    @property
    def key(self) -> tuple[int, float | None]:
        """The frame's number and the time of the newest result, which change with the picture."""
        return self.frame.index, max((float(result["finished_at"]) for result in self.results), default=None)

    def to_json(self) -> dict[str, Any]:
        """All but the image, with each query's newest result as text; times in Unix seconds."""
        index, answered_at = self.key
        results = [{"query": str(result["query"]), "text": _format_result(result)} for result in self.results]
        return {
            "frame": index, "captured_at": self.frame.captured_unix, "answered_at": answered_at, "results": results,
        }  # fmt: skip

    def jpeg(self, is_plain: bool = False) -> bytes:
        """The image with the recent results drawn in, or as the camera gave it."""
        assert self.frame.image is not None
        if is_plain:
            return draw_results(self.frame.image, ())
        oldest = self.frame.captured_unix - STALE_S
        recent = [one for one in self.results if float(one.get("valid_at", one["captured_at"])) >= oldest]
        return draw_results(self.frame.image, recent, self.zones)


class Observer:
    """Records the newest frame and results of each camera, and the timing of results and turns, for HTTP.

    `cameras` maps each query to its camera. Thread-safe; each call costs microseconds.
    """

    def __init__(self, cameras: Mapping[str, str]) -> None:
        self._cameras = dict(cameras)
        self._frames: dict[str, Frame] = {}
        self._results: dict[str, Mapping[str, Any]] = {}
        self.zones: Mapping[str, tuple[tuple[str, Polygon], ...]] = {}
        """By camera, what is drawn beside the results."""
        self._lock = threading.Lock()
        self.metrics = Metrics(cameras)

    def change(self, cameras: Mapping[str, str]) -> None:
        """Serve these queries; what is known of those that stay is kept."""
        with self._lock:
            self._frames = {name: frame for name, frame in self._frames.items() if name in cameras.values()}
            self._results = {
                query: result for query, result in self._results.items() if self._cameras[query] == cameras.get(query)
            }
            self._cameras = dict(cameras)
        self.metrics.change(cameras)

    def add_frame(self, query: str, frame: Frame) -> None:
        """A frame for a query."""
        if frame.image is not None:
            with self._lock:
                self._frames[self._cameras[query]] = frame

    def add_result(self, record: Mapping[str, Any]) -> None:
        """A result record."""
        with self._lock:
            self._results[record["query"]] = {**record, "valid_at": record["captured_at"]}
        self.metrics.age.labels(record["query"]).observe(record["age_ms"] / 1000)

    def hold_result(self, query: str, frame: Frame) -> None:
        """The newest result of a query holds for this frame, too, in which nothing moves."""
        with self._lock:
            if query in self._results:
                self._results[query] = {**self._results[query], "valid_at": frame.captured_unix}

    def add_turn(self, query: str, timing: TurnTiming) -> None:
        """A turn of a query."""
        if timing.load_s is not None and timing.moved_bytes:
            self.metrics.load.labels(query).observe(timing.load_s)
        if timing.run_s is not None:
            self.metrics.run.labels(query).observe(timing.run_s)

    def snapshot(self, camera: str) -> Snapshot | None:
        """The newest frame of a camera with its results; None before its first. KeyError where there is no such
        camera."""
        with self._lock:
            queries = [query for query, name in self._cameras.items() if name == camera]
            if not queries:
                raise KeyError(camera)
            frame = self._frames.get(camera)
            results = tuple(self._results[query] for query in queries if query in self._results)
        return None if frame is None else Snapshot(frame, results, self.zones.get(camera, ()))


def _format_result(result: Mapping[str, Any]) -> str:
    if "label" in result:
        return f"{result['label']} {float(result['score']):.2f}"
    if "labels" in result:
        return ", ".join(f"{one['class']} {float(one['score']):.2f}" for one in result["labels"]) or "nothing"
    if "segments" in result:
        shares = ((str(one["class"]), one["area"] / math.prod(one["mask"]["size"])) for one in result["segments"])
        return ", ".join(f"{name} {share:.0%}" for name, share in shares) or "nothing"
    if "embedding" in result:
        return f"a vector of {len(result['embedding']) * 3 // 8} numbers"
    if "outputs" in result:
        return ", ".join(" x ".join(map(str, one["shape"])) for one in result["outputs"])
    counts = Counter(str(found["class"]) for found in result["detections"])
    return ", ".join(f"{count} × {name}" for name, count in sorted(counts.items())) or "nothing"
