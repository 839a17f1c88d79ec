"""What differs between the box that serves and the one that is to: pure functions of configs and bundles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edge_runtime.config import BoxConfig
from models.bundle import BundleQuery
from models.errors import InputError

KEPT: dict[str, Callable[[BoxConfig], Any]] = {
    "device": lambda config: config.device,
    "spool": lambda config: config.spool,
    "trace": lambda config: config.trace,
    "http.bind": lambda config: None if config.http is None else (config.http.host, config.http.port),
}
"""What a running box keeps."""


def check_change(before: BoxConfig, after: BoxConfig) -> None:
    """Raise InputError where a running box cannot go over to the other config."""
    for key, value in KEPT.items():
        if value(before) != value(after):
            raise InputError(after.path, "cannot be changed while the box runs", "start the box again", key)
    if after.trace is not None:
        fault = "a trace holds one box, so that one which writes it cannot be changed"
        raise InputError(after.path, fault, "leave `trace` out and start the box again", "trace")


def runs_alike(before: BundleQuery, after: BundleQuery) -> bool:
    """Whether runs of the two take equally long: one architecture, whatever its weights."""
    return _build(before) == _build(after)


def looks_alike(before: BundleQuery, after: BundleQuery) -> bool:
    """Whether a frame that waits for the one may be answered by the other."""
    return (before.camera, before.roi) == (after.camera, after.roi)


def changes_text(before: Mapping[str, BundleQuery], after: Mapping[str, BundleQuery]) -> str:
    """What becomes of the queries, in words: `2 queries as they were, 1 changed, 1 new, 1 gone`."""
    both = before.keys() & after.keys()
    same = sum(before[query] == after[query] for query in both)
    counts = {"changed": len(both) - same, "new": len(after.keys() - both), "gone": len(before.keys() - both)}
    queries = f"{same} {'query' if same == 1 else 'queries'} as before"
    return ", ".join([queries, *(f"{count} {what}" for what, count in counts.items() if count)])


def _build(query: BundleQuery) -> tuple[Any, ...]:
    stored = {key: one.dtype for key, one in query.stored.items()}
    return query.model, query.model_args, query.input_size, len(query.classes), query.preprocess, stored
