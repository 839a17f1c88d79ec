"""`gemel drift mend`: a query that drifted learns again from the samples of a box's spool, for an update below 1 MB.

Norms and head of the query alone are trained, with its original as the teacher; weights that queries share, and all
other weights, stay as they are, bit by bit. The samples are cut in time into blocks: one half trains, the other half is
held out: a third of that chooses the epoch, and the rest proves, as of a merge, that the query agrees with its original
(merger.proof).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gemel.drift import check_drift, gather_samples
from gemel.drift_originals import find_bundle, load_original
from gemel.edge_runtime.frames.samples import expected_agreement, read_sample
from gemel.evaluation import query_as_shipped
from gemel.merger.needs import can_tell, find_needs
from gemel.merger.observe import compare_answers
from gemel.merger.proof import PROOF, Observed, Proof, certain_original, prove_queries
from gemel.merger.training.data import TrainingSet
from gemel.merger.training.loop import Diverged, Training
from gemel.merger.training.recipe import Flops, Recipe
from gemel.models.batchnorm import has_folded_norms, recalibrate_batchnorm
from gemel.models.bundle import (
    Bundle,
    BundleQuery,
    Made,
    has_documents,
    open_bundle,
    write_bundle,
    write_substituted,
)
from gemel.models.bundle.delta import write_update
from gemel.models.data import Frames, PreparedFrames, Split
from gemel.models.errors import InputError
from gemel.models.export.export_document import export_documents
from gemel.models.files.io import check_apart, check_output, finite
from gemel.models.footage import FOOTAGE
from gemel.models.measures.agreement import BELOW, UNSURE
from gemel.models.measures.evaluation import Evidence, compare, predict, score
from gemel.models.quantization import PackedWeight
from gemel.models.sharing.layers import layers_of, weight_of
from gemel.models.sharing.similarity import equal_states
from gemel.models.stages import Progress, Stages, silent
from gemel.models.tasks import task_of
from gemel.models.workload import Query, Workload, inputs_of, load_workload
from gemel.models.zoo import preprocess_of
from gemel.text import number, size, table

WRITING = "writing the bundle"
SEARCH_EVERY = 3
"""One of so many held-out blocks chooses the epoch."""


@dataclass(frozen=True)
class MendConfig:
    """How a query learns again."""

    epochs: int = 12
    """Epochs, and evaluations on the part that chooses; the epochs are more where samples are few."""
    min_steps: int = 240
    """Optimiser steps at least."""
    rate: float = 5e-3
    """Peak learning rate of the head; a few hundred samples make few steps."""
    norms: float = 2.0
    """Norms and biases learn so many times as fast, as in the repair of a merge."""
    features: float = 1.0
    """Weight of the inputs of the heads in the loss."""
    batch: int = 16
    blocks: int = 40
    """Blocks of consecutive samples, since neighbours in time are alike: every second one trains."""
    recalibration_frames: int = 512
    max_trained_bytes: int = 950_000
    """Of norms and head; a larger head stays as it is, so that the update stays below 1 MB."""


MEND = MendConfig()


class MendOutcome(str, Enum):
    """What became of a query."""

    __str__ = str.__str__

    ON_TARGET = "on target"
    MENDED = "mended"
    REFUSED = "refused"
    UNPROVABLE = "too few samples"
    OWN_WEIGHTS = "own weights"


OUTCOME_TEXTS = {
    MendOutcome.ON_TARGET: "not below its target: unchanged",
    MendOutcome.MENDED: "mended",
    MendOutcome.REFUSED: "held-out samples do not prove its target: unchanged",
    MendOutcome.UNPROVABLE: "too few samples to prove anything: unchanged",
    MendOutcome.OWN_WEIGHTS: "has its own weights, so merging is not the cause: unchanged",
}


@dataclass(frozen=True)
class MendedQuery:
    """One query: the ratio to its original on the samples that accept, `before` and `after`, and the outcome."""

    id: str
    frames: int
    outcome: MendOutcome
    target: float
    before: float | None = None
    after: float | None = None
    lower_end: float | None = None
    trained_bytes: int = 0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "outcome": str(self.outcome)}


@dataclass(frozen=True)
class DriftMend:
    """The result: all queries, the bundle that was written, and the bytes of its update."""

    bundle: Path
    queries: tuple[MendedQuery, ...]
    out: Path | None
    update_bytes: int | None
    seconds: float

    @property
    def met(self) -> bool:
        """Whether every query that drifted is mended."""
        return all(row.outcome in (MendOutcome.ON_TARGET, MendOutcome.MENDED) for row in self.queries)

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel drift mend --json`."""
        return {
            "bundle": str(self.bundle), "queries": [row.to_json() for row in self.queries],
            "out": None if self.out is None else str(self.out), "update_bytes": self.update_bytes,
            "seconds": round(self.seconds, 1),
        }  # fmt: skip

    def to_text(self) -> str:
        """A row for each query, and the next step."""
        rows = [
            (row.id, row.frames, number(row.before), number(row.after),
             number(row.lower_end), number(row.target),
             OUTCOME_TEXTS[row.outcome] + (f" ({row.note})" if row.note else ""))
            for row in self.queries
        ]  # fmt: skip
        lines = [table(("query", "frames", "before", "after", "proven from", "target", ""), rows), ""]
        if self.out is None:
            lines.append("nothing was written")
        else:
            changed = size(self.update_bytes or 0)
            lines.append(f"{self.out}: written; `gemel bundle diff {self.bundle} {self.out} -o update` is {changed}")
        return "\n".join(lines)

    __repr__ = to_text


