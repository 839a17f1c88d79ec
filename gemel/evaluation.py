"""Offline and streaming accuracy of a bundle against its originals, with bytes, frame outcomes and a report."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gemel.bundle_summary import MergeOutcomes, byte_counts, measure_resident_bytes, network_of, shared_tensors
from gemel.conditions import DEFAULT_DEVICE
from gemel.edge_runtime.memory.usage import planned_base_bytes
from gemel.edge_runtime.policies import DEFAULT_POLICY
from gemel.edge_runtime.scheduler.costs import Costs, memory_bytes, memory_settings
from gemel.gating import evaluate_gating
from gemel.merger.computed import build_answerer
from gemel.merger.networks import answered_by
from gemel.merger.reference import TRAIN_HINT, note_class_order
from gemel.merger.training.recipe import Flops, flops_a_second
from gemel.models.bundle import Bundle, BundleQuery, open_bundle
from gemel.models.bundle.manifest import original_bytes as recorded_bytes
from gemel.models.data import PreparedFrames, Split, load_split
from gemel.models.errors import InputError
from gemel.models.files.io import check_apart, finite, hold_locks, open_atomic
from gemel.models.files.weights import load_weights
from gemel.models.measures.evaluation import (
    WEAK,
    compare,
    count_samples,
    evidence_hint,
    load_labels,
    predict,
    threshold_without_labels,
)
from gemel.models.measures.metrics import average_precision, error_types
from gemel.models.notes import add_note
from gemel.models.predictions import BoxLabels
from gemel.models.sharing.flop_rates import flop_rates
from gemel.models.sharing.layers import state_bytes
from gemel.models.sharing.similarity import equal_states
from gemel.models.stages import Progress, Stages, silent
from gemel.models.tasks import task_of
from gemel.models.tasks.detection import Detection
from gemel.models.workload import Query, Workload, inputs_of, load_workload
from gemel.models.zoo import build_query
from gemel.proof_file import find_proofs
from gemel.report.conclusion import report_limits
from gemel.report.document import (
    MERGED,
    ORIGINALS,
    REPORT_JSON,
    Example,
    GatingRow,
    MemorySetting,
    OfflineProof,
    OfflineRow,
    Report,
    ReportedBundle,
    Settings,
    SharedWeight,
    WeightBytes,
)
from gemel.report.examples import worst_examples
from gemel.report.page import render_report
from gemel.stream_eval import (
    CostModel,
    Footage,
    QueryTest,
    evaluate_streams,
    frame_interval_s,
    load_cost_model,
)
from gemel.text import size

MAX_UNCOUNTED = 0.02
"""Of an original's bytes: counters of norms and tensors of two names are simulated once."""
MEMORY_SETTINGS = ("min", "50%", "all")
"""What is always simulated, as fractions of the originals' needs."""
REPORT_HTML = "report.html"
PACKAGES = ("gemel", "torch", "torchvision", "numpy", "opencv-python-headless")


class Stage(str, Enum):
    """Stages of an evaluation, as progress shows them."""

    OFFLINE = "evaluating each query on test"
    STREAMS = "simulating the streams"
    GATING = "skipping still frames"
    REPORT = "writing the report"


@dataclass(frozen=True)
class EvalOptions:
    """How to evaluate.

    `device` names a profile of the virtual clock, or is `measured`: the costs in BUNDLE.profile.json. `memory`, a
    setting or a size, is what the report's conclusion is for. With `motion_gating` the report says what skipping still
    frames saves and costs.
    """

    device: str = DEFAULT_DEVICE
    seeds: int = 3
    memory: str = "50%"
    motion_gating: bool = False

    def flags(self) -> list[str]:
        """The options of `gemel eval` that mean the same."""
        flags = ["--device", self.device, "--memory", self.memory, "--seeds", str(self.seeds)]
        return flags + (["--motion-gating"] if self.motion_gating else [])


@dataclass(frozen=True)
class QueryEvaluation:
    """One query offline; `examples` are the frames that merging cost most, with a photo each (base64 JPEG)."""

    test: QueryTest
    row: OfflineRow
    split: Split
    original_bytes: int
    examples: list[Example]
    photos: list[str]


