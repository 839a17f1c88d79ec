"""What becomes of each merged model: proven, kept without proof, or refused; and what is lacking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import and_

import numpy as np

from gemel.merger.checkpoint import storable
from gemel.merger.looks import LookFile
from gemel.merger.needs import find_needs
from gemel.merger.proof import (
    PROOF,
    BlockCounts,
    JudgedDifferences,
    LabelledValues,
    Observed,
    OriginalCounts,
    Proof,
    prove_chains,
    prove_query,
)
from gemel.models.footage import FOOTAGE
from gemel.models.measures.evaluation import Evidence, EvidenceState, Flips
from gemel.models.notes import add_note
from gemel.models.workload import Query

_ARRAYS = (np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in (np.float64, np.int64, np.bool_)))
"""What a checkpoint needs to know to read an array."""
for kind in (Observed, BlockCounts, OriginalCounts, JudgedDifferences, LabelledValues, Flips, *_ARRAYS):
    storable(kind)
storable(np.zeros(0).__reduce__()[0])  # type: ignore[arg-type]


@storable
@dataclass(frozen=True)
class TriedModel:
    """One merged model tried: what was `observed`, its plain ratio and its flips on val, and its digests."""

    observed: Observed
    plain: float
    flips: Flips | None
    model: str
    data: str


@dataclass(frozen=True)
class Verdict:
    """What is shown of one query, and what is lacking; `accepts`: all that was promised of it holds."""

    proof: Proof
    accepts: bool
    needs: str


Trials = Mapping[str, Sequence[TriedModel]]
"""Query -> the models that were tried, from the least change on."""


def judge_trials(queries: Mapping[str, Query], trials: Trials, looks: LookFile) -> dict[str, list[Verdict]]:
    """The verdict on each trial; queries share the error, and each look at the data that prove is recorded."""
    errors = {query: looks.record(query, own[0].data, *(one.model for one in own)) for query, own in trials.items()}
    for query, error in errors.items():
        if error < PROOF.error:
            text = f"other models were tried on the same data before, so the error is {error:g} now"
            add_note(query, f"{text} instead of {PROOF.error:g}", "give new footage")
    looks.save()
    observed = {query: [one.observed for one in own] for query, own in trials.items()}
    return judge(queries, observed, {query: [one.flips for one in own] for query, own in trials.items()}, errors)


def judge(
    queries: Mapping[str, Query],
    observed: Mapping[str, Sequence[Observed]],
    flips: Mapping[str, Sequence[Flips | None]],
    errors: Mapping[str, float],
) -> dict[str, list[Verdict]]:
    """The verdict on each query's models at these errors; one is accepted only if all before it are."""
    verdicts = dict[str, list[Verdict]]()
    for query, proofs in prove_chains(observed, errors).items():
        own = [_judge_model(queries[query], *one) for one in zip(observed[query], flips[query], proofs, strict=True)]
        accepts = accumulate((one.accepts for one in own), and_)
        verdicts[query] = [replace(one, accepts=held) for one, held in zip(own, accepts, strict=True)]
    return verdicts


def may_accept(query: Query, trial: TriedModel, looks: LookFile) -> bool:
    """Whether a model could be accepted, if its query had the error alone: else no further one is tried."""
    proof = prove_query(trial.observed, looks.error(query.id, trial.data, trial.model))
    return _judge_model(query, trial.observed, trial.flips, proof).accepts


def _judge_model(query: Query, observed: Observed, flips: Flips | None, proof: Proof) -> Verdict:
    lacking = list[str]()
    if not proof.proven:
        lacking.append(find_needs(observed, proof.error, FOOTAGE.block_s).text())
    kept = proof.agreement_end or 0.0
    if query.agreement_target is not None and kept < query.agreement_target:
        lacking.append(f"agreement of {query.agreement_target:g}: {kept:.3f} is shown")
    if query.max_flips is not None and (flips is None or flips.upper_end > query.max_flips):
        shown = "no labels" if flips is None else f"up to {flips.upper_end:.3f}"
        lacking.append(f"flips of at most {query.max_flips:g}: {shown}")
    return Verdict(proof, not lacking, "; ".join(lacking))


def describe(evidence: Evidence, verdict: Verdict | None, changed: bool) -> Evidence:
    """The evidence of a query with what is proven of it."""
    if not changed:
        return replace(evidence, state=EvidenceState.UNCHANGED)
    if verdict is None:
        return evidence
    proof = verdict.proof
    return replace(
        evidence,
        state=EvidenceState.PROVEN if verdict.accepts else EvidenceState.NOT_PROVEN,
        lower_end=proof.lower_end, source=proof.source.value if proof.source and verdict.accepts else None,
        needs=verdict.needs, answers_kept=proof.agreement, answers_kept_end=proof.agreement_end,
    )  # fmt: skip
