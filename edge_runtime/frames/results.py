"""Results: one record per answered frame, and the publisher that counts and sends them."""

from __future__ import annotations

import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemel.edge_runtime.capture.reader import RecentRate
from gemel.edge_runtime.frames.queues import FAILED, Frame, Ledger
from gemel.edge_runtime.simulation.simulator import age_p95_ms
from gemel.edge_runtime.sinks.base import ResultMessage
from gemel.models.bundle import BundleQuery
from gemel.models.errors import message_of
from gemel.models.predictions import Prediction

BUNDLE_DIGITS = 12
AGES_KEPT = 1000
"""Ages kept of each query's newest results."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The SHA-256 of the bundle and the id of the run; frames are counted anew in each run, so (run, query, frame)
    never repeats.
    """

    bundle: str
    run: str = field(default_factory=lambda: secrets.token_hex(8))


def result_record(
    query: BundleQuery, frame: Frame, prediction: Prediction, finished_at: float, identity: RunIdentity
) -> dict[str, Any]:
    """The result record of docs/running-a-box.md; `finished_at` is in seconds of the clock of `frame.captured_at`.

    captured_at and finished_at of the record are Unix seconds, their difference that of the monotonic clock.
    """
    age_s = finished_at - frame.captured_at
    record: dict[str, Any] = {
        "run": identity.run, "query": query.id, "camera": query.camera, "frame": frame.index,
        "captured_at": round(frame.captured_unix, 6), "finished_at": round(frame.captured_unix + age_s, 6),
        "age_ms": round(age_s * 1000, 3), "late": age_s > query.sla_ms / 1000,
        "bundle": identity.bundle[:BUNDLE_DIGITS],
    }  # fmt: skip
    return {**record, **prediction.to_record()}


def _split_weak(record: dict[str, Any], query: BundleQuery) -> Sequence[Mapping[str, Any]]:
    """Take the detections below the query's least score out of a record."""
    detections, least = record.get("detections", ()), query.least_score
    weak = [detection for detection in detections if detection["score"] < least]
    if weak:
        record["detections"] = [detection for detection in detections if detection["score"] >= least]
    return weak


class Publisher:
    """Turns predictions into results, counts frames in the ledger, and remembers ages of results and failures.

    `offer` may return the record as sinks get it. `damaged` are queries that cannot run, with the reason; queries that
    fail their warm-up join them.
    """

    def __init__(
        self,
        offer: Callable[[ResultMessage], Mapping[str, Any] | None],
        ledger: Ledger,
        queries: Mapping[str, BundleQuery],
        identity: RunIdentity,
        damaged: Mapping[str, str] | None = None,
    ) -> None:
        self.ledger = ledger
        self.failures: dict[str, str] = dict(damaged or {})
        self.disabled = set(self.failures)
        """The queries that cannot run."""
        self._offer, self._queries, self._identity = offer, queries, identity
        self._ages = {query: deque[float](maxlen=AGES_KEPT) for query in queries}
        self._rates = {query: RecentRate() for query in queries}

    def inherit(self, before: Publisher) -> None:
        """Keep the ages and rates of the queries that another publisher has too."""
        self._ages.update({query: ages for query, ages in before._ages.items() if query in self._ages})
        self._rates.update({query: rate for query, rate in before._rates.items() if query in self._rates})

    def publish(
        self, query: str, frames: Sequence[Frame], predictions: Sequence[Prediction], finished_at: float
    ) -> None:
        """Send one record per frame; the frames count as processed, whatever becomes of the records."""
        records = [
            result_record(self._queries[query], frame, prediction, finished_at, self._identity)
            for frame, prediction in zip(frames, predictions, strict=True)
        ]
        for frame, record in zip(frames, records, strict=True):
            self.ledger.count_processed(query, late=record["late"])
            self._ages[query].append(finished_at - frame.captured_at)
            self._rates[query].add(finished_at)
            message = ResultMessage(record, frame.image, frame.captured_at, _split_weak(record, self._queries[query]))
            record = self._offer(message) or record
            if frame.reply is not None:
                frame.reply.answer(query, record)

    def drop(self, query: str, frames: Iterable[Frame], reason: str) -> None:
        """Count taken frames that are not run after all."""
        for frame in frames:
            self.ledger.count_dropped(query, reason)
            if frame.reply is not None:
                frame.reply.decline(query, reason)

    def fail(self, query: str, frames: Iterable[Frame], error: Exception | None = None) -> None:
        """Count frames without a prediction, and log the `error` unless it is known."""
        for frame in frames:
            self.ledger.count_failed(query)
            if frame.reply is not None:
                frame.reply.decline(query, FAILED)
        if error is not None:
            self._log_failure(query, error)

    def disable(self, query: str, error: Exception) -> None:
        """Do not run this query any more; the others run without it."""
        self._log_failure(query, error)
        self.disabled.add(query)

    def age_p95_ms(self, query: str) -> float | None:
        """The 95th percentile of the ages of a query's newest results; None without any."""
        return age_p95_ms(self._ages[query])

    def per_second(self, query: str, now: float) -> float:
        """The recent results of a query a second."""
        return self._rates[query].per_second(now)

    def _log_failure(self, query: str, error: Exception) -> None:
        """Log a failure once, also where only numbers in its text change."""
        text = message_of(error)
        if _NUMBERS.sub("#", self.failures.get(query, "")) != _NUMBERS.sub("#", text):
            log.error("query %s failed on a frame: %s", query, text)
        self.failures[query] = text