def mend_drift(
    spool: str | Path,
    workload: str | Path | Workload,
    out: str | Path,
    bundle: str | Path | None = None,
    progress: Progress = silent,
    config: MendConfig = MEND,
) -> DriftMend:
    """Train norms and head of each query that is below its target, and write a bundle with those that pass.

    The bundle that the box ran is `bundle`, or the one that the ledger in the spool names; it is not changed. Nothing
    is written where no query passes. Raises InputError as `check_drift`, whose report is left in the spool.
    """
    start, spool = time.monotonic(), Path(spool)
    load = load_workload(workload) if isinstance(workload, str | Path) else workload
    opened = find_bundle(spool, load, bundle)
    check_apart([("--out", out)], [("the bundle", opened.path), *inputs_of(load)])
    check_output(out)
    report = check_drift(spool, load, bundle=opened.path).report
    drifted = {row.id for row in report.queries if row.verdict in (BELOW, UNSURE)}
    samples, stages = gather_samples(spool, load.queries, report.bundle), Stages(progress)
    stages.announce([*(f"training {query}" for query in drifted), WRITING])
    runs = [
        _MendRun(query, opened, samples.by_query[query.id], len(drifted), config, stages).run()
        for query in load.queries
        if query.id in drifted
    ]
    observed = {one.query.id: one.observed for one in runs if one.observed is not None}
    proofs = prove_queries(observed, dict.fromkeys(observed, PROOF.error))
    proven = {query for query, proof in proofs.items() if proof.proven}
    passed = {one.query.id: one for one in runs if one.query.id in proven and one.after > one.before}
    stages.begin(WRITING)
    update_bytes = _write_mended(Path(out), opened, passed) if passed else None
    rows = {one.query.id: one.row(one.query.id in passed, proofs.get(one.query.id)) for one in runs}
    for row in report.queries:
        rows.setdefault(row.id, MendedQuery(row.id, row.frames, MendOutcome.ON_TARGET, row.target, row.ratio))
    queries = tuple(rows[query.id] for query in load.queries)
    return DriftMend(opened.path, queries, Path(out) if passed else None, update_bytes, time.monotonic() - start)


@dataclass(frozen=True)
class _HeldOut:
    """Samples that are not trained on, with the original's answers as labels."""

    query: Query
    split: Split
    answers: Sequence[Any]
    truths: Sequence[Any]
    threshold: float

    def at(self, places: Sequence[int]) -> _HeldOut:
        """These samples alone."""
        answers, truths = ([side[place] for place in places] for side in (self.answers, self.truths))
        return _HeldOut(self.query, self.split.at(places), answers, truths, self.threshold)

    def predict(self, model: nn.Module) -> Sequence[Any]:
        """A model's answers."""
        return predict(model, self.query, PreparedFrames(self.query, self.split))

    def ratio(self, answers: Sequence[Any]) -> float:
        """The agreement of these answers with the original's."""
        return score(task_of(self.query), answers, self.truths, self.query.classes, self.threshold)

    def observe(self, answers: Sequence[Any], target: float) -> Observed:
        """What these answers show of their model; samples lie so far apart that each is a block of its own."""
        differences = compare_answers(self.query, self.answers, answers, self.threshold)
        blocks = differences.by_block(range(len(self.split)), len(self.split) * FOOTAGE.block_s)
        return Observed(target, blocks, certain_original(blocks.shown.shape[-1]))


