"""GEMEL's search (Padmanabhan et al., NSDI 2023, section 5): one more group at a time, retrained jointly.

Groups of the paper's signature are tried in descending order of bytes saved. The members that reach their target keep
sharing. If some fail, half of these leave the group and the rest is tried again, while it saves more than the next one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from gemel.merger.budget import Budget
from gemel.merger.checkpoint import Checkpoint, Row, State, Step, StepCache, snapshot, snapshots, storable
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext, Merged
from gemel.merger.evaluate import queries_at_target, required_ratios, tie_and_evaluate, training_flops
from gemel.merger.events import Event
from gemel.merger.methods.epochs import is_hopeless, train_epochs
from gemel.merger.methods.registry import Method
from gemel.merger.outcomes import SetTrial, explain_attempts
from gemel.merger.training.loop import Diverged
from gemel.merger.training.recipe import Recipe
from gemel.models.sharing.groups import Group, groups
from gemel.models.sharing.layers import model_bytes, weight_key
from gemel.models.sharing.plan import Member, SharingPlan

SEARCHING = "sharing one group of layers after the other"
SEEDS_PER_ROUND = 100


def worthwhile_groups(ctx: MergeContext, options: MergeOptions) -> list[Group]:
    """The groups of the paper's signature that save enough, in descending order of bytes saved."""
    total = sum(model_bytes(query) for query in ctx.queries.values())
    found = groups(ctx.layers, "strict", pairing="order")
    return [group for group in found if group.saved_bytes >= options.min_saving * total]


