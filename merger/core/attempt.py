"""One attempt at sharing one more set of layers: tie, retrain jointly, and take what holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from merger.checkpoint import State, StepCache, snapshot, snapshots
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.merit import met
from merger.core.snapshot import evaluate_all, tie_and_evaluate
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.layers import weight_key
from models.sharing.plan import Member, SharingPlan

SETTLING_FRAMES = 128
"""Train frames on which norms are measured before a model is judged."""
SETTLED = 30
"""Steps after which 4 % of a moving average (momentum 0.1) are older than the training."""


@dataclass(frozen=True)
class Attempt:
    """What came of it: the members that may keep sharing, the state they keep, and the best ratios seen on val."""

    kept: tuple[Member, ...]
    merged: Merged | None
    ratios: Mapping[str, float]
    epochs: int
    diverged: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Plain values and tensors, for a journal."""
        merged = self.merged.to_plain() if self.merged is not None else None
        return {**self.__dict__, "ratios": dict(self.ratios), "merged": merged}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Attempt:
        """Inverse of `to_plain`."""
        merged = Merged.from_plain(value["merged"]) if value["merged"] is not None else None
        return cls(**{**value, "merged": merged})


@dataclass(frozen=True)
class Subsampling:
    """Queries that have what is `required` take part in half of the steps at most, and make room for the others.

    Who they are tell the ratios on val that training `begins` with, and after that those judged last.
    """

    begins: Mapping[str, float]
    required: Mapping[str, float]


def train_while(
    ctx: MergeContext,
    models: Mapping[str, nn.Module],
    recipe: Recipe,
    journal: StepCache | None = None,
    plan: SharingPlan | None = None,
    evaluate_from: int = 1,
    subsampling: Subsampling | None = None,
) -> Iterator[dict[str, float]]:
    """Train epoch by epoch; after each from `evaluate_from` on, the ratios on val. Stop by not asking for more.

    Models that have taken few steps are judged with their running statistics measured again, too, and keep what serves
    them better: a moving average has not caught up with their weights yet.

    `plan` says what models share. With a journal it goes on where it stood:
    with the first epoch whose ratios the caller had not yet dealt with.
    """
    journal = journal or StepCache()
    training = ctx.training(models, recipe, met(subsampling.begins, subsampling.required) if subsampling else ())
    journal.training("training", training)
    seen = journal.state("validation")
    for epoch in range(seen.get("epochs", 0), recipe.epochs):
        while training.epochs <= epoch:
            training.epoch()
        if epoch + 1 < evaluate_from:
            continue
        name = f"judged {epoch + 1}"
        measured = SETTLING_FRAMES if training.step < SETTLED else 0
        ratios = evaluate_all(ctx, journal, name, models, plan or SharingPlan(), measured)
        ctx.progress(
            "epoch", queries=list(ratios), epoch=epoch + 1, epochs=recipe.epochs, loss=training.loss, ratios=ratios
        )
        if subsampling:
            training.subsample(met(ratios, subsampling.required))
        yield ratios
        seen["epochs"] = epoch + 1
        journal.discard(name)


def attempt(
    ctx: MergeContext,
    accepted: Merged,
    members: Sequence[Member],
    recipe: Recipe,
    required: Mapping[str, float],
    journal: StepCache | None = None,
) -> Attempt:
    """Share one more set on top of what is accepted and retrain all models tied to it (GEMEL, section 5).

    Ends early when all reach `required`, or when the gain of the last epochs, extrapolated, is too small for those
    that don't. The state is adopted whenever one more member holds. Accepted sets within `members` are replaced, by
    larger ones only.
    """
    journal = journal or StepCache()
    plan = extended(accepted.plan, members)
    queries = plan.tied_to(query for query, _ in members)
    models, begun = tie_and_evaluate(ctx, journal, plan, sorted(queries), accepted.states)
    least = max((len(shared) for shared in accepted.plan.shared if shared not in plan.shared), default=1) + 1
    notes = journal.state("attempt")
    history: list[dict[str, float]] = notes.setdefault("history", [])
    best = Attempt.from_plain(notes["best"]) if "best" in notes else Attempt((), None, {}, 0)
    epochs = train_while(ctx, models, recipe, journal, plan)
    try:
        for epoch in range(len(history), recipe.epochs + 1):
            ratios = next(epochs) if epoch else begun
            holding = set(met(ratios, required))
            if sum(query in holding for query, _ in members) >= max(least, len(best.kept) + 1):
                kept, merged = _what_holds(ctx, accepted, members, models, holding, required)
                if merged is not None:
                    best = Attempt(kept, merged, ratios, epoch)
                    notes["best"] = best.to_plain()
            history.append(ratios)
            if len(best.kept) == len(members):
                return best
            if hopeless(history, required, recipe.epochs - epoch, recipe.patience):
                break
    except Diverged:
        return replace(best, ratios=best.ratios or history[0], epochs=len(history) - 1, diverged=True)
    peak = {query: max(row[query] for row in history) for query in history[0]}
    return Attempt(best.kept, best.merged, peak, len(history) - 1)


def extended(plan: SharingPlan, members: Sequence[Member], kept: Sequence[Member] | None = None) -> SharingPlan:
    """The plan with the members (of which only these are `kept`) as one set, in place of the sets within them."""
    others = tuple(shared for shared in plan.shared if not set(shared) <= set(members))
    return SharingPlan(others).with_set(members if kept is None else kept)


def _what_holds(
    ctx: MergeContext,
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
    states: dict[str, State] = {**accepted.states, **snapshots(models)}
    for query, path in failing:
        if accepted.plan.tied_to([query]) == {query}:
            states[query] = dict(accepted.states[query])
            continue
        key = weight_key(states[query], path)
        states[query][key] = accepted.states[query][key]
        model = ctx.models([query], states)[query]
        ctx.calibrate(query, model)
        if ctx.ratio(query, model) < required[query]:
            return (), None
        states[query] = snapshot(model)
    return kept, Merged(extended(accepted.plan, members, kept), states)


def hopeless(
    history: Sequence[Mapping[str, float]], required: Mapping[str, float], epochs_left: int, patience: int
) -> bool:
    """Early failure: even twice the mean gain of the last `patience` epochs, kept up to the end, would not do."""
    if len(history) < patience + 2:
        return False
    for query, ratio in history[-1].items():
        gain = max(0.0, (ratio - history[-1 - patience][query]) / patience)
        if ratio < required[query] and ratio + 2 * gain * epochs_left < required[query]:
            return True
    return False
