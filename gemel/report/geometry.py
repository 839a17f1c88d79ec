"""Geometry of the report's pictures: plain numbers in, positions in per cent out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gemel.report.document import LedgerRow, OfflineRow, QueryBytes, Report, SharedWeight, WeightBytes

AXIS_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5)
MAX_TICKS = 6
ROUNDING = 1e-9
IN_TIME, LATE, DROPPED, FAILED, PENDING = "in time", "late", "dropped", "failed", "pending"
MIN_AGE_MS = 1.0
DROP_COLOURS = 4
"""Colours of drop reasons; further reasons reuse them."""
MAX_RATIO = 1.3
"""Ratios above are drawn at the end of the axis: outliers of weak originals would flatten all others."""
BYTE_PARTS = ("shared_part", "private")

Part = tuple[str, float, float]
"""A part of a bar: name, per cent of the bar's width, amount."""
Point = tuple[int, float, float, float]
"""Memory in bytes, score, lowest and highest seed."""


class Axis:
    """A range of numbers laid over 0 to 100 per cent of a track, with regular round ticks."""

    def __init__(self, values: Sequence[float], step: float | None = None) -> None:
        low, high = min(values), max(values)
        self.step = step or next((s for s in AXIS_STEPS if (high - low) / s <= MAX_TICKS), AXIS_STEPS[-1])
        self.low = math.floor(low / self.step + ROUNDING) * self.step
        self.high = max(math.ceil(high / self.step - ROUNDING) * self.step, self.low + self.step)
        if self._steps() > 3 and self._steps() % 2:  # an even number can be thinned to every second tick
            self.high += self.step

    def at(self, value: float) -> float:
        """Position of a value in per cent of the track, clamped to it."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)

    def ticks(self) -> list[tuple[float, float]]:
        """(value, position) of each round number."""
        values = [self.low + self.step * index for index in range(self._steps() + 1)]
        return [(value, self.at(value)) for value in values]

    def _steps(self) -> int:
        return round((self.high - self.low) / self.step)


class AgeAxis:
    """A logarithmic axis of milliseconds from 1 ms on."""

    def __init__(self, ages_ms: Iterable[float]) -> None:
        decades = max(1, math.ceil(math.log10(max([10.0, *ages_ms])) - ROUNDING))
        self.decades = decades + (decades > 3 and decades % 2)  # an even number can be thinned to every second tick

    def at(self, age_ms: float) -> float:
        """Position of an age in per cent of the track."""
        return round(100 * min(1.0, math.log10(max(age_ms, MIN_AGE_MS)) / self.decades), 2)

    def ticks(self) -> list[tuple[float, float]]:
        """(milliseconds, position) of each power of ten."""
        return [(float(10**power), round(100 * power / self.decades, 2)) for power in range(self.decades + 1)]


def unit_axis() -> Axis:
    """The axis of scores from 0 to 1."""
    return Axis([0.0, 1.0], step=0.25)


def ratio_axis(rows: Sequence[OfflineRow]) -> Axis:
    """One axis for the ratios of all queries: it holds every lower end, every target, and 1."""
    values = [1.0]
    for row in rows:
        values += [row.target, row.ratio, *([row.lower_end] if row.proven and row.lower_end is not None else [])]
    return Axis([min(1.0, max(0.0, min(values))), min(MAX_RATIO, max(values))])


def make_parts(amounts: Iterable[tuple[str, float]], whole: float) -> list[Part]:
    """The parts of a bar of which 100 % is `whole`, empty ones left out."""
    return [(name, round(100 * amount / (whole or 1), 2), amount) for name, amount in amounts if amount]


def byte_parts(row: QueryBytes, whole: float) -> list[Part]:
    """A query's bytes: its part of shared weights (1/n of a weight that n queries share), and its own."""
    return make_parts([(name, getattr(row, name)) for name in BYTE_PARTS], whole)


