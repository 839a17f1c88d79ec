"""How long work tells what it is doing: one callable, given an event and its fields."""

from __future__ import annotations

from typing import Any, Protocol


class Progress(Protocol):
    """Called with an event's name and plain values.

    Events: `epoch` (query or queries, epoch, epochs, loss, scores), `original` (query, val, seconds), `round` (round,
    rounds, signature, members, saved_bytes, ceiling_bytes, seconds), `attempt` (round, members, outcome, ratios),
    `reference` (query, val, needed), `precision` (query, model, chosen, fp32, bf16: seconds), `rate` (rate, epochs,
    ratio: None where it diverged), `prefix` (query, prefix, layers, ratio), `warning` (text), `test` (query, original,
    merged, ratio), `waits` (waits: a query; after, required, lost or ratio), `accepted` (saved_bytes, ratios: before
    those who waited join), `workers` (workers, threads, cores, each_bytes, free_bytes), `candidates` (kind, judged,
    of).
    """

    def __call__(self, event: str, **fields: Any) -> None:
        """Take note of one event."""
        ...


def silent(event: str, **fields: Any) -> None:
    """The progress of somebody who does not want to know."""
