"""Taking over: layers of one model take weights of others as they are, and the model learns alone to live with them.

Where nothing is left of any query once all is tied, as with models that were trained apart and are no larger than
their tasks ask for, a joint training has to find one weight for all of them and hurts them all. Here whoever gives a
weight keeps it, and so answers as before; whoever takes some trains what is its own, the weights that are shared
standing still (merger.mending.private). The smallest model of a set gives: it can bear least. Layers are taken in
portions, those first whose loss harms least per byte, and a portion is kept when the query still has what is required
of it, so that what is saved grows from one to the next and nothing that was won is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from merger.bench.bounds import Bounds
from merger.bench.merged import Merged, State
from merger.bench.standing import TRAINING_PASSES, training_flops
from merger.bench.workbench import Workbench
from merger.journal.checkpoint import Checkpoint
from merger.journal.outcomes import NO_TIME
from merger.mending.private import GENTLE, train_private
from merger.start.alignment import by_shared_bytes
from merger.start.choosing import Judge
from merger.training.loop import Recipe
from models.sharing.layers import weight_key
from models.sharing.plan import Member, SharingPlan

PORTION = 1 / 8
"""The part of the bytes that a query could take which it takes at once; half of that after it was refused."""
LEAST = 1 / 16
"""A query that bears no portion of this size takes no more."""
ROUNDS = 4
"""An epoch has so many frames that each query can take so many portions within the work, if it has them."""
NEAR = 0.98
"""A portion that ends with this part of what is required is trained once more, at half the rate."""
TAKES = "takes over"
"""The step of a log that says which layers a query took no more."""


@dataclass(frozen=True)
class Adopting:
    """Queries that take weights of each other under a `plan`, until each has what is `required` and bears no more."""

    bench: Workbench
    plan: SharingPlan
    recipe: Recipe
    required: Mapping[str, float]
    checkpoint: Checkpoint
    bounds: Bounds

    def run(self, apart: Mapping[str, State]) -> tuple[Merged, dict[str, float]]:
        """What is merged in the end, and every query's ratio on val; starts from models in one order of channels.

        The plan may be empty. The log has a row for each portion, and one for what each query took no more.
        """
        takers = [query for query in by_shared_bytes(self.bench, self.plan) if self._takeable(query)]
        now = self.checkpoint.part("adopting")
        if not now:
            now.update(
                merged=Merged(SharingPlan(), {q: apart[q] for q in self.plan.queries()}).to_plain(),
                ratios=dict.fromkeys(sorted(self.plan.queries()), 1.0), rows=[], number=0, frames=self._frames(takers),
                sizes=dict.fromkeys(takers, PORTION), risks={}, turns=takers,
            )  # fmt: skip
        while now["turns"]:
            query, *others = now["turns"]
            name = f"portion {now['number'] + 1}"
            if query not in now["risks"]:
                risks = self.checkpoint.step("risks", partial(self._risks, query, apart))
                now["risks"] = {**now["risks"], query: risks}
                self.checkpoint.forget("risks")
            found = self.checkpoint.step(name, partial(self._portion, query, now))
            if found["accepted"]:
                now["merged"], now["ratios"] = found["merged"], {**now["ratios"], query: found["ratio"]}
            if found["row"] is None:
                turns = others  # all of it is taken, or no work is left
            else:
                size = now["sizes"][query] if found["accepted"] else now["sizes"][query] / 2
                now["sizes"] = {**now["sizes"], query: size}
                smaller = size >= LEAST and len(found["row"]["layers"]) > 1
                turns = [*others, query] if found["accepted"] or smaller else others
                now["rows"] = [*now["rows"], found["row"]]
            now.update(turns=turns, number=now["number"] + 1)
            self.checkpoint.forget(name)
        merged = Merged.from_plain(now["merged"])
        for row in [*now["rows"], *self._not_taken(takers, merged.plan, now["rows"])]:
            self.checkpoint.note(row)
        return merged, now["ratios"]

    def _portion(self, query: str, now: Mapping[str, Any]) -> dict[str, Any]:
        """What the next layers that a query takes come to; no `row` where there are none, or no work."""
        before = Merged.from_plain(now["merged"])
        paths = self._next(query, now["risks"][query], before.plan, now["sizes"][query])
        recipe = replace(self.recipe, frames_per_epoch=now["frames"], rate=self.recipe.rate / GENTLE)
        if not paths or not self.checkpoint.step("fits", partial(self._fits, query, recipe)):
            return {"accepted": False, "row": None}
        plan, state = before.plan, dict(before.states[query])
        for path in paths:
            members, (giver, theirs) = self._set(query, path)
            plan = self._joined(plan, members, (giver, theirs), (query, path))
            state[weight_key(state, path)] = before.states[giver][weight_key(before.states[giver], theirs)]
        found: dict[str, Any] = {"ratio": 0.0}
        required, states, epochs = self.required[query], {**before.states, query: state}, 0
        for turn in range(2):
            again = replace(recipe, seed=recipe.seed + 2 * now["number"] + turn, rate=recipe.rate / 2**turn)
            train = partial(
                train_private, self.bench, Merged(plan, states), plan, query, again, required, self.checkpoint
            )
            found = self.checkpoint.step(f"turn {turn}", train)
            states, epochs = {**states, query: found["state"]}, epochs + found["trained"]
            near = NEAR * required <= found["ratio"] < required
            if not near or not self.checkpoint.step(f"fits after {turn}", partial(self._fits, query, recipe)):
                break
        accepted = found["ratio"] >= required
        merged = Merged(plan, states) if accepted else before
        saved = merged.plan.saved_bytes(self.bench.layers)
        row = {"takes": query, "layers": paths, "ratio": found["ratio"], "required": required, "epochs": epochs,
               "accepted": accepted, "accepted_bytes": saved, "work": self.bench.work.total}  # fmt: skip
        self.bench.progress("takes", **{**row, "layers": len(paths)})
        return {"accepted": accepted, "row": row, "merged": merged.to_plain(), "ratio": found["ratio"]}

    def _fits(self, query: str, recipe: Recipe) -> bool:
        """Whether the work that is left is enough for this training of a query."""
        return not self.bounds.over and training_flops(self.bench, [query], recipe) <= self.bounds.work_left

    def _frames(self, takers: Sequence[str]) -> int:
        """The frames of an epoch: as many as the data has, where the work is enough for all rounds with so many."""
        queries, bench = self.bench.queries, self.bench
        epochs = ROUNDS * self.recipe.epochs
        once = sum(bench.work.of(queries[query]) for query in takers)
        judging = epochs * sum(bench.work.of(queries[query]) * len(bench.val[query]) for query in takers)
        left = max(0.0, self.bounds.work_left - judging)
        most = max((len(bench.train[query]) for query in takers), default=1)
        wanted = left / (TRAINING_PASSES * epochs * once) if once else most
        return int(min(most, max(self.recipe.frames_per_epoch, wanted)))

    def _takeable(self, query: str) -> dict[str, int]:
        """Path -> bytes of the layers that a query may take from others."""
        size = {layer.path: layer.bytes for layer in self.bench.layers if layer.query == query}
        own = [(path, members) for members in self.plan.shared for name, path in members if name == query]
        return {path: size[path] for path, members in own if self._giver(members)[0] != query}

    def _giver(self, members: Sequence[Member]) -> Member:
        """The member of the smallest model."""
        rank = {query: place for place, query in enumerate(by_shared_bytes(self.bench, self.plan))}
        return max(members, key=lambda member: rank[member[0]])

    def _set(self, query: str, path: str) -> tuple[Sequence[Member], Member]:
        members = next(members for members in self.plan.shared if (query, path) in members)
        return members, self._giver(members)

    def _joined(self, plan: SharingPlan, members: Sequence[Member], giver: Member, taker: Member) -> SharingPlan:
        """The plan with one more member of a set beside those that have its weight already."""
        present = next((own for own in plan.shared if giver in own), (giver,))
        others = tuple(own for own in plan.shared if giver not in own)
        both = {*present, taker}
        return replace(plan, shared=(*others, tuple(member for member in members if member in both)))

    def _risks(self, query: str, apart: Mapping[str, State]) -> dict[str, float]:
        """Path -> the part of the heads' inputs that a model loses with the weight that this layer would take."""
        judge, risks = Judge(self.bench, [query], self.checkpoint), {}
        for path in self._takeable(query):
            giver, theirs = self._set(query, path)[1]
            key, weight = weight_key(apart[query], path), apart[giver][weight_key(apart[giver], theirs)]
            risks[path] = judge.error(query, self.bench.models([query], {query: {**apart[query], key: weight}})[query])
        return risks

    def _next(self, query: str, risks: Mapping[str, float], plan: SharingPlan, part: float) -> list[str]:
        """The layers that a query takes next: so much of all it could take, the least risk for a byte first."""
        sizes, taken = self._takeable(query), _shared(plan, query)
        chosen: list[str] = []
        for path in sorted(sizes, key=lambda path: (risks[path] / sizes[path], path)):
            if sum(sizes[one] for one in chosen) < part * sum(sizes.values()) and path not in taken:
                chosen.append(path)
        return chosen

    def _not_taken(
        self, takers: Sequence[str], plan: SharingPlan, rows: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Rows that say of each query which layers it took no more, and the portion because of which."""
        said = []
        for query in takers:
            taken = _shared(plan, query)
            refused = [row for row in rows if row["takes"] == query and not row["accepted"]]
            if private := [path for path in self._takeable(query) if path not in taken]:
                last = refused[-1] if refused else None
                after = f"taking over {len(last['layers'])} layers" if last else NO_TIME
                said.append({
                    "query": query, "repair": TAKES, "private": private, "after": after,
                    "ratio": last["ratio"] if last else None, "required": self.required[query],
                    "work": self.bench.work.total,
                })  # fmt: skip
        return said


def _shared(plan: SharingPlan, query: str) -> set[str]:
    return {path for members in plan.shared for owner, path in members if owner == query}
