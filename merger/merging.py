"""From a workload of trained models to one bundle: search, judge on test, write."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from merger.bench.bounds import Bounds
from merger.bench.elsewhere import employed
from merger.bench.merged import Merged
from merger.bench.method import METHODS, TRIALS, MergeOptions
from merger.bench.sizes import bytes_of_residuals
from merger.bench.workbench import Workbench
from merger.beyond.narrow_weights import Narrowing, residual_bytes, store, tied_models
from merger.beyond.narrowing import narrow
from merger.journal.checkpoint import Checkpoint
from merger.journal.outcomes import account
from merger.journal.progress import Progress, silent
from merger.training.precision import Precisions
from merger.workers.jobs import using
from models.bundle import BundleQuery, Made, check_output, write_bundle
from models.errors import InputError
from models.files.atomic import writing
from models.measuring.evaluation import Evidence
from models.parts.low_rank import KEY as LOW_RANK
from models.parts.widths import FP32
from models.sharing.groups import ceiling_bytes
from models.sharing.layers import layers_of_all, model_bytes
from models.weights.reading import fingerprint
from models.workload import Query, Workload

LOG_SUFFIX = ".log.jsonl"
WORK_SUFFIX = ".work"


@dataclass(frozen=True)
class QueryResult(Evidence):
    """How one query came out on test, and what its residuals weigh."""

    id: str = ""
    residual_bytes: int = 0


@dataclass(frozen=True)
class MergeReport:
    """What `gemel merge` reports. `work` = image passes x FLOPs; fractions are of the originals' bytes."""

    method: str
    bundle: str
    bytes_before: int
    bytes_after: int
    saved_fraction: float
    ceiling_fraction: float
    seconds: float
    work: float
    queries: tuple[QueryResult, ...]

    @property
    def met(self) -> bool:
        """Whether every query reaches its target on test."""
        return all(query.met for query in self.queries)

    def to_json(self) -> dict[str, Any]:
        """Plain values under DESIGN's keys."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def merge(
    workload: Workload,
    out: str | Path,
    method: str = "wide",
    resume: bool = False,
    seed: int = 0,
    progress: Progress = silent,
    options: MergeOptions | None = None,
) -> MergeReport:
    """Merge a workload's models into one bundle at `out`, with the merge's log (JSON lines) beside it.

    Raises InputError before any work for a bad output path, method, weights or data. An interrupted merge leaves
    `OUT.work`, from which `resume` goes on.
    """
    out, options = Path(out), options or MergeOptions()
    begun = resume and _beside(out, WORK_SUFFIX).is_dir()  # a kill between the bundle and the end leaves both
    check_output(out, overwrite=begun)
    check_output(_beside(out, LOG_SUFFIX), overwrite=True)
    if method not in METHODS:
        raise InputError("--method", f"'{method}' is unknown", f"choose one of: {', '.join(METHODS)}")
    identity = {
        "workload": _fingerprint(workload), "method": method, "seed": seed, "options": options.to_json(),
    }  # fmt: skip
    if options.beyond and method != "wide":
        raise InputError("--beyond", f"method {method} stops at the ceiling", "leave it out, or take method wide")
    for query in workload.queries:
        if LOW_RANK in query.model_args:
            remedy = "leave it out: `merge --beyond` finds the ranks"
            where = f"queries.{query.id}.model_args.{LOW_RANK}"
            raise InputError(workload.path, "an original has no factors", remedy, where)
        BundleQuery.of(query)  # refuses what a manifest has no room for, before hours of work
    checkpoint = Checkpoint(_beside(out, WORK_SUFFIX), identity, resume)
    started = time.monotonic() - checkpoint.seconds
    torch.manual_seed(seed)
    bench = Workbench(workload, seed, progress)
    bench.open()
    checkpoint.meter = bench.work
    bench.precisions = Precisions(options.precision, checkpoint.part("precision"), progress)
    with employed(bench, options.resources, checkpoint), using(bench.threads.main):
        found = checkpoint.step("method", partial(_searched, bench, method, options, checkpoint))
    merged, spent = Merged.from_plain(found["merged"]), bench.work.total
    checkpoint.log[:] = found["log"]  # a method that was done before the merge was interrupted noted nothing now
    narrowing = _narrowing(bench, merged, options, checkpoint)
    checkpoint.write()  # what comes from here on finds out at once whether it was begun before
    report = _ship(bench, merged, narrowing, out, method, time.monotonic() - started, checkpoint, begun)
    rows = [*checkpoint.log, *_accounted(bench, merged, method, options, found["log"], spent)]
    with writing(_beside(out, LOG_SUFFIX), overwrite=True) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    checkpoint.remove()
    return report


def _searched(bench: Workbench, method: str, options: MergeOptions, checkpoint: Checkpoint) -> dict[str, Any]:
    """What the method merged, and the log it leaves."""
    merged = METHODS[method](bench, options, checkpoint).to_plain()
    return {"merged": merged, "log": list(checkpoint.log)}


def _accounted(
    bench: Workbench, merged: Merged, method: str, options: MergeOptions, log: list[dict[str, Any]], work: float
) -> list[dict[str, Any]]:
    """The rows that end the log: what became of every set that the method tried."""
    plan = merged.plan
    factors = layers_of_all([bench.asked(query, plan) for query in plan.low_rank])
    size = {(layer.query, layer.path): layer.bytes for layer in (*bench.layers, *factors)}
    return account(TRIALS[method](bench, options, log, work), plan, size, bytes_of_residuals(bench, plan))


def _narrowing(bench: Workbench, merged: Merged, options: MergeOptions, checkpoint: Checkpoint) -> Narrowing:
    """How the tensors of what is merged are stored."""
    if options.weights == FP32:
        return Narrowing({}, {})
    required = {query: bench.required(query, options.margin) for query in bench.queries}
    bounds = Bounds.of(bench, options, checkpoint)
    search = partial(narrow, bench, merged, options.weights, required, checkpoint, bounds)
    found = checkpoint.step(f"weights {options.weights}", search)
    for row in found["rows"]:
        checkpoint.note(row)
    return Narrowing(**found["narrowing"])


def _ship(
    bench: Workbench,
    merged: Merged,
    narrowing: Narrowing,
    out: Path,
    method: str,
    seconds: float,
    checkpoint: Checkpoint,
    overwrite: bool,
) -> MergeReport:
    """Judge the merged models on test as they are stored, write the bundle, and say what came of it."""
    models = tied_models(bench, merged, bench.queries)
    stored = store(models, narrowing)
    records, results = [], []
    work = bench.work.total
    for query in bench.workload.queries:
        evidence = Evidence(**checkpoint.step(f"test of {query.id}", partial(_judged, bench, query.id, models)))
        bench.progress("test", query=query.id, **_scores(evidence))
        threshold = bench.references[query.id].threshold if query.task == "detection" else None
        asked, precision = bench.asked(query.id, merged.plan), _precision(bench, merged, query)
        records.append(BundleQuery.of(asked, evidence.to_json(), threshold, precision))
        own = residual_bytes(models[query.id], stored.get(query.id, {}))
        results.append(QueryResult(**evidence.__dict__, id=query.id, residual_bytes=own))
    ceiling = ceiling_bytes(bench.layers)
    made = Made(bench.workload.name, method, ceiling)
    manifest = write_bundle(out, models, records, made, overwrite=overwrite, narrow=stored)
    before, after = manifest.bytes.before, manifest.bytes.after
    return MergeReport(
        method, str(out), before, after, 1 - after / before, ceiling / before, seconds, work, tuple(results)
    )


def _precision(bench: Workbench, merged: Merged, query: Query) -> Any:
    """The precision that this query's model was trained in; None where it is its original or nothing is trained."""
    original, state = bench.originals[query.id].state_dict(), merged.states[query.id]
    assert isinstance(bench.precisions, Precisions)
    if original.keys() == state.keys() and all(torch.equal(original[key].cpu(), state[key].cpu()) for key in state):
        return None
    return bench.precisions.chosen(query)


def _judged(bench: Workbench, query: str, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    return dataclasses.asdict(bench.evidence(query, models[query]))


def _scores(evidence: Evidence) -> dict[str, Any]:
    keys = ("metric", "original", "merged", "ratio", "met", "certain", "worth")
    return {key: getattr(evidence, key) for key in keys}


def _fingerprint(workload: Workload) -> str:
    """Changes with the workload file and with the weights it names."""
    digest = hashlib.sha256(workload.path.read_bytes())
    for query in workload.queries:
        digest.update(fingerprint(query.weights))
    return digest.hexdigest()


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)


def ceiling_fraction(workload: Workload) -> float:
    """The part of the originals' bytes that sharing every group would save."""
    total = sum(model_bytes(query) for query in workload.queries)
    return ceiling_bytes(layers_of_all(workload.queries)) / total
