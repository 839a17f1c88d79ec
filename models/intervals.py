"""How sure a ratio of accuracies is: a lower bound at a confidence, and the p-value of a true ratio below a target."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from models.evaluation import MIN_UNITS, as_ratio
from models.predictions import Task

SEARCH_CONFIDENCE = 0.98
"""Confidence with which the part of val that is searched on must show that a merged model reaches its target."""
MAX_QUANTILE = 6.0
"""Of the normal distribution: a likelihood of 1e-9."""


def lower_bound_ratio(
    task: Task, before: np.ndarray, after: np.ndarray, one_error: float, confidence: float = SEARCH_CONFIDENCE
) -> float:
    """The lower bound of merged / original at a confidence, from the counts of the same units.

    A one-sided interval by the jackknife over units, with Student's t (Miller 1974); errors that both make do not
    widen it. `one_error` is what one wrong prediction costs of the ratio: as in Poisson's limits, half of the
    quantile's square of them are subtracted, since a standard deviation describes few errors badly.
    """
    return _lower_bound(*_jackknife(task, before, after), one_error, float(ndtri(confidence)))


def p_value_below(task: Task, before: np.ndarray, after: np.ndarray, one_error: float, target: float) -> float:
    """The least error at which `lower_bound_ratio` reaches the target: the p-value of a true ratio below it."""
    found = _jackknife(task, before, after)
    low, high = 0.0, MAX_QUANTILE
    if _lower_bound(*found, one_error, low) < target:
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _lower_bound(*found, one_error, middle) >= target else (low, middle)
    return float(ndtr(-low))


def _jackknife(task: Task, before: np.ndarray, after: np.ndarray) -> tuple[float, float, int]:
    """The ratio of these counts, its standard deviation over units, and the degrees of freedom."""
    units, whole = len(before), [side.sum(axis=0) for side in (before, after)]
    ratio = as_ratio(*(task.metric_of(side) for side in reversed(whole)))
    if units < MIN_UNITS:
        return ratio, 0.0, 1
    without = [
        as_ratio(task.metric_of(whole[1] - after[unit]), task.metric_of(whole[0] - before[unit]))
        for unit in range(units)
    ]
    return ratio, math.sqrt((units - 1) * np.var(without)), units - 1


def _lower_bound(ratio: float, deviation: float, freedom: int, one_error: float, quantile: float) -> float:
    return ratio - float(stdtrit(freedom, ndtr(quantile))) * deviation - quantile**2 / 2 * one_error
