"""What a query was merged from: digests of its definition and its original, to tell whether either changed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from gemel.models.bundle.manifest import GRAPH, OriginRecord

if TYPE_CHECKING:
    from gemel.models.workload import Query

RUN_KEYS = ("fps", "sla_ms", "priority")
"""What says how often and how urgently a query runs: its network and what is proven of it stay as they are."""
PLACE_KEYS = ("id", "weights", "init", "data", "file", "footage", "labels")
"""What names the query and its files, whose content may be the same elsewhere."""


def origin_of(query: Query, added: bool = False) -> OriginRecord:
    """The digests of a query as its workload has it; its original's file is read."""
    from gemel.models.files.weights import fingerprint

    return OriginRecord(
        digest_definition(query), hashlib.sha256(fingerprint(query.weights)).hexdigest(), added
    )


def digest_definition(query: Query) -> str:
    """SHA-256 (hex) of the question that a query asks, and of its network but for the weights.

    Keys that are empty count as absent, so that a key of a later version changes nothing where it is not used.
    """
    from gemel.models.zoo.user_models import is_model_file

    keys = {
        name: value
        for name, value in dataclasses.asdict(query).items()
        if name not in (*RUN_KEYS, *PLACE_KEYS) and value not in (None, False, (), {}, 0.0)
    }
    if is_model_file(query.model):
        keys["model"] = GRAPH  # wherever the file lies; its content is the original's
    return hashlib.sha256(json.dumps(keys, sort_keys=True, default=str).encode()).hexdigest()


def is_at_hand(query: Query) -> bool:
    """Whether the file of a query's original is there, or published."""
    return not isinstance(query.weights, Path) or query.weights.exists()
