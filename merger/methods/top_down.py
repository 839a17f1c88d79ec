"""Our method: tie every group at once, retrain all models together by distillation, and mend only what suffers.

GEMEL adds one group after the other and gives a group up when a model fails; here the merge starts at the ceiling,
one annealed training brings nearly all queries back, and a query that stays below its target is mended alone
(merger.mending) while nothing that others share is touched. A query of which next to nothing is left, at the start
of a hard merge or after a sprint, waits: the others are merged and accepted without it, and then it joins them. Where
next to nothing is left of any, models become parts of each other instead (merger.methods.adopting). What saved
most on the way, with every query having what is required, is the merge where the end saves less; before any training
that is what parts of one model answer of others' questions as they are (merger.methods.parts).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from merger.checkpoint import Checkpoint, State, snapshots
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.merit import met
from merger.core.method import MergeOptions, method
from merger.core.sizes import stored_bytes
from merger.core.snapshot import tie_and_evaluate
from merger.core.throughput import training_speed
from merger.mending.search import Case
from merger.mending.several import max_flops, mend_all
from merger.methods.adopting import Adopting
from merger.methods.early import early_layers, plan_without, tell_early
from merger.methods.parts import Parts
from merger.methods.prelude import SLOWER, besides, prelude
from merger.methods.rate import tell
from merger.methods.sprints import Sprints, Trained
from merger.outcomes import BACK, LEAVES, NO_TIME, Rows, Trial, all_at_once
from merger.start.alignment import by_shared_bytes
from merger.start.choosing import Start, choose_start
from merger.start.choosing import max_flops as work_of_choosing
from merger.training.recipe import Recipe
from models.sharing.groups import groups
from models.sharing.layers import model_bytes
from models.sharing.plan import SharingPlan
from models.sharing.similarity import add_identical, cosine_likeness, identical_sets, queries_identical

RATES = (5e-4, 2e-4, 1e-3)
JOINT = 0.8
"""The part of the time or work that the joint training may use up; the rest is kept for repairs."""
CHOICE = 0.25
"""Of what is left of that, what choosing a start may take."""
FIRST = 0.5
"""Of that, what those may use up who are merged before others join them."""
CHOOSING = "choosing what the shared weights start from"
TRAINING = "training all models together"
MENDING = "helping single models that fell short"
FEATURES = 1.0
"""What the features before the heads weigh beside the outputs."""


def _sets_tried(ctx: MergeContext, options: MergeOptions, log: Rows, flops: float) -> list[Trial]:
    """What is equal already, and the sets that were trained: the others of the whole plan, or what models took over."""
    sets = whole_plan(ctx, options).shared
    known = {query for row in log for query in row.get("equal", ())}
    as_is = [members for members in sets if members[0][0] in known]
    taken = [[tuple(map(tuple, members)) for members in row["sets"]] for row in log if "sets" in row]
    trained = taken[-1] if taken else [members for members in sets if members[0][0] not in known]
    return [*map(Trial, as_is), *all_at_once(trained, log, options.required(ctx), flops)]


@method("top-down", _sets_tried)
def wide(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Tie all, choose the start, train jointly, mend; a query that nothing helps gets its original back.

    Whoever shares only weights that are equal already is tied as it is, and takes no part in that.
    """
    whole, originals = ctx.run_on_rank0(partial(whole_plan, ctx, options)), snapshots(ctx.originals)
    equal = identical_sets(whole, originals)
    known = queries_identical(whole, equal)
    plan = whole.without(*known)
    recipe = replace(options.recipe, seed=ctx.seed, features=options.recipe.features or FEATURES)
    budget = Budget.of(ctx, options, checkpoint)
    trains = [CHOOSING, TRAINING, MENDING] if plan.shared else []
    if trains:
        ctx.stages.announce(trains)
    if not whole.shared:
        ctx.progress("warning", text="no two models have a layer in common that saves enough: nothing is shared")
    if equal.shared:
        saved = equal.saved_bytes(ctx.layers)
        ctx.progress("equal", sets=len(equal.shared), saved_bytes=saved, settled=sorted(known))
        checkpoint.add_row({"equal": sorted(known), "saved_bytes": saved, "flops": ctx.flops.total})
    merged = Merged(plan, originals)
    if plan.shared:
        merged = _merged(ctx, plan, recipe, options, checkpoint, budget)
    apart = ctx.queries.keys() - merged.plan.queries()
    states = {query: originals[query] if query in apart else state for query, state in merged.states.items()}
    merged = Merged(add_identical(merged.plan, equal, apart), states)
    if stored_bytes(ctx, merged.plan) > stored_bytes(ctx, equal):
        ctx.progress("warning", text="less is saved than by what is equal already: that alone is shared")
        merged = Merged(equal, originals)
    return merged


