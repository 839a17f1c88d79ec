"""A query for tests, made without a workload file."""

from __future__ import annotations

from typing import Any

from gemel.models.workload import Query

DEFAULTS: dict[str, Any] = {
    "id": "gate", "camera": "c", "task": "classification", "classes": ("empty", "busy"), "model": "resnet18",
    "model_args": {}, "input_size": 32, "weights": None, "init": None, "fps": None, "sla_ms": 100.0, "roi": None,
    "min_score": 0.0, "priority": 1, "data": None, "accuracy_target": 0.95,
}  # fmt: skip


def make_query(**keys: Any) -> Query:
    """A query with these values and DEFAULTS for the others."""
    return Query(**{**DEFAULTS, **keys})
