"""How good a state of several models is, by their ratios on val."""

from __future__ import annotations

from collections.abc import Mapping

from merger.checkpoint import State
from merger.core.merged import Merged
from models.sharing.plan import SharingPlan


def met(ratios: Mapping[str, float], required: Mapping[str, float]) -> list[str]:
    """The queries that have what is required of them: they need only keep it."""
    return [query for query, ratio in ratios.items() if ratio >= required[query]]


def all_met(ratios: Mapping[str, float], required: Mapping[str, float]) -> bool:
    """Whether each of these queries reaches what is required of it."""
    return all(ratio >= required[query] for query, ratio in ratios.items())


def merit(ratios: Mapping[str, float], required: Mapping[str, float]) -> float:
    """How near all of them come to what is required: the larger, the better.

    Not how many reach it: two that are almost there are mended with fewer bytes than one that is far off.
    """
    return sum(min(1.0, ratio / required[query]) for query, ratio in ratios.items())


def held(
    plan: SharingPlan, states: Mapping[str, State], ratios: Mapping[str, float], required: Mapping[str, float]
) -> Merged:
    """Of models that share under a plan those that have what is required, and what they share without the others."""
    plan = plan.without(*(set(ratios) - set(met(ratios, required))))
    return Merged(plan, {query: states[query] for query in plan.queries()})
