"""What a method is: from a workbench to a sharing plan and the weights that go with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from merger.checkpoint import Checkpoint
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.distributed import Resources
from merger.outcomes import Trial
from merger.training.recipe import Recipe, check
from merger.training.step_config import check_precision
from models.bits import FP32, WEIGHTS, WeightBits
from models.errors import InputError


@dataclass(frozen=True)
class MergeOptions:
    """Bounds of a merge, the same for every method.

    `recipe` None means: batch, epochs and frames as `Recipe`, the rate chosen on val. `margin` is how far above its
    target (as a part of the way to 1) a query must come on val; None leaves that to an interval, wide where val is
    small. Groups that save less than `min_saving` of all bytes
    are not tried; nothing is begun after `max_minutes`, nor after `max_work` (image passes x FLOPs: a bound that is
    the same on a slow machine). `precision` is fp32 or bf16. `weights`
    below fp32: the fewest bits they are stored in (merger.quantize). `resources` do not change the result.
    """

    recipe: Recipe = field(default_factory=Recipe)
    choose_rate: bool = True
    margin: float | None = None
    min_saving: float = 0.0
    max_minutes: float | None = None
    max_flops: float | None = None
    precision: str = "fp32"
    weights: WeightBits = FP32
    resources: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        if self.margin is not None:
            check("margin", 0 <= self.margin <= 1, self.margin, "give a number from 0 to 1")
        check_precision(self.precision)
        if self.weights not in WEIGHTS:
            remedy = f"choose one of: {', '.join(WEIGHTS)}"
            raise InputError("options", f"'{self.weights}' is unknown", remedy, "weights")
        check("min_saving", 0 <= self.min_saving <= 1, self.min_saving, "give a number from 0 to 1")

    def required(self, ctx: MergeContext) -> dict[str, float]:
        """The ratio on val from which each query is accepted."""
        return {query: ctx.required(query, self.margin) for query in ctx.queries}

    def to_json(self) -> dict[str, Any]:
        """Plain values, to recognise the options of an interrupted merge; it may go on with other resources."""
        plain = {name: value for name, value in self.__dict__.items() if name not in ("recipe", "resources")}
        return {**plain, "recipe": self.recipe.__dict__}


Method = Callable[[MergeContext, MergeOptions, Checkpoint], Merged]
Trials = Callable[[MergeContext, MergeOptions, Sequence[Mapping[str, Any]], float], list[Trial]]
"""From the workbench, the options, the log and the work of a method that has run: how each set was tried."""
METHODS: dict[str, Method] = {}
TRIALS: dict[str, Trials] = {}


def method(name: str, trials: Trials = lambda *_: []) -> Callable[[Method], Method]:
    """Register a method under its command-line name; `trials` accounts for the sets that it tries."""

    def register(function: Method) -> Method:
        METHODS[name], TRIALS[name] = function, trials
        return function

    return register
