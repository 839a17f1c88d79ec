"""The last hour of a box, a sample every few seconds, for the dashboard's curves."""

from __future__ import annotations

from collections import deque
from typing import Any

from edge_runtime.watching.status import Status

EVERY_S = 5.0
KEPT_S = 3600.0


class History:
    """Samples of what a status says, the newest hour of them."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, int, int, float | None, int]] = deque(maxlen=round(KEPT_S / EVERY_S))

    def note(self, unix_s: float, status: Status) -> None:
        """Take a sample at this time."""
        ages = [query.age_p95_ms for query in status.queries if query.age_p95_ms is not None]
        dropped = sum(sum(query.ledger.dropped.values()) for query in status.queries)
        self._rows.append((
            round(unix_s, 1), status.resident_bytes, status.workspace_bytes, max(ages, default=None), dropped,
        ))  # fmt: skip

    def to_json(self) -> dict[str, list[Any]]:
        """Columns: `at` (Unix seconds), `resident_bytes`, `workspace_bytes`, `age_p95_ms` (the worst query's) and
        `dropped` (frames since the start).
        """
        columns = zip(*self._rows, strict=True) if self._rows else ((),) * 5
        names = ("at", "resident_bytes", "workspace_bytes", "age_p95_ms", "dropped")
        return {name: list(column) for name, column in zip(names, columns, strict=True)}