def _merged(
    ctx: MergeContext, plan: SharingPlan, recipe: Recipe, options: MergeOptions, checkpoint: Checkpoint, budget: Budget
) -> Merged:
    """What the training of all that share under a plan comes to."""
    required, originals = options.required(ctx), snapshots(ctx.originals)
    if math.isfinite(budget.ends):
        speed = checkpoint.step("speed", partial(training_speed, ctx, plan, recipe))
        budget = replace(budget, speed=speed)
    ctx.begin(CHOOSING, flops=work_of_choosing(ctx, plan))
    answered = ctx.run_on_rank0(Parts(ctx, plan, required, checkpoint, budget).answered)
    if _saved(ctx, answered) >= plan.saved_bytes(ctx.layers):
        checkpoint.add_row(_tried(answered))
        for stage in (TRAINING, MENDING):
            ctx.begin(stage)
        return Merged(answered.plan, {**originals, **answered.states})
    sprints = Sprints(ctx, plan, recipe, required, checkpoint, budget.fraction(JOINT), budget)
    early = early_layers(ctx, plan)
    trained = _trained(sprints, plan_without(plan, early), options.choose_rate)
    tell(ctx, checkpoint, trained.recipe)
    ctx.begin(MENDING, flops=max_flops(ctx, _cases(trained, required), budget))
    merged, rows = _mended(ctx, trained, required, checkpoint, budget)
    for row in rows:
        checkpoint.add_row(row)
    merged = _joined(sprints, merged, trained)
    before, first = max(trained.won, answered, key=partial(_saved, ctx)), trained.first
    if first is not None and max(_saved(ctx, merged), _saved(ctx, before)) < _saved(ctx, first):
        mend_first = partial(_mended, ctx, first, required, checkpoint, budget)
        as_first, rows = _remembered(checkpoint, "the first", mend_first)
        before = max(before, as_first, key=partial(_saved, ctx))
        for row in rows:
            checkpoint.add_row(row)
    if (saved := _saved(ctx, before)) > (instead := _saved(ctx, merged)):
        merged = Merged(before.plan, {**originals, **before.states})
        ctx.progress("warning", text="in the end less is saved than held on the way: back to that")
        checkpoint.add_row({"accepted_bytes": saved, "instead_of_bytes": instead, "flops": ctx.flops.total})
        if before is answered:
            checkpoint.add_row(_tried(answered))
        left = {row["query"] for row in checkpoint.log if row.get("repair") == LEAVES}
        for query in sorted(plan.queries() - merged.plan.queries() - left):
            why = {"after": BACK, "ratio": trained.ratios.get(query), "required": required[query]}
            checkpoint.add_row({"query": query, "repair": LEAVES, **why, "flops": ctx.flops.total})
    tell_early(ctx, early, merged, checkpoint, required)
    return merged


def _mended(
    ctx: MergeContext, trained: Trained, required: Mapping[str, float], checkpoint: Checkpoint, budget: Budget
) -> tuple[Merged, list[dict[str, Any]]]:
    """What is merged once those below were mended, and rows for the log."""
    merged = Merged(trained.plan, {**snapshots(ctx.originals), **trained.states})
    return mend_all(ctx, merged, _cases(trained, required), checkpoint, budget)