def evaluate(
    bundle: str | Path,
    workload: str | Path,
    out_dir: str | Path,
    options: EvalOptions | None = None,
    progress: Progress = silent,
) -> Report:
    """Evaluate a bundle against the originals of its workload; write `report.json` and `report.html` into `out_dir`.

    Raises InputError, with nothing written, when bundle and workload do not match, weights or labelled test frames are
    missing, or the largest query does not fit the memory.
    """
    out_dir, options = Path(out_dir), options or EvalOptions()
    load = load_workload(workload)
    opened = open_matching_bundle(bundle, load)
    written = [("--out", out_dir / name) for name in (REPORT_JSON, REPORT_HTML)]
    check_apart(written, [("the bundle", opened.path), *inputs_of(load)])
    _check_writable(out_dir)
    model = load_cost_model(options.device, opened, load.queries)
    check_original_bytes(opened, model.costs[ORIGINALS])
    budgets = _memory_budgets(options.memory, model.costs[ORIGINALS])
    with hold_locks(out_dir / REPORT_JSON):
        stages = Stages(progress)
        stages.announce([stage.value for stage in Stage if stage != Stage.GATING or options.motion_gating])
        stages.begin(Stage.OFFLINE.value, len(load.queries))
        evaluations = []
        for query in load.queries:
            progress("evaluate", query=query.id)
            evaluations.append(evaluate_query(query, opened))
            row = evaluations[-1].row
            progress("test", query=query.id, ratio=row.ratio, met=row.met, worth=row.worth, reason=row.reason)
            stages.add()
        command = shlex.join(["gemel", "eval", str(bundle), str(workload), "-o", str(out_dir), *options.flags()])
        report, page = build_report(opened, evaluations, model, budgets, options, command, progress)
        document = json.dumps(report.to_json(), indent=1, allow_nan=False)
        with (
            open_atomic(out_dir / REPORT_JSON, overwrite=True) as first,
            open_atomic(out_dir / REPORT_HTML, overwrite=True) as second,
        ):  # both files or neither
            first.write(document.encode("utf-8", "backslashreplace"))
            second.write(page.encode("utf-8", "backslashreplace"))
        return report


def check_original_bytes(bundle: Bundle, originals: Costs) -> None:
    """Raise InputError where the originals that are simulated are not those whose bytes the bundle says."""
    for query in bundle.queries:
        recorded = recorded_bytes(query, bundle.header.entries)
        simulated = originals.moved_bytes(originals.queries[query.id].tensors)
        if abs(simulated - recorded) > MAX_UNCOUNTED * recorded:
            problem = f"the original of {query.id} has {size(simulated)}, the bundle says {size(recorded)}"
            raise InputError(bundle.path, problem, "merge it again")


def build_report(
    bundle: Bundle, evaluations: Sequence[QueryEvaluation], model: CostModel, budgets: Mapping[str, int],
    options: EvalOptions, command: str, progress: Progress = silent,
) -> tuple[Report, str]:  # fmt: skip
    """The report and its page of queries that were evaluated offline: simulates the streams.

    `budgets` are the memory settings in bytes; `command` is the command line that reproduces the report.
    """
    stages = Stages(progress)
    stages.begin(Stage.STREAMS.value)
    tests, seeds = [one.test for one in evaluations], list(range(options.seeds))
    streamed = evaluate_streams(tests, model.costs, budgets, seeds, progress)
    gating = list[GatingRow]()
    if options.motion_gating:
        stages.begin(Stage.GATING.value)
        gating = [_gating_row(one) for one in evaluations]
    stages.begin(Stage.REPORT.value)
    resident = {
        "resident_before": sum(one.original_bytes for one in evaluations),
        "resident_after": measure_resident_bytes(bundle),
    }
    counter, known = Flops(), {one.test.query.id: one.test.query for one in evaluations}
    answering = [
        answered_by(query, known[donor]) if (donor := network_of(bundle.query(name))) in known else query
        for name, query in known.items()
    ]
    report = Report(
        workload=bundle.manifest.workload,
        method=bundle.manifest.method,
        bundle=ReportedBundle(file=bundle.path.name, digest=bundle.digest),
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        device=model.device,
        seeds=seeds,
        settings=Settings(policy=DEFAULT_POLICY),
        versions=package_versions(),
        costs=model.rows(),
        base_bytes=planned_base_bytes(len({query.camera for query in answering})),
        bytes=WeightBytes.model_validate({**byte_counts(bundle, MergeOutcomes.of(bundle)), **resident}),
        shared=[SharedWeight(**one) for one in shared_tensors(bundle)],
        offline=[one.row for one in evaluations],
        streaming=streamed.streaming,
        ledger=streamed.ledger,
        transfers=streamed.transfers,
        examples=[example for one in evaluations for example in one.examples],
        limits=[],
        headline=MemorySetting(memory=options.memory, memory_bytes=budgets[options.memory]),
        gating=gating,
        flops_before=flops_a_second(counter, known.values()),
        flops_after=flops_a_second(counter, answering),
        flops_with_prefix=flop_rates(bundle, {name: query.fps or 1.0 for name, query in known.items()}).with_prefix,
        commands=[command],
    )
    unlabelled = [one.test.query.id for one in evaluations if one.split.labels is None]
    report = report.model_copy(update={"limits": report_limits(report, unlabelled)})
    return report, render_report(report, [photo for one in evaluations for photo in one.photos])


