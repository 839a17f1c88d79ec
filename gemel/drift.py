"""Whether a box still answers as its originals would: their answers beside its own, on the frames that it kept.

The samples of a spool that a check can use: those of one bundle, by query; the spool may be anybody's.

Queries get their own original weights again: the bundle that a box ran, with nobody else changed.

A drift check in a few lines, for a terminal.

A drift check: a box's answers beside those of the originals, on the frames that it kept, and what follows.

As in GEMEL (Padmanabhan et al., NSDI 2023) the box samples frames, and a query whose accuracy has fallen runs unmerged
again.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edge_runtime.config import SAMPLES
from edge_runtime.results import BUNDLE_DIGITS
from edge_runtime.samples import (
    DRIFT_FILE,
    SUFFIX,
    DriftReport,
    Predict,
    QueryDrift,
    compare_samples,
    read_head,
    write_drift,
)
from edge_runtime.service import LEDGER_FILE
from gemel.evaluation import open_matching_bundle
from gemel.text import number, table
from merger.events import Progress, Stages, silent
from models.bundle import Bundle, BundleEvidence, Made, check_output, open_bundle, write_bundle, write_substituted
from models.errors import InputError
from models.evaluation import BELOW, KEPT, TOO_FEW, UNSURE, Agreement, compare_agreement
from models.io import check_apart, read_json
from models.predictions import Prediction
from models.tasks import task_of
from models.weights import load_weights
from models.workload import Query, Workload, inputs_of, load_workload
from models.zoo import build_query, preprocess_of

MAX_SAMPLES = 100_000
UNREADABLE, OTHER_BUNDLE, UNKNOWN = "unreadable", "of another bundle", "of no query of the workload"
"""Why a sample is left out."""


@dataclass(frozen=True)
class DriftSamples:
    """The `bundle` (the first digits of its SHA-256) that is judged, for each query its samples in the order of time,
    and how many samples are left out, by reason.
    """

    bundle: str
    samples: Mapping[str, tuple[Path, ...]]
    left_out: Counter[str]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is remembered of a sample."""

    captured_at: float
    path: Path
    query: str
    bundle: str


def gather_samples(spool: Path, queries: Iterable[Query], bundle: str | None) -> DriftSamples:
    """Look at every sample of a spool; those of this bundle are taken, or of the one that served last.

    Raises InputError where there is no sample at all, or more than MAX_SAMPLES.
    """
    left_out: Counter[str] = Counter()
    found: list[_Seen] = []
    for path in _files(spool):
        try:
            head = read_head(path)
        except InputError:
            left_out[UNREADABLE] += 1
        else:
            found.append(_Seen(head.captured_at, path, head.query, head.bundle))
    if not found:
        fault = f"none of its {left_out.total()} samples can be read" if left_out else "holds no samples"
        raise InputError(spool, fault, "name the `spool` of a box, with its folder `samples`")
    found.sort(key=lambda one: (one.captured_at, one.path.name))
    judged = bundle or found[-1].bundle
    samples: dict[str, list[Path]] = {query.id: [] for query in queries}
    for one in found:
        if one.bundle != judged:
            left_out[OTHER_BUNDLE] += 1
        elif one.query not in samples:
            left_out[UNKNOWN] += 1
        else:
            samples[one.query].append(one.path)
    return DriftSamples(judged, {query: tuple(paths) for query, paths in samples.items()}, left_out)


def _files(spool: Path) -> list[Path]:
    folder, paths = spool / SAMPLES, []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    paths.append(folder / entry.name)
                if len(paths) > MAX_SAMPLES:
                    fault = f"holds more than {MAX_SAMPLES:,} samples"
                    raise InputError(folder, fault, "remove the oldest")
    except OSError as error:
        remedy = "name the `spool` of a box, with its folder `samples`"
        raise InputError(folder, f"cannot be read: {error.strerror}", remedy) from error
    return paths


OPTION = "name it with --bundle"


def find_bundle(spool: Path, load: Workload, given: str | Path | None) -> Bundle:
    """The bundle that a box ran: the one that is given, or that the ledger in its spool names.

    Raises InputError where there is none, or it does not hold the workload's queries.
    """
    if given is not None:
        return open_matching_bundle(given, load)
    path = spool / LEDGER_FILE
    named = read_json(path, OPTION).get("bundle")
    if not isinstance(named, str) or not named:
        raise InputError(path, "does not say which bundle the box ran", OPTION, "bundle")
    try:
        return open_matching_bundle(named, load)
    except InputError as error:
        raise InputError(error.where, f"{error.problem} (the ledger in {spool} names it)", OPTION, error.key) from error


