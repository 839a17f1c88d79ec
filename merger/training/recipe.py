"""How to train: what an option may be, and what a frame costs and a query contributes by it.

What a merge takes, in a cost that is the same on every machine.

The device that everything is trained and judged on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from models.cost import flops
from models.errors import InputError
from models.workload import Query
from models.zoo import build_query

BACKWARD_PASSES = 2


@dataclass(frozen=True)
class Recipe:
    """How to train. `rate` is AdamW's peak; it warms up over a tenth of the steps and falls to zero as a cosine.

    `frames_per_epoch` bounds what one query contributes to an epoch. `distill` is the weight of the originals' outputs
    against that of the labels (1 where there are no labels), `features` that of what goes into the heads, added to
    both. A batch is made of nodes of `node` frames (`merger.training.data`). A search gives an attempt up when the
    gain of the last `patience` epochs, kept up twofold, would not do. Where models share weights, those that one has
    for itself move at `private` times the rate: they began right, and are to stay so while the others come to them.
    Norms and biases move at `norms` times the rate. A model that trains alone is judged from the epoch `evaluate_from`
    on: the best of many flatters. With `recompute` most intermediates are computed again in the backward pass and not
    kept (`merger.training.step_config`).
    """

    rate: float = 5e-4
    epochs: int = 4
    batch: int = 16
    frames_per_epoch: int = 512
    distill: float = 0.5
    weight_decay: float = 1e-2
    seed: int = 0
    node: int = 16
    features: float = 0.0
    patience: int = 2
    private: float = 0.1
    norms: float = 1.0
    evaluate_from: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("rate", "epochs", "batch", "frames_per_epoch", "node", "patience", "evaluate_from"):
            check(name, getattr(self, name) > 0, getattr(self, name), "give a number above 0")
        check("distill", 0 <= self.distill <= 1, self.distill, "give a number from 0 to 1")
        check("norms", self.norms > 0, self.norms, "give a number above 0")
        check("private", self.private >= 0, self.private, "give a number from 0 on")
        check("features", self.features >= 0, self.features, "give a number from 0 on")
        whole = self.batch <= self.node or self.batch % self.node == 0
        check("batch", whole, self.batch, f"give at most {self.node}, or a multiple of it (a node)")

    def passes(self, taught: bool = True) -> int:
        """Forward passes that a frame costs: the model's own, two for the gradient, one where intermediates are
        computed again, and the original's where it is taught.
        """
        return 1 + BACKWARD_PASSES + self.recompute + taught

    def contributions(self, lengths: Mapping[str, int], eased: Collection[str] = ()) -> dict[str, int]:
        """The frames that each query contributes to an epoch when these, with splits so long, train together.

        Those `eased` give half as many as the others, and none of their frames twice.
        """
        most = max(min(length, self.frames_per_epoch) for length in lengths.values())
        return {query: min(math.ceil(most / 2), count) if query in eased else most for query, count in lengths.items()}


def check(name: str, sound: bool, value: float, remedy: str) -> None:
    """Raise InputError when an option's value is not sound."""
    if not sound:
        raise InputError("options", f"{value:g} makes no sense", remedy, name)


class Flops:
    """Image passes x FLOPs spent in retraining; a backward pass counts as two forward ones.

    `told` is called after each addition.
    """

    def __init__(self) -> None:
        self.total: float = 0  # a whole number, so that it does not depend on the order of additions
        self.told: Callable[[], None] = lambda: None
        self._flops: dict[str, int] = {}

    def add(self, query: Query, passes: int) -> None:
        """Count `passes` forward passes of one image through the query's model."""
        self.add_flops(passes * self.of(query))

    def add_flops(self, flops: int) -> None:
        """Count so many FLOPs of anything else."""
        self.total += flops
        self.told()

    def of(self, query: Query) -> int:
        """FLOPs of one forward pass of one image."""
        if query.id not in self._flops:
            self._flops[query.id] = forward_flops(query)
        return self._flops[query.id]


def forward_flops(query: Query) -> int:
    """FLOPs of one frame through the query's model, found without weights."""
    model = build_query(query, device="meta")
    return flops(model, query.input_size)


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
