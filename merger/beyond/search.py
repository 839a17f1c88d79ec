"""Past the ceiling: what one model can share with itself, and heavy layers as factors of low rank.

Each kind of step is tried on its own on top of what is merged already. Its candidates stand in order of bytes saved
per risk, those of weights that one query has for itself before all others: with these the shared weights stand still,
and nobody else need train. As many as possible are taken at once and trained together, for longer where they are risky,
half as many after a refusal, and what is refused alone is dropped (factors are tried at their next rank first). A step
stays only when every query that it touches still reaches what is required of it on val.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from merger.bench.attempt import Easing, train_while
from merger.bench.bounds import Bounds
from merger.bench.merged import Merged, snapshots
from merger.bench.merit import all_met, merit
from merger.bench.sizes import stored_bytes
from merger.bench.standing import training_flops
from merger.bench.workbench import Workbench
from merger.beyond.candidates import INSIDE, LOW_RANK, Candidate, inside, low_rank
from merger.beyond.risk import applied, errors, inputs_of, with_risk
from merger.journal.checkpoint import Checkpoint
from merger.mending.private import rest_shared, train_private
from merger.mending.search import enough
from merger.training.loop import Diverged, Recipe
from models.sharing.layers import model_bytes

ROUNDS = {INSIDE: 3, LOW_RANK: 1}
"""Each round halves the weights of a stage; layers are factorised once."""
MOST_TRIES = 12
LEAST_SAVING = 0.002
"""A candidate that saves less than this part of the originals' bytes is not worth a training."""
SHORT, LONG = 0.5, 2
"""Epochs of one try, as parts of those a search gives an attempt."""
MAX_RISK = 0.25
"""A layer starts at the least rank whose risk is below this; steps that are together below it need a short try only."""
NEAR = 0.05
"""A query that lies no further below what is required may be helped by its private parts."""
MOST_RISK = 0.5
"""The risk of all steps of one try, but for a single one's."""
Queue = list[list[dict[str, Any]]]
"""Candidates as plain values, each with those to try instead, one after the other, once it is refused alone."""


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
    search = _Search(bench, recipe, required, checkpoint, bounds)
    queues = checkpoint.step("candidates past the ceiling", partial(search.queues, merged))
    for index, kind in enumerate(queues):
        known = queues[kind] if index == 0 else None  # what is accepted of the first kind changes the others' queues
        found = checkpoint.step(f"past the ceiling: {kind}", partial(search.run, kind, merged, known))
        merged = Merged.from_plain(found["merged"])
        for row in found["rows"]:
            checkpoint.note(row)
    return merged