def _joined(sprints: Sprints, merged: Merged, trained: Trained) -> Merged:
    """What is merged once those who left during the training share the layers that they bear of it."""
    sharing = merged.plan.queries()
    left = [query for query in by_shared_bytes(sprints.ctx, sprints.plan) if query in trained.own.keys() - sharing]
    if not left or not sharing or sprints.checkpoint.step("too late to join", lambda: sprints.end.over):
        return merged
    standing = Merged(merged.plan, {query: merged.states[query] for query in sorted(sharing)})
    run = partial(sprints.deep(sprints.end).run, standing, trained.own, left)
    joined = Merged.from_plain(sprints.took("joining", run)["merged"])
    return Merged(joined.plan, {**merged.states, **joined.states})


def _remembered(
    checkpoint: Checkpoint, name: str, mend: Callable[[], tuple[Merged, list[dict[str, Any]]]]
) -> tuple[Merged, list[dict[str, Any]]]:
    """What mending comes to, as a step of this name."""

    def plain() -> dict[str, Any]:
        merged, rows = mend()
        return {"merged": merged.to_plain(), "rows": rows}

    found = checkpoint.step(name, plain)
    return Merged.from_plain(found["merged"]), found["rows"]


def _cases(trained: Trained, required: Mapping[str, float]) -> list[Case]:
    takers = trained.own.keys() if met(trained.ratios, required) else set[str]()
    return [
        Case(query, ratio, required[query], trained.recipe, query in trained.alone, query in takers)
        for query, ratio in trained.ratios.items()
    ]


def _tried(answered: Merged) -> dict[str, Any]:
    """The log's row of the sets that were tried in place of the plan's."""
    return {"sets": [[list(member) for member in members] for members in answered.plan.shared]}


def _saved(ctx: MergeContext, found: Merged | Trained) -> int:
    return found.plan.saved_bytes(ctx.layers)


def whole_plan(ctx: MergeContext, options: MergeOptions) -> SharingPlan:
    """Every group of the wide signature that saves enough, repeated layers paired by the likeness of their weights."""
    total = sum(model_bytes(query) for query in ctx.queries.values())
    likeness = cosine_likeness({query: model.state_dict() for query, model in ctx.originals.items()})
    found = groups(ctx.layers, "wide", likeness=likeness)
    return SharingPlan.of(group for group in found if group.saved_bytes >= options.min_saving * total)


def _trained(sprints: Sprints, later: SharingPlan, choose_rate: bool) -> Trained:
    """What the training of all came to, in the end with those who waited for the others.

    Where it begins far off, early layers are apart, as in the plan `later`. There are no trials there, and none where
    some wait from the start: half an epoch makes nothing better that was solved, whatever the rate.
    """
    ctx, checkpoint = sprints.ctx, sprints.checkpoint
    start = checkpoint.step("start", partial(_start, sprints, again=later != sprints.plan))
    ctx.begin(TRAINING, flops=sprints.max_flops())
    nothing = Merged(SharingPlan(), {}).to_plain()
    if "shattered" in start:
        return _adopted(sprints, {**start, "won": nothing}, 0)
    far, own = later != sprints.plan and start["far"], start["apart"]
    if far:
        sprints = replace(sprints, plan=later, whole=sprints.plan)
    before = prelude(sprints, own, far)
    if far:
        if not checkpoint.step("an epoch may follow", lambda: sprints.may_begin):
            return _held(sprints, Merged.from_plain(before["won"]), own)
        tied = SharingPlan.from_json(before["tied"])
        again = partial(_start, sprints, {**own, **before["states"]}, tied=tied)
        start = {**checkpoint.step("start without early layers", again), "own": own}
        sprints = replace(sprints, pace=SLOWER if tied.shared else 1.0)
    start = {**start, "won": before["won"]}
    if start["waits"]:
        return _all_joined(sprints, _of_the_others(sprints, start), start)
    found = checkpoint.step("trials", partial(_trials, sprints, start)) if choose_rate and not far else start
    sprints = replace(sprints, recipe=replace(sprints.recipe, rate=found.get("rate", sprints.recipe.rate)))
    return _all_joined(sprints, replace(sprints, lost_wait=True, own=start["own"]).run(found), start)


