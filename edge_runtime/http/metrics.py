"""Metrics in the text format of Prometheus: histograms that the box feeds, everything else out of its status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gemel.edge_runtime.frames.queues import DEADLINE, MEMORY, OVERLOAD, PAUSED, RELOADED, REPLACED, STILL
from gemel.edge_runtime.http.status import Status
from gemel.edge_runtime.sinks.base import Undelivered

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REASONS = (DEADLINE, MEMORY, OVERLOAD, PAUSED, RELOADED, REPLACED, STILL)
"""Reasons of drops; each has its counter from the start, so that a rate sees the first."""
FRAME_COUNTS = {
    "received": "Frames that reached a query.",
    "processed": "Frames that were answered.",
    "late": "Frames that were answered after their deadline.",
    "failed": "Frames whose run failed.",
}

disable_created_metrics()


class Metrics:
    """Histograms by query, in seconds: the `age` of results, each `run`, each `load`. Thread-safe.

    `http_broken` (by reason) and `http_refused` (by status) count failures of the HTTP service, `tensors` what came by
    ZeroMQ (by query and outcome).
    """

    def __init__(self, queries: Iterable[str]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.age = self._histogram("gemel_result_age_seconds", "From the capture of a frame to its result.")
        self.run = self._histogram("gemel_run_seconds", "A run of a query over the frames of one turn.")
        self.load = self._histogram("gemel_load_seconds", "Loading the missing weights of a query.")
        self.http_broken = Counter(
            "gemel_http_broken", "HTTP connections and requests that broke off.", ["reason"], registry=self._registry
        )
        self.http_refused = Counter(
            "gemel_http_refused", "HTTP requests that were refused.", ["status"], registry=self._registry
        )
        self.tensors = Counter(
            "gemel_zmq_tensors", "Tensors by ZeroMQ, and what became of them.", ["query", "outcome"],
            registry=self._registry,
        )  # fmt: skip
        self._queries: frozenset[str] = frozenset()
        self.change(queries)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, ["query"], registry=self._registry, buckets=BUCKETS_S)

    def change(self, queries: Iterable[str]) -> None:
        """Serve these queries; those that are gone are removed."""
        queries = frozenset(queries)
        for histogram in (self.age, self.run, self.load):
            for query in self._queries - queries:
                histogram.remove(query)
            for query in queries:
                histogram.labels(query)
        self._queries = queries

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
        known = {query.id: query for query in queries}
        for name, text in FRAME_COUNTS.items():
            counts = {(query.id,): getattr(query.ledger, name) for query in queries}
            yield _family(CounterMetricFamily, f"gemel_frames_{name}", text, ["query"], counts)
        dropped = {(query.id, reason): query.ledger.dropped.get(reason, 0)
                   for query in queries for reason in {**dict.fromkeys(REASONS), **query.ledger.dropped}}  # fmt: skip
        yield _family(CounterMetricFamily, "gemel_frames_dropped", "Frames not run.", ["query", "reason"], dropped)
        yield _family(GaugeMetricFamily, "gemel_frames_pending", "Frames that wait or run.", ["query"],
                      {(query.id,): query.ledger.pending for query in queries})  # fmt: skip
        yield GaugeMetricFamily("gemel_budget_bytes", "Device memory for weights and workspace.", status.budget_bytes)
        yield GaugeMetricFamily("gemel_resident_bytes", "Weights that are in memory.", status.resident_bytes)
        yield CounterMetricFamily("gemel_bytes_moved", "Weights copied into memory.", status.bytes_moved)
        yield CounterMetricFamily("gemel_loads", "Loads of a query's missing weights.", status.loads)
        yield _family(GaugeMetricFamily, "gemel_query_resident", "Whether all of a query's weights are in memory.",
                      ["query"], {(query.id,): query.resident for query in queries})  # fmt: skip
        yield _family(GaugeMetricFamily, "gemel_camera_up", "Whether frames come from a camera.", ["camera"],
                      {(camera.id,): camera.up for camera in cameras})  # fmt: skip
        yield _family(CounterMetricFamily, "gemel_camera_reconnects", "Times that a camera came back.", ["camera"],
                      {(camera.id,): camera.reconnects for camera in cameras})  # fmt: skip
        yield _family(GaugeMetricFamily, "gemel_camera_frame_age_seconds", "Since a camera's newest frame.", ["camera"],
                      {(camera.id,): camera.frame_age_s for camera in cameras})  # fmt: skip
        yield _family(CounterMetricFamily, "gemel_sink_delivered", "Results that a sink accepted.", ["sink"],
                      {(sink.id,): sink.delivered for sink in sinks})  # fmt: skip
        yield _family(CounterMetricFamily, "gemel_sink_undelivered", "Results that a sink did not get.",
                      ["sink", "reason"],
                      {(sink.id, reason): sink.undelivered.get(reason, 0)
                       for sink in sinks for reason in {**dict.fromkeys(map(str, Undelivered)), **sink.undelivered}},
                      )  # fmt: skip
        yield _family(GaugeMetricFamily, "gemel_sink_up", "Whether a sink takes results.", ["sink"],
                      {(sink.id,): sink.state == "up" for sink in sinks})  # fmt: skip
        yield _family(GaugeMetricFamily, "gemel_sink_queued", "Results that wait for a sink.", ["sink"],
                      {(sink.id,): sink.queued for sink in sinks})  # fmt: skip
        yield _family(CounterMetricFamily, "gemel_camera_undecodable", "Frames that could not be decoded.", ["camera"],
                      {(camera.id,): camera.undecodable for camera in cameras})  # fmt: skip
        yield _family(GaugeMetricFamily, "gemel_query_asked_fps", "Frames a second that a query asks for.", ["query"],
                      {(query.id,): query.asked_fps for query in queries})  # fmt: skip
        yield _family(GaugeMetricFamily, "gemel_query_dropped_ratio",
                      "Of the frames of the last minute, dropped for lack of time or memory.", ["query"],
                      {(query.id,): query.dropped_share for query in queries})  # fmt: skip
        yield GaugeMetricFamily("gemel_overloaded", "Whether the box loses frames that it was asked to answer.",
                                status.overloaded)  # fmt: skip
        yield CounterMetricFamily("process_cpu_seconds", "Processor time of the process.", time.process_time())
        yield _family(CounterMetricFamily, "gemel_seconds", "Processor time of the threads that do it.", ["part"],
                      {(part,): seconds for part, seconds in status.seconds.items()})  # fmt: skip
        yield _family(GaugeMetricFamily, "gemel_camera_fps", "Frames a second that come from a camera.", ["camera"],
                      {(camera.id,): camera.fps for camera in cameras})  # fmt: skip
        if status.clips is not None:
            yield GaugeMetricFamily("gemel_clips_bytes", "Clips and pictures of events on disk.", status.clips.nbytes)
        if status.spool is not None:
            yield _family(GaugeMetricFamily, "gemel_spool_free_bytes", "What the disk of the spool has left.", [],
                          {(): status.spool.free_bytes})  # fmt: skip
        if status.process_bytes is not None:
            yield GaugeMetricFamily("gemel_process_bytes", "Memory of the process that is no mapped file.",
                                    status.process_bytes)  # fmt: skip
        yield _family(CounterMetricFamily, "gemel_reloads", "Reloads by outcome.", ["outcome"],
                      {(outcome,): count for outcome, count in status.reloads.items()})  # fmt: skip
        yield _family(GaugeMetricFamily, "gemel_drift_ratio", "Agreement with the original at the last check.",
                      ["query"], {(drift.query,): drift.ratio for drift in status.drift})  # fmt: skip
        if status.tls is not None:
            yield GaugeMetricFamily("gemel_tls_expiry_timestamp_seconds", "When the certificate of HTTPS runs out.",
                                    status.tls.expires_at)  # fmt: skip
        if (updates := status.updates) is not None:
            yield GaugeMetricFamily("gemel_update_trouble", "Whether updates do not go as they should.",
                                    updates.trouble is not None)  # fmt: skip
            yield _family(GaugeMetricFamily, "gemel_update_state", "Where an update is.", ["state"],
                          {(updates.state,): 1})  # fmt: skip
            yield _family(GaugeMetricFamily, "gemel_update_checked_timestamp_seconds",
                          "When the server of updates answered last.", [], {(): updates.checked_at})  # fmt: skip
            yield _family(GaugeMetricFamily, "gemel_bundle_valid_until_timestamp_seconds",
                          "Until when the bundle was signed to serve.", [], {(): updates.valid_until})  # fmt: skip
        begun = {(query, name): n for query, own in status.events_begun.items() for name, n in own.items()}
        yield _family(CounterMetricFamily, "gemel_events", "Events that began.", ["query", "event"], begun)
        yield _family(GaugeMetricFamily, "gemel_events_open", "Events that go on.", ["query"],
                      {(query,): known[query].open_events for query in status.events_begun if query in known}
                      )  # fmt: skip
        crossed = {
            (query.id, event, way): count
            for query in status.queries
            for event, ways in query.crossed.items()
            for way, count in ways.items()
        }
        yield _family(CounterMetricFamily, "gemel_crossings", "Objects that crossed a line.",
                      ["query", "event", "direction"], crossed)  # fmt: skip
        yield InfoMetricFamily("gemel_bundle", "What is served.",
                               {"digest": status.bundle, "workload": status.workload})  # fmt: skip


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    labels: list[str],
    values: Mapping[tuple[str, ...], float | None],
) -> Metric:
    """A metric with a value for each combination of labels; None is left out."""
    family = kind(name, text, labels=labels)
    for key, value in values.items():
        if value is not None:
            family.add_metric(key, float(value))
    return family