class _MendRun:
    """One drifted query: its samples, its model as trained, and what is known of it."""

    def __init__(
        self, query: Query, bundle: Bundle, paths: Sequence[Path], tried: int, config: MendConfig, stages: Stages
    ) -> None:
        self.query, self.record, self._bundle = query, bundle.query(query.id), bundle
        self._config, self._stages, self._tried = config, stages, tried
        self._student, self._taught = _of_samples(query_as_shipped(query, bundle)), _of_samples(query)
        self._paths = _usable(paths, preprocess_of(self._student).size)
        self.outcome, self.note = MendOutcome.UNPROVABLE, ""
        self.before = self.after = 0.0
        self.observed: Observed | None = None
        self.evidence: Evidence | None = None
        self.trained: dict[str, int] = {}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.teacher = load_original(query).to(device).requires_grad_(False)
        self.model = bundle.build(query.id, copy=True).to(device)

    def row(self, is_accepted: bool, proof: Proof | None) -> MendedQuery:
        """The result."""
        outcome = MendOutcome.MENDED if is_accepted else self.outcome
        before, after = (None if proof is None else ratio for ratio in (self.before, self.after))
        return MendedQuery(
            self.query.id, len(self._paths), outcome, self.query.accuracy_target, before, after,
            None if proof is None else proof.lower_end, sum(self.trained.values()), self.note,
        )  # fmt: skip

    def run(self) -> _MendRun:
        """Train on one half of the samples, choose the epoch on a part of the other, and look at the rest once."""
        self._stages.begin(f"training {self.query.id}", self._config.epochs)
        if equal_states(self.model.state_dict(), self.teacher.state_dict()):
            self.outcome = MendOutcome.OWN_WEIGHTS
            return self
        blocks = _blocks(len(self._paths), self._config.blocks)
        units = tuple(f"block-{block:03d}" for block in blocks)
        frames = Frames([partial(_read_picture, path) for path in self._paths])
        split = Split("spool", frames, None, units, tuple(map(float, range(len(units)))))
        train = split.at([place for place, block in enumerate(blocks) if block % 2 == 0])
        held = self._held_out(split.at([place for place, block in enumerate(blocks) if block % 2]))
        numbers = [blocks[place] // 2 for place in range(len(blocks)) if blocks[place] % 2]
        searched = [place for place, number in enumerate(numbers) if number % SEARCH_EVERY == 0]
        kept = [place for place, number in enumerate(numbers) if number % SEARCH_EVERY]
        if not searched or not kept:
            return self
        search, accept = held.at(searched), held.at(kept)
        target = self.query.accuracy_target * expected_agreement(self.record)
        same, error = accept.observe(accept.answers, target), PROOF.error / self._tried
        if not can_tell(same, error):
            minutes = find_needs(same, error, FOOTAGE.block_s).minutes or 0
            more = math.ceil(minutes * 60 / FOOTAGE.block_s)
            self.note = f"needs about {math.ceil(len(self._paths) * (1 + more / len(kept)))} samples"
            return self
        self.before = accept.ratio(accept.predict(self.model))
        self._train(train, search)
        answers = accept.predict(self.model)
        self.after = accept.ratio(answers)
        self.observed = accept.observe(answers, target)
        self.evidence = compare(self._student, accept.split, accept.answers, answers, accept.threshold, gap="")
        self.outcome = MendOutcome.REFUSED
        return self

    def _held_out(self, split: Split) -> _HeldOut:
        threshold = max(self.record.least_score, self.record.threshold or 0.0)
        answers = predict(self.teacher, self._taught, PreparedFrames(self._taught, split))
        truths = [task_of(self.query).labels_of(one, threshold) for one in answers]
        return _HeldOut(self._student, split, answers, truths, threshold)

    def _train(self, split: Split, search: _HeldOut) -> None:
        """Leave the model with the norms and head of the epoch that is best where the search looks."""
        config, model, name = self._config, self.model, self.query.id
        self.trained = trainable_keys(self._student, model, config.max_trained_bytes)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key in self.trained)
        original = TrainingSet(self._taught, PreparedFrames(self._taught, split))
        data = TrainingSet(self._student, PreparedFrames(self._student, split), original)
        best, state = 0.0, copy.deepcopy(model.state_dict())

        def keep_better() -> None:
            nonlocal best, state
            ratio = search.ratio(search.predict(model))
            if ratio > best:
                best, state = ratio, copy.deepcopy(model.state_dict())

        is_folded = has_folded_norms(self.teacher)
        if not is_folded:
            device, chosen = next(model.parameters()).device, data.spread(config.recalibration_frames)
            recalibrate_batchnorm(model, (data.frames(chunk, device) for chunk in _chunks(chosen, config.batch)))
        keep_better()
        epochs = max(config.epochs, math.ceil(config.min_steps * config.batch / max(1, len(split))))
        recipe = Recipe(
            rate=config.rate, epochs=epochs, batch=config.batch, micro_batch=config.batch, distill=1.0,
            features=config.features, norms=config.norms, weight_decay=0.0, frames_per_epoch=max(1, len(split)),
        )  # fmt: skip
        fixed = {name} if is_folded else ()
        training = Training({name: model}, {name: data}, recipe, Flops(), {name: self.teacher}, eval_norms=fixed)
        try:
            for epoch in range(epochs):
                training.epoch()
                self._stages.add(config.epochs / epochs)
                if (epoch + 1) * config.epochs // epochs > epoch * config.epochs // epochs:
                    keep_better()
        except Diverged:
            self.note = "its training diverged"
        model.load_state_dict(state)
        model.eval()


