"""The summary of a box that was asked to stop before it served; made without the libraries of one that serves."""

from __future__ import annotations

from typing import Any


def empty_summary(reason: str) -> dict[str, Any]:
    """What a summary holds where nothing was done, `reason` being the name of the signal."""
    nothing = dict.fromkeys(("seconds", "bytes_moved", "swaps", "max_used_bytes", "budget_bytes"), 0)
    lists: dict[str, Any] = {name: [] for name in ("queries", "cameras", "sinks", "ledger", "unwritten", "hanging")}
    return {**nothing, **lists, "stopped_by": reason, "fault": None, "spool": None, "balanced": True}
