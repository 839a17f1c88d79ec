"""What becomes of frames that were taken: results on the sinks, or failures, each counted in the ledger."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from edge_runtime.frames.ledger import Ledger
from edge_runtime.frames.mailbox import Frame
from edge_runtime.frames.results import record_of
from edge_runtime.frames.sinks.base import Sink
from edge_runtime.rehearsal.simulator import age_p95_ms
from models.bundle import BundleQuery
from models.errors import GemelError, one_line
from models.tasks import Answer

AGES_KEPT = 10_000

log = logging.getLogger("gemel.run")


class Publisher:
    """Writes results to all sinks; remembers their ages, and why queries fail, which it says once.

    `digest` is the bundle's and goes into every result. `damaged` are queries that cannot run, with the reason; those
    that are out later join them.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        ledger: Ledger,
        queries: Mapping[str, BundleQuery],
        digest: str,
        damaged: Mapping[str, str] | None = None,
    ) -> None:
        self.ledger = ledger
        self.failures: dict[str, str] = dict(damaged or {})
        self._out = set(self.failures)
        self._sinks, self._queries, self._digest = sinks, queries, digest
        self._refused: dict[int, Exception] = {}
        self._left: set[int] = set()
        self._ages = {query: deque[float](maxlen=AGES_KEPT) for query in queries}

    @property
    def unheard(self) -> bool:
        """Whether there is no sink left that anybody reads."""
        return bool(self._left) and len(self._left) == len(self._sinks)

    @property
    def unwritten(self) -> list[str]:
        """Why sinks did not take the last results, one line each."""
        return [_said(error) for error in self._refused.values()]

    @property
    def out(self) -> Set[str]:
        """The queries that cannot run."""
        return self._out

    def publish(self, query: str, frames: Sequence[Frame], answers: Sequence[Answer], finished_at: float) -> None:
        """One record per frame to every sink, then the frames count as processed; what a sink raises comes through,
        once all were tried. One that nobody reads any more (BrokenPipeError) is left out from then on.
        """
        records = [
            record_of(self._queries[query], frame, answer, finished_at, self._digest)
            for frame, answer in zip(frames, answers, strict=True)
        ]
        self._deliver(records)
        for frame, record in zip(frames, records, strict=True):
            self.ledger.processed(query, late=record["late"])
            self._ages[query].append(finished_at - frame.captured_at)

    def _deliver(self, records: Sequence[dict[str, Any]]) -> None:
        """Try every sink, whatever the others do; then raise what the first of them did."""
        first = None
        for index, sink in enumerate(self._sinks):
            if index in self._left:
                continue
            try:
                for record in records:
                    sink.write(record)
                self._refused.pop(index, None)
            except BrokenPipeError:
                log.warning("nobody reads sinks[%d] any more: it is left out", index)
                self._left.add(index)
            except Exception as error:
                self._refused[index] = error
                first = first or error
        if first is not None:
            raise first

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
        """Remember why a query failed; say it once."""
        text = _said(error)
        if self.failures.get(query) != text:
            log.error("query %s failed on a frame: %s", query, text)
        self.failures[query] = text

    def age_p95_ms(self, query: str) -> float | None:
        """The 95th percentile of the ages of a query's results; None without any."""
        return age_p95_ms(self._ages[query])


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, GemelError) else one_line(f"{type(error).__name__}: {error}")
