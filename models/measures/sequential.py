"""A fall of quality found while values come in, at whatever times one looks, with few false alarms in a year.

An e-detector (Shin, Ramdas and Rinaldo, "E-detectors", 2022; bets of Waudby-Smith and Ramdas, 2023): each value moves
the wealth of some bets that the mean is below a limit. While it is not, the wealth is a fair game, whatever the
distribution, so `run_length` frames pass on average before it reaches that number by chance. That asks that the mean of
a value is not below the limit whatever came before it. Losses come in bursts, so a value is the mean of a block of
frames some times as long as a burst. Simulated (benchmarks/drift/years.py), with bursts of up to 30 frames: at most 0.7
false alarms of a box in a year; a fall by five points takes 600 to 1,600 frames with bursts of up to 3 frames, 3,600 to
4,700 with those of 10, and 9,300 to 11,300 with those of 30.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gemel.models.measures.bounds import design_effect


@dataclass(frozen=True)
class DetectorConfig:
    """The bets of a detector, and its blocks."""

    block: int = 10
    """Frames of a block at least, and until bursts are measured."""
    max_block: int = 320
    """Frames of a block at most, so that a total loss is found within some days."""
    bursts: float = 4.0
    """Length of a block in those of a burst."""
    measured: int = 6000
    """Frames before, by which bursts are measured: fewer hold too few bursts of half an hour."""
    spare: float = 2.0
    """Times the run length, for the likeness of neighbouring blocks, between which a burst may lie."""
    stakes: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
    """Parts of the largest bet that cannot lose all: small ones find small falls of values that vary much."""
    year_s: float = 365 * 24 * 3600.0


DETECTOR = DetectorConfig()


@dataclass
class FallDetector:
    """Detects that the mean of values in [0, 1] is below `limit`; at most one false alarm in `run_length` frames."""

    limit: float
    run_length: float
    wealth: list[float] = field(default_factory=lambda: [0.0] * len(DETECTOR.stakes))

    @property
    def strength(self) -> float:
        """How near an alarm is: 1 and more is one."""
        return sum(self.wealth) / len(self.wealth) / self.run_length

    @property
    def chance_per_year(self) -> float | None:
        """How often in a year such wealth comes by chance at most; 1 and less is an alarm, None before any value."""
        return 1 / self.strength if self.strength else None

    @property
    def is_alarmed(self) -> bool:
        """Whether the mean has fallen below the limit."""
        return self.strength >= 1

    def add(self, value: float, frames: int) -> bool:
        """Take the next value, the mean of so many frames; whether this is an alarm."""
        value = min(1.0, max(0.0, value))
        # The bet wins on values below the limit what it loses above; it never loses all.
        largest = 1 / max(1e-9, 1 - self.limit)
        for place, stake in enumerate(DETECTOR.stakes):
            factor = 1 + stake * largest * (self.limit - value)
            self.wealth[place] = factor * (self.wealth[place] + frames)
        return self.is_alarmed


def start_test(limit: float, error: float) -> FallDetector:
    """A test that is wrong at most with this likelihood, however long it goes on, given no frames (`frames=0`).

    Its wealth begins at 1, and reaches 1 / error by chance with that likelihood.
    """
    return FallDetector(limit, 1 / error, [1.0] * len(DETECTOR.stakes))


def run_length_of_year(frames_a_second: float, detectors: int) -> float:
    """Frames of one detector in a year, times their number and some spare: at most one false alarm of all in a year."""
    return DETECTOR.spare * max(1.0, frames_a_second * DETECTOR.year_s) * max(1, detectors)


def choose_block(values: Sequence[float]) -> int:
    """Frames of a block for values like these, of frames in order of time: doubled until bursts are short in it."""
    measured = np.asarray(values[-DETECTOR.measured :], float)
    burst = float(design_effect(measured)) if len(measured) else 1.0
    block = DETECTOR.block
    while block < min(DETECTOR.max_block, DETECTOR.bursts * burst):
        block *= 2
    return block


def group_values(values: Sequence[float], block: int) -> list[float]:
    """Means of blocks of values in a row; the rest waits for more."""
    return [
        math.fsum(values[start : start + block]) / block
        for start in range(0, len(values) - block + 1, block)
    ]