@dataclass(frozen=True)
class _Search:
    bench: Workbench
    recipe: Recipe
    required: Mapping[str, float]
    journal: Checkpoint
    bounds: Bounds

    def queues(self, merged: Merged) -> dict[str, Queue]:
        """The queue of each kind that has candidates, the kind with most bytes per risk first."""
        found = {kind: queue for kind in (LOW_RANK, INSIDE) if (queue := self._queue(kind, merged))}
        return dict(sorted(found.items(), key=lambda item: _order(item[1][0][0])))

    def run(self, kind: str, merged: Merged, known: Queue | None) -> dict[str, Any]:
        """Try the candidates of one kind, round after round; `merged` as plain values, and log `rows`."""
        notes = self.journal.part("notes")
        if not notes:
            notes.update(merged=merged.to_plain(), round=0, tries=0, queue=[], size=0, rows=[], gained=True,
                         begun=self.bench.work.total)  # fmt: skip
            if known is not None:
                notes.update(queue=known, size=len(known), round=1, gained=False)
        while not self.bounds.over and notes["tries"] < MOST_TRIES:
            now = Merged.from_plain(notes["merged"])
            if notes["queue"]:
                self._step(kind, now, notes)
                continue
            if not notes["gained"] or notes["round"] == ROUNDS[kind]:
                break
            name = f"queue {notes['round']}"
            queue = self.journal.step(name, partial(self._queue, kind, now))
            notes.update(queue=queue, size=len(queue), round=notes["round"] + 1, gained=False)
            self.journal.forget(name)
        saved = sum(row["gained_bytes"] for row in notes["rows"])
        total = {"beyond": kind, "tries": notes["tries"], "gained_bytes": saved, "work": self.bench.work.total,
                 "work_spent": self.bench.work.total - notes["begun"]}  # fmt: skip
        self.bench.progress("beyond", kind=kind, tries=notes["tries"], gained_bytes=saved)
        return {"merged": notes["merged"], "rows": [*notes["rows"], total]}

    def _queue(self, kind: str, merged: Merged) -> Queue:
        """The candidates of one kind with their risk, by bytes saved per risk."""
        bench = self.bench
        least = LEAST_SAVING * sum(model_bytes(query) for query in bench.queries.values())
        if kind == INSIDE:
            ladders = [[one] for one in inside(bench.layers, merged.plan, least)]
        else:
            ladders = low_rank(bench.layers, bench.originals, merged.plan, least)
        queries = sorted({query for ladder in ladders for query in ladder[0].queries})
        before = self.journal.step(f"{kind}: before", partial(errors, bench, merged, queries))
        largest = [ladder[-1] for ladder in ladders]
        inputs = self.journal.step(f"{kind}: inputs", partial(inputs_of, bench, merged, largest))
        queue = []
        for number, ladder in enumerate(ladders, 1):
            judge = partial(with_risk, bench, merged, inputs=inputs, before=before)
            queue.append(self.journal.step(f"{kind}: {number}", partial(_judged, ladder, judge)))
            bench.progress("candidates", kind=kind, judged=number, of=len(ladders))
        return sorted(queue, key=lambda ladder: _order(ladder[0]))

    def _step(self, kind: str, merged: Merged, notes: dict[str, Any]) -> None:
        """One try with the first candidates of the queue, and what it changes in the notes."""
        queue, size = notes["queue"], notes["size"]
        chunk = _together([Candidate.from_plain(ladder[0]) for ladder in queue[:size]])
        size = len(chunk)
        name = f"try {notes['tries']}"
        found = self.journal.step(name, partial(self._try, merged, chunk))
        row = {
            "beyond": kind, "try": notes["tries"] + 1, "round": notes["round"], "accepted": found["accepted"],
            "candidates": [_told(one) for one in chunk], "gained_bytes": found["gained_bytes"],
            "ratios": found["ratios"], "epochs": found["epochs"],
            "in_the_way": [query for query, ratio in found["ratios"].items() if ratio < self.required[query]],
            "work": self.bench.work.total,
        }  # fmt: skip
        self.bench.progress("beyond", **{key: row[key] for key in ("accepted", "gained_bytes", "ratios")}, kind=kind)
        changes: dict[str, Any] = {"tries": notes["tries"] + 1, "rows": [*notes["rows"], row]}
        if found["accepted"]:
            changes.update(merged=found["merged"], queue=queue[size:], size=2 * size, gained=True)
        elif len(chunk) > 1:
            changes["size"] = (len(chunk) + 1) // 2
        else:
            left = [queue[0][1:]] if len(queue[0]) > 1 else []
            changes["queue"] = [*left, *queue[1:]]
        rest = changes.get("queue", queue)
        if rest and Candidate.from_plain(rest[0][0]).alone != chunk[0].alone:
            changes["size"] = len(rest)  # what was refused says nothing of weights that are shared
        notes.update(changes)
        self.journal.forget(name)

    def _try(self, merged: Merged, chunk: Sequence[Candidate]) -> dict[str, Any]:
        """Take these steps at once, train, and see whether everyone still reaches what is required.

        Queries that lie just below it train their private parts alone.
        """
        inputs = self.journal.step("inputs", partial(inputs_of, self.bench, merged, chunk))
        at = merged
        for candidate in chunk:
            at = applied(self.bench, at, candidate, inputs)
        touched = {query for candidate in chunk for query in candidate.queries}
        queries = sorted(touched if chunk[0].alone else at.plan.tied_to(touched))
        epochs = self._epochs(queries, sum(candidate.risk for candidate in chunk))
        found = self.journal.step("trained", partial(self._trained, at, queries, chunk[0].alone, epochs))
        found = self._mended(at, found)
        gained = stored_bytes(self.bench, merged.plan) - stored_bytes(self.bench, at.plan)
        accepted = found["held"] and gained > 0
        after = Merged(at.plan, {**at.states, **found["states"]}).to_plain() if accepted else None
        return {
            "accepted": accepted, "merged": after, "ratios": found["ratios"], "epochs": found["epochs"],
            "gained_bytes": gained if accepted else 0,
        }  # fmt: skip

    def _short(self, ratios: Mapping[str, float]) -> dict[str, float]:
        """What the queries lack that are below what is required."""
        return {query: self.required[query] - ratio for query, ratio in ratios.items() if ratio < self.required[query]}

    def _mended(self, at: Merged, found: dict[str, Any]) -> dict[str, Any]:
        """What was `found` by training, those that lie just below mended by their private parts; no bytes."""
        short = self._short(found["ratios"])
        if not short or max(short.values()) > NEAR:
            return found
        states, ratios = dict(found["states"]), dict(found["ratios"])
        recipe = replace(self.recipe, epochs=self._part(SHORT))
        for query in sorted(short, key=lambda query: -short[query]):
            merged, required = Merged(at.plan, states), self.required[query]
            train = partial(train_private, self.bench, merged, at.plan, query, recipe, required, self.journal)
            mended = self.journal.step(f"{query} alone", train)
            states[query], ratios[query] = mended["state"], mended["ratio"]
            self.bench.progress("alone", query=query, ratio=mended["ratio"], required=required)
            if mended["ratio"] < required:
                break
        return {**found, "states": states, "ratios": ratios, "held": all_met(ratios, self.required)}

    def _epochs(self, queries: Sequence[str], risk: float) -> int:
        """How long a try of this risk trains these queries: long only where there is work for all of it."""
        if risk <= MAX_RISK:
            return self._part(SHORT)
        long = self._part(LONG)
        flops = training_flops(self.bench, queries, replace(self.recipe, epochs=long))
        return long if flops <= self.bounds.work_left else self._part(SHORT)

    def _part(self, part: float) -> int:
        """So many epochs of those a search gives an attempt."""
        return max(1, round(part * self.recipe.epochs))

    def _trained(self, start: Merged, queries: Sequence[str], alone: bool, epochs: int) -> dict[str, Any]:
        """The best state that a joint training of these queries' models passes through, and whether it `held`.

        It is of the first epoch at the earliest: what passes on val as it starts has not been trained to answer like
        its original. With `alone` what they share with others stands still.
        """
        bench, journal = self.bench, self.journal
        models = bench.tied(start.plan, queries, start.states, journal)
        if alone:
            rest_shared(models, start.plan)
        best: dict[str, Any] = journal.part("best")
        if not best:
            ratios = {query: bench.ratio(query, model) for query, model in models.items()}
            best.update(ratios=ratios, states=snapshots(models), epochs=0, held=False)
        recipe = replace(self.recipe, epochs=epochs)
        judged = train_while(bench, models, recipe, journal, start.plan, easing=Easing(best["ratios"], self.required))
        try:
            while not best["held"] and (ratios := next(judged, None)) is not None:
                better = not best["epochs"] or merit(ratios, self.required) >= merit(best["ratios"], self.required)
                states = snapshots(models) if better else best["states"]
                best.update(
                    epochs=best["epochs"] + 1, states=states, ratios=ratios if better else best["ratios"],
                    held=all_met(ratios, self.required),
                )  # fmt: skip
        except Diverged as error:
            bench.progress("warning", text=f"the loss of {error} is no number any more; back to the best epoch")
        return dict(best)


