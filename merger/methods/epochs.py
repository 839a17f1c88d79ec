"""What every method trains with: epochs with evaluations, early failure, and bisection over trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from gemel.merger.budget import Budget
from gemel.merger.checkpoint import Step, StepCache
from gemel.merger.config import MEASUREMENT
from gemel.merger.context import MergeContext
from gemel.merger.evaluate import evaluate_queries
from gemel.merger.events import Event
from gemel.merger.training.loop import OutOfTime
from gemel.merger.training.recipe import Recipe
from gemel.models.sharing.layers import weight_of
from gemel.models.sharing.plan import SharingPlan


def train_epochs(
    ctx: MergeContext,
    models: Mapping[str, nn.Module],
    recipe: Recipe,
    cache: StepCache,
    budget: Budget | None = None,
) -> Iterator[dict[str, float]]:
    """Train epoch by epoch and yield every query's ratio after each; stop by not asking for more.

    An epoch in which the budget ends is not evaluated.

    After few steps a model is also evaluated with recalibrated norms, because a moving average has not caught up with
    its weights yet. A resumed training goes on at the first epoch whose ratios the caller had not dealt with.
    Raises Diverged.
    """
    training = ctx.training(models, recipe)
    cache.training(training)
    if budget is not None:
        training.is_over = lambda: budget.over
    seen = cache.state(Step.EVALUATED)
    for epoch in range(seen.get("epochs", 0), recipe.epochs):
        while training.epochs <= epoch:
            ctx.trained.update(dict.fromkeys(models, True))
            try:
                training.epoch()
            except OutOfTime:
                return
        if epoch + 1 >= min(recipe.evaluate_from, recipe.epochs):
            settling = MEASUREMENT.settling_frames if training.step < MEASUREMENT.settling_steps else 0
            ratios = evaluate_queries(ctx, cache, Step.EVALUATED, models, settling, str(epoch + 1))
            fields = {"epoch": epoch + 1, "epochs": recipe.epochs, "loss": training.loss, "ratios": ratios}
            ctx.report(Event.EPOCH, queries=list(ratios), **fields)
            ctx.expect(None)
            yield ratios
            seen["epochs"] = epoch + 1
            cache.discard(Step.EVALUATED, str(epoch + 1))


def freeze_shared(models: Mapping[str, nn.Module], plan: SharingPlan) -> None:
    """Freeze the weights that these models share under a plan."""
    for members in plan.shared:
        for query, path in members:
            if query in models:
                owner, attribute = weight_of(models[query], path)
                getattr(owner, attribute).requires_grad_(False)


def is_hopeless(
    history: Sequence[Mapping[str, float]], required: Mapping[str, float], epochs_left: int, patience: int
) -> bool:
    """Early failure (GEMEL, section 5): twice the mean gain of the last `patience` epochs would not suffice."""
    if len(history) < patience + 2:
        return False
    for query, ratio in history[-1].items():
        gain = max(0.0, (ratio - history[-1 - patience][query]) / patience)
        if ratio < required[query] and ratio + 2 * gain * epochs_left < required[query]:
            return True
    return False


def bisect_options(count: int, holds: Callable[[int], bool], over: Callable[[], bool]) -> int:
    """The first of `count` options, in ascending cost, that holds; `count` without one. None is tried once `over`."""
    held, failed = count, -1
    while held - failed > 1 and not over():
        index = (failed + held) // 2
        if holds(index):
            held = index
        else:
            failed = index
    return held
