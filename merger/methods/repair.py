"""Stage d of the method top-down: repair single queries below their requirement while shared weights stay frozen.

Cheapest first: train the query's norms, head and private layers alone; then make layers private, those whose features
differ most from the original's, with the least bytes that suffice; at last restore the original, unshared. Features
are compared by linear CKA, which ignores the order and scale of channels (Kornblith, Norouzi, Lee and Hinton,
Similarity of Neural Network Representations Revisited, ICML 2019, section 3), with the unbiased estimate of HSIC (Song
et al., Feature Selection via Dependence Maximization, 2012), because frames are few and features many.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merger.budget import Budget
from merger.checkpoint import State, Step, StepCache, snapshot, storable
from merger.config import MEASUREMENT, TopDownConfig
from merger.context import MergeContext, Merged
from merger.evaluate import as_input, evaluate_queries, module_paths, raw_frames, record_layers, training_flops
from merger.events import Event, Repair
from merger.methods.epochs import bisect_options, freeze_shared, train_epochs
from merger.methods.registry import MergeTask
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan

REPAIRING = "repairing single queries"


@storable
@dataclass(frozen=True)
class Repaired:
    """One query after a repair step: its ratio on val, the plan, its state, and the epochs of the last training."""

    ratio: float
    plan: SharingPlan
    state: State
    epochs: int = 0


def repair_queries(task: MergeTask, merged: Merged, ratios: Mapping[str, float]) -> Merged:
    """What is merged once every query holds or has its original back.

    Each query below its requirement is repaired on its own, with an equal share of the FLOPs left, so the result does
    not depend on their order.
    """
    ctx, cache = task.ctx, task.checkpoint
    below = sorted((query for query in ratios if ratios[query] < task.required[query]), key=lambda q: ratios[q])
    if not below:
        return merged
    if cache.step(Step.REPAIR_TIME, lambda: task.budget.over):
        task.report_time_over(REPAIRING, merged.plan, merged.plan.without(*below))
        for query in below:
            task.report(Event.REPAIR, query=query, repair=Repair.ORIGINAL.value, required=task.required[query])
        return merged.without(below)
    share, recipe = task.budget.flops_left / len(below), repair_recipe(task.recipe, task.config)
    ends_at = time.time() + task.budget.ends - task.budget.clock()  # a clock that other machines have too

    def repair(own: StepCache, query: str) -> Repaired:
        budget = Budget(ctx.flops, ctx.flops.total + share, time.monotonic() + ends_at - time.time())
        alone = replace(task, recipe=recipe, budget=budget, checkpoint=own)
        return _repair(alone, query, Repaired(ratios[query], merged.plan, merged.states[query]))

    plan, states = merged.plan, dict(merged.states)
    for query, found in ctx.for_each_query(cache, Step.REPAIRS, below, repair).items():
        kept = _shared_paths(found.plan, query)
        plan = plan.with_private(query, [path for path in _shared_paths(merged.plan, query) if path not in kept])
        states[query] = found.state
    return Merged(plan, {query: states[query] for query in plan.queries()})


def repair_recipe(recipe: Recipe, config: TopDownConfig) -> Recipe:
    """How one query is trained alone, from how all are trained together."""
    rate = config.repair_learning_rate * recipe.rate
    return replace(
        recipe, epochs=max(1, recipe.epochs // 2), frames_per_epoch=2 * recipe.frames_per_epoch, rate=rate,
        norms=config.norm_learning_rate / rate, features=recipe.features or config.feature_weight,
        seed=recipe.seed + 2,
    )  # fmt: skip


def max_repair_flops(task: MergeTask, queries: Sequence[str]) -> float:
    """About the FLOPs that repairs of these queries take at most, within the budget."""
    recipe = repair_recipe(task.recipe, task.config)
    flops = sum(training_flops(task.ctx, [query], recipe) for query in queries)
    return min(max_attempts(task.config) * flops, task.budget.flops_left)


def max_attempts(config: TopDownConfig) -> int:
    """Trainings of one repair at most: norms and head, the dearest option, and a bisection."""
    return 1 + len(config.repair_fractions).bit_length()


def cka_distances(ctx: MergeContext, query: str, model: nn.Module, paths: Sequence[str]) -> dict[str, float]:
    """Path -> 1 - CKA of a merged layer's outputs with its original's on train frames; only paths of modules."""
    mine, theirs = (_features(ctx, query, one, paths) for one in (model.eval(), ctx.bases[query]))
    return {path: 1 - linear_cka(mine[path], theirs[path]) for path in mine if path in theirs}


def linear_cka(one: Tensor, other: Tensor) -> float:
    """Linear CKA of two sets of features of the same frames, f32 (N, F) and (N, G), N >= 4; 0 if one is constant."""
    a, b = _gram(one), _gram(other)
    own = _hsic(a, a) * _hsic(b, b)
    return float(_hsic(a, b) / own.sqrt()) if own > 0 else 0.0


def _repair(task: MergeTask, query: str, begun: Repaired) -> Repaired:
    best = _attempt(task, query, begun, Repair.NORMS_AND_HEAD, begun.plan, (), 0)
    if best.ratio >= task.required[query]:
        return best
    options = [] if task.budget.over else _private_options(task, query, best)

    def attempt(index: int) -> tuple[bool, Repaired]:
        plan, private, cost = options[index]
        found = _attempt(task, query, best, Repair.PRIVATE_LAYERS, plan, private, cost)
        return found.ratio >= task.required[query], found

    found = bisect_options(len(options), attempt, lambda: task.budget.over)
    if found is not None:
        return found[1]
    if task.budget.over:
        task.ctx.warn(f"{query}: the budget ended its repair early")
    task.report(Event.REPAIR, query=query, repair=Repair.ORIGINAL.value, required=task.required[query])
    return Repaired(1.0, begun.plan.without(query), snapshot(task.ctx.bases[query]))


def _attempt(
    task: MergeTask, query: str, begun: Repaired, kind: Repair, plan: SharingPlan, private: Sequence[str], cost: int
) -> Repaired:
    """Train what the query has for itself under a plan, and log it; the best state on val."""
    train = partial(_train_private, task, query, plan, begun.state)
    found = task.checkpoint.step(Step.ATTEMPT, train, kind.value, str(cost))
    task.report(
        Event.REPAIR, query=query, repair=kind.value, cost_bytes=cost, ratio=found.ratio,
        required=task.required[query], epochs=found.epochs, private=list(private),
    )  # fmt: skip
    return found


def _train_private(task: MergeTask, query: str, plan: SharingPlan, state: State) -> Repaired:
    """Train with frozen shared weights until the query holds; nothing if recalibrated norms suffice."""
    ctx, cache, models = task.ctx, task.checkpoint, task.ctx.models([query], {query: state})
    freeze_shared(models, plan)
    best = cache.state(Step.BEST)
    if not best:
        frames = MEASUREMENT.recalibration_frames
        ratio = evaluate_queries(ctx, cache, Step.BEGUN, models, frames)[query]
        best.update(ratio=ratio, state=snapshot(models[query]), epochs=0)
    epochs = train_epochs(ctx, models, task.recipe, cache)
    with suppress(Diverged):
        while best["ratio"] < task.required[query] and (ratios := next(epochs, None)) is not None:
            best["epochs"] += 1
            if ratios[query] > best["ratio"]:
                best.update(ratio=ratios[query], state=snapshot(models[query]))
    return Repaired(best["ratio"], plan, best["state"], best["epochs"])


def _private_options(task: MergeTask, query: str, begun: Repaired) -> list[tuple[SharingPlan, tuple[str, ...], int]]:
    """(plan, private layers, bytes) in ascending order of bytes: the layers with the most distant features first."""
    size = {layer.path: layer.bytes for layer in task.ctx.layers if layer.query == query}
    shared = _shared_paths(begun.plan, query)

    def rank() -> list[str]:
        model = task.ctx.models([query], {query: begun.state})[query]
        found = cka_distances(task.ctx, query, model, shared)
        return sorted(module_paths(model, shared), key=lambda path: -found.get(path, 0.0))

    ranked, total = task.checkpoint.step(Step.LAYER_RANKING, rank), sum(size[path] for path in shared)
    options: list[tuple[SharingPlan, tuple[str, ...], int]] = []
    for fraction in task.config.repair_fractions:
        chosen, cost = list[str](), 0
        for path in ranked:
            if cost < fraction * total:
                chosen.append(path)
                cost += size[path]
        if not options or cost > options[-1][2]:
            options.append((begun.plan.with_private(query, chosen), tuple(chosen), cost))
    return options


def _shared_paths(plan: SharingPlan, query: str) -> list[str]:
    return [path for members in plan.shared for name, path in members if name == query]


@torch.no_grad()
def _features(ctx: MergeContext, query: str, model: nn.Module, paths: Iterable[str]) -> dict[str, Tensor]:
    """Path -> outputs of a layer on train frames, averaged over places: (N, F)."""
    frames, paths = raw_frames(ctx, query, MEASUREMENT.cka_frames), module_paths(model, paths)
    rows: dict[str, list[Tensor]] = {path: [] for path in paths}
    for start in range(0, len(frames), MEASUREMENT.cka_batch):
        chunk = frames[start : start + MEASUREMENT.cka_batch]
        with record_layers(model, paths) as seen:
            model(as_input(ctx, query, chunk))
        for path in paths:
            rows[path].append(_pool(seen[path][1], len(chunk)))
    ctx.flops.add(ctx.queries[query], len(frames))
    found = {path: torch.cat(own) for path, own in rows.items()}
    return {path: own for path, own in found.items() if len(own) == len(frames) >= MEASUREMENT.min_cka_frames}


def _pool(output: Tensor, frames: int) -> Tensor:
    """One row of features per frame; none for outputs of a varying number of regions."""
    if output.ndim == 4:
        output = F.adaptive_avg_pool2d(output, MEASUREMENT.cka_cells)
    if len(output) % frames:
        return output[:0].flatten(1)
    return output.unflatten(0, (frames, -1)).mean(1).flatten(1)


def _gram(x: Tensor) -> Tensor:
    x = x.double() - x.double().mean(0)
    gram = x @ x.T
    return gram.fill_diagonal_(0.0)


def _hsic(a: Tensor, b: Tensor) -> Tensor:
    """Unbiased HSIC of two kernel matrices (n, n) with empty diagonals (Song et al. 2012, equation 5)."""
    n = len(a)
    whole = (a * b).sum() + a.sum() * b.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (a.sum(0) @ b.sum(0))
    return whole / (n * (n - 3))
