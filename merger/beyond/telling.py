"""What is written of the search past the ceiling: a row of the log for each try, and the sum of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merger.beyond.candidates import Candidate
from merger.beyond.trying import Tried


def row_of_try(kind: str, chunk: Sequence[Candidate], tried: Tried, in_the_way: Sequence[str]) -> dict[str, Any]:
    """One try; which one it was, in which round and after what work is for the search to say."""
    return {
        "beyond": kind, "accepted": tried.merged is not None, "candidates": [_named(one) for one in chunk],
        "gained_bytes": tried.gained_bytes, "ratios": dict(tried.ratios), "epochs": tried.epochs,
        "in_the_way": list(in_the_way),
    }  # fmt: skip


def sum_of_kind(kind: str, rows: Sequence[dict[str, Any]], work: float, begun: float) -> dict[str, Any]:
    """All tries of one kind; `begun` is the work before the first."""
    gained = sum(row["gained_bytes"] for row in rows)
    return {"beyond": kind, "tries": len(rows), "gained_bytes": gained, "work": work, "work_spent": work - begun}


def _named(candidate: Candidate) -> dict[str, Any]:
    """A candidate in the log: one layer of each unit stands for all."""
    units = [unit[0] for unit in (candidate.first, candidate.second) if unit]
    what = {"rank": candidate.rank} if candidate.rank else {"start": candidate.start}
    return {"layers": [f"{query}: {path}" for query, path in units], "saved_bytes": candidate.saved_bytes,
            "risk": candidate.risk, **what}  # fmt: skip