def trainable_keys(query: Query, model: nn.Module, max_bytes: int) -> dict[str, int]:
    """State_dict keys of a model's norms, biases and head, with their bytes.

    The largest weights of a head that would exceed `max_bytes` are left out.
    """
    heads = [layer.path for layer in layers_of(query) if layer.head]
    of_head = {id(getattr(owner, name)) for owner, name in (weight_of(model, path) for path in heads)}
    nbytes = {key: one.numel() * one.element_size() for key, one in model.named_parameters()}
    found = {key: nbytes[key] for key, one in model.named_parameters() if one.ndim <= 1}
    large = [key for key, one in model.named_parameters() if one.ndim > 1 and id(one) in of_head]
    for key in sorted(large, key=lambda one: nbytes[one]):
        if sum(found.values()) + nbytes[key] <= max_bytes:
            found[key] = nbytes[key]
    return found


def _write_mended(out: Path, bundle: Bundle, passed: Mapping[str, _MendRun]) -> int:
    """Write the bundle with these queries as they are now; returns the bytes of its update."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".gemel-") as folder:
        path = Path(folder) / "mended"
        models, records, packed = {}, [], {}
        for name, run in passed.items():
            assert run.evidence is not None
            models[name], record, ratio = run.model.cpu(), run.record, run.evidence.ratio
            evidence = finite({**run.evidence.to_json(), "agreement": expected_agreement(record) * ratio})
            records.append(dataclasses.replace(record, tensors={}, stored={}, evidence=evidence))
            packed[name] = {key: one for key, one in _packed_weights(bundle, record) if key not in run.trained}
        manifest = bundle.manifest
        made = Made(manifest.workload, manifest.method, 0)
        documents = export_documents(models, records) if has_documents(bundle.queries) else {}
        write_bundle(path, models, records, made, packed=packed, documents=documents)
        own = open_bundle(path, bundle.factories, bundle.folder)
        for name, run in passed.items():
            _check_unchanged(run.record, own.query(name), run)
        write_substituted(out, bundle, dict.fromkeys(passed, own))
    return write_update(bundle.path, out, None).bytes


def _packed_weights(bundle: Bundle, record: BundleQuery) -> Iterator[tuple[str, PackedWeight]]:
    for key, stored in record.stored.items():
        tensor = bundle.tensor(record.tensors[key])
        scale = None if stored.scale is None else bundle.tensor(stored.scale)
        yield key, PackedWeight(tensor, scale, stored.dtype, stored.shape or tuple(tensor.shape))


def _check_unchanged(before: BundleQuery, after: BundleQuery, run: _MendRun) -> None:
    """Raise RuntimeError where more than norms and head differs: content names tell."""
    buffers = {key for key, _ in run.model.named_buffers()}
    for key, name in before.tensors.items():
        if key not in run.trained and key not in buffers and after.tensors[key] != name:
            raise RuntimeError(f"query {before.id}: {key} changed, and was not trained")


def _of_samples(query: Query) -> Query:
    """The query on pictures that are its input already."""
    preprocess = dataclasses.replace(preprocess_of(query), resize="stretch", crop_fraction=1.0)
    return dataclasses.replace(query, preprocess=preprocess, roi=None, frame_size=None)


def _usable(paths: Sequence[Path], input_size: tuple[int, int]) -> list[Path]:
    """The samples whose picture this network takes."""
    found = []
    for path in paths:
        try:
            if _read_picture(path).shape[:2] == input_size:
                found.append(path)
        except InputError:
            continue
    return found


def _read_picture(path: Path) -> np.ndarray:
    return read_sample(path).picture


def _blocks(count: int, blocks: int) -> list[int]:
    """The block of each sample, in order of time."""
    blocks = max(1, min(blocks, count // 2))
    return [place * blocks // count for place in range(count)]


def _chunks(places: Sequence[int], length: int) -> Iterator[list[int]]:
    """Of two or more each: a norm needs several values."""
    for start in range(0, len(places), length):
        if len(chunk := list(places[start : start + length])) > 1:
            yield chunk
