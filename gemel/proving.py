"""`gemel prove`: what footage, labels and a person's answers show of a bundle's queries, without a new merge.

The result is written beside the bundle (gemel.proof_file), where `gemel bundle show` and `gemel eval` read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemel.evaluation import open_matching_bundle, query_as_shipped
from gemel.merger.computed import build_answerer
from gemel.merger.distributed import ProcessGroup
from gemel.merger.looks import LookFile, digest_data, digest_state
from gemel.merger.observe import AnswerDifferences, compare_answers, observe
from gemel.merger.proof import Observed
from gemel.merger.training.data import default_device
from gemel.merger.verdict import Verdict, judge
from gemel.merger.workload_data import WorkloadData
from gemel.models.bundle import Bundle
from gemel.models.data import PreparedFrames
from gemel.models.errors import InputError
from gemel.models.files.io import check_apart
from gemel.models.measures.evaluation import EvidenceState, Flips, count_flips, predict
from gemel.models.predictions import Prediction
from gemel.models.sharing.similarity import equal_states
from gemel.models.stages import Progress, Stages, silent
from gemel.models.workload import Query, Workload, inputs_of, load_workload
from gemel.models.zoo import preprocess_of
from gemel.proof_file import ProofRow, proof_path, write_proofs
from gemel.questions import QuestionSheet, answers_path, carry_answers, note_one_sided, read_sheet
from gemel.text import flips_text, percent, state_text, table

COMPARING, JUDGING = "comparing answers", "writing the proof"


@dataclass(frozen=True, eq=False)
class ComparedQuery:
    """A query whose model changed: what both models answer on the footage and on val."""

    query: Query
    threshold: float
    before: Sequence[Prediction]
    after: Sequence[Prediction]
    differences: AnswerDifferences | None
    observed: Observed
    flips: Flips | None
    model: str
    data: str


@dataclass(frozen=True)
class ProveResult:
    """What is proven of each query, and the file that says so."""

    bundle: Path
    rows: tuple[ProofRow, ...]
    path: Path

    @property
    def met(self) -> bool:
        """Whether every query is proven or unchanged."""
        return all(row.state != EvidenceState.NOT_PROVEN.value for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel prove --json`."""
        queries = [row.model_dump(by_alias=True) for row in self.rows]
        return {"bundle": str(self.bundle), "proof": str(self.path), "queries": queries}

    def to_text(self) -> str:
        """A row for each query."""
        rows = [
            (row.id, "-" if row.answers_kept is None else percent(row.answers_kept),
             state_text(row.state, row.lower_end, row.source, row.needs))
            for row in self.rows
        ]  # fmt: skip
        flips = [f"{row.id}: {row.flips}" for row in self.rows if row.flips]
        return "\n".join([table(("query", "answers as before", "proof"), rows), "", *flips, f"{self.path}: written"])

    __repr__ = to_text


class BundleTrial:
    """A bundle beside the originals of its workload: compared query by query, on first use."""

    def __init__(self, bundle: str | Path, workload: str | Path | Workload) -> None:
        self.workload = load_workload(workload) if isinstance(workload, str | Path) else workload
        self.bundle: Bundle = open_matching_bundle(bundle, self.workload)
        check_apart([("the proof", proof_path(self.bundle.path))], inputs_of(self.workload))
        self.device = default_device()
        self.data = WorkloadData(self.workload, self.device, ProcessGroup())
        self.looks = LookFile(self.workload.path)

    def compare(self, query: Query) -> ComparedQuery | None:
        """Both models of a query on footage and val; None where the model is its original, bit by bit."""
        shipped = query_as_shipped(query, self.bundle)
        model = build_answerer(self.bundle, query.id, self.device)
        original = self.data.originals[query.id]
        if shipped == query and equal_states(model.state_dict(), original.state_dict()):
            return None
        val, proof, blocks, differences = self.data.val_answers[query.id], self.data.footage[query.id], None, None
        before, after = self.data.footage_answers[query.id], list[Prediction]()
        if proof is not None and proof.places:
            after = self._predict(model, query, shipped, proof.frames, proof.places)
            differences = compare_answers(query, before, after, val.threshold)
            blocks = differences.by_block(proof.blocks, proof.seconds)
        merged, flips = None, None
        if val.is_labelled:
            merged = self._predict(model, query, shipped, self.data.val[query.id], None)
            flips = count_flips(query, val.split, val.answers, merged, val.threshold)
        observed = observe(query, val, merged, blocks)
        data = digest_data(proof, self.data.val[query.id])
        return ComparedQuery(
            query, val.threshold, before, after, differences, observed, flips, digest_state(model.state_dict()), data
        )

    def _predict(
        self, model: nn.Module, query: Query, shipped: Query, frames: PreparedFrames, places: Sequence[int] | None
    ) -> list[Prediction]:
        if preprocess_of(shipped) != preprocess_of(query):
            frames = PreparedFrames(shipped, frames.split)
        return predict(model, shipped, frames, places=places)


