"""What is said of a model's parts where no tensor is at hand: the words of arguments and manifests, codes, shapes.

A bundle is looked at without torch, so nothing here needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

LOW_RANK = "low_rank"
"""The argument of a model that asks for layers as two factors (models.parts.low_rank)."""
FACTORS = ("a", "b")
Width = Literal["fp16", "int8"]
"""How a weight can be stored in fewer bits (models.parts.widths)."""
FP32 = "fp32"
WEIGHTS = (FP32, "fp16", "int8")
WIDE_CODE = "F32"
"""What packed weights are widened to, as the container calls it."""
STORED_CODES: dict[str, str] = {"fp16": "F16", "int8": "I8"}
MOST = 127
"""The largest code of int8; -128 is left out, so that codes are symmetric."""


def with_ranks(model_args: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, Any]:
    """A model's arguments with these ranks in place of those they had; without any, the plain architecture."""
    plain = {key: value for key, value in model_args.items() if key != LOW_RANK}
    return {**plain, LOW_RANK: dict(ranks)} if ranks else plain


def residual_shapes(weight: Sequence[int], groups: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a residual's a and b beside a weight (out, in, ...); ValueError when groups != 1 or the rank does
    not fit.
    """
    if groups != 1:
        raise ValueError(f"a convolution with {groups} groups cannot carry a residual")
    out, *inner = weight
    most = min(out, math.prod(inner))
    if not 1 <= rank <= most:
        raise ValueError(f"rank {rank} does not fit a weight of shape {tuple(weight)} (1 to {most})")
    return (rank, *inner), (out, rank, *(1,) * (len(inner) - 1))