def open_matching_bundle(bundle: str | Path, load: Workload) -> Bundle:
    """The bundle, opened; InputError unless it holds the workload's queries with the same models."""
    opened = open_bundle(bundle, factories=[query.model for query in load.queries], folder=load.path.parent)
    shipped, known = {query.id: query for query in opened.queries}, {query.id: query for query in load.queries}
    odd = sorted(set(shipped) ^ {query.id for query in load.queries})
    if odd:
        raise InputError(bundle, f"does not hold the queries of {load.path.name} ({odd[0]})", "give its own workload")
    for query in load.queries:
        found = shipped[query.id]
        network = known.get(found.substitution.query, query) if found.substitution is not None else query
        record = BundleQuery.of(network)
        wanted = {"task": query.task, "model": record.model, "input_size": record.input_size}
        wanted |= {"preprocess": record.preprocess, "classes": query.classes}
        for key, value in wanted.items():
            if getattr(found, key) != value:
                raise InputError(bundle, f"query {query.id} differs from {load.path.name}", "merge it again", key)
    return opened


def query_as_shipped(query: Query, bundle: Bundle) -> Query:
    """The query with the network that answers it in a bundle."""
    found = bundle.query(query.id)
    if found.substitution is None:
        return query
    network = {key: getattr(found, key) for key in ("model", "model_args", "input_size", "preprocess")}
    return dataclasses.replace(query, **network)


def evaluate_query(query: Query, bundle: Bundle) -> QueryEvaluation:
    """Run a query's original and its merged model over the test split.

    Raises InputError where weights or test frames are missing, or the labels cannot be scored.
    """
    task, device = task_of(query), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    original = build_query(query)
    load_weights(query, original)
    original_bytes = state_bytes(original)
    split = load_split(query, "test")
    prepared = PreparedFrames(query, split).load()
    if split.labels is not None and task_of(query).footage == "objects":
        check_objects(query, split.labels)  # type: ignore[arg-type]
    before = predict(original.to(device), query, prepared)
    merged, model = query_as_shipped(query, bundle), build_answerer(bundle, query.id, device)
    if merged == query and equal_states(model.state_dict(), original.state_dict()):
        after = before
    else:
        after = predict(model, merged, prepared if merged == query else PreparedFrames(merged, split))
    threshold = bundle.query(query.id).threshold
    if threshold is None:
        val = load_split(query, "val")
        threshold = threshold_without_labels(query)
        if val.labels is not None:
            threshold = task.choose_threshold(predict(original, query, val), val.labels)  # type: ignore[arg-type]
    found = score_query(query, split, {ORIGINALS: before, MERGED: after}, threshold, original_bytes)
    shown = {"network": network_of(bundle.query(query.id))}
    if after is not before:
        shown |= recorded_proof(bundle, query.id)
    return dataclasses.replace(found, row=found.row.model_copy(update=shown))


def recorded_proof(bundle: Bundle, query: str) -> dict[str, Any]:
    """What the merge, or `gemel prove` after it, has proven of a query, as values of its row in the report."""
    evidence = dict[str, Any](find_proofs(bundle).get(query) or bundle.query(query).evidence or {})
    names = ("proven", "state", "lower_end", "from", "needs", "answers_kept", "answers_kept_end")
    shown = {name: evidence[name] for name in names if name in evidence}
    return OfflineProof.model_validate(finite(shown)).model_dump(exclude_unset=True)


