"""Deep layers first: a model keeps its early ones and takes the deep ones, which hold most bytes, as others have them.

No weight has to be found that serves all: who gives stands still. Whoever takes begins as its original, channels in the
givers' order, and keeps to itself the layers whose shared weight alone would move it most for its bytes
(merger.methods.harm). Those are the early ones, which are light and which all that follows was made for. How little it
has to keep is found by bisection: as it is, norms measured again, which takes a few validations; or with what is its
own trained, where that is needed, to the end of an annealing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from merger.bench.merged import Merged, State
from merger.bench.standing import training_flops
from merger.journal.outcomes import NO_TIME
from merger.mending.private import GENTLE, best_begun, train_private
from merger.methods.harm import PASSES, harms
from merger.methods.parts import Parts
from merger.training.recipe import Recipe
from models.sharing.layers import weight_key
from models.sharing.plan import Member, SharingPlan

KEPT = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""The part of the bytes it could share that a query keeps to itself, at most."""
NORMS = 8
"""Norms and biases move so many times as fast as in a joint training, the layers of its own as fast."""
LONGER = 2
"""So many times the epochs of a joint training, and at most twice as many times the frames in one."""
SLOWER = 1 / 16
"""Where the fewest layers are not borne when trained, they are tried once more at this part of the rate, and what
follows keeps to it: a rate that all bear together ruins some model that trains by itself."""
PART = 1 / 4
"""A training takes at most this part of the work that is there for its query."""
RANKING = 1 / 32
"""To find the most harmful layers may take at most this part of the work that is left; else the first count as such."""
TAKES = "takes deep layers"
"""The step of a log that says which layers a query kept to itself."""


