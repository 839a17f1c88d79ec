"""What is proposed past the ceiling: the candidates of each kind, with what they do to the heads untrained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from merger.bench.merged import Merged
from merger.bench.workbench import Workbench
from merger.beyond.candidates import INSIDE, LOW_RANK, Candidate, inside, low_rank
from merger.beyond.queue import Queue, worth
from merger.beyond.risk import errors, inputs_of, originals_answers, with_risk
from merger.journal.steps import Journal
from models.sharing.layers import model_bytes

MIN_SAVING = 0.002
"""A candidate that saves less than this part of the originals' bytes is not worth a training."""
MAX_RISK = 0.25
"""A layer starts at the least rank whose risk is below this; steps that are together below it need a short try only."""


def proposed(bench: Workbench, merged: Merged, journal: Journal) -> dict[str, dict[str, Any]]:
    """The queue (plain) of each kind that has candidates, the kind with most bytes per risk first."""
    found = {kind: queue for kind in (LOW_RANK, INSIDE) if (queue := queue_of(bench, kind, merged, journal)).ladders}
    first = dict(sorted(found.items(), key=lambda item: worth(item[1].ladders[0][0])))
    return {kind: queue.to_plain() for kind, queue in first.items()}


def queue_of(bench: Workbench, kind: str, merged: Merged, journal: Journal) -> Queue:
    """The candidates of one kind with their risk; how many are judged is told."""
    least = MIN_SAVING * sum(model_bytes(query) for query in bench.queries.values())
    if kind == INSIDE:
        ladders = [[one] for one in inside(bench.layers, merged.plan, least)]
    else:
        ladders = low_rank(bench.layers, bench.originals, merged.plan, least)
    queries = sorted({query for ladder in ladders for query in ladder[0].queries})
    theirs = journal.step(f"{kind}: originals", partial(originals_answers, bench, queries))
    before = journal.step(f"{kind}: before", partial(errors, bench, merged, theirs))
    largest = [ladder[-1] for ladder in ladders]
    inputs = journal.step(f"{kind}: inputs", partial(inputs_of, bench, merged, largest))
    found = []
    for number, ladder in enumerate(ladders, 1):
        judge = partial(with_risk, bench, merged, inputs=inputs, theirs=theirs, before=before)
        rows = journal.step(f"{kind}: {number}", partial(judged, ladder, judge))
        found.append(tuple(map(Candidate.from_plain, rows)))
        bench.progress("candidates", kind=kind, judged=number, of=len(ladders))
    return Queue.of(found)


def judged(ladder: Sequence[Candidate], judge: Callable[[Candidate], Candidate]) -> list[dict[str, Any]]:
    """The ladder from the least rank whose risk can be borne, or its last, as plain values.

    Larger ranks are not judged: they do less, and count with the risk of this one.
    """
    larger = list(ladder)
    one = judge(larger.pop(0))
    while larger and one.risk > MAX_RISK:
        one = judge(larger.pop(0))
    return [candidate.to_plain() for candidate in (one, *(replace(other, risk=one.risk) for other in larger))]
