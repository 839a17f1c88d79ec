"""What decoders compute, for NumPy's arrays and torch's tensors alike.

A box reads outputs in NumPy and has no torch; training and exported graphs need the same formulas on tensors.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

Array = Any
"""A NumPy array or a torch tensor."""


def library_of(values: Array) -> Any:
    """numpy for an array, torch for a tensor: the functions that decoders use have one name in both."""
    return np if isinstance(values, np.ndarray) else sys.modules["torch"]


def as_float(values: Array) -> Array:
    """The values as float32."""
    return (
        values.astype(np.float32, copy=False) if isinstance(values, np.ndarray) else values.float()
    )


def constant(numbers: Any, like: Array) -> Array:
    """Numbers as float32, of the kind and on the device of other values."""
    if isinstance(like, np.ndarray):
        return np.asarray(numbers, np.float32)
    return like.new_tensor(numbers, dtype=sys.modules["torch"].float32)


def sigmoid(values: Array) -> Array:
    """1 / (1 + exp(-x))."""
    if not isinstance(values, np.ndarray):
        return values.sigmoid()
    with np.errstate(over="ignore"):  # exp is infinite where the result is 0
        return 1 / (1 + np.exp(-values))


def softmax(values: Array, axis: int = -1) -> Array:
    """Probabilities along an axis."""
    if not isinstance(values, np.ndarray):
        return values.softmax(dim=axis)
    powers = np.exp(values - values.max(axis=axis, keepdims=True))
    powers /= powers.sum(axis=axis, keepdims=True)
    return powers


def logit(values: Array, least: float) -> Array:
    """The logarithm of the odds of probabilities, which count as at least `least` and at most 1 - `least`."""
    if not isinstance(values, np.ndarray):
        return values.logit(least)
    with np.errstate(divide="ignore"):
        probable = np.clip(values, np.float32(least), np.float32(1 - least))
        return np.log(probable / (1 - probable))


def logarithm(values: Array, least: float) -> Array:
    """The logarithm of probabilities, which count as at least `least`."""
    library = library_of(values)
    return library.log(library.clip(values, least, None))
