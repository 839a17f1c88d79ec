"""The last hour of a box, a sample every few seconds, for the dashboard's curves."""

from __future__ import annotations

import math
from array import array
from typing import Any

from edge_runtime.watching.status import Status

INTERVAL_S = 5.0
KEPT_S = 3600.0


COLUMNS = ("at", "resident_bytes", "workspace_bytes", "age_p95_ms", "dropped")
"""`at` in Unix seconds; `age_p95_ms` is the worst query's; `dropped` are frames since the start."""
ROWS = round(KEPT_S / INTERVAL_S)


class History:
    """Samples of what a status says, the newest hour of them, in memory that is taken once."""

    def __init__(self) -> None:
        self._columns = {name: array("d", bytes(8 * ROWS)) for name in COLUMNS}
        self._noted = 0

    def note(self, unix_s: float, status: Status) -> None:
        """Take a sample at this time."""
        ages = [query.age_p95_ms for query in status.queries if query.age_p95_ms is not None]
        dropped = sum(sum(query.ledger.dropped.values()) for query in status.queries)
        row = (
            round(unix_s, 1), status.resident_bytes, status.workspace_bytes, max(ages, default=math.nan), dropped,
        )  # fmt: skip
        for name, value in zip(COLUMNS, row, strict=True):
            self._columns[name][self._noted % ROWS] = value
        self._noted += 1

    def to_json(self) -> dict[str, list[Any]]:
        """The columns, oldest sample first; null where a sample has no age, whole numbers but for `at` and the ages."""
        first = max(0, self._noted - ROWS)
        places = [index % ROWS for index in range(first, self._noted)]
        told = {name: [column[place] for place in places] for name, column in self._columns.items()}
        ages = [None if math.isnan(age) else age for age in told["age_p95_ms"]]
        whole = {name: [int(value) for value in told[name]] for name in COLUMNS if name not in ("at", "age_p95_ms")}
        return {**told, **whole, "age_p95_ms": ages}