@dataclass(frozen=True)
class Deep(Parts):
    """Models that take deep layers from those that stand, one after the other, each training as by a `recipe` for all,
    where there is one. Of the `fewest` layers that they could take only, or else of as many as they bear.
    """

    recipe: Recipe | None
    fewest: bool = False

    def run(self, standing: Merged, own: Mapping[str, State], takers: Sequence[str]) -> dict[str, Any]:
        """What is `merged` (plain) once each of the takers, beginning from its `own` state, took from those that stand,
        and `rows` for the log: one for each training, one for what each kept, and why.

        Who took, and who could not take anything, may give to those that follow.
        """
        now = self.checkpoint.part("deep")
        if not now:
            now.update(merged=standing.to_plain(), rows=[], turns=list(takers))
        while now["turns"]:
            query, *others = now["turns"]
            found = self.checkpoint.step(f"{query} takes", partial(self._taking, query, now, own[query]))
            now.update(merged=found["merged"], rows=[*now["rows"], *found["rows"]], turns=others)
            self.checkpoint.forget(f"{query} takes")
        return {"merged": now["merged"], "rows": now["rows"]}

    def stand(self, query: str, turns: Sequence[str], state: State) -> dict[str, Any]:
        """The `state` of a query that trained all it has, for itself, so that it can give; None where it does not come
        to what is required. And a `row` for the log.
        """
        found: dict[str, Any] = {"ratio": None, "state": state, "trained": 0}
        if (recipe := self.checkpoint.step("recipe", partial(self._fits, query, turns))) is not None:
            found = self._judged(query, SharingPlan(), [state], recipe)
        row = {"alone": query, "ratio": found["ratio"], "required": self.required[query], "epochs": found["trained"],
               "work": self.bench.work.total}  # fmt: skip
        return {"state": found["state"] if (found["ratio"] or 0.0) >= self.required[query] else None, "row": row}

    def _taking(self, query: str, now: Mapping[str, Any], own: State) -> dict[str, Any]:
        """The plan and the states once a query took what it bears, and rows for the log."""
        before = Merged.from_plain(now["merged"])
        pairs, rows = self._pairs(before, query), list[dict[str, Any]]()
        shared = dict(own)
        for path, (giver, theirs) in pairs.items():
            shared[weight_key(own, path)] = before.states[giver][weight_key(before.states[giver], theirs)]
        kept = self._kept(query, own, shared, list(pairs))
        held, failed, pace = len(kept), -1, 1.0
        reached, why, state = Merged(before.plan, {**before.states, query: own}), (NO_TIME, None), own
        while held - failed > 1 and not (self.fewest and rows):
            fewest = held == len(kept)
            place = len(kept) - 1 if fewest else (failed + held) // 2
            fits = partial(self._fits, query, now["turns"], pace)
            if (recipe := self.checkpoint.step(f"recipe {place}, {pace:g}", fits)) is None:
                break
            taken = [path for path in pairs if path not in kept[place]]
            plan = before.plan.with_pairs([pairs[path], (query, path)] for path in taken)
            keys = {weight_key(own, path) for path in taken}
            begins = [
                {**one, **{key: shared[key] for key in keys}} for one in ([own] if state is own else [own, state])
            ]
            train = partial(self._judged, query, plan, begins, recipe)
            found = self.checkpoint.step(f"keeping {place}, {pace:g}", train)
            after = (f"taking {len(taken)} of {len(pairs)} layers", found["ratio"])
            if found["ratio"] >= self.required[query]:
                held, state = place, found["state"]
                reached = Merged(plan, {**before.states, query: state})
            else:
                why = after
                failed, pace = (failed, SLOWER) if fewest and recipe and pace > SLOWER else (place, pace)
            givers = [pairs[path][0] for path in taken]
            giver = max(givers, key=givers.count)
            row = self.row(query, giver, taken, found["ratio"], found["trained"], reached.plan)
            rows.append({**row, "rate": GENTLE * recipe["rate"]} if recipe else row)
            self.bench.progress("takes", **{**rows[-1], "layers": len(taken)})
        private = list(kept[held]) if held < len(kept) else list(pairs)
        if private and not self.fewest:
            rows.append({"query": query, "repair": TAKES, "private": private, "after": why[0], "ratio": why[1],
                         "required": self.required[query], "work": self.bench.work.total})  # fmt: skip
        return {"merged": reached.to_plain(), "rows": rows}

    def _pairs(self, before: Merged, query: str) -> dict[str, Member]:
        """Path -> whose layer it could share, of those that stand: that which most share, else that of the first."""
        shared_by = {member: len(members) for members in before.plan.shared for member in members}
        first = {owner: number for number, owner in enumerate(before.states)}
        found = dict[str, Member]()
        for members in self.plan.shared:
            mine = [path for owner, path in members if owner == query]
            theirs = [member for member in members if member[0] in before.states and member[0] != query]
            if mine and theirs:
                found[mine[0]] = max(theirs, key=lambda member: (shared_by.get(member, 1), -first[member[0]]))
        return found

    def _kept(self, query: str, own: State, shared: State, paths: Sequence[str]) -> list[tuple[str, ...]]:
        """The layers that a query may keep to itself, in ascending order of bytes: the most harmful for their bytes."""
        if not paths:
            return []
        size = self.takeable(query)
        worst = self.checkpoint.step("worst", partial(self._worst, query, own, shared, paths))
        steps = list[tuple[str, ...]]()
        for part in KEPT:
            chosen, left = list[str](), part * sum(size[path] for path in paths)
            for path in worst:
                if size[path] <= left:
                    chosen.append(path)
                    left -= size[path]
            if tuple(chosen) not in steps:
                steps.append(tuple(chosen))
        return steps

    def _worst(self, query: str, own: State, shared: State, paths: Sequence[str]) -> list[str]:
        """These layers, the most harmful for their bytes first: as measured, or else as they follow each other."""
        in_order = [layer.path for layer in self.bench.layers if layer.query == query and layer.path in paths]
        if len(paths) * PASSES * self.bench.work.of(self.bench.queries[query]) > RANKING * self.bounds.work_left:
            return in_order
        found, size = harms(self.bench, query, own, shared, paths), self.takeable(query)
        return sorted(in_order, key=lambda path: -found[path] / size[path])

    def _judged(
        self, query: str, plan: SharingPlan, begins: Sequence[State], recipe: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The `ratio` that a query comes to from the best of these states, its `state`, and the epochs `trained`."""
        if not recipe:
            return {**best_begun(self.bench, begins, plan, query, self.checkpoint), "trained": 0}
        required = self.required[query]
        return train_private(self.bench, begins, plan, query, Recipe(**recipe), required, self.checkpoint)

    def _fits(self, query: str, turns: Sequence[str], pace: float = 1.0) -> dict[str, Any] | None:
        """How a query is trained next, at this part of the rate, empty where it is not; None where too little work is
        left.
        """
        bench, cost = self.bench, {one: self.bench.work.of(self.bench.queries[one]) for one in turns}
        if self.recipe is None:
            return None if self.bounds.over else {}
        mine = PART * self.bounds.work_left * cost[query] / sum(cost.values())
        epochs = LONGER * self.recipe.epochs
        frames = (mine / (cost[query] * epochs) - len(bench.val[query])) / self.recipe.passes()
        least, most = self.recipe.frames_per_epoch, 2 * LONGER * self.recipe.frames_per_epoch
        recipe = replace(
            self.recipe, epochs=epochs, judged_from=epochs, rate=pace * self.recipe.rate / GENTLE,
            norms=NORMS, private=1.0,
            frames_per_epoch=int(min(len(bench.train[query]), most, max(least, frames))),
        )  # fmt: skip
        fits = not self.bounds.over and training_flops(bench, [query], recipe) <= self.bounds.work_left
        return asdict(recipe) if fits else None
