"""How often something happens, lately."""

from __future__ import annotations

from collections import deque

KEPT_S = 10.0


class Rate:
    """Counts over the last seconds; call it from one thread at a time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def per_second(self, now: float, total: int) -> float:
        """What came a second of late, told the `total` so far each time that it is asked."""
        self._seen.append((now, total))
        while len(self._seen) > 2 and self._seen[1][0] <= now - KEPT_S:
            self._seen.popleft()
        (since, before), (_, after) = self._seen[0], self._seen[-1]
        return (after - before) / (now - since) if now > since else 0.0
