"""How often the watch of an update takes a good one back, and how soon it finds one that is late, by simulation.

Usage: python -m benchmarks.serving.watching [--updates 200]

Four queries of five frames a second; an hour before the update, ten minutes after it. Frames are late one by one or in
bursts of five seconds that begin at any moment, each query for itself. The code is the box's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.drift.years import draw_agreement
from benchmarks.real.tables import print_simulation
from gemel.edge_runtime.updates.update_health import HealthWatch, QueryHealth, measure_limits

QUERIES, FPS, TICK_S, BEFORE_S, WATCH_S, FALL = 4, 5, 5, 3600, 600, 0.2


def draw_ticks(random: np.random.Generator, seconds: int, share: float, burst: int) -> list[dict[str, QueryHealth]]:
    """The health of all queries, tick by tick, with this share of frames in time."""
    frames, columns = FPS * TICK_S, []
    for _ in range(QUERIES):
        in_time = draw_agreement(random, seconds * FPS, share, burst)
        columns.append(in_time.reshape(-1, frames).sum(-1).tolist())
    return [
        {f"q{place}": QueryHealth(frames, count) for place, count in enumerate(counts)}
        for counts in zip(*columns, strict=True)
    ]


def find_lapse_s(random: np.random.Generator, before: float, after: float, burst: int) -> float:
    """Seconds until the update is taken back; infinite where it is not."""
    watch = HealthWatch(measure_limits(draw_ticks(random, BEFORE_S, before, burst)))
    for place, tick in enumerate(draw_ticks(random, WATCH_S, after, burst)):
        if watch.add(tick) is not None:
            return (place + 1) * TICK_S
    return float("inf")


def rows(updates: int, seed: int = 0) -> list[tuple[str, ...]]:
    """A row for each kind of lateness and share in time."""
    cells, random = [], np.random.default_rng(seed)
    for burst in (1, 5 * FPS):
        for share in (0.99, 0.95, 0.9, 0.8):
            good = np.asarray([find_lapse_s(random, share, share, burst) for _ in range(updates)])
            bad = np.asarray([find_lapse_s(random, share, share - FALL, burst) for _ in range(updates // 2)])
            found = np.isfinite(bad)
            seconds = np.median(bad[found]) if found.any() else float("inf")
            cells.append((
                "one by one" if burst == 1 else "bursts of 5 s", f"{share:.0%}", f"{np.isfinite(good).mean():.1%}",
                f"{found.mean():.0%}", f"{seconds:.0f}",
            ))  # fmt: skip
    return cells


HEADS = ("late frames", "in time before", "good updates taken back", "falls of 20 points found", "after s, median")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return print_simulation(__doc__ or "", "updates", 200, "", HEADS, rows, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
