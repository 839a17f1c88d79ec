"""How to train, and the FLOPs that training costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gemel.merger.checkpoint import storable
from gemel.models.errors import InputError
from gemel.models.export.cost import flops
from gemel.models.workload import Query
from gemel.models.zoo import build_query, input_size_of


@dataclass(frozen=True)
class OptimizerConfig:
    """What every training has in common.

    `epsilon` is AdamW's: at its usual 1e-8 a gradient of pure rounding error becomes a step of full size, whose
    direction depends on the machine. The learning rate warms up over `warmup_fraction` of the steps and falls to zero
    as a cosine. BatchNorm momentum falls with it, to `min_momentum_fraction`: from ten batches alone the averages are
    unstable (lab notes).
    """

    epsilon: float = 1e-6
    max_gradient_norm: float = 10.0
    warmup_fraction: float = 0.1
    min_momentum_fraction: float = 0.1
    max_eval_norms: float = 2.0
    """Largest factor on the learning rate of norms in eval mode."""
    min_epoch_frames: int = 256
    """An epoch of a short split repeats it: five steps of a hundred frames teach nothing."""
    backward_passes: int = 2
    """A backward pass costs about two forward passes."""


OPTIMIZER = OptimizerConfig()


@storable
@dataclass(frozen=True)
class Recipe:
    """How to train. `rate` is AdamW's peak learning rate.

    `frames_per_epoch` bounds what one query contributes to an epoch. `distill` weighs the loss against the original's
    outputs, 1 - `distill` that against labels (without labels: 1); `features` weighs the inputs of the heads, added to
    both. `micro_batch` frames pass through a model at once. A search stops early when the gain of the last `patience`
    epochs, extrapolated twofold, is too small. Where models share weights, unshared ones learn at `private` times the
    rate; norms and biases at `norms` times. Models are evaluated from epoch `evaluate_from` on: the
    best of many evaluations is biased upwards. `checkpointing` recomputes activations in the backward pass.
    """

    rate: float = 5e-4
    epochs: int = 4
    batch: int = 16
    frames_per_epoch: int = 512
    distill: float = 0.5
    weight_decay: float = 1e-2
    seed: int = 0
    micro_batch: int = 16
    features: float = 0.0
    patience: int = 2
    private: float = 0.1
    norms: float = 1.0
    evaluate_from: int = 1
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("rate", "epochs", "batch", "frames_per_epoch", "micro_batch", "patience", "evaluate_from"):
            check(name, getattr(self, name) > 0, getattr(self, name), "give a number above 0")
        check("distill", 0 <= self.distill <= 1, self.distill, "give a number from 0 to 1")
        check("norms", self.norms > 0, self.norms, "give a number above 0")
        check("private", self.private >= 0, self.private, "give a number from 0 on")
        check("features", self.features >= 0, self.features, "give a number from 0 on")
        whole = self.batch <= self.micro_batch or self.batch % self.micro_batch == 0
        check("batch", whole, self.batch, f"give at most {self.micro_batch}, or a multiple of it (a micro-batch)")

    def passes(self, taught: bool = True) -> int:
        """Forward passes that a frame costs: the model's own, the backward pass, recomputation, the teacher's."""
        return 1 + OPTIMIZER.backward_passes + self.checkpointing + taught

    def contribution(self, lengths: Iterable[int]) -> int:
        """Frames that each query contributes to an epoch, from the lengths of all splits; short ones are repeated."""
        return min(self.frames_per_epoch, max(OPTIMIZER.min_epoch_frames, *lengths))


def check(name: str, valid: bool, value: float, hint: str) -> None:
    """Raise InputError when an option's value is not valid."""
    if not valid:
        raise InputError("options", f"{value:g} makes no sense", hint, name)


class Flops:
    """Image passes x FLOPs spent in training and evaluation; `on_change` is called after each addition."""

    def __init__(self) -> None:
        self.total: float = 0  # a whole number, so that it does not depend on the order of additions
        self.on_change: Callable[[], None] = lambda: None
        self._per_image: dict[Query, int] = {}

    def add(self, query: Query, passes: int) -> None:
        """Count forward passes of one image through the query's model."""
        self.add_flops(passes * self.of(query))

    def add_flops(self, flops: int) -> None:
        """Count FLOPs of anything else."""
        self.total += flops
        self.on_change()

    def of(self, query: Query) -> int:
        """FLOPs of one forward pass of one image."""
        if query not in self._per_image:
            self._per_image[query] = forward_flops(query)
        return self._per_image[query]


def forward_flops(query: Query) -> int:
    """FLOPs of one frame through the query's model, counted without weights."""
    return flops(build_query(query, device="meta"), input_size_of(query))


def flops_a_second(flops: Flops, queries: Iterable[Query]) -> float:
    """FLOPs a second of these queries at their frame rates; one frame a second where the rate is unknown."""
    return sum((query.fps or 1.0) * flops.of(query) for query in queries)
