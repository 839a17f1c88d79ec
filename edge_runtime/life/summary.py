"""The summary of a box that was stopped before it served, without the imports of one that serves."""

from __future__ import annotations

from typing import Any


def empty_summary(reason: str) -> dict[str, Any]:
    """The summary where nothing was done; `reason` is the name of the signal."""
    zeros = dict.fromkeys(("seconds", "bytes_moved", "swaps", "max_used_bytes", "budget_bytes"), 0)
    lists: dict[str, Any] = {name: [] for name in ("queries", "cameras", "sinks", "ledger", "unwritten", "hanging")}
    joint = dict.fromkeys(("runs", "queries", "frames"), 0)
    nothing = {"fault": None, "spool": None, "joint": joint, "balanced": True}
    return {**zeros, **lists, "stopped_by": reason, **nothing}
