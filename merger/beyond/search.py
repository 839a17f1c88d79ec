"""Past the ceiling: what one model can share with itself, and heavy layers as factors of low rank.

Each kind of step is tried on its own on top of what is merged already. What is tried is proposed in
`merger.beyond.proposing` and put in order in `merger.beyond.queue`; a step stays only when every query that it touches
still reaches what is required of it on val once it was trained (`merger.beyond.trying`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from merger.bench.bounds import Bounds
from merger.bench.merged import Merged
from merger.bench.standing import training_flops
from merger.bench.workbench import Workbench
from merger.beyond.candidates import INSIDE, LOW_RANK
from merger.beyond.proposing import proposed, queue_of
from merger.beyond.queue import Queue
from merger.beyond.telling import row_of_try, sum_of_kind
from merger.beyond.trying import SHORT, Tried, Trying
from merger.journal.checkpoint import Checkpoint
from merger.mending.search import enough
from merger.training.recipe import Recipe

ROUNDS = {INSIDE: 3, LOW_RANK: 1}
"""Each round halves the weights of a stage; layers are factorised once."""
MAX_TRIES = 12


def beyond(
    bench: Workbench,
    merged: Merged,
    recipe: Recipe,
    required: Mapping[str, float],
    checkpoint: Checkpoint,
    bounds: Bounds,
) -> Merged:
    """What is merged with every step past the ceiling that holds; the log gets a row per try and a sum per kind.

    A query that was merged with less than `required` must keep half of the margin. No try begins once the bounds are
    over.
    """
    recipe = replace(recipe, private=1.0)  # factors belong to one query, and have yet to learn
    reached = checkpoint.step("reached", partial(_reached, bench, merged))
    required = {
        query: ratio if reached[query] >= ratio else min(reached[query], enough(bench, query, ratio))
        for query, ratio in required.items()
    }
    search = Search(Trying(bench, recipe, required, checkpoint, bounds))
    queues = checkpoint.step("candidates past the ceiling", partial(proposed, bench, merged, checkpoint))
    for index, kind in enumerate(queues):
        known = queues[kind] if index == 0 else None  # what is accepted of the first kind changes the others' queues
        found = checkpoint.step(f"past the ceiling: {kind}", partial(search.run, kind, merged, known))
        merged = Merged.from_plain(found["merged"])
        for row in found["rows"]:
            checkpoint.note(row)
    return merged


def most_tried(bench: Workbench, recipe: Recipe, bounds: Bounds) -> float:
    """About the work that all tries take at most, within the bounds."""
    one = training_flops(bench, list(bench.queries), replace(recipe, epochs=max(1, round(SHORT * recipe.epochs))))
    return min(len(ROUNDS) * MAX_TRIES * one, bounds.work_left)


@dataclass(frozen=True)
class Search:
    """The loop over what is proposed of one kind."""

    trying: Trying

    def run(self, kind: str, merged: Merged, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Try what is proposed of this kind, round after round; `merged` as plain values, and log `rows`.

        `known` is the first round's queue as plain values, where it is known already.
        """
        bench, journal = self.trying.bench, self.trying.journal
        notes = journal.part("notes")
        if not notes:
            queue = known or Queue().to_plain()
            notes.update(merged=merged.to_plain(), round=int(known is not None), queue=queue, rows=[],
                         gained=known is None, begun=bench.work.total)  # fmt: skip
        while not self.trying.bounds.over and len(notes["rows"]) < MAX_TRIES:
            now, queue = Merged.from_plain(notes["merged"]), Queue.from_plain(notes["queue"])
            if queue.ladders:
                self._try(kind, now, queue, notes)
                continue
            if not notes["gained"] or notes["round"] == ROUNDS[kind]:
                break
            name = f"queue {notes['round']}"
            found = journal.step(name, lambda now=now: queue_of(bench, kind, now, journal).to_plain())
            notes.update(queue=found, round=notes["round"] + 1, gained=False)
            journal.forget(name)
        total = sum_of_kind(kind, notes["rows"], bench.work.total, notes["begun"])
        bench.progress("beyond", kind=kind, tries=total["tries"], gained_bytes=total["gained_bytes"])
        return {"merged": notes["merged"], "rows": [*notes["rows"], total]}

    def _try(self, kind: str, merged: Merged, queue: Queue, notes: dict[str, Any]) -> None:
        """One try with the first of the queue, and what it changes in the notes."""
        bench, journal, chunk, number = self.trying.bench, self.trying.journal, queue.next(), len(notes["rows"])
        name = f"try {number}"
        tried = Tried.from_plain(journal.step(name, lambda: self.trying.take(merged, chunk).to_plain()))
        row = row_of_try(kind, chunk, tried, list(self.trying.short(tried.ratios)))
        row |= {"try": number + 1, "round": notes["round"], "work": bench.work.total}
        bench.progress("beyond", **{key: row[key] for key in ("accepted", "gained_bytes", "ratios")}, kind=kind)
        changes: dict[str, Any] = {"rows": [*notes["rows"], row]}
        if tried.merged is not None:
            changes.update(merged=tried.merged.to_plain(), gained=True)
        notes.update(changes, queue=queue.after(chunk, tried.merged is not None).to_plain())
        journal.forget(name)


def _reached(bench: Workbench, merged: Merged) -> dict[str, float]:
    models = bench.models(merged.states, merged.states, merged.plan)
    return {query: bench.ratio(query, model) for query, model in models.items()}
