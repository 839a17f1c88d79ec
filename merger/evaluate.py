"""Evaluation of merged models on the frames that a search goes by.

A model's ratio is its metric there over its original's (`MergeContext.ratio`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from gemel.merger.checkpoint import State, Step, StepCache, storable
from gemel.merger.config import MEASUREMENT, MergeOptions
from gemel.merger.context import MergeContext, Ratio
from gemel.merger.training.recipe import Recipe, flops_a_second
from gemel.models.sharing.layers import model_bytes
from gemel.models.sharing.plan import SharingPlan
from gemel.models.sharing.similarity import equal_states
from gemel.models.workload import Query


@storable
@dataclass(frozen=True)
class Evaluated:
    """A model's ratio, and the buffers and biases that belong to it."""

    ratio: float
    settled: State


@dataclass(frozen=True)
class Price:
    """What a query keeps and computes after a step, and the part of all answers that are its original's."""

    kept_bytes: int
    flops_per_s: float
    agreement: float | None

    @classmethod
    def of(cls, ctx: MergeContext, query: Query, kept_bytes: int, ratio: float) -> Price:
        """The price of a query's network, with the ratio that it reaches."""
        agreement = ratio.agreement if isinstance(ratio, Ratio) else None
        return cls(kept_bytes, flops_a_second(ctx.flops, [query]), agreement)


def required_ratios(ctx: MergeContext) -> dict[str, float]:
    """Query -> the ratio with which a search is content."""
    return {query: ctx.required_ratio(query) for query in ctx.queries}


def queries_at_target(ratios: Mapping[str, float], required: Mapping[str, float]) -> list[str]:
    """The queries whose ratio reaches what is required."""
    return [query for query, ratio in ratios.items() if ratio >= required[query]]


def all_met(ratios: Mapping[str, float], required: Mapping[str, float]) -> bool:
    """Whether every query reaches what is required."""
    return all(ratio >= required[query] for query, ratio in ratios.items())


def objective(ratios: Mapping[str, float], required: Mapping[str, float]) -> float:
    """Mean of min(1, ratio / required): two queries nearly there are easier to repair than one far off."""
    return sum(min(1.0, ratio / required[query]) for query, ratio in ratios.items()) / max(1, len(ratios))


def changed_tensors(model: nn.Module, before: Mapping[str, torch.Tensor]) -> State:
    """Copies of the tensors in which a model differs from a state of all its tensors."""
    now = model.state_dict()
    return {name: tensor.detach().clone() for name, tensor in now.items() if not torch.equal(tensor, before[name])}


def evaluate_queries(
    ctx: MergeContext,
    cache: StepCache,
    name: str,
    models: Mapping[str, nn.Module],
    settling_frames: int = 0,
    *parts: str,
) -> dict[str, float]:
    """The ratio of every model, each on the rank of its query; an unchanged original's is 1.

    With `settling_frames` a model below what is required is also evaluated with its norms fitted to its weights, on so
    many train frames where that is a recalibration, and keeps the better ones. A detector's scores are matched with its
    original's first (merger.scores).
    """

    def evaluate(_: StepCache, query: str) -> Evaluated:
        if query not in ctx.networks and equal_states(models[query].state_dict(), ctx.originals[query].state_dict()):
            return Evaluated(Ratio(1.0, 1.0), {})
        model = copy.deepcopy(models[query]).eval()
        matched = ctx.match_scores(query, model)
        unsettled = Evaluated(ctx.ratio(query, model), matched)
        model.load_state_dict(models[query].state_dict())
        if unsettled.ratio >= ctx.required_ratio(query) or not settling_frames:
            return unsettled
        if not ctx.recalibrate(query, model, settling_frames):
            return unsettled
        settled = {**changed_tensors(model, models[query].state_dict()), **ctx.match_scores(query, model)}
        return max(unsettled, Evaluated(ctx.ratio(query, model), settled), key=lambda one: one.ratio)

    found = ctx.for_each_query(cache, name, models, evaluate, *parts)
    for query in ctx.group.own(models):
        models[query].load_state_dict(found[query].settled, strict=False)
    return {query: one.ratio for query, one in found.items()}


def tie_and_evaluate(
    ctx: MergeContext, cache: StepCache, plan: SharingPlan, queries: Iterable[str], states: Mapping[str, State]
) -> tuple[dict[str, nn.Module], dict[str, float]]:
    """Fresh models of these queries, tied under a plan, with the better of both norm statistics; and their ratios.

    They are spread over the ranks (`MergeContext.spread_models`).
    """
    models = ctx.spread_models(plan, queries, states)
    return models, evaluate_queries(ctx, cache, Step.TIED, models, MEASUREMENT.recalibration_frames)


def evaluation_flops(ctx: MergeContext) -> float:
    """FLOPs of evaluating every query once."""
    return sum(ctx.flops.of(ctx.queries[query]) * len(ctx.search[query]) for query in ctx.judged)


def price_in_bytes(ctx: MergeContext, options: MergeOptions, flops: float) -> float:
    """Bytes that a step of so many FLOPs must be able to save; none where no query is left to train."""
    root = ctx.root
    epoch = training_flops(root, root.judged, replace(options.recipe, epochs=1))
    percents = flops / (epoch * options.effort) if epoch else 0.0
    return percents / 100 * sum(map(model_bytes, root.queries.values()))


def training_flops(ctx: MergeContext, queries: Sequence[str], recipe: Recipe) -> float:
    """FLOPs of training these queries' models by this recipe and of evaluating them once."""
    total, recipe = 0.0, ctx.memory.config(recipe).apply(recipe)
    lengths = [len(ctx.train[query]) for query in queries]
    visits = recipe.contribution(lengths) * recipe.epochs if lengths else 0
    for query in queries:
        passes = recipe.passes(taught=True) * visits + len(ctx.search[query])
        total += ctx.flops.of(ctx.queries[query]) * passes
    return total