def total_parts(counts: WeightBytes) -> list[Part]:
    """The whole bundle in per cent of the originals."""
    return make_parts([(name, sum(getattr(row, name) for row in counts.queries)) for name in BYTE_PARTS], counts.before)


def sharing_matrix(shared: Sequence[SharedWeight], queries: Sequence[str]) -> list[list[int]]:
    """Bytes that each two queries share; on the diagonal, all that a query shares."""
    common = defaultdict[tuple[str, str], int](int)
    for one in shared:
        inside = {query for query, _ in one.members}
        for a in inside:
            for b in inside:
                common[a, b] += one.bytes
    return [[common[a, b] for b in queries] for a in queries]


@dataclass(frozen=True)
class SharedRow:
    """A shared weight: the bytes that it saves, its shape, and the layer that it is in every query."""

    saves: int
    shape: str
    cells: list[str]


def largest_shared(shared: Sequence[SharedWeight], queries: Sequence[str]) -> list[SharedRow]:
    """The shared weights, those that save most first."""
    rows = []
    for one in shared:
        paths = defaultdict[str, list[str]](list)
        for query, path in one.members:
            paths[query].append(path.removesuffix(".weight"))
        cells = [", ".join(paths[query]) for query in queries]
        rows.append(SharedRow(one.bytes * (len(one.members) - 1), "×".join(map(str, one.shape)), cells))
    return sorted(rows, key=lambda row: -row.saves)


def mean_points(report: Report) -> dict[str, list[Point]]:
    """Arm -> the mean of the strong queries, seed by seed; of several metrics, shares of the originals offline."""
    found = defaultdict[tuple[int, str], list[list[float]]](list)
    for row in (row for row in report.streaming if row.query in report.averaged):
        divisor = 1.0 if report.divisors is None else report.divisors[row.query]
        found[row.memory_bytes, row.arm].append([value / divisor for value in row.by_seed])
    points = defaultdict[str, list[Point]](list)
    for (nbytes, arm), rows in sorted(found.items()):
        by_seed = [sum(values) / len(values) for values in zip(*rows, strict=True)]
        points[arm].append((nbytes, sum(by_seed) / len(by_seed), min(by_seed), max(by_seed)))
    return points


@dataclass(frozen=True)
class OutcomeRow:
    """Frames by outcome: `name` and `arm` of the row, all frames, and the parts in a fixed order."""

    name: str
    arm: str
    received: int
    parts: list[Part]

    @property
    def in_time(self) -> float:
        """The fraction that was processed in time."""
        return sum(frames for name, _, frames in self.parts if name == IN_TIME) / max(1, self.received)


def outcome_rows(ledger: Sequence[LedgerRow], by: str = "memory") -> list[OutcomeRow]:
    """Frames by outcome for each arm at each memory setting, or of each query."""
    reasons = sorted({reason for row in ledger for reason in row.dropped})
    sums = defaultdict[tuple[str, str], dict[str, int]](lambda: defaultdict(int))
    for row in ledger:
        counts = sums[getattr(row, by), row.arm]
        counts[IN_TIME] += row.processed - row.late
        counts[LATE] += row.late
        for reason in reasons:
            counts[f"{DROPPED}: {reason}"] += row.dropped.get(reason, 0)
        counts[FAILED] += row.failed
        counts[PENDING] += row.pending
    return [
        OutcomeRow(name, arm, received, make_parts(counts.items(), received))
        for (name, arm), counts in sums.items()
        for received in [sum(counts.values())]
    ]


def outcome_classes(rows: Iterable[OutcomeRow]) -> dict[str, str]:
    """Outcomes that occur in these rows, in order, and the CSS class of each."""
    names = list(dict.fromkeys(name for row in rows for name, _, _ in row.parts))
    reasons = [name for name in names if name.startswith(DROPPED)]
    return {
        name: f"drop{reasons.index(name) % DROP_COLOURS}" if name in reasons else name.replace(" ", "-")
        for name in names
    }
