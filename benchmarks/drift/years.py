"""False alarms of drift checks in years of a box, and the delay to a real fall, by simulation.

Usage: python -m benchmarks.drift.years [--years 20]

A box samples a frame of each of its queries a minute. In a year without a fall every query agrees with its original as
its target asks, and no more; losses come one by one, or in bursts of some minutes that begin at any moment. The length
of blocks is measured once, on the 6,000 frames before. A fall is by five points below the target, after a month without
one. The detector is that of `models/measures/sequential.py`, for many queries at once (a test compares both).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.real.tables import print_simulation
from gemel.models.measures.sequential import DETECTOR, choose_block, run_length_of_year

MINUTES_A_YEAR = 365 * 24 * 60
MONTH, RATE, FALL = 30 * 24 * 60, 1 / 60, 0.05
BURSTS = (1, 3, 10, 30, 60)
"""Minutes that a loss lasts."""


def draw_agreement(random: np.random.Generator, frames: int, quality: float, burst: int) -> np.ndarray:
    """Agreement of frames, 0 or 1, of this mean; a loss lasts so many frames and begins at any of them."""
    chance = (1 - quality) / (quality * burst + 1 - quality)
    count = int(3 * frames * (1 - quality) / burst) + 100
    starts = np.cumsum(random.geometric(chance, count) - 1 + burst) - burst
    is_lost = np.zeros(frames + burst, np.int8)
    for later in range(burst):
        is_lost[starts[starts < frames] + later] = 1
    return 1 - is_lost[:frames]


def find_alarms(means: np.ndarray, block: int, target: float, run_length: float) -> np.ndarray:
    """Whether each mean (queries, blocks) is an alarm; detectors begin anew after one."""
    stakes = np.asarray(DETECTOR.stakes)
    wealth, alarms = np.zeros((len(means), len(stakes))), np.zeros(means.shape, bool)
    for place in range(means.shape[1]):
        wealth = (1 + stakes / (1 - target) * (target - means[:, place, None])) * (wealth + block)
        alarms[:, place] = wealth.mean(-1) >= run_length
        wealth[alarms[:, place]] = 0.0
    return alarms


def simulate(
    random: np.random.Generator, target: float, queries: int, runs: int, burst: int, before: float, after: float
) -> tuple[np.ndarray, np.ndarray]:
    """For each of `runs` queries the alarms of a year, and frames to the first one after its month `before`."""
    parts: dict[int, list[np.ndarray]] = {}
    for _ in range(runs):
        block = choose_block(draw_agreement(random, DETECTOR.measured, before, burst).tolist())
        month = MONTH // block * block
        frames = [draw_agreement(random, month, before, burst), draw_agreement(random, MINUTES_A_YEAR, after, burst)]
        whole = np.concatenate(frames)
        parts.setdefault(block, []).append(whole[: len(whole) // block * block].reshape(-1, block).mean(-1))
    counts, delays = [], []
    for block, means in parts.items():
        alarms = find_alarms(np.stack(means), block, target, run_length_of_year(RATE, queries))
        year = alarms[:, MONTH // block :]
        counts += year.sum(-1).tolist()
        first = np.where(year.any(-1), year.argmax(-1) + 1, year.shape[1])
        delays += (first * block).tolist()
    return np.asarray(counts), np.asarray(delays)


def rows(years: int, seed: int = 0) -> list[tuple[str, ...]]:
    """A row for each number of queries and length of bursts."""
    cells, random, target = [], np.random.default_rng(seed), 0.95
    for queries in (1, 10):
        for burst in BURSTS:
            alarms, _ = simulate(random, target, queries, years * queries, burst, target, target)
            _, delays = simulate(random, target, queries, 2 * years, burst, 0.98, target - FALL)
            _, losses = simulate(random, target, queries, years, burst, 0.98, 0.0)
            cells.append((
                str(queries), str(burst), f"{alarms.sum() / years:.2f}", f"{np.median(delays):,.0f}",
                f"{np.quantile(delays, 0.95):,.0f}", f"{np.median(losses):,.0f}",
            ))  # fmt: skip
    return cells


HEADS = (
    "queries", "minutes of a loss", "false alarms of the box in a year", "frames to a fall of 5 points", "95 %",
    "to a total loss",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return print_simulation(__doc__ or "", "years", 20, ", target 0.95", HEADS, rows, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
