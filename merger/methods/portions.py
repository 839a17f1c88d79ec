"""Portions: the heaviest sets of a plan alone, for where all at once are too many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from merger.methods.sprints import Sprints, Trained
from models.sharing.layers import Layer
from models.sharing.plan import SharingPlan

PORTIONS = (1 / 2, 1 / 4, 1 / 8)
"""What is tried instead of all sets when every query is lost with these: so much of what they save, the heaviest first,
as GEMEL adds them."""
PORTION = "portion"


def heaviest(plan: SharingPlan, layers: Iterable[Layer], share: float) -> SharingPlan:
    """The sets that save most, as many as it takes to save this share of what all do."""
    layers = list(layers)
    saved = {members: SharingPlan((members,)).saved_bytes(layers) for members in plan.shared}
    chosen, wanted = set(), share * sum(saved.values())
    for members in sorted(plan.shared, key=lambda members: -saved[members]):
        if wanted <= 0:
            break
        chosen.add(members)
        wanted -= saved[members]
    return replace(plan, shared=tuple(members for members in plan.shared if members in chosen))


def given_up(whole: Sprints, part: Trained) -> list[dict[str, Any]]:
    """Rows for the log: of each query that shares in a part what it shared in the whole alone, and why no more."""
    lost = {row["waits"]: row for row in whole.checkpoint.log if "waits" in row}
    rows = []
    for query in sorted(part.plan.queries() & lost.keys()):
        private = [path for path in _paths(whole.plan, query) if path not in _paths(part.plan, query)]
        why = {key: lost[query][key] for key in ("after", "ratio", "required")}
        rows.append({"query": query, "repair": PORTION, "private": private, **why, "work": whole.bench.work.total})
    return rows


def _paths(plan: SharingPlan, query: str) -> list[str]:
    return [path for members in plan.shared for owner, path in members if owner == query]
