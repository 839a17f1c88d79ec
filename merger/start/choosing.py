"""Where a merge starts from: the weight that each set begins with, chosen by running it and not by belief."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from merger.checkpoint import State, StepCache, snapshots
from merger.core.context import MergeContext
from merger.start.alignment import FRAMES as ORDERED_ON
from merger.start.alignment import aligned, by_shared_bytes
from merger.start.ancestry import COMMON, kinship
from merger.start.solving import FRAMES as SOLVED_ON
from merger.start.solving import STAGES as SOLVED_STAGES
from merger.start.solving import most_flops, solved
from merger.training.distillation import record_inputs, watched_layers
from models.sharing.layers import weight_key
from models.sharing.plan import SharingPlan

MEAN, ALIGNED, SOLVED = "mean", "aligned mean", "solved"
JUDGED_ON = 3
"""Passes of `FRAMES` that judging a start takes: norms as they are, measured again, and judged with those."""
MAX_DONORS = 4
"""Donors tried at most, those with the most shared bytes of their own first; one where all have a common ancestor."""
FAR = 0.6
"""Where the best start loses more, it is far off, and the best mean is worth solving: a third of an epoch."""
BEHIND = 0.5
"""Of a start that is far off, a query that keeps less than this part of what their median keeps is far behind."""
SHATTERED = 0.85
"""Where every query loses more with the best start, next to nothing of anybody is left: four published ResNets for
CIFAR-10 lose 0.91 to 0.94, while of hard merges that came back whole most queries lost less than a half."""
MIN_VARIANCE = 1e-12
MIN_KEPT = 1e-3
FRAMES = 32
"""Train frames of each query by which a start is judged."""


@dataclass(frozen=True)
class Start:
    """The `states` to begin with, and the part that each query loses of what goes into its head once they are tied.

    They were made of `own` models, each with weights of its own; models `apart` are the same with their channels in one
    order. `far` says that this will be a hard merge: before anything was solved, the best start lost more than `FAR`.
    `related` says that all have a common ancestor.
    """

    states: dict[str, State]
    errors: dict[str, float]
    apart: dict[str, State]
    far: bool = False
    related: bool = False
    own: dict[str, State] = field(default_factory=dict)

    @property
    def shattered(self) -> bool:
        """Whether next to nothing is left of any query, and none is related to another, which training brings back."""
        return self.near_shattered and min(self.errors.values()) > SHATTERED

    @property
    def near_shattered(self) -> bool:
        """Whether next to nothing is left of all queries together: whose weights were taken may still have much."""
        return self.far and not self.related and together(self.errors.values()) > SHATTERED

    @property
    def far_behind(self) -> dict[str, float]:
        """Query -> error of those that have next to nothing left, beside the others, in a hard merge."""
        least = BEHIND * median(1 - error for error in self.errors.values()) if self.far else 0.0
        return {query: error for query, error in self.errors.items() if 1 - error < least}


def choose_start(
    ctx: MergeContext,
    plan: SharingPlan,
    journal: StepCache,
    apart: Mapping[str, State] | None = None,
    max_flops: float = math.inf,
    solving: bool = True,
) -> Start:
    """The best start: every set with its members' mean, or with one donor's weight wherever it has one.

    It is made of the originals, or of models `apart` that have their channels in one order.
    Each start is tied, and one pass of a few train frames decides, norms as they are or measured again: how much of
    what goes into the originals' heads is lost, on the geometric mean of what the queries keep. A donor keeps all
    of its own, and that must not hide that the others begin with nothing. Where they have no common ancestor, the
    mean of models whose channels were brought into one order is tried too. Where the best is far off, the best mean
    is tried once more with every tied layer solved by least squares (a donor's weights, which one model knows
    already, lose by that), where `solving` is asked for, and the least is taken. What `most_work` is not enough for
    is left out, but for the mean. Progress hears of the ancestry and of the error of every start. Several processes
    judge starts together, each its own queries; the first alone brings channels into one order and solves.
    """
    found = snapshots(ctx.originals) if apart is None else dict(apart)
    kin = apart is None and ctx.run_on_rank0(partial(_have_common_ancestor, ctx, plan, found))
    in_order = kin or apart is not None
    donors = by_shared_bytes(ctx, plan)[: 1 if kin else MAX_DONORS]
    cost = _costs(ctx, plan)
    named = [MEAN, *([] if in_order else [ALIGNED]), *donors]
    planned, left = affordable({name: cost[name if name == ALIGNED else MEAN] for name in named}, max_flops)
    starts = {donor: (found, donated(plan, found, donor)) for donor in donors if donor in planned}
    starts[MEAN] = (found, averaged(plan, found))
    ordered = found
    if ALIGNED in planned:
        ordered = journal.step(ALIGNED, lambda: ctx.run_on_rank0(lambda: aligned(ctx, plan, donors[0], journal, found)))
        starts[ALIGNED] = (ordered, averaged(plan, ordered))
    evaluate = InitEvaluator(ctx, plan.queries(), journal)
    errors = {name: evaluate.errors(name, plan, states) for name, (_, states) in starts.items()}
    best = min(errors, key=lambda name: together(errors[name].values()))
    start = Start(starts[best][1], errors[best], ordered, together(errors[best].values()) > FAR, kin, starts[best][0])
    if solving and start.far and left >= cost[SOLVED]:
        mean = min(
            (name for name in (MEAN, ALIGNED) if name in starts), key=lambda name: together(errors[name].values())
        )
        wanted, states = starts[mean]
        states = journal.step(SOLVED, lambda: ctx.run_on_rank0(lambda: solved(ctx, plan, wanted, states, journal)))
        after = evaluate.errors(f"{mean}, {SOLVED}", plan, states)
        if together(after.values()) < together(errors[best].values()):
            start = replace(start, states=states, errors=after, own=wanted)
    return ctx.run_on_rank0(lambda: start)  # the same bits everywhere


def max_flops(ctx: MergeContext, plan: SharingPlan) -> float:
    """About what it takes at most to choose a start: to judge every one, to bring channels in order, and to solve."""
    cost = _costs(ctx, plan)
    return MAX_DONORS * cost[MEAN] + sum(cost.values())


def _costs(ctx: MergeContext, plan: SharingPlan) -> dict[str, float]:
    """About the work that a start takes of each kind: a donor as much as the mean."""
    once = sum(ctx.flops.of(ctx.queries[query]) for query in plan.queries())
    evaluated = JUDGED_ON * FRAMES
    solving = (evaluated + 3 * SOLVED_STAGES * SOLVED_ON) * once + most_flops(ctx, plan)
    return {MEAN: evaluated * once, ALIGNED: (evaluated + 4 * ORDERED_ON) * once, SOLVED: solving}


def affordable(costs: Mapping[str, float], most: float) -> tuple[list[str], float]:
    """The first of these in any case, those after it that the rest is enough for, and what is left then."""
    names: list[str] = []
    for name, cost in costs.items():
        if not names or cost <= most:
            names.append(name)
            most -= cost
    return names, most


def averaged(plan: SharingPlan, states: Mapping[str, State]) -> dict[str, State]:
    """Every member of a set gets the mean of the members' weights."""
    changed = {query: dict(state) for query, state in states.items()}
    for members in plan.shared:
        weights = [states[query][weight_key(states[query], path)] for query, path in members]
        mean = torch.stack(weights).mean(dim=0)
        for query, path in members:
            changed[query][weight_key(states[query], path)] = mean
    return changed


