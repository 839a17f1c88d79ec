"""What became of frames and how old answers were: the geometry of the report's bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

IN_TIME, LATE, DROPPED, FAILED, PENDING = "in time", "late", "dropped", "failed", "pending"
SHARES = (50, 95, 99)
MIN_AGE_MS = 1.0
DROP_KINDS = 4
"""How many reasons for dropping have a colour of their own; further ones begin again."""


def fate_rows(ledger: Sequence[Mapping[str, Any]], by: Sequence[str] = ("memory", "arm")) -> list[dict[str, Any]]:
    """For each of what `by` names, these frames by fate: parts are (name, per cent, frames), in a fixed order."""
    reasons = sorted({reason for row in ledger for reason in row["dropped"]})
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for row in ledger:
        fates = found.setdefault(tuple(row[key] for key in by), {})
        for name, frames in _fates(row, reasons):
            fates[name] = fates.get(name, 0) + frames
    return [
        {**dict(zip(by, key, strict=True)), "received": sum(fates.values()), "parts": _parts(fates)}
        for key, fates in found.items()
    ]


def fates_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The fates that occur in these rows, in order, and the class that each is drawn by."""
    names = list(dict.fromkeys(name for row in rows for name, _, _ in row["parts"]))
    reasons = [name for name in names if name.startswith(DROPPED)]
    return {
        name: f"drop{reasons.index(name) % DROP_KINDS}" if name in reasons else name.replace(" ", "-") for name in names
    }


def age_rows(
    streaming: Sequence[Mapping[str, Any]], offline: Sequence[Mapping[str, Any]], memory: str
) -> dict[str, Any]:
    """Per query the ages of answers in a memory setting: p50, p95 and p99 of each arm, and its SLA.

    `at` are places in per cent on an axis of powers of ten, which begins at 1 ms: the answers that swapping makes wait
    are a hundred times older than others. `ticks` are (milliseconds, place) of each power.
    """
    slas = {row["query"]: row["sla_ms"] for row in offline}
    rows = [row for row in streaming if row["memory"] == memory and row["age_p50_ms"] is not None]
    oldest = max([row["age_p99_ms"] for row in rows] + list(slas.values()), default=10.0)
    decades = max(1, math.ceil(math.log10(max(oldest, 10.0)) - 1e-9))

    def at(age_ms: float) -> float:
        return round(100 * min(1.0, math.log10(max(age_ms, MIN_AGE_MS)) / decades), 2)

    queries: dict[str, dict[str, Any]] = {
        query: {"query": query, "sla_ms": sla, "sla_at": at(sla), "arms": {}} for query, sla in slas.items()
    }
    for row in rows:
        ages = [row[f"age_p{share}_ms"] for share in SHARES]
        queries[row["query"]]["arms"][row["arm"]] = {"ages": ages, "at": [at(age) for age in ages]}
    ticks = [(float(10**power), round(100 * power / decades, 2)) for power in range(decades + 1)]
    return {"rows": list(queries.values()), "ticks": ticks}


def _fates(row: Mapping[str, Any], reasons: Sequence[str]) -> list[tuple[str, int]]:
    return [
        (IN_TIME, row["processed"] - row["late"]), (LATE, row["late"]),
        *((f"{DROPPED}: {reason}", row["dropped"].get(reason, 0)) for reason in reasons),
        (FAILED, row["failed"]), (PENDING, row["pending"]),
    ]  # fmt: skip


def _parts(fates: Mapping[str, int]) -> list[tuple[str, float, int]]:
    whole = sum(fates.values()) or 1
    return [(name, round(100 * frames / whole, 2), frames) for name, frames in fates.items() if frames]
