"""What a method is: from a workbench to a sharing plan and the weights that go with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from merger.checkpoint import Checkpoint
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.pace import laid_out
from merger.core.snapshot import ModelSnapshot
from merger.jobs import Resources
from merger.outcomes import Trial
from merger.training.precision import check_precision
from merger.training.recipe import Recipe, check
from models.bits import FP32, WEIGHTS, WeightBits
from models.errors import InputError


@dataclass(frozen=True)
class MergeOptions:
    """Bounds of a merge, the same for every method.

    `recipe` None means: batch, epochs and frames as `Recipe`, the rate chosen on val. `margin` is how far above its
    target (as a part of the way to 1) a query must come on val; None leaves that to an interval, wide where val is
    small. Groups that save less than `min_saving` of all bytes
    are not tried; nothing is begun after `max_minutes`, nor after `max_work` (image passes x FLOPs: a bound that is
    the same on a slow machine). `precision` auto: measured at the start for each architecture, and kept. `weights`
    below fp32: the fewest bits they are stored in (merger.widths.search). `resources` do not change the result.
    """

    recipe: Recipe = field(default_factory=Recipe)
    choose_rate: bool = True
    margin: float | None = None
    min_saving: float = 0.0
    max_minutes: float | None = None
    max_flops: float | None = None
    precision: str = "auto"
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
Trains = Callable[[MergeContext, MergeOptions], ModelSnapshot | None]
"""What a method trains together at first, with the originals' weights; None where that is nothing."""
METHODS: dict[str, Method] = {}
TRIALS: dict[str, Trials] = {}


def method(name: str, trials: Trials = lambda *_: [], trains: Trains | None = None) -> Callable[[Method], Method]:
    """Enter a method under the name the command line knows; `trials` accounts for the sets it tries, if any.

    What it `trains` at first is laid out on a card before it begins (merger.core.pace); one that does not say lays out
    its training itself, or goes on with less where memory is full.
    """

    def enter(function: Method) -> Method:
        def laid_out_first(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
            start = trains(ctx, options) if trains is not None and ctx.device.type != "cpu" else None
            if start is not None:
                laid_out(ctx, start, options.recipe, checkpoint)
            return function(ctx, options, checkpoint)

        METHODS[name], TRIALS[name] = laid_out_first, trials
        return function

    return enter
