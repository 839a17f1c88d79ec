"""A drift check: a box's answers beside those of the originals, on the frames that it kept, and what follows.

As in GEMEL (Padmanabhan et al., NSDI 2023) the box samples frames, and a query whose accuracy has fallen runs unmerged
again.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edge_runtime.frames.results import BUNDLE_DIGITS
from edge_runtime.spool.checked import FILE, Checked, CheckedQuery, write_checked
from edge_runtime.spool.comparing import Answering, compared
from gemel.drift.gathering import Gathered, gather
from gemel.drift.reverting import bundle_of, check_same, is_own_already, original_of, write_originals
from merger.events import Progress, Stages, silent
from models.bundle import Bundle, check_output, write_substituted
from models.errors import InputError
from models.evaluation import BELOW, Agreement, judge_agreement
from models.io import check_apart
from models.predictions import Prediction
from models.tasks import task_of
from models.workload import Query, Workload, inputs_of, load_workload
from models.zoo import preprocess_of

READING, JUDGING, WRITING = "reading samples", "asking the originals", "writing the bundle"
UNUSABLE = "unusable"
OWN_ALREADY = "its weights are its own already: it is not the merge"


def check(
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
    opened = bundle_of(spool, load, bundle) if out is not None or bundle is not None else None
    written = [("--out", out), ("the spool", spool / FILE)]
    check_apart(written, [("the bundle", None if opened is None else opened.path), *inputs_of(load)])
    if out is not None:
        check_output(out)
    stages = Stages(progress)
    stages.announce([READING, JUDGING, *([] if out is None else [WRITING])])
    stages.begin(READING)
    found = gather(spool, load.queries, None if bundle is None or opened is None else opened.digest[:BUNDLE_DIGITS])
    if opened is not None:
        check_same(opened, found.bundle)
    rows, left_out = _judged(load, found, stages)
    below = [query for query in load.queries if rows[query.id].verdict == BELOW]
    reverted = frozenset[str]()
    if opened is not None and out is not None and below:
        stages.begin(WRITING)
        reverted = _write_reverted(Path(out), below, opened)
    queries = [_row(query, rows[query.id], query.id in reverted) for query in load.queries]
    checked = Checked(checked_at=round(time.time(), 3), bundle=found.bundle, queries=queries)
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


def _judged(load: Workload, found: Gathered, stages: Stages) -> tuple[dict[str, Agreement], Counter[str]]:
    """The verdict on each query, and how many samples were left out by then, by reason."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, left_out = dict[str, Agreement](), found.left_out.copy()
    stages.begin(JUDGING, sum(map(len, found.samples.values())))
    for query in load.queries:
        paths = found.samples[query.id]
        beside = compared(query, paths, _asking(query, original_of(query).to(device)), stages.add)
        left_out[UNUSABLE] += beside.unusable
        rows[query.id] = judge_agreement(beside, task_of(query.task), query.accuracy_target)
    return rows, +left_out


def _asking(query: Query, original: nn.Module) -> Answering:
    """How the original answers."""
    task, device = task_of(query.task), next(original.parameters()).device

    @torch.inference_mode()
    def answers(batch: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Prediction]:
        prepared = preprocess_of(query.model, query.input_size).normalise(batch.to(device))
        return task.answers(original, original(prepared), sizes, query.classes)

    return answers


def _write_reverted(out: Path, below: list[Query], bundle: Bundle) -> frozenset[str]:
    """Write the bundle in which these queries have their own weights again, unless all have; returns who had not."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".gemel-") as folder:
        own = write_originals(Path(folder) / "own", below, bundle)
        reverted = frozenset(query.id for query in below if not is_own_already(query.id, own, bundle))
        if reverted:
            write_substituted(out, bundle, dict.fromkeys(reverted, own))
    return reverted


def _row(query: Query, one: Agreement, reverted: bool) -> CheckedQuery:
    return CheckedQuery(
        id=query.id, frames=one.frames, ratio=one.ratio, ci95=None if one.ci95 is None else list(one.ci95),
        target=query.accuracy_target, verdict=one.verdict, reverted=reverted,  # type: ignore[arg-type]
    )  # fmt: skip


def _tell(spool: Path, checked: Checked) -> bool:
    """Leave it in the spool, for the box to show, if that can be written; whether it could."""
    try:
        write_checked(spool, checked)
    except InputError:
        return False
    return True