def score_query(
    query: Query, split: Split, predictions: Mapping[str, Sequence[Any]], threshold: float, original_bytes: int
) -> QueryEvaluation:
    """Score the predictions of both models (by arm) on the frames of a split."""
    sides: dict[str, Sequence[Any]] = {"original": predictions[ORIGINALS], "merged": predictions[MERGED]}
    labels = load_labels(query, split, predictions[ORIGINALS], threshold)
    test = QueryTest(query, Footage(split.units, split.times_s, query.fps), labels, threshold, predictions)
    describe = DESCRIPTIONS.get(query.task, lambda *_: {})
    evidence = compare(query, split, sides["original"], sides["merged"], threshold)
    if evidence.reason:
        outcome = "it is unchanged" if evidence.met else "it counts as not met"
        hint = evidence_hint(query)
        if evidence.reason.startswith(WEAK):
            hint = note_class_order(query, predictions[ORIGINALS], split.labels) or TRAIN_HINT
        add_note(query.id, f"no evidence: {evidence.reason}; {outcome}", hint)
    row = OfflineRow.model_validate(finite({
        "query": query.id, "camera": query.camera, "task": query.task, "model": query.model, **evidence.to_json(),
        **describe(query, sides, labels, threshold), "target": query.accuracy_target, "sla_ms": query.sla_ms,
        "threshold": threshold, "label_interval_s": frame_interval_s(test.footage),
    }))  # fmt: skip
    return QueryEvaluation(test, row, split, original_bytes, *worst_examples(query, split, labels, sides, threshold))


def _gating_row(evaluation: QueryEvaluation) -> GatingRow:
    found = evaluate_gating(evaluation.test, evaluation.split, MERGED)
    return GatingRow(
        query=evaluation.row.query, metric=evaluation.row.metric, frames=found.frames, run=found.run,
        still_fraction=found.still_fraction, ungated=found.ungated, gated=found.gated,
    )  # fmt: skip


def check_objects(query: Query, labels: Sequence[BoxLabels]) -> None:
    """Raise InputError for labels without any object: nothing can be scored."""
    if not any(label.boxes for label in labels):
        problem = f"no frame of the test split shows {' or '.join(query.classes)} (query {query.id}): nothing to score"
        where = f"{query.data}/test" if query.data else query.id
        raise InputError(where, problem, "add labelled frames that do", "data")


def package_versions() -> dict[str, str]:
    """Versions of Python, the system, and the packages that figures depend on."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _detection_errors(
    query: Query, sides: Mapping[str, Sequence[Any]], labels: Sequence[Any], threshold: float
) -> dict[str, Any]:
    """COCO's mean average precision, and the types of errors at the threshold, of both models."""
    found, errors = dict[str, Any](), {}
    task = task_of(query)
    assert isinstance(task, Detection)
    for name, predictions in sides.items():
        overlaps = task.overlaps(predictions, labels)
        found |= {f"{key}_{name}": value for key, value in average_precision(overlaps, query.classes).items()}
        errors[name] = {kind: asdict(one) for kind, one in error_types(overlaps, threshold).items()}
    return {**found, "errors": errors}


def _class_recalls(
    query: Query, sides: Mapping[str, Sequence[Any]], labels: Sequence[Any], threshold: float
) -> dict[str, Any]:
    """The recall (of segmentation, the IoU) of each class that occurs, of both models."""
    recalls, samples = {}, count_samples(query, labels)
    for name, predictions in sides.items():
        right, *_, whole = task_of(query).tallies(predictions, labels, query.classes, threshold).sum(axis=0)
        recalls[name] = (right / np.maximum(whole, 1)).tolist()
    return {
        "classes": [
            {"class": label, "frames": samples[label], **{name: own[index] for name, own in recalls.items()}}
            for index, label in enumerate(query.classes) if samples[label]
        ]
    }  # fmt: skip


DESCRIPTIONS = {
    "detection": _detection_errors,
    "keypoints": _detection_errors,
    "classification": _class_recalls,
    "segmentation": _class_recalls,
}
"""Task -> what its row in the report says besides the metric."""


def _memory_budgets(memory: str, originals: Costs) -> dict[str, int]:
    """The memory settings that are simulated, the requested one among them, in bytes from small to large."""
    settings = memory_settings(originals)
    budgets = {name: settings[name] for name in MEMORY_SETTINGS} | {memory: memory_bytes(memory, originals, "--memory")}
    if budgets[memory] < settings["min"]:
        hint = f"the largest query alone does not fit; give at least {size(settings['min'])}"
        raise InputError("--memory", f"{memory} is too little", hint)
    return dict(sorted(budgets.items(), key=lambda item: item[1]))


def _check_writable(out_dir: Path) -> None:
    """Refuse an output folder that cannot be made, before the evaluation begins."""
    lexical = next(one for one in (out_dir, *out_dir.absolute().parents) if os.path.lexists(one))
    if not lexical.is_dir():  # a loop of links neither
        raise InputError(lexical, "exists and is no folder", "give a folder", "--out")
    if not os.access(lexical, os.W_OK | os.X_OK):
        raise InputError(out_dir, f"{lexical} cannot be written", "choose another folder", "--out")
