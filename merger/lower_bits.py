"""Fewer bits as steps of the ladder: the merge in int8, then in int4, as far as queries hold on the frames of a search.

They come last, since what they save is in proportion to what is left, and every network is calibrated once. Each step
begins with the float32 weights and packs a shared weight once, so queries that share layers keep equal codes. What is
private (norms, and with them the scales of a query's channels) goes into scales of its own (models.graph.query_graph).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import cast

from gemel.merger.budget import Budget
from gemel.merger.checkpoint import Checkpoint, Step, StepCache
from gemel.merger.computed import OUT_OF_TIME, Computed, compute_query
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext, Merged
from gemel.merger.evaluate import Price, price_in_bytes, required_ratios
from gemel.merger.events import Change, Event, StepStart
from gemel.merger.methods.registry import enter_step, report_row
from gemel.merger.quantize import Quantized, max_flops, quantizable_weights, quantize
from gemel.merger.shipped import Shipped
from gemel.models.bits import AUTO_BITS, Bits
from gemel.models.errors import join_names
from gemel.models.notes import add_note

LOWERING = "finding how few bits weights need"
ROUNDING = "rounding costs too much of"
MAX_NAMES = 3
"""Weights that a reason names."""
CHANGES: Mapping[Bits, Change] = {"fp16": Change.FP16, "int8": Change.INT8, "int4": Change.INT4}
ORIGINALS_ARE_SMALLER = "the originals in as many bits are smaller than the merge: only identical layers are shared"


@dataclass(frozen=True)
class BitsTask:
    """What the steps work with: the options, the budget and the required ratios of a merge, and where results stay.

    `queries` may have fewer bits, and `name` tells apart two climbs.
    """

    ctx: MergeContext
    options: MergeOptions
    checkpoint: Checkpoint
    budget: Budget
    required: Mapping[str, float]
    merged: Merged
    queries: Sequence[str]
    alone: Merged | None
    name: str

    @cached_property
    def wide(self) -> Mapping[str, float]:
        """Query -> its ratio in float32."""

        def measure(_: StepCache, query: str) -> float:
            return self.ctx.ratio(query, self.ctx.models([query], self.merged.states)[query].eval())

        return self.ctx.for_each_query(self.checkpoint, Step.WIDE, self.queries, measure, self.name)


def lower_bits(
    ctx: MergeContext,
    merged: Merged,
    options: MergeOptions,
    checkpoint: Checkpoint,
    queries: Sequence[str],
    name: str,
    alone: Merged | None = None,
) -> list[Shipped]:
    """The merge in float32, and in fewer bits step by step, while there is time and a step could save enough.

    A step is expected to take as long as the one before, and does not begin where that is more than is left. One that
    has not ended in time changes nothing, where the one before has fewer bits already.
    Where what is `alone` shared without training takes fewer bytes in as many bits, that is the step.
    """
    steps = [Shipped(merged)]
    has_packed_donors = options.documents and bool(ctx.donors.queries)
    if not queries or not (options.bits or has_packed_donors):
        return steps
    is_auto = options.weights == AUTO_BITS
    cost = max_flops(ctx, not is_auto)
    ctx.begin(LOWERING, flops=cost)
    required, budget = required_ratios(ctx), Budget.of(ctx, options, checkpoint)
    task = BitsTask(ctx, options, checkpoint, budget, required, merged, queries, alone, name)
    if has_packed_donors:
        computed = _compute(task, steps[0], steps[0])
        ranges = {query: result.ranges for query, result in computed.items() if result.ranges}
        steps = [replace(steps[0], activations=ranges)]
    seconds = 0.0
    for bits in options.bits:
        weights = quantizable_weights(ctx, merged, bits, queries)
        before = steps[-1].storage.nbytes or sum(weight.wide_bytes for weight in weights)
        possible = max(0, before - sum(weight.nbytes for weight in weights))
        price = price_in_bytes(ctx, options, cost) if is_auto else -math.inf  # given bits are taken whatever they save
        start = enter_step(ctx, checkpoint, budget, CHANGES[bits], possible, price, name, seconds=seconds)
        began_s = checkpoint.step(Step.BITS, lambda: checkpoint.elapsed_s, bits, name)
        shipped = _store(task, steps[-1], merged, bits) if start is StepStart.BEGINS else None
        if shipped is None:
            too_little = f"{bits} could save too little beyond {steps[-1].bits}"
            reason = too_little if start is StepStart.LEFT_OUT else OUT_OF_TIME
            steps[-1] = replace(steps[-1], why={**dict.fromkeys(queries, reason), **steps[-1].why})
            break
        steps.append(shipped)
        seconds = checkpoint.elapsed_s - began_s
    return steps


def _store(task: BitsTask, before: Shipped, merged: Merged, bits: Bits) -> Shipped | None:
    """The merge in these bits where queries hold; without what was shared, if the originals take fewer bytes so.

    None where time was over before and the step before has fewer bits than float32.
    """
    ctx, checkpoint = task.ctx, task.checkpoint

    def fit(name: Step, state: Merged) -> Quantized:
        trains = task.options.weights != AUTO_BITS
        run = partial(quantize, ctx, state, bits, task.required, checkpoint, task.budget, task.wide, trains)
        return checkpoint.step(name, run, bits, task.name)

    storage, alone = fit(Step.QUANTIZED, merged), task.alone
    if alone is not None and merged.plan != alone.plan:
        smallest = sum(weight.nbytes for weight in quantizable_weights(ctx, alone, bits, task.queries))
        instead = fit(Step.QUANTIZED_ORIGINALS, alone) if smallest < storage.nbytes else storage
        if instead.nbytes < storage.nbytes:
            ctx.warn(ORIGINALS_ARE_SMALLER)
            merged, storage = alone, instead
    if before.storage.bits and checkpoint.step(Step.BITS_TIME, lambda: task.budget.over, bits, task.name):
        return None
    shipped = Shipped(merged, storage, {}, bits)
    computed = _compute(task, before, shipped) if task.options.documents else {}
    return _report(task, before, shipped, computed)


def _compute(task: BitsTask, before: Shipped, shipped: Shipped) -> dict[str, Computed]:
    """What is computed in integers of each query; each network is calibrated once."""
    ctx, storage = task.ctx, shipped.storage

    def compute(_: object, query: str) -> Computed | None:
        models, packed = shipped.models(ctx, [query])
        if not packed.get(query):
            return None
        is_calibrated = before.storage.bits and before.merged is shipped.merged
        known = before.activations.get(query) if is_calibrated else None
        ratio = storage.ratios.get(query, task.wide[query])
        return compute_query(ctx, query, models[query], packed[query], task.required[query], ratio, known, task.budget)

    results = ctx.for_each_query(task.checkpoint, Step.COMPUTED, list(task.wide), compute, shipped.bits, task.name)
    return {query: result for query, result in results.items() if result is not None}


def _report(task: BitsTask, before: Shipped, shipped: Shipped, computed: Mapping[str, Computed]) -> Shipped:
    """A row of the log for each query, with what the step costs and saves, and why it has no fewer bits."""
    ctx, storage, why = task.ctx, shipped.storage, dict[str, str]()
    asked = weights_by_query(ctx, shipped, list(task.wide))
    sizes = [bytes_by_query(ctx, one, list(task.wide)) for one in (before, shipped)]
    for query in task.wide:
        own, result = storage.bits.get(query, {}), computed.get(query)
        ratio = result.ratio if result else storage.ratios[query]
        kinds = sorted(set(own.values()))
        if not own and asked[query]:
            why[query] = f"{shipped.bits} keeps {storage.ratios[query]:.3f}, {storage.needs[query]:.3f} is required"
        elif wider := [key for key, bits in asked[query].items() if own.get(key) != bits]:
            why[query] = f"{ROUNDING} {join_names(wider, MAX_NAMES)}"
        if result and result.wide:
            where = (
                "stay in float32" if not result.ranges else f"stay in float32, and {len(result.ranges)} take eight bits"
            )
            add_note(query, f"{result.wide} of its activations {where}; {result.why}".rstrip("; "))
        row = {
            "step": CHANGES[shipped.bits].value, "query": query, "saved_bytes": sizes[0][query] - sizes[1][query],  # type: ignore[index]
            "ratio": ratio, "required": storage.needs[query], "taken": bool(own),
            **asdict(Price.of(ctx, ctx.queries[query], sizes[1][query], ratio)),
            "in_integers": bool(result and result.ranges), "bits": kinds,
        }  # fmt: skip
        report_row(ctx, task.checkpoint, Event.STEP, row)
    ranges = {query: result.ranges for query, result in computed.items() if result.ranges}
    return replace(shipped, activations=ranges, why=why)


def weights_by_query(ctx: MergeContext, shipped: Shipped, queries: Sequence[str]) -> dict[str, dict[str, Bits | None]]:
    """Query -> its weights by name, and the bits of each that the step is about."""
    found: dict[str, dict[str, Bits | None]] = {query: {} for query in queries}
    for weight in quantizable_weights(ctx, shipped.merged, cast(Bits, shipped.bits), queries):
        for query, key in weight.places:
            found[query][key] = weight.bits
    return found


def bytes_by_query(ctx: MergeContext, shipped: Shipped, queries: Sequence[str]) -> dict[str, int]:
    """Bytes of the weights that could have fewer bits, as they are stored; one of n queries has 1/n of a shared one."""
    sizes = dict.fromkeys(queries, 0.0)
    for weight in quantizable_weights(ctx, shipped.merged, "int4", queries):
        query, key = weight.places[0]
        bits = shipped.storage.bits.get(query, {}).get(key)
        level = weight.options.index(bits) if bits is not None else len(weight.options)
        users = {name for name, _ in weight.places}
        for name in users:
            sizes[name] += replace(weight, level=level).nbytes / len(users)
    return {query: round(size) for query, size in sizes.items()}
