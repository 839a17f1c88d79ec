"""From a workload of trained models to one bundle: search, judge on test, write."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from merger.checkpoint import WORK_SUFFIX, Checkpoint, StepCache, snapshots
from merger.core.budget import Budget
from merger.core.context import EVALUATING, READING, MergeContext
from merger.core.merged import Merged
from merger.core.method import METHODS, TRIALS, MergeOptions
from merger.distributed import ProcessGroup, Resources, check_consistent, partition, run_on_ray
from merger.events import Progress, silent
from merger.jobs import torch_threads
from merger.methods.top_down import whole_plan
from merger.outcomes import LEAVES, outcomes_of
from merger.quantize import Quantized, max_flops, pack_models, quantizable_weights, quantize, tied_models
from merger.report import MergeReport, QueryResult
from merger.training.step_config import HINT, MemoryPlan
from models.bits import FP32, Bits
from models.bundle import BundleQuery, Made, check_output, write_bundle
from models.device import is_out_of_memory
from models.errors import InputError
from models.evaluation import Evidence
from models.io import check_apart, finite, hold_locks, open_atomic
from models.quantization import PackedWeight
from models.sharing.groups import ceiling_bytes
from models.sharing.layers import layers_of_all, model_bytes
from models.sharing.similarity import ceiling_with_copies, copies, identical_sets
from models.weights import fingerprint
from models.workload import Query, Workload, inputs_of

_Stored = tuple[dict[str, nn.Module], dict[str, dict[str, PackedWeight]]]
_Making = Callable[[tuple[str, ...]], _Stored]
LOG_SUFFIX = ".log.jsonl"
BOUNDS = ("max_minutes", "max_flops")
"""The options that may be others when a merge goes on: with less it ends sooner, with what holds by then."""
QUANTIZED_ORIGINALS_ARE_SMALLER = "quantisation: the quantised originals are smaller than the quantised merge"
SEARCHING, FITTING = "searching what models can share", "finding how few bits weights need"
MEASURING, WRITING = "measuring on test", "writing the bundle"


def merge(
    workload: Workload,
    out: str | Path,
    method: str = "top-down",
    resume: bool = False,
    seed: int = 0,
    progress: Progress = silent,
    options: MergeOptions | None = None,
) -> MergeReport:
    """Merge a workload's models into one bundle at `out`, with the merge's log (JSON lines) beside it.

    Raises InputError before any work for a bad output path, method, weights or data. An interrupted merge leaves
    `OUT.work`, from which `resume` goes on, with the same options but for its bounds and resources. Of several
    processes (`Resources.group`) all call this, and rank 0 writes. With `Resources.ray` the merge runs on that cluster.
    """
    out, options = Path(out), options or MergeOptions()
    resources = options.resources
    if resources.ray is not None:
        if resources.group.size > 1:
            raise InputError("--ray", "does not go together with torchrun", "give one of them")

        def entry(group: ProcessGroup, report: Progress) -> MergeReport:
            own = replace(options, resources=Resources(resources.threads, None, group))
            return merge(workload, out.absolute(), method, resume, seed, report, own)

        return run_on_ray(resources.ray, entry, progress)
    group = resources.group
    group.run_on_rank0(partial(_check_paths, workload, out))
    with ExitStack() as held, _telling_of_full_memory():
        group.run_on_rank0(lambda: held.enter_context(hold_locks(out)))
        return _merged(workload, out, method, resume, seed, progress if group.rank == 0 else silent, options)


def _merged(
    workload: Workload, out: Path, method: str, resume: bool, seed: int, progress: Progress, options: MergeOptions
) -> MergeReport:
    group = options.resources.group
    begun = group.run_on_rank0(partial(_check, workload, out, method, options, resume))
    unbound = {name: value for name, value in options.to_json().items() if name not in BOUNDS}
    identity = {"workload": _fingerprint(workload), "method": method, "seed": seed, "options": unbound}
    check_consistent(group, identity)
    checkpoint = Checkpoint(_beside(out, WORK_SUFFIX), identity, resume, group)
    started = time.monotonic() - checkpoint.seconds
    torch.manual_seed(seed)
    with _without_torchs_warnings():
        ctx = MergeContext(workload, seed, progress, group=group)
        ctx.interval = options.margin is None
        loads = {query.id: float(ctx.flops.of(query)) for query in workload.queries}
        group.assign(partition(loads, group.size))
        if group.size > 1:
            progress("processes", queries=partition(loads, group.size))
        ctx.stages.announce(_stages(options))
        ctx.open()
        checkpoint.meter = ctx.flops
        ctx.memory, ctx.precision = MemoryPlan(checkpoint.state("memory"), progress), options.precision
        found = _searched(ctx, method, options, checkpoint)
        stored = partial(_stored_as, ctx, found, method, options, checkpoint)
        found, storage = stored()
        checkpoint.save()  # what comes from here on finds out at once whether it was begun before
        ended = _Ended(found, storage, time.monotonic() - started, ctx.flops.total)
        made = cache(partial(ended.models, ctx))  # once, where one process has all queries
        evidence = _measured(ctx, made, checkpoint)
        return ctx.run_on_rank0(lambda: _written(ctx, ended, made, evidence, (out, method, options, begun), checkpoint))


def _written(
    ctx: MergeContext,
    ended: _Ended,
    made_of: _Making,
    evidence: Mapping[str, Evidence],
    asked: tuple[Path, str, MergeOptions, bool],
    checkpoint: Checkpoint,
) -> MergeReport:
    """Write what was found, with what it reaches on test: the bundle and the log."""
    (out, method, options, begun), found = asked, ended.found
    ctx.begin(WRITING)
    models, stored = made_of(tuple(ctx.queries))
    records = _records(ctx, found.merged, evidence)
    made = Made(ctx.workload.name, method, _ceiling_bytes(ctx))
    manifest = write_bundle(out, models, records, made, overwrite=begun, packed=stored)
    _write_log(_beside(out, LOG_SUFFIX), [*checkpoint.log, *_accounted(ctx, found, method, options)])
    checkpoint.remove()
    results = tuple(QueryResult(**one.__dict__, id=query) for query, one in evidence.items())
    before, after = manifest.bytes.before, manifest.bytes.after
    saved, ceiling = 1 - after / before, made.ceiling_bytes / before
    told = next((row for row in found.log if "recipe" in row), {"recipe": None, "search_flops": 0.0})
    recipe, search_flops = told["recipe"], told["search_flops"]
    spent = (ended.seconds, ended.flops)
    return MergeReport(method, str(out), before, after, saved, ceiling, *spent, results, recipe, search_flops)


@dataclass(frozen=True)
class _Found:
    """What a method came to: what is merged, the log it left, and the work done by then."""

    merged: Merged
    log: list[dict[str, Any]]
    flops: float


@dataclass(frozen=True)
class _Ended:
    """A merge but for its test: what was found, how it is stored, and the seconds and the work that took."""

    found: _Found
    storage: Quantized
    seconds: float
    flops: float

    def models(self, ctx: MergeContext, queries: tuple[str, ...]) -> _Stored:
        """Fresh models of these queries with the weights that a box will run, and those that are stored packed."""
        models = tied_models(ctx, self.found.merged, queries)
        return models, pack_models(models, self.storage)


def _check_paths(workload: Workload, out: Path) -> None:
    """Refuse an output that is an input, or that could never be written."""
    written = [("--out", out), *(("--out", _beside(out, suffix)) for suffix in (LOG_SUFFIX, WORK_SUFFIX))]
    check_apart(written, inputs_of(workload))
    check_output(out, overwrite=True)
    check_output(_beside(out, LOG_SUFFIX), overwrite=True)


def _check(workload: Workload, out: Path, method: str, options: MergeOptions, resume: bool) -> bool:
    """Raise InputError for what can be seen before anything is loaded; whether the merge was begun before."""
    begun = resume and _beside(out, WORK_SUFFIX).is_dir()  # a kill between the bundle and the end leaves both
    check_output(out, overwrite=begun)
    if method not in METHODS:
        raise InputError("--method", f"'{method}' is unknown", f"choose one of: {', '.join(METHODS)}")
    for query in workload.queries:
        BundleQuery.of(query)  # refuses what a manifest has no room for, before hours of work
    return begun


def _stages(options: MergeOptions) -> list[str]:
    """What a merge does, in order; its method announces its own stages within the search."""
    storage = [] if options.weights == FP32 else [FITTING]
    return [READING, EVALUATING, SEARCHING, *storage, MEASURING, WRITING]


def _searched(ctx: MergeContext, method: str, options: MergeOptions, checkpoint: Checkpoint) -> _Found:
    """What the method comes to."""
    ctx.begin(SEARCHING)

    def search() -> dict[str, Any]:
        checkpoint.step("begun", lambda: None)  # what counts the work stands again where the method found it
        merged = METHODS[method](ctx, options, checkpoint).to_plain()
        return {"merged": merged, "log": list(checkpoint.log)}

    with torch_threads(options.resources.threads):
        found = checkpoint.step("method", search)
    checkpoint.log[:] = found["log"]  # a method that was done before the merge was interrupted noted nothing now
    return _Found(Merged.from_plain(found["merged"]), found["log"], ctx.flops.total)


def _stored_as(
    ctx: MergeContext, found: _Found, method: str, options: MergeOptions, checkpoint: Checkpoint
) -> tuple[_Found, Quantized]:
    """What is merged and how its tensors are stored; the quantised originals instead, if these are smaller."""
    if options.weights == FP32:
        return found, Quantized()
    bits: Bits = options.weights
    ctx.begin(FITTING, flops=max_flops(ctx))
    budget, required = Budget.of(ctx, options, checkpoint), options.required(ctx)

    def fit(name: str, merged: Merged) -> Quantized:
        return checkpoint.step(name, lambda: quantize(ctx, merged, bits, required, checkpoint, budget))

    chosen = fit(f"weights {bits}", found.merged)
    alone = _alone(ctx, options) if method == "top-down" else found.merged
    smallest = sum(weight.nbytes for weight in quantizable_weights(ctx, alone, bits))
    if found.merged.plan != alone.plan and smallest < sum(chosen.stored_bytes.values()):
        instead = fit(f"weights {bits} of the originals", alone)
        if sum(instead.stored_bytes.values()) < sum(chosen.stored_bytes.values()):
            ctx.progress("warning", text="the quantised originals are smaller: only identical layers are shared")
            rows = _left(ctx, sorted(found.merged.plan.queries() - alone.plan.queries()), required)
            for row in rows:
                checkpoint.add_row(row)
            found, chosen = _Found(alone, [*found.log, *rows], found.flops), instead
    for row in chosen.rows:
        checkpoint.add_row(row)
    return found, chosen


def _left(ctx: MergeContext, queries: Iterable[str], required: Mapping[str, float]) -> list[dict[str, Any]]:
    """The log's rows of queries that share nothing because quantised originals are smaller."""
    return [
        {"query": query, "repair": LEAVES, "after": QUANTIZED_ORIGINALS_ARE_SMALLER, "ratio": None,
         "required": required[query], "flops": ctx.flops.total}
        for query in queries
    ]  # fmt: skip