def _reached(bench: Workbench, merged: Merged) -> dict[str, float]:
    models = bench.models(merged.states, merged.states, merged.plan)
    return {query: bench.ratio(query, model) for query, model in models.items()}


def _judged(ladder: Sequence[Candidate], judge: Callable[[Candidate], Candidate]) -> list[dict[str, Any]]:
    """The ladder from the least rank whose risk can be borne, or its last, as plain values.

    Larger ranks are not judged: they do less, and count with the risk of this one.
    """
    larger = list(ladder)
    one = judge(larger.pop(0))
    while larger and one.risk > MAX_RISK:
        one = judge(larger.pop(0))
    return [candidate.to_plain() for candidate in (one, *(replace(other, risk=one.risk) for other in larger))]


def _together(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first of these that one try may take: either all private or all shared, and no risk that nothing mends."""
    chunk = list(candidates[:1])
    for candidate in candidates[1:]:
        risk = sum(one.risk for one in (*chunk, candidate))
        if candidate.alone != chunk[0].alone or risk > MOST_RISK:
            break
        chunk.append(candidate)
    return chunk


def _order(candidate: Mapping[str, Any]) -> tuple[bool, float]:
    """What comes first: weights that nobody else has, then most bytes saved per risk."""
    return not Candidate.from_plain(candidate).alone, -candidate["saved_bytes"] / candidate["risk"]


def _told(candidate: Candidate) -> dict[str, Any]:
    """A candidate in the log: one layer of each unit stands for all."""
    units = [unit[0] for unit in (candidate.first, candidate.second) if unit]
    what = {"rank": candidate.rank} if candidate.rank else {"start": candidate.start}
    return {"layers": [f"{query}: {path}" for query, path in units], "saved_bytes": candidate.saved_bytes,
            "risk": candidate.risk, **what}  # fmt: skip
