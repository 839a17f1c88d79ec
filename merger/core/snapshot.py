"""Models as plain values: what a job needs to have the same models somewhere else, and to judge or train them there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from merger.checkpoint import State, StepCache
from merger.core.context import CALIBRATION_FRAMES, MergeContext
from merger.jobs import Job, run_jobs
from merger.training.recipe import Recipe
from merger.training.teacher_cache import cache_capacities, expected_teacher_passes
from models.sharing.plan import SharingPlan, tie


@dataclass(frozen=True)
class ModelSnapshot:
    """Some models as they stand: their plan and states, and the parameters that training leaves alone."""

    plan: SharingPlan
    states: Mapping[str, State]
    frozen: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, models: Mapping[str, nn.Module], plan: SharingPlan) -> ModelSnapshot:
        """These models under the plan; tensors are those at work, not copies."""
        states = {query: {name: t.detach() for name, t in m.state_dict().items()} for query, m in models.items()}
        frozen = {q: [name for name, p in m.named_parameters() if not p.requires_grad] for q, m in models.items()}
        return cls(plan, states, frozen)

    def models(self, ctx: MergeContext) -> dict[str, nn.Module]:
        """Fresh models that stand like this, tied under the plan."""
        models = ctx.models(self.states, self.states, self.plan)
        tie(models, self.plan)
        for query, model in models.items():
            for name in self.frozen.get(query, ()):
                model.get_parameter(name).requires_grad_(False)
        return models

    def to_plain(self) -> dict[str, Any]:
        """Plain values and tensors."""
        states = {query: dict(state) for query, state in self.states.items()}
        return {"plan": self.plan.to_json(), "states": states, "frozen": {q: list(n) for q, n in self.frozen.items()}}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> ModelSnapshot:
        """Inverse of `to_plain`."""
        return cls(SharingPlan.from_json(value["plan"]), value["states"], value["frozen"])


def evaluate_all(
    ctx: MergeContext,
    journal: StepCache,
    name: str,
    models: Mapping[str, nn.Module],
    plan: SharingPlan,
    settling: int = 0,
) -> dict[str, float]:
    """Every model's ratio on val, one job each.

    With `settling` it is judged with its norms measured again on so many frames, too, and keeps them where it answers
    better with them. A detector's scores are matched with its original's before (merger.core.scores), and stay so.
    """
    jobs = [
        Job(query, evaluated, {
            "query": query, "standing": ModelSnapshot.of({query: model}, SharingPlan()).to_plain(),
            "settling": settling,
        }, (query,))
        for query, model in models.items()
    ]  # fmt: skip
    found = dict(zip(models, run_jobs(ctx, journal, name, jobs), strict=True))
    for query, model in models.items():
        model.load_state_dict(found[query]["settled"], strict=False)
    return {query: one["ratio"] for query, one in found.items()}


def evaluated(
    ctx: MergeContext, journal: StepCache, query: str, standing: Mapping[str, Any], settling: int
) -> dict[str, Any]:
    """The job: `ratio` of the query's model on val, and what was `settled` for it: norms' statistics, heads' biases."""
    model = ModelSnapshot.from_plain(standing).models(ctx)[query]
    matched = ctx.match_scores(query, model)
    as_it_is = {"ratio": ctx.ratio(query, model), "settled": matched}
    model = ModelSnapshot.from_plain(standing).models(ctx)[query]
    if not settling or not ctx.calibrate(query, model, settling):
        return as_it_is
    measured = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    settled = {**measured, **ctx.match_scores(query, model)}
    again = {"ratio": ctx.ratio(query, model), "settled": settled}
    return again if again["ratio"] > as_it_is["ratio"] else as_it_is


def tie_and_evaluate(
    ctx: MergeContext, journal: StepCache, plan: SharingPlan, queries: Iterable[str], states: Mapping[str, State]
) -> tuple[dict[str, nn.Module], dict[str, float]]:
    """Fresh models of these queries, tied under a plan, with the norms that serve them better; and their ratios."""
    models = ctx.models(queries, states, plan)
    tie(models, plan)
    return models, evaluate_all(ctx, journal, "tied", models, plan, CALIBRATION_FRAMES)


def training_flops(
    ctx: MergeContext, queries: Sequence[str], recipe: Recipe, subsampled: Collection[str] = ()
) -> float:
    """About what it takes to train these queries' models by this recipe, and to judge them once."""
    total, recipe = 0.0, ctx.memory.config(recipe).apply(recipe)
    sets = {query: ctx.train[query] for query in queries}
    kept = cache_capacities(sets, recipe)
    lengths = {query: len(data) for query, data in sets.items()}
    for query, count in recipe.contributions(lengths, subsampled).items() if lengths else ():
        visits = count * recipe.epochs
        taught = expected_teacher_passes(visits, lengths[query], kept.get(query, 0))
        passes = recipe.passes(taught=False) * visits + taught + len(ctx.val[query])
        total += ctx.flops.of(ctx.queries[query]) * passes
    return total
