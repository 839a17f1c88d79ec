"""One attempt at sharing one more set of layers: tie, retrain jointly, and take what holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from merger.training import Diverged, Recipe
from merger.workbench import Merged, State, Workbench, snapshot
from models.layers import weight_key
from models.plan import Member


@dataclass(frozen=True)
class Attempt:
    """What came of it: the members that may keep sharing, the state they keep, and the best ratios seen on val."""

    kept: tuple[Member, ...]
    merged: Merged | None
    ratios: Mapping[str, float]
    epochs: int
    diverged: bool = False


def train_while(bench: Workbench, models: Mapping[str, nn.Module], recipe: Recipe) -> Iterator[dict[str, float]]:
    """Train epoch by epoch; after each, every query's ratio on val. Stop early by not asking for more."""
    training = bench.training(models, recipe)
    for epoch in range(recipe.epochs):
        loss = training.epoch()
        ratios = {query: bench.ratio(query, model) for query, model in models.items()}
        bench.progress("epoch", queries=list(models), epoch=epoch + 1, epochs=recipe.epochs, loss=loss, ratios=ratios)
        yield ratios


def attempt(
    bench: Workbench,
    accepted: Merged,
    members: Sequence[Member],
    recipe: Recipe,
    required: Mapping[str, float],
) -> Attempt:
    """Share one more set on top of what is accepted and retrain all models tied to it (GEMEL, section 5).

    Ends early when all reach `required`, or when the gain of the last epoch, extrapolated, is too small for those
    that don't. The state is adopted whenever one more member holds.
    """
    plan = accepted.plan.with_set(members)
    queries = plan.tied_to(query for query, _ in members)
    models = bench.tied(plan, sorted(queries), accepted.states)
    ratios = {query: bench.ratio(query, model) for query, model in models.items()}
    best = Attempt((), None, ratios, 0)
    history = [ratios]
    epochs = train_while(bench, models, recipe)
    try:
        for epoch in range(recipe.epochs + 1):
            if epoch:
                ratios = next(epochs)
                history.append(ratios)
            met = {query for query, ratio in ratios.items() if ratio >= required[query]}
            if sum(query in met for query, _ in members) > len(best.kept):
                kept, merged = _what_holds(bench, accepted, members, models, met, required)
                if merged is not None:
                    best = Attempt(kept, merged, ratios, epoch)
            if len(best.kept) == len(members):
                return best
            if _hopeless(history, required, recipe.epochs - epoch):
                break
    except Diverged:
        return Attempt(best.kept, best.merged, best.ratios, len(history) - 1, diverged=True)
    peak = {query: max(row[query] for row in history) for query in ratios}
    return Attempt(best.kept, best.merged, peak, len(history) - 1)


def _what_holds(
    bench: Workbench,
    accepted: Merged,
    members: Sequence[Member],
    models: Mapping[str, nn.Module],
    met: set[str],
    required: Mapping[str, float],
) -> tuple[tuple[Member, ...], Merged | None]:
    """The present state with the failing members taken out of the new set, if every query then reaches its target.

    A failing member gets back its last accepted weight for this layer; tied to nobody else, it gets back all of it.
    """
    failing = [(query, path) for query, path in members if query not in met]
    kept = tuple(member for member in members if member not in failing)
    bystanders = set(models) - {query for query, _ in members}
    if len(kept) < 2 or not bystanders <= met:
        return (), None
    states: dict[str, State] = {**accepted.states, **{query: snapshot(model) for query, model in models.items()}}
    for query, path in failing:
        if accepted.plan.tied_to([query]) == {query}:
            states[query] = dict(accepted.states[query])
            continue
        key = weight_key(states[query], path)
        states[query][key] = accepted.states[query][key]
        model = bench.models([query], states)[query]
        bench.calibrate(query, model)
        if bench.ratio(query, model) < required[query]:
            return (), None
        states[query] = snapshot(model)
    return kept, Merged(accepted.plan.with_set(kept), states)


def _hopeless(history: Sequence[Mapping[str, float]], required: Mapping[str, float], epochs_left: int) -> bool:
    """Early failure: even twice the mean gain of the last two epochs, kept up to the end, would not do."""
    if len(history) < 4:
        return False
    for query, ratio in history[-1].items():
        gain = max(0.0, (ratio - history[-3][query]) / 2)
        if ratio < required[query] and ratio + 2 * gain * epochs_left < required[query]:
            return True
    return False
