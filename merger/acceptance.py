"""What is promised about chance: the part of val that accepts, the error shared among queries, how much val it takes.

Val is cut in two by clip. One part is searched on, as often as a method wants. The other part is looked at once, when
the method has ended: there each query that changed needs a one-sided p-value against its target, and the queries share
the error by Holm's method (Scandinavian Journal of Statistics, 1979).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from models.data import Split
from models.evaluation import count_samples
from models.intervals import lower_bound_ratio
from models.predictions import GroundTruth, Task
from models.workload import Query


@dataclass(frozen=True)
class AcceptanceConfig:
    """How queries are accepted on val."""

    error: float = 0.025
    """Likelihood that a merge accepts any query whose true ratio is below its target."""
    search_every: int = 3
    """One of so many clips is for the search, the others are for acceptance."""
    disagreement: float = 0.04
    """Part of the frames on which a good merged model and its original differ, for the estimate of how much val it
    takes."""
    unproven_margin: float = 0.5
    """How far above its target, of the way to 1, a query must come on val where val cannot tell."""
    unproven_error: float = 0.05
    """Or the largest p-value of a ratio below its target, of one query alone."""


ACCEPTANCE = AcceptanceConfig()
ALL = ""
"""In place of a class: every frame."""


@dataclass(frozen=True)
class Proof:
    """The frames of val that accept, their labels, the part of the metric that one error costs, the original's counts
    by clip or track."""

    frames: Sequence[int]
    truths: Sequence[GroundTruth]
    one_error: float
    tallies: np.ndarray


def cut_val(query: Query, split: Split, truths: Sequence[GroundTruth]) -> tuple[list[int], list[int]]:
    """The frames to search on, and those to accept on: about every third clip, so that a third of each class is there.

    Fewer clips than that are each cut in time.
    """
    every, units = ACCEPTANCE.search_every, list(dict.fromkeys(split.units))
    if len(units) < every:
        places = {unit: [index for index, one in enumerate(split.units) if one == unit] for unit in units}
        searched = {index for own in places.values() for index in own[: len(own) // every]}
    else:
        shown = {unit: Counter[str]() for unit in units}
        for unit, truth in zip(split.units, truths, strict=True):
            shown[unit].update([ALL, *count_samples(query, [truth])])
        chosen = _draw_units(shown)
        searched = {index for index, unit in enumerate(split.units) if unit in chosen}
    return sorted(searched), [index for index in range(len(split)) if index not in searched]


def _draw_units(shown: Mapping[str, Counter[str]]) -> set[str]:
    """The units that together hold about one of `search_every` frames, of each class too."""
    seen, drawn, chosen = Counter[str](), Counter[str](), set[str]()
    for unit, own in shown.items():
        seen.update(own)
        lacking = {name: seen[name] / ACCEPTANCE.search_every - drawn[name] for name in own}
        if sum(abs(lacking[name] - own[name]) - abs(lacking[name]) for name in own) < 0:
            chosen.add(unit)
            drawn.update(own)
    return chosen


def search_ratio(
    task: Task, ratio: float, before: np.ndarray, after: np.ndarray, one_error: float, strict: bool = False
) -> float:
    """What a search goes by where another part of val accepts, from a ratio and the counts of its frames (N, ...).

    The lower end of its interval; but the plain ratio, unless `strict`, of a model with no more errors than its
    original.
    """
    return ratio if ratio >= 1 and not strict else lower_bound_ratio(task, before, after, one_error)


def find_doubt(frames: int, one_error: float, target: float, queries: int) -> str:
    """Why val cannot tell whether a query reaches its target, of so many that share the error; empty where it can.

    `one_error` is the part of the metric that one error costs in the part that accepts; not even a model that answers
    as its original does would be accepted. The frames that it takes are an estimate for `disagreement`.
    """
    z, spare = float(-ndtri(ACCEPTANCE.error / max(1, queries))), 1 - target
    if z * z / 2 * one_error <= spare:
        return ""
    if spare <= 0:
        return f"a target of {target:g} cannot be told on any val"
    root = math.sqrt(ACCEPTANCE.disagreement)
    error = ((math.sqrt(ACCEPTANCE.disagreement + 2 * spare) - root) / z) ** 2
    return f"cannot be told with {frames} frames of val; needs about {_round_up(frames * one_error / error)}"


def accepted_by_holm(p_values: Mapping[str, float], error: float = ACCEPTANCE.error) -> set[str]:
    """The hypotheses rejected while the likelihood of any wrong one stays below `error` (Holm, 1979)."""
    accepted = set[str]()
    for query in sorted(p_values, key=lambda one: p_values[one]):
        if p_values[query] > error / (len(p_values) - len(accepted)):
            break
        accepted.add(query)
    return accepted


def accepted_evenly(p_values: Mapping[str, float], hypotheses: int) -> set[str]:
    """The hypotheses rejected where so many share the error evenly (Bonferroni)."""
    return {query for query, p_value in p_values.items() if p_value <= ACCEPTANCE.error / hypotheses}


def _round_up(count: float) -> int:
    """To two digits."""
    step = 10 ** max(0, math.floor(math.log10(max(1.0, count))) - 1)
    return math.ceil(count / step) * step
