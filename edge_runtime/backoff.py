"""Exponential back-off: the pause after a failure, by the number of failures in a row."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DOUBLINGS = 60


@dataclass(frozen=True, slots=True)
class BackOff:
    """`first_s` seconds after the first failure, twice as long after each further one, at most `max_s`.

    A random share of up to `spread` is left out, so that many that failed together are not retried together.
    """

    first_s: float
    max_s: float
    spread: float = 0.5

    def wait_s(self, failures: int, chance: float) -> float:
        """Seconds to wait after so many failures in a row; `chance` is a random number in [0, 1)."""
        full = min(self.max_s, self.first_s * 2.0 ** min(max(0, failures - 1), MAX_DOUBLINGS))
        return full * (1 - self.spread * chance)
