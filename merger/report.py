"""What a merge reports: bytes before and after, and how every query came out on test."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.evaluation import Evidence


@dataclass(frozen=True)
class QueryResult(Evidence):
    """How one query came out on test."""

    id: str = ""


@dataclass(frozen=True)
class MergeReport:
    """What `gemel merge` reports. `work` = image passes x FLOPs; fractions are of the originals' bytes.

    `recipe` is what the method trained by (None where it trained nothing), `search_work` what it took to find it, which
    is no part of `work`.
    """

    method: str
    bundle: str
    bytes_before: int
    bytes_after: int
    saved_fraction: float
    ceiling_fraction: float
    seconds: float
    flops: float
    queries: tuple[QueryResult, ...]
    recipe: Mapping[str, Any] | None = None
    search_flops: float = 0.0

    @property
    def met(self) -> bool:
        """Whether every query reaches its target on test."""
        return all(query.met for query in self.queries)

    def to_json(self) -> dict[str, Any]:
        """Plain values under DESIGN's keys."""
        return json.loads(json.dumps(dataclasses.asdict(self)))
