"""Metrics in the text format of Prometheus: histograms that the box feeds, everything else out of its status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from edge_runtime.http.status import Status

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FRAME_COUNTS = {
    "received": "Frames that reached a query.",
    "processed": "Frames that were answered.",
    "late": "Frames that were answered after their deadline.",
    "failed": "Frames whose run failed.",
}

disable_created_metrics()


class Metrics:
    """Histograms of result ages, runs and loads by query. Thread-safe; each call costs microseconds."""

    def __init__(self, queries: Iterable[str]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._age = self._histogram("gemel_result_age_seconds", "From the capture of a frame to its result.")
        self._run = self._histogram("gemel_run_seconds", "A run of a query over the frames of one turn.")
        self._load = self._histogram("gemel_load_seconds", "Loading the missing weights of a query.")
        self._queries: frozenset[str] = frozenset()
        self.change(queries)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, ["query"], registry=self._registry, buckets=BUCKETS_S)

    def change(self, queries: Iterable[str]) -> None:
        """Serve these queries; those that are gone are removed."""
        queries = frozenset(queries)
        for histogram in (self._age, self._run, self._load):
            for query in self._queries - queries:
                histogram.remove(query)
            for query in queries:
                histogram.labels(query)
        self._queries = queries

    def observe_age(self, query: str, age_s: float) -> None:
        """The age of a result."""
        self._age.labels(query).observe(age_s)

    def observe_run(self, query: str, run_s: float) -> None:
        """A run over the frames of one turn."""
        self._run.labels(query).observe(run_s)

    def observe_load(self, query: str, load_s: float) -> None:
        """A load before a run."""
        self._load.labels(query).observe(load_s)

    def to_text(self, status: Callable[[], Status]) -> bytes:
        """All metrics; the counts are consistent with each other."""
        everything = CollectorRegistry(auto_describe=False)
        everything.register(self._registry)
        everything.register(_StatusMetrics(status()))
        return generate_latest(everything)


class _StatusMetrics(Collector):
    """The metrics of a status."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        queries, cameras, sinks = status.queries, status.cameras, status.sinks
        for name, text in FRAME_COUNTS.items():
            yield _counters(f"gemel_frames_{name}", text, "query", {q.id: getattr(q.ledger, name) for q in queries})
        yield _reason_counters(
            "gemel_frames_dropped", "Frames not run.", "query", {q.id: q.ledger.dropped for q in queries}
        )
        yield _gauges(
            "gemel_frames_pending", "Frames that wait or run.", "query", {q.id: q.ledger.pending for q in queries}
        )
        yield GaugeMetricFamily("gemel_budget_bytes", "Device memory for weights and workspace.", status.budget_bytes)
        yield GaugeMetricFamily("gemel_resident_bytes", "Weights that are in memory.", status.resident_bytes)
        yield CounterMetricFamily("gemel_bytes_moved", "Weights copied into memory.", status.bytes_moved)
        yield CounterMetricFamily("gemel_loads", "Loads of a query's missing weights.", status.loads)
        yield _gauges("gemel_query_resident", "Whether all of a query's weights are in memory.", "query",
                      {query.id: query.resident for query in queries})  # fmt: skip
        yield _gauges("gemel_camera_up", "Whether frames come from a camera.", "camera", {c.id: c.up for c in cameras})
        yield _counters("gemel_camera_reconnects", "Times that a camera came back.", "camera",
                        {camera.id: camera.reconnects for camera in cameras})  # fmt: skip
        yield _gauges("gemel_camera_frame_age_seconds", "Since a camera's newest frame.", "camera",
                      {camera.id: age for camera in cameras if (age := camera.frame_age_s) is not None})  # fmt: skip
        yield _counters(
            "gemel_sink_delivered", "Results that a sink accepted.", "sink", {s.id: s.delivered for s in sinks}
        )
        yield _reason_counters("gemel_sink_undelivered", "Results that a sink did not get.", "sink",
                               {sink.id: sink.undelivered for sink in sinks})  # fmt: skip
        yield _counters(
            "gemel_reloads", "Reloads by outcome.", "outcome", {str(k): n for k, n in status.reloads.items()}
        )
        yield _gauges("gemel_drift_ratio", "A query's agreement with its original at the last check.", "query",
                      {drift.query: ratio for drift in status.drift if (ratio := drift.ratio) is not None})  # fmt: skip
        yield InfoMetricFamily("gemel_bundle", "What is served.",
                               {"digest": status.bundle, "workload": status.workload})  # fmt: skip


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _reason_counters(name: str, text: str, label: str, values: Mapping[str, Mapping[str, int]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label, "reason"])
    for key, counts in values.items():
        for reason, count in counts.items():
            family.add_metric([key, reason], count)
    return family
