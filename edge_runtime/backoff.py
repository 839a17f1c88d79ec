"""Back-off: how long to wait after one failure, and after many in a row."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DOUBLINGS = 60


@dataclass(frozen=True, slots=True)
class BackOff:
    """`first_s` seconds after the first failure, twice as long after each further one, `most_s` at most.

    Up to `spread` of that is left out by chance, so that many who wait for one thing do not all come back at once.
    """

    first_s: float
    most_s: float
    spread: float = 0.5

    def wait_s(self, failures: int, chance: float) -> float:
        """Seconds to wait after so many failures in a row; `chance` is a random number in [0, 1)."""
        full = min(self.most_s, self.first_s * 2.0 ** min(max(0, failures - 1), MAX_DOUBLINGS))
        return full * (1 - self.spread * chance)
