"""The last hour of a box: the newest samples in order, in memory that does not grow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edge_runtime.http.app import HISTORY_ROWS, History


def status(resident_bytes: int, *ages: float | None) -> Any:
    """What a sample is taken of: a query for each age, each with a frame dropped for two reasons."""
    ledger = SimpleNamespace(dropped={"deadline": 1, "memory": 1})
    queries = [SimpleNamespace(age_p95_ms=age, ledger=ledger) for age in ages]
    return SimpleNamespace(resident_bytes=resident_bytes, workspace_bytes=7, queries=queries)


def test_history_sample_has_worst_age() -> None:
    history = History()
    history.add(1.04, status(5, None, 20.5, 10.0))
    history.add(6.0, status(6, None))
    told = history.to_json()
    assert told == {
        "at": [1.0, 6.0],
        "resident_bytes": [5, 6],
        "workspace_bytes": [7, 7],
        "age_p95_ms": [20.5, None],
        "dropped": [6, 2],
    }
    assert all(isinstance(value, int) for name in ("resident_bytes", "dropped") for value in told[name])


def test_history_keeps_one_hour() -> None:
    history = History()
    for index in range(HISTORY_ROWS + 3):
        history.add(float(index), status(index))
    told = history.to_json()
    assert (
        told["at"] == [float(index) for index in range(3, HISTORY_ROWS + 3)]
        and told["resident_bytes"][-1] == HISTORY_ROWS + 2
    )