def prove_bundle(
    bundle: str | Path,
    workload: str | Path | Workload,
    answers: str | Path | None = None,
    progress: Progress = silent,
) -> ProveResult:
    """Prove a bundle's queries by agreement on footage, a person's answers and labels; write the proof beside it.

    `answers` is a file of `gemel review`; the one beside the bundle is used where there is one. Raises InputError where
    bundle and workload do not match, weights or frames are missing, or answers contradict each other.
    """
    torch.manual_seed(0)
    trial, stages = BundleTrial(bundle, workload), Stages(progress)
    stages.announce([COMPARING, JUDGING])
    stages.begin(COMPARING, len(trial.workload.queries))
    compared = dict[str, ComparedQuery]()
    for query in trial.workload.queries:
        found = trial.compare(query)
        if found is not None:
            compared[query.id] = found
        stages.add()
    stages.begin(JUDGING)
    sheet = find_sheet(trial.bundle, answers)
    verdicts = judge_compared(compared, sheet, trial.looks)
    rows = tuple(_row(query.id, compared.get(query.id), verdicts.get(query.id)) for query in trial.workload.queries)
    return ProveResult(trial.bundle.path, rows, write_proofs(trial.bundle, rows))


def find_sheet(bundle: Bundle, answers: str | Path | None) -> QuestionSheet | None:
    """The questions about a bundle with their answers, also those of another file; None without any."""
    beside = answers_path(bundle.path)
    sheet = read_sheet(beside) if beside.exists() else None
    if answers is not None:
        given = read_sheet(Path(answers))
        if sheet is not None:
            sheet = carry_answers(sheet, given)
        elif given.bundle == bundle.digest:
            sheet = given
        else:
            problem = "is about another bundle, and nothing was drawn for this one yet"
            raise InputError(answers, problem, "run `gemel review` first, with these --answers")
    if sheet is not None and sheet.bundle != bundle.digest:
        return None
    if sheet is not None:
        note_one_sided(sheet)
    return sheet


def judge_compared(
    compared: Mapping[str, ComparedQuery], sheet: QuestionSheet | None, looks: LookFile
) -> dict[str, Verdict]:
    """The verdict on each compared query, with the answers that belong to its footage."""
    observed, errors = dict[str, Observed](), dict[str, float]()
    for name, one in compared.items():
        judged = sheet.judge_differences(name) if sheet is not None and sheet.footage.get(name) == one.data else None
        observed[name] = replace(one.observed, judged=judged)
        errors[name] = looks.record(name, one.data, one.model)
    looks.save()
    queries = {name: one.query for name, one in compared.items()}
    chains = {name: [one] for name, one in observed.items()}
    verdicts = judge(queries, chains, {name: [one.flips] for name, one in compared.items()}, errors)
    return {name: own[0] for name, own in verdicts.items()}


def _row(query: str, compared: ComparedQuery | None, verdict: Verdict | None) -> ProofRow:
    row: dict[str, Any] = {"id": query, "state": "unchanged", "proven": False, "lower_end": None, "from": None}
    row |= {"needs": "", "answers_kept": None, "answers_kept_end": None, "footage": ""}
    if compared is not None and verdict is not None:
        proof, proven = verdict.proof, verdict.accepts
        row |= {"state": "proven" if proven else "not proven", "proven": proven, "lower_end": proof.lower_end}
        row |= {"from": proof.source.value if proof.source and proven else None, "needs": verdict.needs}
        row |= {"answers_kept": proof.agreement, "answers_kept_end": proof.agreement_end, "footage": compared.data}
        if compared.flips is not None:
            flips = compared.flips
            row["flips"] = flips_text(flips.right, flips.wrong, flips.upper_end, flips.frames)
    return ProofRow.model_validate(row)
