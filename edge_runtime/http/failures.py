"""What breaks off or is refused at the HTTP service: counted, and logged in at most one line a minute."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum

from gemel.edge_runtime.http.metrics import Metrics

LOG_INTERVAL_S = 60.0
REFUSED_STATUSES = frozenset((401, 403, 408, 413, 429))

log = logging.getLogger("gemel.run")


class Broken(str, Enum):
    """Why a connection or request ended without an answer."""

    __str__ = str.__str__

    DISCONNECTED = "disconnected"
    """The client left before its answer."""
    MALFORMED = "malformed"
    """No HTTP, or no TLS where the box speaks TLS."""
    SLOW = "slow"
    """Its head or its body did not come in time."""
    CROWDED = "crowded"
    """There was no place for a further connection."""


class HttpFailures:
    """Counts failures into the metrics; `clock` is in seconds. Anybody can cause them, so none gets a line of its own.

    All calls in the loop's thread.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._unlogged: Counter[str] = Counter()
        self._logged_at = clock() - LOG_INTERVAL_S
        for reason in Broken:
            metrics.http_broken.labels(str(reason))

    def note_broken(self, reason: Broken) -> None:
        """A connection or request ended without an answer."""
        self._metrics.http_broken.labels(str(reason)).inc()
        self._unlogged[str(reason)] += 1

    def note_status(self, status: int) -> None:
        """A request got this status."""
        if status in REFUSED_STATUSES:
            self._metrics.http_refused.labels(str(status)).inc()
            self._unlogged[f"status {status}"] += 1

    def log_counts(self) -> None:
        """Log what was counted since the last line, where that is LOG_INTERVAL_S ago; call it every second or so."""
        now = self._clock()
        if not self._unlogged or now - self._logged_at < LOG_INTERVAL_S:
            return
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(self._unlogged.items()))
        log.info("HTTP: requests that broke off or were refused: %s", counts)
        self._unlogged.clear()
        self._logged_at = now
