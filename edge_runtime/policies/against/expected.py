"""The frames that are expected: every camera that was heard of lately goes on at its rate."""

from __future__ import annotations

from collections.abc import Mapping

from edge_runtime.scheduler.types import QuerySpec

# A query of which nothing was heard for so many periods is expected to stay silent.
SILENT_PERIODS = 3.0


def expected(
    newest: Mapping[str, float], demands: Mapping[str, QuerySpec], now: float, ends: float
) -> list[tuple[float, str]]:
    """The frames (captured_at, query) that will come after `now` and before `ends`, going by each query's newest."""
    frames = []
    for query, captured_at in newest.items():
        period = 1 / demands[query].fps
        if now - captured_at > SILENT_PERIODS * period:
            continue
        count = int((ends - captured_at) / period)
        times = [captured_at + index * period for index in range(1, count + 1)]
        frames += [(at, query) for at in times if now < at < ends]
    return frames