def _held(sprints: Sprints, won: Merged, own: Mapping[str, State]) -> Trained:
    """What the training came to where no work was left for it: what was `won` before."""
    ratios = {query: sprints.required[query] for query in sorted(won.plan.queries())}
    for query in sorted(sprints.plan.queries() - ratios.keys()):
        _leaves(sprints, query, NO_TIME, None)
    return Trained(won.plan, won.states, ratios, sprints.recipe, (), 0, won, own=own)


def _leaves(sprints: Sprints, query: str, after: str, ratio: float | None) -> None:
    """Say that a query gets its original back."""
    row = {"query": query, "repair": LEAVES, "after": after, "ratio": ratio, "required": sprints.required[query],
           "flops": sprints.ctx.flops.total}  # fmt: skip
    sprints.ctx.progress("repair", **row)
    sprints.checkpoint.add_row(row)


def _of_the_others(sprints: Sprints, start: Mapping[str, Any]) -> Trained:
    """What the training came to of those who do not wait from the `start`, which tells what the others lose."""
    waits: Mapping[str, float] = start["waits"]
    for query, error in waits.items():
        row = {"waits": query, "after": "the start", "lost": error, "required": sprints.required[query],
               "flops": sprints.ctx.flops.total}  # fmt: skip
        sprints.ctx.progress("waits", **row)
        sprints.checkpoint.add_row(row)
    budget = sprints.budget.fraction(FIRST)
    plan = sprints.plan.without(*waits)
    others = replace(sprints, plan=plan, budget=budget, others_wait=True, lost_wait=True, own=start["own"])
    found = sprints.checkpoint.step("start of the others", partial(_begun, others, start["apart"]))
    return others.run({**found, "won": start["won"]})


def _all_joined(sprints: Sprints, first: Trained, start: Mapping[str, Any]) -> Trained:
    """What the training of all came to once those who waited, since the start or since a sprint, joined the `first`.

    Where nothing was won by these, whoever was lost on the way leaves, and so do all where no work is left.
    """
    ctx, checkpoint = sprints.ctx, sprints.checkpoint
    waiting = sprints.plan.queries() - first.plan.queries()
    if not waiting:
        return first
    if not (start["waits"] or first.plan.shared):
        return _adopted(sprints, {**start, "won": first.won.to_plain()}, first.sprints)
    before = _saved(ctx, Merged.from_plain(start["won"]))
    won = saved if (saved := _saved(ctx, first.won)) > before else 0
    if not checkpoint.step("all may join", lambda: bool(won or start["waits"]) and sprints.may_begin):
        lost = {row["waits"]: row for row in checkpoint.log if "waits" in row}
        for query in sorted(waiting - first.plan.queries()):
            _leaves(sprints, query, lost[query]["after"], lost[query].get("ratio"))
        return first
    ctx.progress("accepted", saved_bytes=won, ratios=first.ratios)
    checkpoint.add_row({"accepted_bytes": won, "flops": ctx.flops.total})
    found = checkpoint.step("start of all", partial(_begun, sprints, {**start["apart"], **first.states}))
    joined = replace(sprints, own=start["own"], pace=1.0)
    return replace(joined.run({**found, "won": first.won.to_plain()}, first.sprints), first=first)


def _adopted(sprints: Sprints, start: Mapping[str, Any], number: int) -> Trained:
    """What it comes to when models become parts of each other, after so many sprints in vain."""
    sprints.ctx.progress("adopting", queries=sorted(sprints.plan.queries()))
    plan = sprints.whole or sprints.plan
    adopting = Adopting(sprints.ctx, plan, sprints.required, sprints.checkpoint, sprints.end, sprints.recipe)
    merged, ratios = sprints.ctx.run_on_rank0(adopting.run)
    ratios, own = {query: ratios[query] for query in sorted(merged.plan.queries())}, start["apart"]
    won = max(merged, Merged.from_plain(start["won"]), key=partial(_saved, sprints.ctx))
    return Trained(merged.plan, merged.states, ratios, sprints.recipe, (), number, won, own=own)


