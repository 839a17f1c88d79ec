"""From a workload of trained models to one bundle: search, quantize, evaluate on test, write.

The path from `gemel merge` to `optimizer.step()` (measured by benchmarks/call_depth.py):

    gemel.commands.merge -> merger.merge.merge
    -> top_down -> merge_different                   (merger/methods/top_down.py)
    -> train_together -> train_kind                  (merger/methods/joint_training.py)
    -> train_epochs                                  (merger/methods/epochs.py)
    -> Training.epoch                                (merger/training/loop.py)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemel.merger.acceptance import Acceptance, accept, is_worth_look
from gemel.merger.addition import Addition, open_addition, recommend_whole_merge
from gemel.merger.budget import reserve_end
from gemel.merger.checkpoint import WORK_SUFFIX, Checkpoint, Row, Step, StepCache, snapshot, snapshots, storable
from gemel.merger.config import MergeOptions
from gemel.merger.context import EVALUATING, READING, MergeContext, Merged
from gemel.merger.cost_meter import CostMeter, MergeCost
from gemel.merger.distributed import (
    ProcessGroup,
    Resources,
    check_consistent,
    is_later_start,
    run_on_ray,
    torch_threads,
)
from gemel.merger.events import Event
from gemel.merger.forecast import Forecast
from gemel.merger.lower_bits import LOWERING, ROUNDING, lower_bits
from gemel.merger.methods.prefix import SHARING_PREFIXES, share_prefixes
from gemel.merger.methods.registry import METHODS
from gemel.merger.methods.top_down import whole_plan
from gemel.merger.networks import query_as_stored
from gemel.merger.outcomes import outcome_rows
from gemel.merger.shipped import Shipped
from gemel.merger.training.data import default_device
from gemel.merger.training.recipe import Flops, flops_a_second
from gemel.merger.training.step_config import HINT, MemoryPlan
from gemel.merger.verdict import describe
from gemel.models.bits import FP32
from gemel.models.bundle import (
    Bundle,
    BundleQuery,
    Made,
    Manifest,
    Substitution,
    check_output,
    check_writable,
    open_bundle,
    write_bundle,
)
from gemel.models.bundle.manifest import wide_bytes
from gemel.models.bundle.origin import origin_of
from gemel.models.device import disable_tf32
from gemel.models.errors import InputError, join_names, size_text
from gemel.models.export.export_document import export_documents
from gemel.models.files.io import check_apart, finite, hold_locks, open_atomic
from gemel.models.files.weights import fingerprint
from gemel.models.measures.evaluation import Evidence, EvidenceState
from gemel.models.notes import add_note, collect_notes
from gemel.models.out_of_memory import is_out_of_memory
from gemel.models.quantization import PackedWeight
from gemel.models.sharing.flop_rates import layers_by_query, prefix_rates
from gemel.models.sharing.layers import layers_of_all, model_bytes
from gemel.models.sharing.plan import SharingPlan
from gemel.models.sharing.similarity import ceiling_with_copies, copies, equal_states, identical_sets
from gemel.models.stages import Progress, silent
from gemel.models.tasks import task_of
from gemel.models.workload import Query, Workload, inputs_of

LOG_SUFFIX = ".log.jsonl"
BUDGET_OPTIONS = ("max_minutes", "max_flops")
"""The options that may differ when a merge resumes."""
storable(Evidence)
storable(EvidenceState)
SEARCHING = "searching what models can share"
MEASURING, WRITING = "measuring on test", "writing the bundle"


@dataclass(frozen=True)
class QueryResult(Evidence):
    """How one query came out on test; `network` is the query whose network answers it, where that is another.

    `bits` are those of most of its weights, `in_integers` whether it is computed so, `why_bits` why there are no fewer.
    """

    id: str = ""
    model: str = ""
    network: str | None = None
    bits: str = FP32
    in_integers: bool = False
    why_bits: str = ""


@dataclass(frozen=True)
class MergeReport:
    """The result of a merge. `flops` = image passes x FLOPs; fractions are of the originals' bytes.

    `flops_before` and `flops_after` are FLOPs a second of all queries at their frame rates (1 a second where unknown),
    `flops_with_prefix` those with common prefixes run once a frame.
    `recipe` is what the method trained by, None if it trains nothing. `notes` are those of models.notes. Of a bundle
    that grew, `addition` says which queries were `kept`, `new` and `removed`, how many `new_bytes` the bundle before
    lacks, and what a `whole_merge` could save; `queries` are the new ones, all else is of the whole bundle.
    `cost` is of all starts and to the end, where prices or a deadline are known.
    """

    method: str
    bundle: str
    bytes_before: int
    bytes_after: int
    saved_fraction: float
    ceiling_fraction: float
    flops_before: float
    flops_after: float
    flops_with_prefix: float
    seconds: float
    flops: float
    queries: tuple[QueryResult, ...]
    recipe: Mapping[str, object] | None = None
    notes: tuple[str, ...] = ()
    cost: MergeCost | None = None
    addition: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        rows = []
        for row in self.queries:
            metric, outcome = row.metric.replace("_", " "), f"{'not ' * (not row.met)}met, {row.state.value}"
            needs = f"; what would prove a change: {row.needs}" if row.needs else ""
            rows.append(f"{row.id}: {metric} {row.original:.3f} -> {row.merged:.3f}, {outcome}{needs}")
        saved = f"{100 * self.saved_fraction:.1f} % saved"
        bytes_text = f"{size_text(self.bytes_before)} became {size_text(self.bytes_after)}"
        return "\n".join([f"{self.bundle}: {bytes_text}, {saved} ({self.method})", *rows])

    @property
    def untried(self) -> list[str]:
        """The queries that were left as they are because nothing here could prove a change."""
        return [row.id for row in self.queries if row.state is EvidenceState.UNCHANGED and row.needs]

    @property
    def met(self) -> bool:
        """Whether every query reaches its target on test, with evidence, or is unchanged."""
        return all(query.met for query in self.queries)

    def to_json(self) -> dict[str, Any]:
        """Plain values under the keys of `gemel merge --json`."""
        plain = {**dataclasses.asdict(self), "queries": [query.to_json() for query in self.queries]}
        return json.loads(json.dumps(plain))


@dataclass(frozen=True)
class _Output:
    """Where a merge goes: the file, the method's name, whether an earlier start may have written it, `documents` as in
    MergeOptions, and the bundle that it adds to, with the whole workload."""

    path: Path
    method: str
    begun: bool
    documents: bool
    workload: Workload
    addition: Addition | None

    def list_queries(self, merged: Mapping[str, Query]) -> list[Query]:
        """All queries of the workload, each with the network that answers it; `merged` are those of the merge."""
        kept = {} if self.addition is None else self.addition.kept
        return [
            merged[query.id] if query.id in merged else query_as_stored(query, kept[query.id])
            for query in self.workload.queries
        ]


def merge(
    workload: Workload,
    out: str | Path,
    method: str = "top-down",
    resume: bool = False,
    seed: int = 0,
    progress: Progress = silent,
    options: MergeOptions | None = None,
    onto: str | Path | None = None,
) -> MergeReport:
    """Merge a workload's models into one bundle at `out`, with the merge's log (JSON lines) beside it.

    Raises InputError before any training for a bad output path, method, weights or data. An interrupted merge leaves
    `OUT.work`, from which `resume` goes on, with the same options but for its budget and resources. Several processes
    (`Resources.group`) all call this, and rank 0 writes; with `Resources.ray` the merge runs on that cluster.

    `onto` is a bundle whose queries stay as they are, bit by bit and with their proofs, where the workload has them
    unchanged; only the others are merged (merger.addition).
    """
    out, options = Path(out), options or MergeOptions()
    if options.public_key is not None and onto is None:
        raise InputError("--public-key", "says who signed the bundle of --onto", "give both, or none")
    if options.resources.ray is not None:
        return _merge_on_ray(workload, out, method, resume, seed, progress, options, onto)
    group, resume = options.resources.group, resume or is_later_start()
    group.run_on_rank0(partial(_check_paths, workload, out, onto))
    with ExitStack() as stack, _full_memory_as_input_error(), warnings.catch_warnings(), disable_tf32():
        notes = stack.enter_context(collect_notes())
        warnings.simplefilter("ignore")  # torch's own, of algorithms and calls that a user cannot change
        group.run_on_rank0(lambda: stack.enter_context(hold_locks(out)))
        begun = group.run_on_rank0(partial(_check, workload, out, method, resume))
        addition = None
        if onto is not None:
            _check_addition_options(method, options)
            addition = open_addition(onto, workload, options.public_key)
        output = _Output(out, method, begun, options.documents, workload, addition)
        if addition is not None and not addition.new:
            return group.run_on_rank0(lambda: replace(_write_kept(output), notes=tuple(notes)))
        workload = workload if addition is None else addition.new_workload
        checkpoint = _open_checkpoint(workload, output, seed, options, resume)
        started = time.monotonic() - checkpoint.seconds
        meter = CostMeter(options.spending, checkpoint, group) if options.spending else None
        options = meter.limit(options) if meter else options
        shown = progress if group.rank == 0 else silent
        ctx = _open_context(workload, output, seed, shown, options, checkpoint)
        if addition is not None:
            checkpoint.add_row({**addition.describe(), "flops": ctx.flops.total})
        options = reserve_end(ctx, options)
        with torch_threads(options.resources.threads):
            forecast = _open_forecast(ctx, meter, options, checkpoint) if meter else None
            ctx.begin(SEARCHING)
            with checkpoint.open_step(Step.METHOD) as step:
                if not step.done:
                    checkpoint.step(Step.BEGUN, lambda: None)  # the FLOPs that were counted before
                    step.value = METHODS[method].run(ctx, options, checkpoint)
            own, ctx, merged = ctx, _apply_networks(ctx, step.value), step.value
            if options.share_prefix:
                merged = share_prefixes(ctx, merged, options, checkpoint)
            taken = _lower_and_accept(ctx, merged, method, options, checkpoint)
            ctx = _apply_networks(own, taken.shipped.merged)
        log = [*checkpoint.log, *_bits_rows(ctx, taken.shipped)]
        log += _outcomes(own, taken.shipped.merged, checkpoint.log, method, options)
        checkpoint.save()
        flops = ctx.flops.total
        evidence = _measure(ctx, taken, checkpoint)
        write = partial(_write, ctx, taken.shipped, log, evidence, output, checkpoint, flops, meter)
        report = ctx.run_on_rank0(write)
        if forecast:
            forecast.finish(flops)
        every = group.all_gather_object(lambda: notes)
        notes = tuple(dict.fromkeys(note for own in every for note in own))
        return replace(report, seconds=time.monotonic() - started, notes=notes)


def _merge_on_ray(
    workload: Workload,
    out: Path,
    method: str,
    resume: bool,
    seed: int,
    progress: Progress,
    options: MergeOptions,
    onto: str | Path | None,
) -> MergeReport:
    """The same merge in the processes of a Ray cluster."""
    resources = options.resources
    if resources.group.size > 1:
        raise InputError("--ray", "does not go together with torchrun", "give one of them")

    def entry(group: ProcessGroup, report: Progress) -> MergeReport:
        own = replace(options, resources=Resources(resources.threads, None, group))
        return merge(workload, out.absolute(), method, resume, seed, report, own, onto)

    assert resources.ray is not None
    return run_on_ray(resources.ray, entry, progress)


def _check_paths(workload: Workload, out: Path, onto: str | Path | None) -> None:
    """Refuse an output that is an input, or that could never be written."""
    written = [("--out", out), *(("--out", _beside(out, suffix)) for suffix in (LOG_SUFFIX, WORK_SUFFIX))]
    before = [] if onto is None else [("the bundle that is added to", onto)]
    check_apart(written, [*inputs_of(workload), *before])
    check_output(out, overwrite=True)
    check_output(_beside(out, LOG_SUFFIX), overwrite=True)


def _check(workload: Workload, out: Path, method: str, resume: bool) -> bool:
    """Raise InputError for what can be seen before anything is loaded; whether the merge was begun before."""
    begun = resume and _beside(out, WORK_SUFFIX).is_dir()  # a kill between the bundle and the end leaves both
    check_output(out, overwrite=begun)
    METHODS.find(method, "--method")
    for query in workload.queries:
        BundleQuery.of(query)  # refuses what a manifest has no room for
    return begun


def _check_addition_options(method: str, options: MergeOptions) -> None:
    """Refuse what would change queries that stay as they are."""
    if not METHODS[method].keeps_donors:
        hint = f"choose one of: {', '.join(one.name for one in METHODS.usable() if one.keeps_donors)}"
        raise InputError("--method", f"'{method}' does not go together with --onto", hint)
    if options.share_prefix:
        problem = "does not go together with --onto: a common prefix changes queries that stay"
        raise InputError("--share-prefix", problem, "leave out one of them")


def _open_checkpoint(workload: Workload, output: _Output, seed: int, options: MergeOptions, resume: bool) -> Checkpoint:
    group = options.resources.group
    fixed = {name: value for name, value in options.to_json().items() if name not in BUDGET_OPTIONS}
    identity = {"workload": digest_workload(workload), "method": output.method, "seed": seed, "options": fixed}
    if output.addition is not None:
        identity["onto"] = output.addition.bundle.digest
    check_consistent(group, identity)
    return Checkpoint(_beside(output.path, WORK_SUFFIX), identity, resume, group)


def _open_context(
    workload: Workload, output: _Output, seed: int, progress: Progress, options: MergeOptions, checkpoint: Checkpoint
) -> MergeContext:
    """Everything loaded and the originals evaluated."""
    torch.manual_seed(seed)
    group, method = options.resources.group, output.method
    donors = None if output.addition is None else output.addition.open_donors(default_device())
    ctx = MergeContext(workload, seed, progress, group=group, donors=donors)
    if options.documents:
        ctx.documents |= ctx.donors.documents()
    keeps_originals = not METHODS[method].searches and not options.bits and not options.share_prefix
    changes = METHODS[method].accepts and not keeps_originals
    ctx.proves, ctx.accept_unproven, ctx.margin = changes, options.accept_unproven, options.margin
    ctx.evidence_config = options.evidence
    parts = ctx.assign_queries()
    if group.size > 1:
        progress(Event.PROCESSES.value, queries=parts)
    more = [SHARING_PREFIXES] * options.share_prefix + [LOWERING] * bool(options.bits)
    ctx.stages.announce([READING, EVALUATING, SEARCHING, *more, MEASURING, WRITING])
    ctx.open()
    records = [BundleQuery.of(query) for query in workload.queries]
    group.run_on_rank0(partial(check_writable, workload.path, ctx.originals, records))
    checkpoint.meter = ctx.flops
    ctx.memory = MemoryPlan(checkpoint.state(Step.MEMORY), options.precision)
    ctx.trained = checkpoint.state(Step.TRAINED)
    return ctx


def _open_forecast(ctx: MergeContext, meter: CostMeter, options: MergeOptions, checkpoint: Checkpoint) -> Forecast:
    """The forecast of this merge, after a trial of some steps."""
    forecast = Forecast(ctx, meter, checkpoint.digest)
    forecast.try_steps(options)
    ctx.expect = forecast.expect
    return forecast


def _bits_rows(ctx: MergeContext, shipped: Shipped) -> list[Row]:
    """A row of the log for each query: its bits, and why it has no fewer; of those in float32 a note."""
    rows = list[Row]()
    for query in ctx.queries:
        bits, why = shipped.main_bits(ctx, query), shipped.why.get(query, "")
        rows.append({"query": query, "bits": bits, "in_integers": query in shipped.activations, "why_bits": why})
        if why and (bits == FP32 or why.startswith(ROUNDING)):
            add_note(query, f"stays in {bits}: {why}" if bits == FP32 else why)
    return rows


def _apply_networks(ctx: MergeContext, merged: Merged) -> MergeContext:
    """The context in which queries have the networks that answer them."""
    return ctx.substitute(merged.networks, {query: merged.states[query] for query in merged.networks})


def _lower_and_accept(
    ctx: MergeContext, merged: Merged, method: str, options: MergeOptions, checkpoint: Checkpoint
) -> Acceptance:
    """The merge in the fewest bits with which each query is accepted; originals that are back take fewer bits, too."""
    alone = None
    if METHODS[method].ties_identical and options.bits:
        plan = identical_sets(whole_plan(ctx, options), ctx.states_that_share())
        alone = Merged(plan, snapshots(ctx.bases), merged.networks)
    steps = lower_bits(ctx, merged, options, checkpoint, ctx.judged, "merged", alone)
    if not METHODS[method].accepts:
        return Acceptance(steps[-1])
    taken = accept(ctx, steps, checkpoint, list(ctx.queries), "merged")
    root = ctx.root
    again = [query for query in taken.originals if query in root.judged and is_worth_look(root, query)]
    if not options.bits or not again:
        return taken
    originals = Merged(SharingPlan(), {query: snapshot(root.originals[query]) for query in root.queries})
    steps = lower_bits(root, originals, options, checkpoint, again, "originals")
    more = accept(root, steps, checkpoint, again, "originals")
    shipped = taken.shipped.only(set(root.queries) - set(again)).join(more.shipped.only(again))
    return replace(taken, shipped=shipped, verdicts={**taken.verdicts, **more.verdicts})


def _outcomes(
    own: MergeContext, merged: Merged, log: Sequence[Row], method: str, options: MergeOptions
) -> Sequence[Row]:
    """The rows that end the log: what became of every set that the method tried."""
    ctx = own.substitute(merged.networks)
    size = {(layer.query, layer.path): layer.bytes for layer in (*own.layers, *ctx.layers)}
    return outcome_rows(METHODS[method].explain(ctx, options, log, ctx.flops.total), merged.plan, size)


def _measure(ctx: MergeContext, taken: Acceptance, checkpoint: Checkpoint) -> dict[str, Evidence]:
    """Query -> its merged model, as it is stored, against its original on test."""
    ctx.begin(MEASURING, pieces=2 * sum(map(len, ctx.test.values())))

    def measure(_: StepCache, query: str) -> Evidence:
        changed = taken.shipped.is_changed(ctx, query)
        evidence = ctx.evidence(query, taken.shipped.answerer(ctx, query) if changed else None)
        evidence = describe(evidence, taken.verdicts.get(query), changed)
        if not changed and query not in ctx.judged:
            evidence = replace(evidence, needs=ctx.references[query].needs)
        keys = ("metric", "original", "merged", "ratio", "met", "worth", "reason")
        ctx.report(Event.TEST, query=query, **{key: getattr(evidence, key) for key in keys}, state=evidence.state.value)
        return evidence

    return ctx.for_each_query(checkpoint, Step.TEST, ctx.queries, measure)


def _write(
    ctx: MergeContext,
    shipped: Shipped,
    log: Sequence[Row],
    evidence: Mapping[str, Evidence],
    output: _Output,
    checkpoint: Checkpoint,
    flops: float,
    meter: CostMeter | None,
) -> MergeReport:
    """Write the bundle and the log; the report."""
    ctx.begin(WRITING)
    models, packed = shipped.models(ctx, ctx.queries)
    records = [_record(ctx, shipped.merged, query, evidence[query.id], output) for query in ctx.queries.values()]
    records = [replace(record, activations=dict(shipped.activations.get(record.id, {}))) for record in records]
    graphs = export_documents(models, records, ctx.documents) if output.documents else {}
    twins = copies({query: model.state_dict() for query, model in ctx.originals.items()})
    manifest = _write_bundle(output, models, records, twins, packed, graphs)
    cost = meter.cost(flops, manifest.bytes.before - manifest.bytes.after) if meter else None
    rows = [*log, *([{"cost": dataclasses.asdict(cost)}] if cost else [])]
    with open_atomic(_beside(output.path, LOG_SUFFIX), overwrite=True) as file:
        file.write("".join(json.dumps(finite(row)) + "\n" for row in rows).encode())
    checkpoint.remove()
    report = _report(output, manifest, ctx.queries, ctx.flops)
    results = [
        QueryResult(
            **one.__dict__, id=query, model=ctx.queries[query].model, network=ctx.networks.get(query),
            bits=shipped.main_bits(ctx, query), in_integers=query in shipped.activations,
            why_bits=shipped.why.get(query, ""),
        )
        for query, one in evidence.items()
    ]  # fmt: skip
    recipe = next((row["recipe"] for row in log if "recipe" in row), None)
    return replace(report, flops=flops, queries=tuple(results), recipe=recipe, cost=cost)


def _write_kept(output: _Output) -> MergeReport:
    """Write what stays of a bundle where nothing is new."""
    return _report(output, _write_bundle(output, {}, [], (), {}, {}), {}, Flops())


def _write_bundle(
    output: _Output,
    models: Mapping[str, nn.Module],
    records: Sequence[BundleQuery],
    twins: Collection[str],
    packed: Mapping[str, Mapping[str, PackedWeight]],
    documents: Mapping[str, bytes],
) -> Manifest:
    """Write these models, and what stays of the bundle that is added to, in the order of the workload."""
    addition, queries = output.addition, output.workload.queries
    kept = {} if addition is None else addition.kept
    holders = {} if addition is None else dict.fromkeys(kept, addition.bundle)
    whole = {**kept, **{record.id: record for record in records}}
    sizes = {query.id: model_bytes(query) for query in queries}
    ceiling = ceiling_with_copies(layers_of_all(queries), sizes, twins)
    made = Made(output.workload.name, METHODS[output.method].name, ceiling)
    return write_bundle(
        output.path, models, [whole[query.id] for query in queries], made,
        overwrite=output.begun, packed=packed, documents=documents, holders=holders,
    )  # fmt: skip


def _report(output: _Output, manifest: Manifest, merged: Mapping[str, Query], flops: Flops) -> MergeReport:
    """The report on the bundle that was written, without what only a merge can tell."""
    bundle, queries = open_bundle(output.path), output.list_queries(merged)
    before, after = manifest.bytes.before, manifest.bytes.after
    addition = None if output.addition is None else _report_addition(output.addition, bundle)
    return MergeReport(
        output.method, str(output.path), before, after, 1 - after / before, manifest.bytes.ceiling / before,
        flops_a_second(flops, output.workload.queries), flops_a_second(flops, queries),
        _prefix_flops(bundle, queries), 0.0, 0.0, (), addition=addition,
    )  # fmt: skip


def _report_addition(addition: Addition, bundle: Bundle) -> dict[str, Any]:
    """What stayed, came and left; notes name what left, and recommend a whole merge where much was added."""
    held = addition.bundle.header.entries.keys()
    new_bytes = sum(entry.nbytes for entry in bundle.header.tensors if entry.name not in held)
    if addition.removed:
        add_note(bundle.path, f"without {join_names(addition.removed)}, which the workload does not name any more")
    whole_merge = recommend_whole_merge(bundle, addition.workload)
    if whole_merge:
        add_note(bundle.path, whole_merge)
    return {**addition.describe(), "new_bytes": new_bytes, "whole_merge": whole_merge}


def _prefix_flops(bundle: Bundle, queries: Sequence[Query]) -> float:
    """FLOPs a second with what queries of one camera have in common run once a frame."""
    nbytes = dict[str, int]()
    for record in bundle.queries:
        nbytes |= {name: wide_bytes(record, key, bundle.header.entries[name]) for key, name in record.tensors.items()}
    fps = {query.id: query.fps or 1.0 for query in queries}
    return prefix_rates(bundle.queries, layers_by_query(queries), fps, nbytes.__getitem__).with_prefix


def _record(ctx: MergeContext, merged: Merged, query: Query, evidence: Evidence, output: _Output) -> BundleQuery:
    """A query's entry in the manifest, with the precision that its model was trained in; None if it was not."""
    threshold = ctx.references[query.id].threshold if task_of(query).has_threshold else None
    unchanged = equal_states(snapshot(ctx.bases[query.id]), merged.states[query.id])
    precision = ctx.memory.precision_of(ctx.bases[query.id]) if query.id in ctx.trained and not unchanged else None
    record = BundleQuery.of(query, evidence.to_json(), threshold, precision)  # type: ignore[arg-type]
    record = replace(record, origin=origin_of(ctx.workload.query(query.id), output.addition is not None))
    if (donor := ctx.networks.get(query.id)) is None:
        return record
    own = ctx.workload.query(query.id)
    return replace(record, substitution=Substitution(donor, BundleQuery.of(own).model, model_bytes(own)))


@contextmanager
def _full_memory_as_input_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InputError("the memory", "is full", HINT) from error


def digest_workload(workload: Workload) -> str:
    """What changes with the workload file and with the weights it names."""
    digest = hashlib.sha256(workload.path.read_bytes())
    for query in workload.queries:
        digest.update(fingerprint(query.weights))
    return digest.hexdigest()


def _beside(out: Path, suffix: str) -> Path:
    return out.parent / (out.name + suffix)