def _alone(ctx: MergeContext, options: MergeOptions) -> Merged:
    """The originals, of which only what is equal is shared."""
    originals = snapshots(ctx.originals)
    return Merged(identical_sets(whole_plan(ctx, options), originals), originals)


def _measured(ctx: MergeContext, made_of: _Making, checkpoint: Checkpoint) -> dict[str, Evidence]:
    """Query -> its merged model, as it is stored, against its original on test; each process measures its own.

    What several processes have measured they measure again after an interruption.
    """
    ctx.begin(MEASURING, pieces=2 * sum(map(len, ctx.test.values())))
    mine, journal = ctx.group.own(ctx.queries), checkpoint if ctx.group.size == 1 else StepCache()

    def measured() -> dict[str, Evidence]:
        models, _ = made_of(tuple(mine))
        return {query: _measure(ctx, query, models[query], journal) for query in mine}

    found = ctx.gather(measured)
    return {query: found[query] for query in ctx.queries}


def _measure(ctx: MergeContext, query: str, model: nn.Module, journal: StepCache) -> Evidence:
    found = journal.step(f"test of {query}", lambda: dataclasses.asdict(ctx.evidence(query, model)))
    told = ("metric", "original", "merged", "ratio", "met", "certain", "worth")
    ctx.progress("test", query=query, **{key: found[key] for key in told})
    return Evidence(**found)


