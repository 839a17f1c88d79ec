"""Bounds on means of limited values that hold for few values, too; pure functions in NumPy.

Arrays may have leading axes, for simulations of many cases at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BoundsConfig:
    """How bounds are computed."""

    halvings: int = 22
    """Of the interval in which a bound is searched: to a millionth of it."""
    min_joined: int = 4
    """Blocks that are left at least when their length is doubled to find correlation between them."""
    chance: float = 0.5
    """Standard errors of a ratio of variances that are put down to chance."""


BOUNDS = BoundsConfig()
_tail_of_normal = np.vectorize(lambda value: 0.5 * math.erfc(value / math.sqrt(2)), otypes=[float])


def tail_of_mean(
    values: np.ndarray, heaviest: np.ndarray | float, counts: np.ndarray | float = 1.0
) -> np.ndarray:
    """The p-value of a true mean of 0 or more, from `values` (..., N) of which none can be above `heaviest` (...).

    Each value was seen `counts` (..., N) times.

    Gaffke's bound: the likelihood that a mean of the values and one more, the heaviest, is positive where each weighs
    as an exponential draw (Gaffke 2005; Learned-Miller and Thomas 2020). Of zeros and ones it is Clopper and Pearson's
    exact bound, so few events are counted as strictly as they must be; of many it is the normal one, corrected for
    skewness.
    The likelihood is Lugannani and Rice's approximation (1980), within a hundredth of the exact one.
    """
    values = np.asarray(values, float)
    heaviest = np.broadcast_to(np.asarray(heaviest, float), values.shape[:-1])[..., None]
    weights = np.broadcast_to(np.asarray(counts, float), values.shape)
    return tail_of_sum(
        np.concatenate([values, heaviest], -1),
        np.concatenate([weights, np.ones_like(heaviest)], -1),
    )


def tail_of_sum(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The likelihood that a sum of `values` (..., K) times gamma draws of these shapes (..., K) is positive."""
    top = np.where(weights > 0, values, -np.inf).max(-1)
    scaled = np.where(weights > 0, values, 0.0) / np.where(top > 0, top, 1.0)[..., None]
    low = np.zeros(top.shape)
    high = np.ones(top.shape)
    for _ in range(BOUNDS.halvings):  # the saddle point: where the derivative of the cumulants is 0
        middle = (low + high) / 2
        slope = (weights * scaled / (1 - middle[..., None] * scaled)).sum(-1)
        low = np.where(slope < 0, middle, low)
        high = np.where(slope < 0, high, middle)
    ratio = scaled / (1 - low[..., None] * scaled)
    cumulant = -(weights * np.log1p(-low[..., None] * scaled)).sum(-1)
    signed = np.sqrt(np.maximum(-2 * cumulant, 1e-12))
    spread = np.maximum(low * np.sqrt((weights * ratio**2).sum(-1)), 1e-6)
    density = np.exp(-(signed**2) / 2) / math.sqrt(2 * math.pi)
    tail = np.clip(_tail_of_normal(signed) + density * (1 / spread - 1 / signed), 0, 1)
    near = signed < 1e-3
    tail = np.where(near, 0.5, tail)
    return np.where((weights * values).sum(-1) >= 0, 1.0, np.where(top <= 0, 0.0, tail))


def design_effect(values: np.ndarray) -> np.ndarray:
    """The variance of the mean of values (..., B), in order of time, over that of independent ones; at least 1.

    Blocks are joined to longer ones, twice as long each time, while enough are left. Where neighbours are alike (rain,
    dusk), the mean of longer blocks varies more than it should: the largest such ratio counts, less some chance.
    """
    count = values.shape[-1]
    single = values.var(-1) / max(1, count - 1)
    effect = np.ones(values.shape[:-1])
    length = 2
    while count // length >= BOUNDS.min_joined:
        joined = count // length
        means = values[..., : joined * length].reshape(*values.shape[:-1], joined, length).mean(-1)
        variance = means.var(-1) / (joined - 1) * (joined * length / count)
        chance = BOUNDS.chance * math.sqrt(2 * (length - 1) / length / (joined - 1))
        effect = np.maximum(
            effect, np.where(single > 0, variance / np.maximum(single, 1e-30) - chance, 1.0)
        )
        length *= 2
    return effect


def bisect_largest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest number from `low` to `high` for which a decreasing condition holds; `low` where it holds nowhere."""
    if holds(high):
        return high
    for _ in range(BOUNDS.halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def upper_ends(
    parts: np.ndarray, sizes: np.ndarray, heaviest: np.ndarray, error: float
) -> np.ndarray:
    """The upper end (...) at this error of a share, the sum of `parts` (..., N) over that of `sizes`, from 0 to 1.

    `heaviest` (...) is the largest part that one of them may have, where the mean size is 1.
    """
    low = np.zeros(parts.shape[:-1])
    high = np.ones(parts.shape[:-1])
    for _ in range(BOUNDS.halvings):
        middle = (low + high) / 2
        above = tail_of_mean(parts - middle[..., None] * sizes, heaviest - middle) > error
        low = np.where(above, middle, low)
        high = np.where(above, high, middle)
    return high