def _start(
    sprints: Sprints,
    apart: Mapping[str, State] | None = None,
    again: bool = False,
    tied: SharingPlan = SharingPlan(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """What is found before anything is trained: the best start, and who waits, with what they lose.

    It is made of models `apart` that have their channels in one order, where these are known. Nobody waits where
    nothing would be left to share, where next to nothing is left of any query, or where all have trained together
    before. Where a start that is far off is chosen `again`, it is solved only to see whether next to nothing is left.
    Sets that are `tied` already stay as they are.
    """
    rest = besides(sprints.plan, tied)
    if apart is not None and not rest.shared:
        begins = Start(dict(apart), {}, dict(apart))
        return {"waits": {}, "apart": apart, "own": apart, "far": True, **_tied(sprints, begins)}
    start = _chosen(replace(sprints, plan=rest), apart, solving=not again)
    if again and start.near_shattered:
        start = _chosen(sprints, apart)
    found = {"waits": {}, "apart": start.apart, "own": start.own, "far": start.far}
    if start.shattered and apart is None:
        return {**found, "shattered": True}
    if again and start.far:
        return found
    if start.far_behind and not tied.shared and sprints.plan.without(*start.far_behind).shared:
        return {**found, "waits": start.far_behind}
    return {**found, **_tied(sprints, start)}


def _begun(sprints: Sprints, apart: Mapping[str, State]) -> dict[str, Any]:
    """The best start of models that have their channels in one order, tied."""
    return _tied(sprints, _chosen(sprints, apart))


def _chosen(sprints: Sprints, apart: Mapping[str, State] | None = None, solving: bool = True) -> Start:
    max_flops = sprints.checkpoint.step("most work", lambda: CHOICE * sprints.budget.flops_left)
    return choose_start(sprints.ctx, sprints.plan, sprints.checkpoint, apart, max_flops, solving)


def _tied(sprints: Sprints, start: Start) -> dict[str, Any]:
    """The models of a start, tied, with the norms that serve them better, and their ratios on val."""
    queries = sorted(sprints.plan.queries())
    models, ratios = tie_and_evaluate(sprints.ctx, sprints.checkpoint, sprints.plan, queries, start.states)
    return {"states": snapshots(models), "ratios": ratios}


def _trials(sprints: Sprints, start: Mapping[str, Any]) -> dict[str, Any]:
    """What half an epoch makes of the start at a good rate; the merge goes on from there.

    The first rate that brings any of it back is taken, else the best of all: half an epoch flatters a low rate, and
    the work of a trial is worth more in training. None begins that leaves no work for a sprint.
    """
    ctx, checkpoint = sprints.ctx, sprints.checkpoint
    frames = math.ceil(sprints.recipe.frames_per_epoch / 2)
    best = checkpoint.state("best of trials")
    for rate in RATES:
        if rate in best.get("tried", ()) or best.get("reached", -1.0) > 0:
            continue
        short = replace(sprints.recipe, rate=rate, epochs=1, frames_per_epoch=frames)
        if not checkpoint.step(f"rate {rate:g} fits", partial(sprints.leaves_enough, short)):
            break
        begins = {**start, "won": best.get("won", start.get("won"))}
        found = checkpoint.step(f"rate {rate:g}", partial(sprints.sprint, begins, short))
        reached = _regained(start["ratios"], found["ratios"])
        ctx.progress("rate", rate=rate, epochs=0.5, regained=reached)
        if reached > best.get("reached", -1.0):
            best.update({**found, "rate": rate, "reached": reached})
        best.update(tried=[*best.get("tried", ()), rate], won=found["won"])
        checkpoint.discard(f"rate {rate:g}")
    return dict(best) if "tried" in best else dict(start)


def _regained(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """The part of what was lost, on the sum of the queries, that training brought back."""
    lost = sum(max(0.0, 1 - ratio) for ratio in before.values())
    return 1 - sum(max(0.0, 1 - ratio) for ratio in after.values()) / lost if lost else 1.0