def donated(plan: SharingPlan, states: Mapping[str, State], donor: str) -> dict[str, State]:
    """Every member of a set gets the donor's weight, or the first member's where the donor is not in the set."""
    changed = {query: dict(state) for query, state in states.items()}
    for members in plan.shared:
        giver, path = next((member for member in members if member[0] == donor), members[0])
        weight = states[giver][weight_key(states[giver], path)]
        for query, path in members:
            changed[query][weight_key(states[query], path)] = weight
    return changed


def _have_common_ancestor(ctx: MergeContext, plan: SharingPlan, states: Mapping[str, State]) -> bool:
    """Whether all that share do; then their channels are in one order already."""
    found = kinship(plan, ctx.layers, states)
    common = min(found.values()) >= COMMON
    ctx.progress("ancestry", common=common, kinship=found)
    return common


def lost(seen: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The part of the variance of the features (N, C, ...) that each one's own counterpart no longer tells, 0 to 1.

    Scale and mean of a channel don't matter: private norms and heads restore them. What is `wanted` may lie on another
    device, as after an interruption.
    """
    parts = []
    for mine, theirs in zip(seen, wanted, strict=True):
        theirs = theirs.to(mine.device)
        if mine.shape == theirs.shape:
            one, other = (each.transpose(0, 1).flatten(1).double() for each in (mine, theirs))
            one, other = one - one.mean(1, keepdim=True), other - other.mean(1, keepdim=True)
            told = (one * other).sum(1).clamp(min=0).square() / one.square().sum(1).clamp(min=MIN_VARIANCE)
            parts.append(1 - told.sum() / other.square().sum().clamp(min=MIN_VARIANCE))
    return float(torch.stack(parts).mean()) if parts else 0.0


def together(errors: Collection[float]) -> float:
    """What queries that lose these parts lose together: 1 less the geometric mean of what they keep."""
    return 1 - math.prod(max(MIN_KEPT, 1 - error) for error in errors) ** (1 / len(errors))


class InitEvaluator:
    """How far starts are off: the part of the heads' inputs that is lost, on a few train frames of each query.

    Several processes judge together; each knows only what its own originals have there.
    """

    def __init__(self, ctx: MergeContext, queries: Iterable[str], journal: StepCache) -> None:
        self._ctx, self._queries, self._journal = ctx, sorted(queries), journal
        self._mine = ctx.group.own(self._queries)
        self._wanted: dict[str, list[Tensor]] = {}
        self._wanted = journal.step("originals' features", lambda: ctx.gather(self._originals))

    def errors(self, name: str, plan: SharingPlan, states: Mapping[str, State]) -> dict[str, float]:
        """What each query loses tied with a start of this name; progress hears of it, and what they lose together."""
        errors = self._journal.step(f"start {name}", partial(self._errors, plan, states))
        self._ctx.progress("start", start=name, error=together(errors.values()), errors=errors)
        return errors

    @torch.no_grad()
    def error(self, query: str, model: nn.Module) -> float:
        """What a query loses with this model, its norms as they are or measured again, whichever is less."""
        error = lost(self._features(query, model), self._wanted[query])
        if self._ctx.calibrate(query, model, FRAMES):
            error = min(error, lost(self._features(query, model), self._wanted[query]))
        return error

    def _errors(self, plan: SharingPlan, states: Mapping[str, State]) -> dict[str, float]:
        """One model after the other: a card has no room for all beside the originals."""

        def own() -> dict[str, float]:
            return {query: self.error(query, self._ctx.models([query], states, plan)[query]) for query in self._mine}

        found = self._ctx.gather(own)
        return {query: found[query] for query in self._queries}

    @torch.no_grad()
    def _originals(self) -> dict[str, list[Tensor]]:
        return {query: self._features(query, self._ctx.originals[query]) for query in self._mine}

    def _features(self, query: str, model: nn.Module) -> list[Tensor]:
        data, found = self._ctx.train[query], self._ctx.queries[query]
        indices = data.spread(FRAMES)  # others than solving has seen
        frames = data.frames(indices, self._ctx.device)
        self._ctx.flops.add(found, len(frames))
        with record_inputs(model.eval(), watched_layers(found, model)) as seen:
            model(frames)
        return seen