def check_bundle_digest(bundle: Bundle, digits: str) -> None:
    """Raise InputError unless this is the bundle that samples are of."""
    if bundle.digest[:BUNDLE_DIGITS] != digits:
        fault = f"has the SHA-256 {bundle.digest[:BUNDLE_DIGITS]}..., the newest samples are of {digits}..."
        raise InputError(bundle.path, fault, f"{OPTION}: the one that the box ran then")


def load_original(query: Query) -> nn.Module:
    """A query's own trained model; InputError where its weights are missing or do not fit."""
    original = build_query(query)
    load_weights(query, original)
    return original.eval()


def write_originals(path: Path, queries: Sequence[Query], bundle: Bundle) -> Bundle:
    """A bundle of these queries alone, each with its own weights and everything else as it is in `bundle`.

    Its evidence is that of the original against itself.
    """
    bare: dict[str, Any] = {"tensors": {}, "stored": {}, "trained": None}
    records = []
    for query in queries:
        old = bundle.query(query.id)
        own = {**bare, "model_args": dict(query.model_args), "evidence": _own(old.evidence)}
        records.append(dataclasses.replace(old, **own))
    models = {query.id: load_original(query) for query in queries}
    write_bundle(path, models, records, Made(bundle.manifest.workload, bundle.manifest.method, 0))
    return open_bundle(path, bundle.factories, bundle.folder)


def has_own_weights(query: str, own: Bundle, bundle: Bundle) -> bool:
    """Whether a query has its own weights in the bundle as it is."""
    return own.query(query).places() == bundle.query(query).places()


def _own(evidence: BundleEvidence | None) -> BundleEvidence | None:
    if evidence is None:
        return None
    return BundleEvidence(
        metric=evidence["metric"], split=evidence["split"], samples=evidence["samples"], original=evidence["original"],
        merged=evidence["original"], ratio=1.0, ci95=(1.0, 1.0), certain=True,
    )  # fmt: skip


WORDS = {
    KEPT: "on target", BELOW: "BELOW its target", UNSURE: "below its target, perhaps by chance",
    TOO_FEW: "too few frames with something to compare: nothing can be said",
}  # fmt: skip


def format_check(found: Mapping[str, Any]) -> str:
    """A line for each query, what was left out, and what is to be done."""
    rows = [
        (row["id"], row["metric"], row["frames"], number(row["ratio"]), _interval(row["ci95"]), number(row["target"]),
         _verdict(row))
        for row in found["queries"]
    ]  # fmt: skip
    lines = [
        table(("query", "metric", "frames", "ratio", "95 % interval", "target", "verdict"), rows),
        "",
        f"samples of bundle {found['bundle']}"
        + "".join(f"; left out: {count} {reason}" for reason, count in found["left_out"].items()),
    ]
    if found["out"] is not None:
        lines.append(f"{found['out']}: written; `gemel bundle diff OLD {found['out']} -o update` is what ships")
    elif any(row["verdict"] == BELOW and row["note"] is None for row in found["queries"]):
        lines.append("with -o FILE a bundle is written in which what is below has its own weights again")
    if not found["told"]:
        lines.append(f"{found['spool']} cannot be written: the box is not told")
    return "\n".join(lines)


def _verdict(row: Mapping[str, Any]) -> str:
    more = "; has its own weights again" if row["reverted"] else f"; {row['note']}" if row["note"] else ""
    return WORDS[row["verdict"]] + more


def _interval(ci95: list[float] | None) -> str:
    return "-" if ci95 is None else f"{ci95[0]:.3f} to {ci95[1]:.3f}"


READING, JUDGING, WRITING = "reading samples", "asking the originals", "writing the bundle"
UNUSABLE = "unusable"
OWN_ALREADY = "its weights are its own already: it is not the merge"


