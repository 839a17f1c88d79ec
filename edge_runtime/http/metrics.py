"""Metrics in the text format of Prometheus: histograms that the box feeds, everything else out of its status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from edge_runtime.http.status import Status

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

disable_created_metrics()


class Metrics:
    """How long results, runs and loads took, by query. Safe between threads; each call costs microseconds."""

    def __init__(self, queries: Iterable[str]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)

        def histogram(name: str, told: str) -> Histogram:
            made = Histogram(name, told, ["query"], registry=self._registry, buckets=SECONDS)
            for query in known:
                made.labels(query)
            return made

        self._known = known = frozenset(queries)
        self._age = histogram("gemel_result_age_seconds", "From the capture of a frame to its result.")
        self._run = histogram("gemel_run_seconds", "A run of a query over the frames of one turn.")
        self._load = histogram("gemel_load_seconds", "Bringing what a query lacks into memory.")

    def change(self, queries: Iterable[str]) -> None:
        """Other queries are served; those that have gone are forgotten."""
        known = frozenset(queries)
        for histogram in (self._age, self._run, self._load):
            for query in self._known - known:
                histogram.remove(query)
            for query in known:
                histogram.labels(query)
        self._known = known

    def finished(self, query: str, age_s: float) -> None:
        """A result of this age."""
        self._age.labels(query).observe(age_s)

    def ran(self, query: str, run_s: float) -> None:
        """A run over the frames of one turn."""
        self._run.labels(query).observe(run_s)

    def loaded(self, query: str, load_s: float) -> None:
        """A load before a run."""
        self._load.labels(query).observe(load_s)

    def text(self, status: Callable[[], Status]) -> bytes:
        """All metrics; the counts are of one moment and add up."""
        everything = CollectorRegistry(auto_describe=False)
        everything.register(self._registry)
        everything.register(_StatusMetrics(status()))
        return generate_latest(everything)


class _StatusMetrics(Collector):
    """The metrics that a status says."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield from _frames(status)
        yield _gauge("gemel_budget_bytes", "Device memory for weights and workspace.", status.budget_bytes)
        yield _gauge("gemel_resident_bytes", "Weights that are in memory.", status.resident_bytes)
        yield _counter("gemel_bytes_moved", "Weights copied into memory.", status.bytes_moved)
        yield _counter("gemel_loads", "Times that a query's missing weights were loaded.", status.loads)
        yield _by("gemel_query_resident", "Whether all of a query's weights are in memory.", "query",
                  {query.id: float(query.resident) for query in status.queries})  # fmt: skip
        yield _by("gemel_camera_up", "Whether frames come from a camera.", "camera",
                  {camera.id: float(camera.up) for camera in status.cameras})  # fmt: skip
        yield _counted("gemel_camera_reconnects", "Times that a camera came back.", "camera",
                       {camera.id: camera.reconnects for camera in status.cameras})  # fmt: skip
        ages = {camera.id: age for camera in status.cameras if (age := camera.frame_age_s) is not None}
        yield _by("gemel_camera_frame_age_seconds", "Since a camera's newest frame.", "camera", ages)
        yield from _sinks(status)
        yield _counted("gemel_reloads", "Reloads by outcome.", "outcome",
                       {str(outcome): count for outcome, count in status.reloads.items()})  # fmt: skip
        ratios = {one.query: ratio for one in status.drift if (ratio := one.ratio) is not None}
        yield _by("gemel_drift_ratio", "A query's answers against its original's, at the last check.", "query", ratios)
        yield InfoMetricFamily("gemel_bundle", "What is served.",
                               {"digest": status.bundle, "workload": status.workload})  # fmt: skip


def _frames(status: Status) -> Iterator[Metric]:
    counts = {
        "received": "that reached a query",
        "processed": "that were answered",
        "late": "that were answered after their deadline",
        "failed": "whose run failed",
    }
    for name, told in counts.items():
        values = {query.id: getattr(query.ledger, name) for query in status.queries}
        yield _counted(f"gemel_frames_{name}", f"Frames {told}.", "query", values)
    dropped = CounterMetricFamily("gemel_frames_dropped", "Frames not run.", labels=["query", "reason"])
    for query in status.queries:
        for reason, count in query.ledger.dropped.items():
            dropped.add_metric([query.id, reason], count)
    yield dropped
    pending = {query.id: float(query.ledger.pending) for query in status.queries}
    yield _by("gemel_frames_pending", "Frames that wait or run.", "query", pending)


def _sinks(status: Status) -> Iterator[Metric]:
    delivered = {sink.id: sink.delivered for sink in status.sinks}
    yield _counted("gemel_sink_delivered", "Results that a sink accepted.", "sink", delivered)
    family = CounterMetricFamily(
        "gemel_sink_undelivered", "Results that a sink did not get.", labels=["sink", "reason"]
    )
    for sink in status.sinks:
        for reason, count in sink.undelivered.items():
            family.add_metric([sink.id, reason], count)
    yield family


def _gauge(name: str, told: str, value: float) -> Metric:
    return GaugeMetricFamily(name, told, value=value)


def _counter(name: str, told: str, value: float) -> Metric:
    return CounterMetricFamily(name, told, value=value)


def _by(name: str, told: str, label: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, told, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counted(name: str, told: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, told, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