class GemelSearch(Method):
    """The paper's search: one more group at a time, retrained jointly.

    Groups one after the other, on top of what is accepted.
    """

    name = "gemel"

    def run(self, ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
        """Try the groups one by one on top of what is accepted."""
        queue = worthwhile_groups(ctx, options)
        required, budget = required_ratios(ctx), Budget.of(ctx, options, checkpoint)
        checkpoint.add_row({"recipe": dict(options.recipe.__dict__), "flops": ctx.flops.total})
        ctx.stages.announce([SEARCHING])
        ctx.begin(SEARCHING, pieces=len(queue))
        ceiling = sum(group.saved_bytes for group in queue)
        started = time.monotonic() - checkpoint.seconds
        done = checkpoint.state(Step.SEARCH)
        if not done:
            done.update(accepted=Merged(SharingPlan(), snapshots(ctx.originals)), rounds=0, rows=[])
        for index in range(done["rounds"], len(queue)):
            ctx.expect(partial(training_flops, ctx, ctx.judged * (len(queue) - index), options.recipe))
            if budget.over:
                ctx.warn(f"time is over after {index} of {len(queue)} groups; the others were not tried")
                break
            with checkpoint.open_step(Step.ROUND, str(index + 1)) as step:
                if not step.done:
                    begun = done["accepted"]
                    step.value = _try_group(ctx, checkpoint, budget, begun, queue, index, options.recipe, required)
            accepted, rows = step.value
            done.update(accepted=accepted, rounds=index + 1, rows=[*done["rows"], *rows])
            checkpoint.discard(Step.ROUND, str(index + 1))
            checkpoint.save()
            ctx.report(
                Event.SEARCH_ROUND, round=index + 1, rounds=len(queue), signature=queue[index].signature,
                members=rows[-1]["kept"], saved_bytes=accepted.plan.saved_bytes(ctx.layers), ceiling_bytes=ceiling,
                ratios=rows[-1]["ratios"], seconds=time.monotonic() - started,
            )  # fmt: skip
            ctx.stages.reach(index + 1)
        checkpoint.log.extend(done["rows"])
        return done["accepted"]

    def explain(self, ctx: MergeContext, options: MergeOptions, log: Sequence[Row], flops: float) -> list[SetTrial]:
        """How each group was tried."""
        required = required_ratios(ctx)
        return explain_attempts([group.members for group in worthwhile_groups(ctx, options)], log, required)


@storable
@dataclass(frozen=True)
class Attempt:
    """One attempt at a group: the members that keep sharing, the state if any, and the best ratios."""

    kept: tuple[Member, ...]
    merged: Merged | None
    ratios: Mapping[str, float]
    epochs: int
    diverged: bool = False


def _try_group(
    ctx: MergeContext,
    cache: StepCache,
    budget: Budget,
    accepted: Merged,
    queue: Sequence[Group],
    index: int,
    recipe: Recipe,
    required: Mapping[str, float],
) -> tuple[Merged, list[Row]]:
    """What is accepted after all attempts at one group of the queue, and a log row for each attempt."""
    group, rows = queue[index], list[Row]()
    next_saving = queue[index + 1].saved_bytes if index + 1 < len(queue) else 0
    members, best = group.members, Attempt((), None, {}, 0)
    while len(members) > 1 and not (rows and budget.over):
        seed = (ctx.seed * len(queue) + index) * SEEDS_PER_ROUND + len(rows)
        before = cache.step(Step.BEGUN, lambda: ctx.flops.total, str(len(rows)))
        attempt = partial(attempt_set, ctx, accepted, members, replace(recipe, seed=seed), required, cache, budget)
        tried = cache.step(Step.ATTEMPT, attempt, str(len(rows)))
        if len(tried.kept) > len(best.kept):
            best = tried
        row = {
            "group": group.signature, "members": list(members), "kept": list(tried.kept), "epochs": tried.epochs,
            "ratios": dict(tried.ratios), "diverged": tried.diverged, "flops": ctx.flops.total,
            "flops_spent": ctx.flops.total - before,
        }  # fmt: skip
        rows.append(row)
        ctx.report(Event.ATTEMPT, round=index + 1, **row)
        members = smaller_set(members, tried.kept, tried.ratios)
        if len(members) <= len(best.kept) or group.bytes * (len(members) - 1) <= next_saving:
            break
    return best.merged or accepted, rows


def attempt_set(
    ctx: MergeContext,
    accepted: Merged,
    members: Sequence[Member],
    recipe: Recipe,
    required: Mapping[str, float],
    cache: StepCache,
    budget: Budget,
) -> Attempt:
    """Share one more set on top of what is accepted and retrain all models tied to it.

    Ends early once all reach `required`, or if the gain of the last epochs, extrapolated, is too small for those that
    do not. The state is adopted whenever one more member holds.
    """
    plan = accepted.plan.with_set(members)
    queries = sorted(plan.tied_to(query for query, _ in members))
    models, begun = tie_and_evaluate(ctx, cache, plan, queries, accepted.states)
    notes = cache.state(Step.PROGRESS)
    history: list[dict[str, float]] = notes.setdefault("history", [])
    best: Attempt = notes.setdefault("best", Attempt((), None, {}, 0))
    epochs = train_epochs(ctx, models, recipe, cache, budget)
    try:
        for epoch in range(len(history), recipe.epochs + 1):
            ratios = next(epochs, None) if epoch else begun
            if ratios is None:
                break
            holding = set(queries_at_target(ratios, required))
            if sum(query in holding for query, _ in members) >= max(2, len(best.kept) + 1):
                kept, merged = _holding_subset(ctx, accepted, members, models, holding, required)
                if merged is not None:
                    best = notes["best"] = Attempt(kept, merged, ratios, epoch)
            history.append(ratios)
            if len(best.kept) == len(members):
                return best
            if is_hopeless(history, required, recipe.epochs - epoch, recipe.patience):
                break
    except Diverged:
        return replace(best, ratios=best.ratios or history[0], epochs=len(history) - 1, diverged=True)
    peak = {query: max(row[query] for row in history) for query in history[0]}
    return Attempt(best.kept, best.merged, peak, len(history) - 1)


def smaller_set(members: Sequence[Member], kept: Sequence[Member], ratios: Mapping[str, float]) -> tuple[Member, ...]:
    """The members to try next: those that held, and the better half of those that did not."""
    failing = sorted((m for m in members if m not in kept), key=lambda member: -ratios[member[0]])
    again = set(kept) | set(failing[: len(failing) // 2])
    return tuple(member for member in members if member in again)


def _holding_subset(
    ctx: MergeContext,
    accepted: Merged,
    members: Sequence[Member],
    models: Mapping[str, nn.Module],
    holding: set[str],
    required: Mapping[str, float],
) -> tuple[tuple[Member, ...], Merged | None]:
    """The present state without the failing members in the new set, if every query then reaches its target.

    A failing member gets back its last accepted weight for this layer; tied to no other, it gets back all of it.
    """
    failing = [(query, path) for query, path in members if query not in holding]
    kept = tuple(member for member in members if member not in failing)
    bystanders = set(models) - {query for query, _ in members}
    if len(kept) < 2 or not bystanders <= holding:
        return (), None
    states: dict[str, State] = {**accepted.states, **ctx.snapshots(models)}
    for query, path in failing:
        if accepted.plan.tied_to([query]) == {query}:
            states[query] = dict(accepted.states[query])
            continue
        key = weight_key(states[query], path)
        states[query][key] = accepted.states[query][key]
        model = ctx.models([query], states)[query]
        ctx.recalibrate(query, model)
        if ctx.ratio(query, model) < required[query]:
            return (), None
        states[query] = snapshot(model)
    return kept, Merged(accepted.plan.with_set(kept), states)
