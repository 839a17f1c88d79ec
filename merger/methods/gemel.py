"""The paper's search (GEMEL, NSDI 2023, section 5): one more group at a time, in descending order of bytes saved."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from merger.attempt import Attempt, attempt
from merger.checkpoint import Checkpoint
from merger.method import MergeOptions, method
from merger.rate import choose_rate
from merger.training import Recipe
from merger.workbench import Merged, Workbench
from models.groups import Group, groups
from models.layers import model_bytes
from models.plan import Member, SharingPlan

SEEDS_PER_ROUND = 100


@method("gemel")
def gemel(bench: Workbench, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Try the groups of the strict signature one by one over what is already accepted.

    The members that reach their target keep sharing; of those that fail half are taken out, while what is left still
    saves more than the next group would. Resumes after the last finished round.
    """
    total = sum(model_bytes(query) for query in bench.queries.values())
    queue = [g for g in groups(bench.layers, "strict", pairing="order") if g.saved_bytes >= options.min_saving * total]
    required = {query: bench.required(query, options.margin) for query in bench.queries}
    accepted = checkpoint.merged(bench)
    recipe = _recipe(bench, options, checkpoint, queue)
    ceiling = sum(group.saved_bytes for group in queue)
    started = time.monotonic() - checkpoint.seconds
    for index in range(checkpoint.rounds, len(queue)):
        if options.max_minutes is not None and time.monotonic() - started > options.max_minutes * 60:
            text = f"stopped after {options.max_minutes:g} minutes, {index} of {len(queue)} groups"
            bench.progress("warning", text=text)
            break
        accepted, rows = _round(bench, accepted, queue, index, recipe, required)
        seconds = time.monotonic() - started
        saved = accepted.plan.saved_bytes(bench.layers)
        checkpoint.save(accepted, index + 1, rows, bench.work.total, seconds, recipe.rate)
        bench.progress(
            "round", round=index + 1, rounds=len(queue), signature=queue[index].signature, members=rows[-1]["kept"],
            saved_bytes=saved, ceiling_bytes=ceiling, ratios=rows[-1]["ratios"], seconds=seconds,
        )  # fmt: skip
    return accepted


def _recipe(bench: Workbench, options: MergeOptions, checkpoint: Checkpoint, queue: Sequence[Group]) -> Recipe:
    if checkpoint.rate is not None:
        return replace(options.recipe, rate=checkpoint.rate)
    if not options.choose_rate or not queue:
        return options.recipe
    plan = SharingPlan.of(queue[:1])
    queries = sorted(plan.tied_to(query for query, _ in queue[0].members))
    return replace(options.recipe, rate=choose_rate(bench, lambda: bench.tied(plan, queries), options.recipe))


def _round(
    bench: Workbench,
    accepted: Merged,
    queue: Sequence[Group],
    index: int,
    recipe: Recipe,
    required: Mapping[str, float],
) -> tuple[Merged, list[dict]]:
    """All attempts at one group; what is accepted afterwards, and a log row for each."""
    group = queue[index]
    next_saving = queue[index + 1].saved_bytes if index + 1 < len(queue) else 0
    members, base, best, rows = group.members, accepted, Attempt((), None, {}, 0), []
    while len(members) > 1:
        seed = (bench.seed * len(queue) + index) * SEEDS_PER_ROUND + len(rows)
        tried = attempt(bench, base, members, replace(recipe, seed=seed), required)
        if len(tried.kept) > len(best.kept):
            best = tried
        row = {
            "group": group.signature, "members": list(members), "kept": list(tried.kept), "epochs": tried.epochs,
            "ratios": dict(tried.ratios), "diverged": tried.diverged, "work": bench.work.total,
        }  # fmt: skip
        rows.append(row)
        bench.progress("attempt", round=index + 1, **row)
        members = smaller(members, tried.kept, tried.ratios)
        if len(members) <= len(best.kept) or group.bytes * (len(members) - 1) <= next_saving:
            break
    return best.merged or accepted, rows


def smaller(
    members: Sequence[Member], kept: Sequence[Member], ratios: Mapping[str, float]
) -> tuple[Member, ...]:
    """The members to try next: those that held, and the better half of those that did not."""
    failing = sorted((m for m in members if m not in kept), key=lambda member: -ratios[member[0]])
    again = set(kept) | set(failing[: len(failing) // 2])
    return tuple(member for member in members if member in again)