def _records(ctx: MergeContext, merged: Merged, evidence: Mapping[str, Evidence]) -> list[BundleQuery]:
    """What the manifest says of each query."""
    records = []
    for query in ctx.workload.queries:
        threshold = ctx.references[query.id].threshold if query.task == "detection" else None
        precision = _precision(ctx, merged, query)
        records.append(BundleQuery.of(query, evidence[query.id].to_json(), threshold, precision))
    return records


def _precision(ctx: MergeContext, merged: Merged, query: Query) -> Any:
    """The precision that this query's model was trained in; None where it is its original or nothing is trained."""
    original, state = ctx.originals[query.id].state_dict(), merged.states[query.id]
    if original.keys() == state.keys() and all(torch.equal(original[key].cpu(), state[key].cpu()) for key in state):
        return None
    return ctx.precision


def _ceiling_bytes(ctx: MergeContext) -> int:
    sizes = {query.id: model_bytes(query) for query in ctx.workload.queries}
    twins = copies({query: model.state_dict() for query, model in ctx.originals.items()})
    return ceiling_with_copies(ctx.layers, sizes, twins)


def _accounted(ctx: MergeContext, found: _Found, method: str, options: MergeOptions) -> list[dict[str, Any]]:
    """The rows that end the log: what became of every set that the method tried."""
    plan = found.merged.plan
    size = {(layer.query, layer.path): layer.bytes for layer in ctx.layers}
    trials = TRIALS[method](ctx, options, found.log, found.flops)
    return outcomes_of(trials, plan, size)


def _write_log(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with open_atomic(path, overwrite=True) as file:
        file.write("".join(json.dumps(finite(row)) + "\n" for row in rows).encode())


@contextmanager
def _telling_of_full_memory() -> Iterator[None]:
    """Where nothing takes less memory any more one line says so, and what was stored last is there for `--resume`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InputError("the memory", "is full", HINT) from error


@contextmanager
def _without_torchs_warnings() -> Iterator[None]:
    """What torch warns of is its own business (an algorithm it takes, a call that will change): no line of a merge.

    Many of its warnings come from C++ and are said to be the caller's, so that no module tells them from others.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _fingerprint(workload: Workload) -> str:
    """Changes with the workload file and with the weights it names."""
    digest = hashlib.sha256(workload.path.read_bytes())
    for query in workload.queries:
        digest.update(fingerprint(query.weights))
    return digest.hexdigest()


def _beside(out: Path, suffix: str) -> Path:
    return out.parent / (out.name + suffix)


def ceiling_fraction(workload: Workload) -> float:
    """The part of the originals' bytes that sharing every group would save."""
    total = sum(model_bytes(query) for query in workload.queries)
    return ceiling_bytes(layers_of_all(workload.queries)) / total
