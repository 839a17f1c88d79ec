"""What the drift checks of a spool have seen: the wealth of each query's detector, so that no frame counts twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from gemel.models.files.io import Exact, open_atomic, read_json, validate
from gemel.models.measures.sequential import DETECTOR, FallDetector, choose_block, group_values, run_length_of_year

FILE = "drift-state.json"
MAX_BYTES = 1 << 24
HINT = "remove it: the next check begins anew"


class DetectorRow(Exact):
    """The detector of one query: its wealth, the name of the last sample it saw, and values that wait for more.

    `measured` are the values by which the length of bursts is measured, in hundredths.
    """

    wealth: list[float] = Field(min_length=len(DETECTOR.stakes), max_length=len(DETECTOR.stakes))
    until: str = Field(max_length=300)
    waiting: list[float] = Field(max_length=DETECTOR.max_block)
    measured: list[int] = Field(max_length=DETECTOR.measured)
    is_alarmed: bool


class StateDocument(Exact):
    """The detectors of the queries of one bundle (first digits of its SHA-256)."""

    bundle: str = Field(max_length=64)
    queries: dict[str, DetectorRow]


class FallEvidence(NamedTuple):
    """What a detector says: whether quality has fallen below the limit, and how often a year such evidence comes by
    chance at most, None before any.
    """

    is_below: bool
    chance_per_year: float | None


@dataclass
class DriftState:
    """The detectors of a spool with so many queries, read from their file where it is of this bundle."""

    spool: Path
    bundle: str
    count: int
    rows: dict[str, DetectorRow] = field(default_factory=dict)

    @classmethod
    def read(cls, spool: Path, bundle: str, count: int) -> DriftState:
        """The state in a spool; a new one for another bundle. InputError for a damaged file."""
        path = spool / FILE
        if not path.exists():
            return cls(spool, bundle, count)
        document = validate(path, read_json(path, HINT, MAX_BYTES), StateDocument, hint=HINT)
        return cls(spool, bundle, count, document.queries if document.bundle == bundle else {})

    def seen_until(self, query: str) -> str:
        """The name of the last sample that the query's detector saw; samples are named by their time."""
        row = self.rows.get(query)
        return "" if row is None else row.until

    def add(
        self, query: str, limit: float, values: Sequence[float], until: str, frames_a_second: float
    ) -> FallEvidence:
        """Show further agreements to the query's detector.

        All queries of the box share one false alarm in a year.
        """
        row = self.rows.get(query)
        detector = FallDetector(limit, run_length_of_year(frames_a_second, self.count))
        waiting, measured, is_alarmed = list(values), list[int](), False
        if row is not None:
            detector.wealth, waiting, is_alarmed = list(row.wealth), [*row.waiting, *values], row.is_alarmed
            measured = row.measured
        block = choose_block(measured)  # by earlier values alone: a block must not know what is in it
        means = group_values(waiting, block)
        for mean in means:
            is_alarmed = detector.add(mean, block) or is_alarmed
        self.rows[query] = DetectorRow(
            wealth=[min(value, 1e300) for value in detector.wealth], until=until, is_alarmed=is_alarmed,
            waiting=waiting[len(means) * block :],
            measured=[*measured, *(round(100 * value) for value in values)][-DETECTOR.measured :],
        )  # fmt: skip
        chance = detector.chance_per_year
        return FallEvidence(is_alarmed, min(chance or 1.0, 1.0) if is_alarmed else chance)

    def write(self) -> None:
        """Write the file; InputError where that fails."""
        document = StateDocument(bundle=self.bundle, queries=self.rows)
        with open_atomic(self.spool / FILE, overwrite=True) as file:
            file.write(json.dumps(document.model_dump(), allow_nan=False).encode())
