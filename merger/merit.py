"""How good a state of several models is, by their ratios on val."""

from __future__ import annotations

from collections.abc import Mapping


def all_met(ratios: Mapping[str, float], required: Mapping[str, float]) -> bool:
    """Whether each of these queries reaches what is required of it."""
    return all(ratio >= required[query] for query, ratio in ratios.items())


def merit(ratios: Mapping[str, float], required: Mapping[str, float]) -> tuple[int, float]:
    """The queries that reach what is required, then how near the others come: the larger, the better."""
    shares = [min(1.0, ratio / required[query]) for query, ratio in ratios.items()]
    return sum(share >= 1 for share in shares), sum(shares)
