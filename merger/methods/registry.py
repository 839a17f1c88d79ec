"""What a method is, the methods by name, and what their stages work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gemel.merger.budget import Budget
from gemel.merger.checkpoint import Checkpoint, Row, Step, StepCache
from gemel.merger.config import MergeOptions, TopDownConfig
from gemel.merger.context import MergeContext, Merged
from gemel.merger.evaluate import required_ratios, training_flops
from gemel.merger.events import Change, Event, StepStart
from gemel.merger.outcomes import SetTrial
from gemel.merger.training.recipe import Recipe
from gemel.models.notes import add_note
from gemel.models.plugins import Registry
from gemel.models.sharing.plan import SharingPlan


class Method(ABC):
    """A way to find what queries share. The fields of its dataclass, if it is one, are its options.

    `searches`: it shares anything at all. `accepts`: val accepts its result query by query. `keeps_donors`: it leaves
    donors of a bundle as they are, so that queries can be added to it. `ties_identical`: where fewer bits undo what it
    trained, identical weights alone are tied.
    """

    name: ClassVar[str]
    searches: ClassVar[bool] = True
    accepts: ClassVar[bool] = True
    keeps_donors: ClassVar[bool] = False
    ties_identical: ClassVar[bool] = False

    @abstractmethod
    def run(self, ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
        """What is shared, and the state of each query."""

    def explain(self, ctx: MergeContext, options: MergeOptions, log: Sequence[Row], flops: float) -> list[SetTrial]:
        """From the log and the FLOPs of a finished run: how each set of layers was tried."""
        return []


METHODS: Registry[Method] = Registry("gemel.methods", "method", Method, makes=True)


@dataclass(frozen=True)
class MergeTask:
    """What a stage works with: the whole `plan`, the `recipe`, each query's `required` ratio, the `least` one that a
    proof might accept, the budget.
    """

    ctx: MergeContext
    plan: SharingPlan
    recipe: Recipe
    required: Mapping[str, float]
    least: Mapping[str, float]
    budget: Budget
    checkpoint: StepCache
    config: TopDownConfig
    kin: frozenset[tuple[str, str]] = frozenset()
    """Pairs of queries that are not answered by each other's network: sharing layers keeps norms and heads."""

    def report(self, event: Event, **fields: Any) -> None:
        """Add a row to the log and pass the same fields to the progress."""
        report_row(self.ctx, self.checkpoint, event, fields)

    def private_recipe(self, epochs: int, seed: int) -> Recipe:
        """How norms, heads and private layers are trained while shared weights are frozen; `seed` is added."""
        config, recipe = self.config, self.recipe
        return replace(
            recipe, epochs=epochs, frames_per_epoch=config.frozen_frames * recipe.frames_per_epoch, private=1.0,
            norms=config.norm_learning_rate / recipe.rate, seed=recipe.seed + seed,
        )  # fmt: skip

    def fit_recipe(self, queries: Sequence[str], recipe: Recipe, min_frames: int) -> Recipe | None:
        """The recipe within the budget: fewer frames an epoch (at least `min_frames`), then fewer epochs; None if not
        even one epoch fits."""
        for frames in (recipe.frames_per_epoch, min_frames):
            epoch = training_flops(self.ctx, queries, replace(recipe, epochs=1, frames_per_epoch=frames))
            epochs = min(float(recipe.epochs), self.budget.flops_left // max(1.0, epoch))
            if epochs == recipe.epochs or (epochs >= 1 and frames == min_frames):
                return replace(recipe, epochs=int(epochs), frames_per_epoch=frames)
        return None


def report_row(ctx: MergeContext, cache: StepCache, event: Event, fields: Row) -> None:
    """Add a row to the log and pass the same fields to the progress."""
    row = {**fields, "flops": ctx.flops.total}
    cache.add_row(row)
    ctx.report(event, **row)


def enter_step(
    ctx: MergeContext,
    cache: StepCache,
    budget: Budget,
    change: Change,
    gain: int,
    price: float,
    *parts: str,
    seconds: float = 0.0,
) -> StepStart:
    """Whether a step that could save `gain` bytes more and must save more than `price` begins; else the log says why.

    It begins only if it can end, where it takes so many `seconds`. `parts` tell apart two climbs over the same steps.
    """
    if gain <= price:
        fields = {"step": change.value, "possible_bytes": gain, "price_bytes": round(price)}
        if gain:
            report_row(ctx, cache, Event.LEFT_OUT, fields)
        return StepStart.LEFT_OUT
    if cache.step(Step.RUNG_TIME, lambda: budget.ends_within(seconds), change.value, *parts):
        text = f"leaves too little for '{change.value}', which could save up to {gain / 1e6:.1f} MB more"
        add_note("the budget", text, "raise --max-minutes or --max-flops")
        cache.add_row({"out_of_budget": change.value, "possible_bytes": gain, "flops": ctx.flops.total})
        return StepStart.OUT_OF_TIME
    return StepStart.BEGINS


def prepare_task(ctx: MergeContext, plan: SharingPlan, options: MergeOptions, checkpoint: Checkpoint) -> MergeTask:
    """What the stages of a method work with; training speed is measured if time is limited."""
    config, budget = options.top_down, Budget.of(ctx, options, checkpoint).fraction(options.search_share)
    features = options.recipe.features or config.feature_weight
    recipe = replace(options.recipe, seed=ctx.seed, features=features)
    if not ctx.accept_unproven:
        recipe = replace(recipe, distill=1.0)  # labels pull away from the original's answers where these are wrong
    checkpoint.add_row({"recipe": dict(recipe.__dict__), "flops": ctx.flops.total})
    ctx.report(Event.RECIPE, rate=recipe.rate, epochs=recipe.epochs, features=recipe.features, private=recipe.private)
    least = {query: ctx.trial_ratio(query) for query in ctx.queries}
    return MergeTask(ctx, plan, recipe, required_ratios(ctx), least, budget, checkpoint, config)
