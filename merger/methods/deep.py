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

from merger.checkpoint import State
from merger.core.merged import Merged
from merger.core.snapshot import training_flops
from merger.mending.private import GENTLE, best_begun, train_private
from merger.methods.harm import PASSES, harms
from merger.methods.parts import Parts
from merger.outcomes import NO_TIME
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
    """Models that take deep layers from those that stand, training as by a `recipe` for all, where there is one: one
    after the other, each to its end. Where nothing is trained all take the `fewest` layers that they could take, and
    unless that is all that is asked for, then each in its turn as many as it bears, step by step: the first steps save
    most for their work.
    """

    recipe: Recipe | None
    fewest: bool = False

    def run(
        self, standing: Merged, own: Mapping[str, State], takers: Sequence[str], taking: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What is `merged` (plain) once each of the takers, beginning from its `own` state, took from those that stand,
        and `rows` for the log: one for each training, one for what each kept, and why. And how far each is in `taking`:
        with that of an earlier run, those that stand go on from there, and the others know what was found of layers
        that they are offered again.

        Who took, and who could not take anything, may give to those that come after.
        """
        now = self.checkpoint.state("deep")
        if not now:
            now.update(merged=standing.to_plain(), rows=[], turns=list(takers), taking=dict(taking or {}))
        while now["turns"]:
            query, *others = now["turns"]
            found = self.checkpoint.step(f"{query} takes", partial(self._turn, query, now, own[query]))
            now.update(
                merged=found["merged"], rows=[*now["rows"], *found["rows"]],
                turns=[*others, query] if found["goes_on"] else others,
                taking={**now["taking"], query: found["taking"]},
            )  # fmt: skip
            self.checkpoint.discard(f"{query} takes")
        return {key: now[key] for key in ("merged", "rows", "taking")}

    def stand(self, query: str, turns: Sequence[str], state: State) -> dict[str, Any]:
        """The `state` of a query that trained all it has, for itself, so that it can give; None where it does not come
        to what is required. And a `row` for the log.
        """
        found: dict[str, Any] = {"ratio": None, "state": state, "trained": 0}
        if (recipe := self.checkpoint.step("recipe", partial(self._fits, query, turns))) is not None:
            found = self._evaluated(query, SharingPlan(), [state], recipe)
        row = {"alone": query, "ratio": found["ratio"], "required": self.required[query], "epochs": found["trained"],
               "flops": self.ctx.flops.total}  # fmt: skip
        return {"state": found["state"] if (found["ratio"] or 0.0) >= self.required[query] else None, "row": row}

    def _turn(self, query: str, now: Mapping[str, Any], own: State) -> dict[str, Any]:
        """The plan and the states once a query took one step further, or all that it bears where it trains; how far it
        is in `taking`, whether it `goes_on`, and rows for the log.
        """
        merged, rows = Merged.from_plain(now["merged"]), list[dict[str, Any]]()
        taking = now["taking"].get(query)
        if taking is None or query not in merged.states:
            taking = self._beginning(query, merged, own, taking)
        place, one_step = _next(taking), self.fewest or self.recipe is None
        while place is not None and not (one_step and rows):
            pace = taking["pace"]
            fits = partial(self._fits, query, now["turns"], pace)
            if (recipe := self.checkpoint.step(f"recipe {place}, {pace:g}", fits)) is None:
                place = None
                break
            merged, taking, row = self._stepped(query, merged, own, taking, recipe)
            place = _next(taking)
            rows.append(row)
        goes_on = place is not None and not self.fewest
        private = [path for path in taking["pairs"] if path not in taking["taken"]]
        if private and not goes_on and not self.fewest:
            why, ratio = taking["why"]
            rows.append({"query": query, "repair": TAKES, "private": private, "after": why, "ratio": ratio,
                         "required": self.required[query], "flops": self.ctx.flops.total})  # fmt: skip
        merged = Merged(merged.plan, {**merged.states, query: merged.states.get(query, own)})
        return {"merged": merged.to_plain(), "taking": taking, "goes_on": goes_on, "rows": rows}

    def _stepped(
        self, query: str, merged: Merged, own: State, taking: Mapping[str, Any], recipe: Mapping[str, Any]
    ) -> tuple[Merged, Mapping[str, Any], dict[str, Any]]:
        """What is merged and how far a query is once it was tried with the next of what it may keep, and the log's
        row.
        """
        place, pairs, kept, pace = _next(taking), taking["pairs"], taking["kept"], taking["pace"]
        taken = [path for path in pairs if path not in kept[place]]
        before = merged.plan.with_private(query, taking["taken"])
        plan = before.with_pairs([pairs[path], (query, path)] for path in taken)
        begins = self._begins(merged, query, own, {path: pairs[path] for path in taken})
        train = partial(self._evaluated, query, plan, begins, recipe)
        found = self.checkpoint.step(f"keeping {place}, {pace:g}", train)
        if found["ratio"] >= self.required[query]:
            taking = {**taking, "held": place, "taken": taken}
            merged = Merged(plan, {**merged.states, query: found["state"]})
        else:
            slower = place == len(kept) - 1 and recipe and pace > SLOWER
            bound = {"pace": SLOWER} if slower else {"failed": place}
            taking = {**taking, **bound, "why": (f"taking {len(taken)} of {len(pairs)} layers", found["ratio"])}
        givers = [pairs[path][0] for path in taken]
        giver = max(givers, key=givers.count)
        row = self.row(query, giver, taken, found["ratio"], found["trained"], merged.plan)
        if recipe:
            row["rate"] = GENTLE * recipe["rate"]
        self.ctx.progress("takes", **{**row, "layers": len(taken)})
        return merged, taking, row

    def _beginning(self, query: str, before: Merged, own: State, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """How far a query is that has taken nothing yet: whose layers it could take, which of them it may keep, the
        places among these between which the fewest that it needs lie, and why it takes no more.

        Of the same layers it is `known` which harm most, and whether even the fewest were too many.
        """
        pairs = self._pairs(before, query)
        again = known if known and known["pairs"] == pairs else None
        if again and not again["taken"]:
            return again
        shared = self._begins(before, query, own, pairs)[0]
        kept = again["kept"] if again else self._kept(query, own, shared, list(pairs))
        return {"pairs": pairs, "kept": kept, "held": len(kept), "failed": -1, "pace": 1.0, "taken": [],
                "why": (NO_TIME, None)}  # fmt: skip

    def _begins(self, before: Merged, query: str, own: State, taken: Mapping[str, Member]) -> list[State]:
        """Its own state with these layers as others have them, and the state it has come to by now."""
        theirs = {
            weight_key(own, path): before.states[giver][weight_key(before.states[giver], its)]
            for path, (giver, its) in taken.items()
        }
        return [{**state, **theirs} for state in (own, before.states.get(query)) if state is not None]

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
        in_order = [layer.path for layer in self.ctx.layers if layer.query == query and layer.path in paths]
        if len(paths) * PASSES * self.ctx.flops.of(self.ctx.queries[query]) > RANKING * self.budget.flops_left:
            return in_order
        found, size = harms(self.ctx, query, own, shared, paths), self.takeable(query)
        return sorted(in_order, key=lambda path: -found[path] / size[path])

    def _evaluated(
        self, query: str, plan: SharingPlan, begins: Sequence[State], recipe: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The `ratio` that a query comes to from the best of these states, its `state`, and the epochs `trained`."""
        if not recipe:
            return {**best_begun(self.ctx, begins, plan, query, self.checkpoint), "trained": 0}
        required = self.required[query]
        return train_private(self.ctx, begins, plan, query, Recipe(**recipe), required, self.checkpoint)

    def _fits(self, query: str, turns: Sequence[str], pace: float = 1.0) -> dict[str, Any] | None:
        """How a query is trained next, at this part of the rate, empty where it is not; None where too little work is
        left.
        """
        ctx, cost = self.ctx, {one: self.ctx.flops.of(self.ctx.queries[one]) for one in turns}
        if self.recipe is None:
            return None if self.budget.over else {}
        mine = PART * self.budget.flops_left * cost[query] / sum(cost.values())
        epochs = LONGER * self.recipe.epochs
        frames = (mine / (cost[query] * epochs) - len(ctx.val[query])) / self.recipe.passes()
        least, most = self.recipe.frames_per_epoch, 2 * LONGER * self.recipe.frames_per_epoch
        recipe = replace(
            self.recipe, epochs=epochs, evaluate_from=epochs, rate=pace * self.recipe.rate / GENTLE,
            norms=NORMS, private=1.0,
            frames_per_epoch=int(min(len(ctx.train[query]), most, max(least, frames))),
        )  # fmt: skip
        fits = not self.budget.over and training_flops(ctx, [query], recipe) <= self.budget.flops_left
        return asdict(recipe) if fits else None


def _next(taking: Mapping[str, Any]) -> int | None:
    """The place among what a query may keep that is tried next, None where that which it needs is found."""
    held, failed = taking["held"], taking["failed"]
    if held - failed <= 1:
        return None
    return held - 1 if held == len(taking["kept"]) else (failed + held) // 2
