"""The breaker of a query: one that fails again and again pauses, so that the others have its time.

Pure: no clock, no thread. Closed: it runs. Open: it pauses, the longer the more often it had to. Half-open: the pause
is over, and its next run decides.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from edge_runtime.backoff import BackOff

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
MAX_FAILURES = 3
"""Failures in a row after which a query pauses."""
PAUSES = BackOff(1.0, 60.0, spread=0.25)


class Breaker:
    """One query's. `chance` gives random numbers in [0, 1)."""

    def __init__(self, pauses: BackOff = PAUSES, chance: Callable[[], float] = random.random) -> None:
        self._pauses, self._chance = pauses, chance
        self._failures = self._trips = 0
        self._until = -math.inf

    def state(self, now: float) -> str:
        """Closed, open or half-open at this moment."""
        if not self._trips:
            return CLOSED
        return OPEN if now < self._until else HALF_OPEN

    def until(self, now: float) -> float | None:
        """When the pause is over; None where there is none."""
        return self._until if self.state(now) == OPEN else None

    def failed(self, now: float) -> float | None:
        """A run failed: the seconds for which the query now pauses, if it does."""
        self._failures += 1
        if not self._trips and self._failures < MAX_FAILURES:
            return None
        self._trips += 1
        pause_s = self._pauses.wait_s(self._trips, self._chance())
        self._until = now + pause_s
        return pause_s

    def ran(self) -> bool:
        """A run went well; whether that ends a time of pauses."""
        recovered = self._trips > 0
        self._failures = self._trips = 0
        return recovered
