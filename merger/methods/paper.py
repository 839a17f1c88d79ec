"""The paper's search (GEMEL, NSDI 2023, section 5): one more group at a time, in descending order of bytes saved."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from merger.bench.attempt import Attempt, attempt
from merger.bench.bounds import Bounds
from merger.bench.merged import Merged
from merger.bench.method import MergeOptions, method
from merger.bench.pace import begins
from merger.bench.standing import Standing
from merger.bench.workbench import Workbench
from merger.checkpoint import Checkpoint, snapshots
from merger.methods.rate import CHOOSING, choose_recipe, chosen, in_every_way, most_work, tell
from merger.outcomes import Rows, Trial, one_by_one
from merger.training.recipe import Recipe
from models.sharing.groups import Group, groups
from models.sharing.layers import model_bytes
from models.sharing.plan import Member, SharingPlan

SEARCHING = "sharing one group of layers after the other"
SEEDS_PER_ROUND = 100
SAMPLE = 0.5
"""The recipe is chosen with the first groups tied that make up this part of what the search could save."""


def sets_tried(bench: Workbench, options: MergeOptions, log: Rows, work: float) -> list[Trial]:
    """How each group was tried by a search, whatever its order."""
    return one_by_one([group.members for group in worthwhile(bench, options)], log, options.required(bench))


def first_trained(bench: Workbench, options: MergeOptions) -> Standing | None:
    """What is tied where the recipe is chosen: much of what a search comes to; None where nothing can be shared."""
    plan = _sample(bench, options)
    return begins(plan) if plan.shared else None


@method("gemel", sets_tried, first_trained)
def paper(bench: Workbench, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Try the groups of the strict signature one by one, those that save most first."""
    return search(bench, options, checkpoint, worthwhile(bench, options))


def worthwhile(bench: Workbench, options: MergeOptions) -> list[Group]:
    """The groups of the paper's signature that save enough to be tried, in descending order of bytes saved."""
    total = sum(model_bytes(query) for query in bench.queries.values())
    found = groups(bench.layers, "strict", pairing="order")
    return [group for group in found if group.saved_bytes >= options.min_saving * total]


def search(bench: Workbench, options: MergeOptions, checkpoint: Checkpoint, queue: Sequence[Group]) -> Merged:
    """Try the groups of a queue one by one over what is already accepted.

    The members that reach their target keep sharing; of those that fail half are taken out, while what is left still
    saves more than the next group would. A group that contains an accepted set extends it by its last member.
    """
    required = {query: bench.required(query, options.margin) for query in bench.queries}
    bounds = Bounds.of(bench, options, checkpoint)
    bench.stages.announce([*([CHOOSING] if options.choose_rate and queue else []), SEARCHING])
    recipe = _recipe(bench, options, checkpoint)
    # After the recipe, which was chosen before: the work is that of the last round.
    accepted = _accepted(bench, checkpoint)
    ceiling = sum(group.saved_bytes for group in worthwhile(bench, options))
    started = time.monotonic() - checkpoint.seconds
    bench.begin(SEARCHING, pieces=len(queue))
    for index in range(checkpoint.rounds, len(queue)):
        if bounds.over:
            bench.progress("warning", text=f"its time or work is over after {index} of {len(queue)} groups")
            break
        accepted, rows = _Round(bench, checkpoint, accepted, queue, index, recipe, required).run()
        seconds = time.monotonic() - started
        checkpoint.discard(_name(index))
        checkpoint.save(accepted.to_plain(), index + 1, rows, bench.work.total, seconds, recipe.rate)
        bench.progress(
            "round", round=index + 1, rounds=len(queue), signature=queue[index].signature, members=rows[-1]["kept"],
            saved_bytes=accepted.plan.saved_bytes(bench.layers), ceiling_bytes=ceiling, ratios=rows[-1]["ratios"],
            seconds=seconds,
        )  # fmt: skip
        bench.stages.reach(index + 1)
    return accepted


def _accepted(bench: Workbench, checkpoint: Checkpoint) -> Merged:
    """What was accepted after the last finished round; the originals and nothing shared at the start."""
    if checkpoint.accepted is None:
        return Merged(SharingPlan(), snapshots(bench.originals))
    bench.work.total = checkpoint.work
    return Merged.from_plain(checkpoint.accepted)


def _recipe(bench: Workbench, options: MergeOptions, checkpoint: Checkpoint) -> Recipe:
    """The options' recipe, or the best way to train on val with half of what could be shared tied at once."""
    plan = _sample(bench, options)
    if not options.choose_rate or not plan.shared:
        tell(bench, checkpoint, options.recipe)
        return options.recipe
    queries, recipes = sorted(plan.queries()), in_every_way(options.recipe)

    def choose() -> Recipe:
        start = Standing.of(bench.tied(plan, queries, journal=checkpoint), plan)
        return choose_recipe(bench, start, recipes, checkpoint)

    bench.begin(CHOOSING, work=most_work(bench, queries, recipes))
    return chosen(bench, checkpoint, choose)


def _sample(bench: Workbench, options: MergeOptions) -> SharingPlan:
    """The first groups that make up half of what could be shared."""
    sample, saved = [], 0
    found = worthwhile(bench, options)
    for group in found:
        if saved < SAMPLE * sum(group.saved_bytes for group in found):
            sample.append(group)
            saved += group.saved_bytes
    return SharingPlan.of(sample)


@dataclass(frozen=True)
class _Round:
    """All attempts at one group of the queue."""

    bench: Workbench
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
            before = self.checkpoint.step(f"{name} begun", lambda: self.bench.work.total)
            tried = Attempt.from_plain(self.checkpoint.step(name, partial(self._attempt, members, len(rows))))
            if len(tried.kept) > len(best.kept):
                best = tried
            row = {
                "group": group.signature, "members": list(members), "kept": list(tried.kept), "epochs": tried.epochs,
                "ratios": dict(tried.ratios), "diverged": tried.diverged, "work": self.bench.work.total,
                "work_spent": self.bench.work.total - before,
            }  # fmt: skip
            rows.append(row)
            self.bench.progress("attempt", round=self.index + 1, **row)
            members = smaller(members, tried.kept, tried.ratios)
            if extends or len(members) <= len(best.kept) or group.bytes * (len(members) - 1) <= next_saving:
                break
        return best.merged or self.accepted, rows

    def _attempt(self, members: Sequence[Member], attempts: int) -> dict:
        seed = (self.bench.seed * len(self.queue) + self.index) * SEEDS_PER_ROUND + attempts
        recipe = replace(self.recipe, seed=seed)
        return attempt(self.bench, self.accepted, members, recipe, self.required, self.checkpoint).to_plain()


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
