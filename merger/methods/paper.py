"""The paper's search (GEMEL, NSDI 2023, section 5): one more group at a time, in descending order of bytes saved."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from merger.checkpoint import Checkpoint, snapshots
from merger.core.attempt import Attempt, attempt
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.method import MergeOptions, method
from merger.core.snapshot import ModelSnapshot
from merger.methods.rate import CHOOSING, choose_recipe, chosen, in_every_way, max_flops, tell
from merger.outcomes import Rows, Trial, one_by_one
from merger.training.recipe import Recipe
from models.sharing.groups import Group, groups
from models.sharing.layers import model_bytes
from models.sharing.plan import Member, SharingPlan

SEARCHING = "sharing one group of layers after the other"
SEEDS_PER_ROUND = 100
SAMPLE = 0.5
"""The recipe is chosen with the first groups tied that make up this part of what the search could save."""


def sets_tried(ctx: MergeContext, options: MergeOptions, log: Rows, flops: float) -> list[Trial]:
    """How each group was tried by a search, whatever its order."""
    return one_by_one([group.members for group in worthwhile(ctx, options)], log, options.required(ctx))


@method("gemel", sets_tried)
def paper(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Try the groups of the strict signature one by one, those that save most first."""
    return search(ctx, options, checkpoint, worthwhile(ctx, options))


def worthwhile(ctx: MergeContext, options: MergeOptions) -> list[Group]:
    """The groups of the paper's signature that save enough to be tried, in descending order of bytes saved."""
    total = sum(model_bytes(query) for query in ctx.queries.values())
    found = groups(ctx.layers, "strict", pairing="order")
    return [group for group in found if group.saved_bytes >= options.min_saving * total]


def search(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint, queue: Sequence[Group]) -> Merged:
    """Try the groups of a queue one by one over what is already accepted.

    The members that reach their target keep sharing; of those that fail half are taken out, while what is left still
    saves more than the next group would. A group that contains an accepted set extends it by its last member.
    """
    required = {query: ctx.required(query, options.margin) for query in ctx.queries}
    budget = Budget.of(ctx, options, checkpoint)
    ctx.stages.announce([*([CHOOSING] if options.choose_rate and queue else []), SEARCHING])
    recipe = _recipe(ctx, options, checkpoint)
    # After the recipe, so that the FLOPs are those of the last round.
    state = checkpoint.state("rounds")
    originals = Merged(SharingPlan(), snapshots(ctx.originals))
    accepted = Merged.from_plain(state["accepted"]) if state else originals
    for row in state.get("rows", ()):
        checkpoint.add_row(row)
    ceiling = sum(group.saved_bytes for group in worthwhile(ctx, options))
    started = time.monotonic() - checkpoint.seconds
    ctx.begin(SEARCHING, pieces=len(queue))
    for index in range(state.get("rounds", 0), len(queue)):
        if budget.over:
            ctx.progress("warning", text=f"its time or work is over after {index} of {len(queue)} groups")
            break
        accepted, rows = _Round(ctx, checkpoint, accepted, queue, index, recipe, required).run()
        seconds = time.monotonic() - started
        for row in rows:
            checkpoint.add_row(row)
        checkpoint.discard(_name(index))
        state.update(rounds=index + 1, accepted=accepted.to_plain(), rows=[*state.get("rows", ()), *rows])
        checkpoint.save()
        ctx.progress(
            "round", round=index + 1, rounds=len(queue), signature=queue[index].signature, members=rows[-1]["kept"],
            saved_bytes=accepted.plan.saved_bytes(ctx.layers), ceiling_bytes=ceiling, ratios=rows[-1]["ratios"],
            seconds=seconds,
        )  # fmt: skip
        ctx.stages.reach(index + 1)
    return accepted


def _recipe(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Recipe:
    """The options' recipe, or the best way to train on val with half of what could be shared tied at once."""
    plan = _sample(ctx, options)
    if not options.choose_rate or not plan.shared:
        tell(ctx, checkpoint, options.recipe)
        return options.recipe
    queries, recipes = sorted(plan.queries()), in_every_way(options.recipe)

    def choose() -> Recipe:
        start = ModelSnapshot.of(ctx.tied(plan, queries, journal=checkpoint), plan)
        return choose_recipe(ctx, start, recipes, checkpoint)

    ctx.begin(CHOOSING, flops=max_flops(ctx, queries, recipes))
    return chosen(ctx, checkpoint, choose)


def _sample(ctx: MergeContext, options: MergeOptions) -> SharingPlan:
    """The first groups that make up half of what could be shared."""
    sample, saved = [], 0
    found = worthwhile(ctx, options)
    for group in found:
        if saved < SAMPLE * sum(group.saved_bytes for group in found):
            sample.append(group)
            saved += group.saved_bytes
    return SharingPlan.of(sample)


@dataclass(frozen=True)
class _Round:
    """All attempts at one group of the queue."""

    ctx: MergeContext
    checkpoint: Checkpoint
    accepted: Merged
    queue: Sequence[Group]
    index: int
    recipe: Recipe
    required: Mapping[str, float]

    def run(self) -> tuple[Merged, list[dict]]:
        """What is accepted afterwards, and a log row for each attempt."""
        group = self.queue[self.index]
        next_saving = self.queue[self.index + 1].saved_bytes if self.index + 1 < len(self.queue) else 0
        members, extends = _to_try(self.accepted.plan, group)
        best, rows = Attempt((), None, {}, 0), []
        while len(members) > 1:
            name = f"{_name(self.index)}/attempt {len(rows)}"
            before = self.checkpoint.step(f"{name} begun", lambda: self.ctx.flops.total)
            tried = Attempt.from_plain(self.checkpoint.step(name, partial(self._attempt, members, len(rows))))
            if len(tried.kept) > len(best.kept):
                best = tried
            row = {
                "group": group.signature, "members": list(members), "kept": list(tried.kept), "epochs": tried.epochs,
                "ratios": dict(tried.ratios), "diverged": tried.diverged, "flops": self.ctx.flops.total,
                "flops_spent": self.ctx.flops.total - before,
            }  # fmt: skip
            rows.append(row)
            self.ctx.progress("attempt", round=self.index + 1, **row)
            members = smaller(members, tried.kept, tried.ratios)
            if extends or len(members) <= len(best.kept) or group.bytes * (len(members) - 1) <= next_saving:
                break
        return best.merged or self.accepted, rows

    def _attempt(self, members: Sequence[Member], attempts: int) -> dict:
        seed = (self.ctx.seed * len(self.queue) + self.index) * SEEDS_PER_ROUND + attempts
        recipe = replace(self.recipe, seed=seed)
        return attempt(self.ctx, self.accepted, members, recipe, self.required, self.checkpoint).to_plain()


def _name(index: int) -> str:
    return f"round {index + 1}"


def _to_try(plan: SharingPlan, group: Group) -> tuple[tuple[Member, ...], bool]:
    """The group's members; with an accepted set among them, that set and the last one. And whether it is so."""
    for shared in plan.shared:
        if set(shared) < set(group.members):
            return (*shared, group.members[-1]), True
    return group.members, False


def smaller(members: Sequence[Member], kept: Sequence[Member], ratios: Mapping[str, float]) -> tuple[Member, ...]:
    """The members to try next: those that held, and the better half of those that did not."""
    failing = sorted((m for m in members if m not in kept), key=lambda member: -ratios[member[0]])
    again = set(kept) | set(failing[: len(failing) // 2])
    return tuple(member for member in members if member in again)
