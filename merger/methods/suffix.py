"""Stage e of the method top-down: share suffixes of layers without training.

Every other model starts from its own weights. Rank its shareable layers by sensitivity per byte: replace one layer by
the donor's, recalibrate BatchNorm, measure how far the head outputs move. Keep the most sensitive layers private. The
private fraction (1/64 to 3/4 of the shareable bytes) is found by bisection; each probe costs one validation pass and
no training. Sensitive layers are mostly early and light, so that what is shared is mostly a suffix of the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from merger.checkpoint import State, Step, snapshot
from merger.config import MEASUREMENT
from merger.context import MergeContext, Merged
from merger.evaluate import evaluate_queries, head_distance, head_outputs
from merger.events import Event
from merger.init.start import Start
from merger.methods.epochs import bisect_options
from merger.methods.registry import MergeTask
from models.sharing.layers import weight_key
from models.sharing.plan import Member

SHARING_SUFFIXES = "sharing layers without training"
SENSITIVITY_PASSES = 3
"""Forward passes of `sensitivity_frames` for each layer: two comparisons and a recalibration."""


def share_suffixes(task: MergeTask, start: Start, merged: Merged, receivers: Sequence[str]) -> Merged:
    """What is merged once each receiver, in turn, shares the layers that it can take from those merged before.

    `merged` holds the states of the models that give; a receiver's own weights are `start`'s.
    """
    for receiver in receivers:
        if task.checkpoint.step(Step.SUFFIX_TIME, lambda: task.budget.over, receiver):
            task.report_time_over(SHARING_SUFFIXES, task.plan, merged.plan)
            break
        with task.checkpoint.open_step(Step.SUFFIX, receiver) as step:
            if not step.done:
                step.value = task.ctx.run_on_rank0(partial(_share_suffix, task, start, merged, receiver))
        merged = step.value
    return merged


def layer_sensitivity(
    ctx: MergeContext, query: str, own: State, shared: State, paths: Sequence[str]
) -> dict[str, float]:
    """Path -> distance by which the head outputs move if this layer alone has its `shared` weight.

    `own` is the query's unshared state with its channels in the order of the shared weights.
    """
    found = dict[str, float]()
    model = ctx.models([query], {query: own})[query]
    theirs = head_outputs(ctx, query, model)
    for path in paths:
        key = weight_key(own, path)
        model.load_state_dict({**own, key: shared[key]})
        distance = head_distance(head_outputs(ctx, query, model), theirs)
        if ctx.recalibrate(query, model, MEASUREMENT.sensitivity_frames):
            distance = min(distance, head_distance(head_outputs(ctx, query, model), theirs))
        found[path] = distance
    return found


def _share_suffix(task: MergeTask, start: Start, merged: Merged, query: str) -> Merged:
    """What is merged once one receiver shares the most bytes with which it holds."""
    ctx, own = task.ctx, start.states[query]
    donors = _donor_layers(task, start, merged, query)
    weights = {
        weight_key(own, path): merged.states[donor][weight_key(merged.states[donor], its)]
        for path, (donor, its) in donors.items()
    }
    options = _private_options(task, query, own, {**own, **weights}, list(donors))
    ratios: list[float] = []

    def probe(index: int) -> tuple[bool, Merged]:
        taken = [path for path in donors if path not in options[index]]
        plan = merged.plan.with_pairs([donors[path], (query, path)] for path in taken)
        state = {**own, **{weight_key(own, path): weights[weight_key(own, path)] for path in taken}}
        models = ctx.models([query], {query: state})
        frames = MEASUREMENT.recalibration_frames
        ratios.append(evaluate_queries(ctx, task.checkpoint, Step.PROBE, models, frames, str(index))[query])
        return ratios[-1] >= task.required[query], Merged(plan, {**merged.states, query: snapshot(models[query])})

    found = bisect_options(len(options), probe, lambda: task.budget.over)
    if found is None:
        result, private = Merged(merged.plan, {**merged.states, query: own}), list(donors)
    else:
        result, private = found[1], list(options[found[0]])
    if ratios:
        task.report(
            Event.SUFFIX, query=query, donor=start.donors[0], suffix=len(donors) - len(private), of=len(donors),
            private=private, ratio=ratios[-1] if found is None else max(ratios), required=task.required[query],
            accepted=found is not None, saved_bytes=task.saved_bytes(result.plan),
        )  # fmt: skip
    return result


def _donor_layers(task: MergeTask, start: Start, merged: Merged, query: str) -> dict[str, Member]:
    """Path -> the layer that a receiver could share: one that is shared already, else the first donor's."""
    sharing = {member: len(members) for members in merged.plan.shared for member in members}
    found = dict[str, Member]()
    for members in task.plan.shared:
        mine = [path for owner, path in members if owner == query]
        theirs = [member for member in members if member[0] in merged.states and member[0] != query]
        if mine and theirs:
            found[mine[0]] = max(theirs, key=lambda one: (sharing.get(one, 1), -start.donors.index(one[0])))
    return found


def _private_options(
    task: MergeTask, query: str, own: State, shared: State, paths: Sequence[str]
) -> list[tuple[str, ...]]:
    """Sets of layers to keep private, in ascending order of bytes: the most sensitive per byte that fit a fraction."""
    size = {layer.path: layer.bytes for layer in task.ctx.layers if layer.query == query}
    ranked = _rank_layers(task, query, own, shared, paths, size)
    options: list[tuple[str, ...]] = []
    for fraction in task.config.private_fractions if paths else ():
        chosen, left = list[str](), fraction * sum(size[path] for path in paths)
        for path in ranked:
            if size[path] <= left:
                chosen.append(path)
                left -= size[path]
        if tuple(chosen) not in options:
            options.append(tuple(chosen))
    return options


def _rank_layers(
    task: MergeTask, query: str, own: State, shared: State, paths: Sequence[str], size: Mapping[str, int]
) -> list[str]:
    """The layers by sensitivity per byte, most sensitive first; from the input on if the budget is short."""
    passes = SENSITIVITY_PASSES * MEASUREMENT.sensitivity_frames * len(paths)
    in_order = [path for path in size if path in paths]
    if 2 * passes * task.ctx.flops.of(task.ctx.queries[query]) > task.budget.flops_left:
        return in_order
    rank = partial(layer_sensitivity, task.ctx, query, own, shared, in_order)
    found = task.checkpoint.step(Step.SENSITIVITY, rank)
    return sorted(in_order, key=lambda path: -found[path] / size[path])
