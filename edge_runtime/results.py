"""Results: one record per answered frame.

What becomes of frames that were taken: results, or failures, each counted in the ledger.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.queues import Frame, Ledger
from edge_runtime.simulation.simulator import age_p95_ms
from edge_runtime.sinks.base import ResultMessage
from models.bundle import BundleQuery
from models.errors import message_of
from models.predictions import ClassPrediction, Prediction

BUNDLE_DIGITS = 12


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What every result of a run has in common: the SHA-256 of its bundle, and the run itself.

    Frames are counted anew in each run; (run, query, frame) is never the same twice.
    """

    bundle: str
    run: str = field(default_factory=lambda: secrets.token_hex(8))


def result_record(
    query: BundleQuery, frame: Frame, answer: Prediction, finished_at: float, identity: RunIdentity
) -> dict[str, Any]:
    """The result record as docs/box.md defines it; `finished_at` is in seconds of the clock of `frame.captured_at`.

    captured_at and finished_at of the record are Unix seconds, their difference that of the monotonic clock.
    """
    age_s = finished_at - frame.captured_at
    record: dict[str, Any] = {
        "run": identity.run, "query": query.id, "camera": query.camera, "frame": frame.index,
        "captured_at": round(frame.captured_unix, 6), "finished_at": round(frame.captured_unix + age_s, 6),
        "age_ms": round(age_s * 1000, 3), "late": age_s > query.sla_ms / 1000,
        "bundle": identity.bundle[:BUNDLE_DIGITS],
    }  # fmt: skip
    if isinstance(answer, ClassPrediction):
        return {**record, "label": answer.label, "score": answer.score}
    found = zip(answer.classes, answer.scores, answer.boxes, strict=True)
    detections = [{"class": name, "score": score, "box": list(box)} for name, score, box in found]
    return {**record, "detections": detections}


AGES_KEPT = 1000
"""Of each query's newest results: a box that works for months reaches it within minutes, and holds no more."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")

log = logging.getLogger("gemel.run")


class Publisher:
    """Hands results to the post (`edge_runtime.delivery`); remembers their ages, and why queries fail, which it says
    once.

    `identity` is that of this run and of the bundle, which go into every result. `damaged` are queries that cannot run,
    with the reason; those that are out later join them.
    """

    def __init__(
        self,
        offer: Callable[[ResultMessage], None],
        ledger: Ledger,
        queries: Mapping[str, BundleQuery],
        identity: RunIdentity,
        damaged: Mapping[str, str] | None = None,
    ) -> None:
        self.ledger = ledger
        self.failures: dict[str, str] = dict(damaged or {})
        self._out = set(self.failures)
        self._offer, self._queries, self._identity = offer, queries, identity
        self._ages = {query: deque[float](maxlen=AGES_KEPT) for query in queries}

    def follow(self, before: Publisher) -> None:
        """Go on where another publisher ends, for the queries that both have."""
        self._ages.update({query: ages for query, ages in before._ages.items() if query in self._ages})

    @property
    def out(self) -> Set[str]:
        """The queries that cannot run."""
        return self._out

    def publish(self, query: str, frames: Sequence[Frame], answers: Sequence[Prediction], finished_at: float) -> None:
        """One record per frame; the frames count as processed, whatever becomes of the records."""
        records = [
            result_record(self._queries[query], frame, answer, finished_at, self._identity)
            for frame, answer in zip(frames, answers, strict=True)
        ]
        for frame, record in zip(frames, records, strict=True):
            self.ledger.processed(query, late=record["late"])
            self._ages[query].append(finished_at - frame.captured_at)
            self._offer(ResultMessage(record, frame.image))

    def dropped(self, query: str, frames: Sequence[Frame], reason: str) -> None:
        """These frames were taken and are not run after all."""
        for _ in frames:
            self.ledger.dropped(query, reason)

    def failed(self, query: str, frames: Sequence[Frame], error: Exception | None = None) -> None:
        """These frames have no answer; the `error` is told unless it is known."""
        for _ in frames:
            self.ledger.failed(query)
        if error is not None:
            self.tell(query, error)

    def give_up(self, query: str, error: Exception) -> None:
        """This query is out: the others run without it."""
        self.tell(query, error)
        self._out.add(query)

    def readmit(self, queries: Iterable[str]) -> None:
        """These queries may run again; why they could not is forgotten."""
        for query in queries:
            self._out.discard(query)
            self.failures.pop(query, None)

    def tell(self, query: str, error: Exception) -> None:
        """Remember why a query failed; say it once, also where only numbers in it change."""
        text = message_of(error)
        if _gist(self.failures.get(query, "")) != _gist(text):
            log.error("query %s failed on a frame: %s", query, text)
        self.failures[query] = text

    def age_p95_ms(self, query: str) -> float | None:
        """The 95th percentile of the ages of a query's newest results; None without any."""
        return age_p95_ms(self._ages[query])


def _gist(text: str) -> str:
    return _NUMBERS.sub("#", text)