def check_drift(
    spool: str | Path,
    workload: str | Path | Workload,
    out: str | Path | None = None,
    bundle: str | Path | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Judge what a box answered by its originals, on the samples in its spool; returns what was found, as JSON values.

    With `out` a bundle is written there in which each query that is below its target for certain has its own weights
    again; it is made of the one that the box ran: `bundle`, or what the ledger in the spool names. What was found is
    left in the spool, for the box to show; `told` says whether that could be done. Raises InputError, with nothing
    written, where the spool has no samples, weights are missing, or the bundle is not the one that the samples are of.
    """
    spool = Path(spool)
    load = load_workload(workload) if isinstance(workload, str | Path) else workload
    opened = find_bundle(spool, load, bundle) if out is not None or bundle is not None else None
    written = [("--out", out), ("the spool", spool / DRIFT_FILE)]
    check_apart(written, [("the bundle", None if opened is None else opened.path), *inputs_of(load)])
    if out is not None:
        check_output(out)
    stages = Stages(progress)
    stages.announce([READING, JUDGING, *([] if out is None else [WRITING])])
    stages.begin(READING)
    found = gather_samples(
        spool, load.queries, None if bundle is None or opened is None else opened.digest[:BUNDLE_DIGITS]
    )
    if opened is not None:
        check_bundle_digest(opened, found.bundle)
    rows, left_out = _judged(load, found, stages)
    below = [query for query in load.queries if rows[query.id].verdict == BELOW]
    reverted = frozenset[str]()
    if opened is not None and out is not None and below:
        stages.begin(WRITING)
        reverted = _write_reverted(Path(out), below, opened)
    queries = [_row(query, rows[query.id], query.id in reverted) for query in load.queries]
    checked = DriftReport(checked_at=round(time.time(), 3), bundle=found.bundle, queries=queries)
    return {
        "spool": str(spool), "workload": load.name, "bundle": found.bundle, "checked_at": checked.checked_at,
        "queries": [
            {**row.model_dump(), "metric": task_of(query.task).metric,
             "note": OWN_ALREADY if out is not None and row.verdict == BELOW and not row.reverted else None}
            for query, row in zip(load.queries, queries, strict=True)
        ],
        "left_out": dict(sorted(left_out.items())), "out": str(out) if reverted else None,
        "told": _tell(spool, checked),
    }  # fmt: skip


def _judged(load: Workload, found: DriftSamples, stages: Stages) -> tuple[dict[str, Agreement], Counter[str]]:
    """The verdict on each query, and how many samples were left out by then, by reason."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, left_out = dict[str, Agreement](), found.left_out.copy()
    stages.begin(JUDGING, sum(map(len, found.samples.values())))
    for query in load.queries:
        paths = found.samples[query.id]
        beside = compare_samples(query, paths, _asking(query, load_original(query).to(device)), stages.add)
        left_out[UNUSABLE] += beside.unusable
        rows[query.id] = compare_agreement(beside, task_of(query.task), query.accuracy_target)
    return rows, +left_out


def _asking(query: Query, original: nn.Module) -> Predict:
    """How the original answers."""
    task, device = task_of(query.task), next(original.parameters()).device

    @torch.inference_mode()
    def answers(batch: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Prediction]:
        prepared = preprocess_of(query.model, query.input_size).normalise(batch.to(device))
        return task.predictions(original, original(prepared), sizes, query.classes)

    return answers


def _write_reverted(out: Path, below: list[Query], bundle: Bundle) -> frozenset[str]:
    """Write the bundle in which these queries have their own weights again, unless all have; returns who had not."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".gemel-") as folder:
        own = write_originals(Path(folder) / "own", below, bundle)
        reverted = frozenset(query.id for query in below if not has_own_weights(query.id, own, bundle))
        if reverted:
            write_substituted(out, bundle, dict.fromkeys(reverted, own))
    return reverted


def _row(query: Query, one: Agreement, reverted: bool) -> QueryDrift:
    return QueryDrift(
        id=query.id, frames=one.frames, ratio=one.ratio, ci95=None if one.ci95 is None else list(one.ci95),
        target=query.accuracy_target, verdict=one.verdict, reverted=reverted,  # type: ignore[arg-type]
    )  # fmt: skip


def _tell(spool: Path, checked: DriftReport) -> bool:
    """Leave it in the spool, for the box to show, if that can be written; whether it could."""
    try:
        write_drift(spool, checked)
    except InputError:
        return False
    return True
