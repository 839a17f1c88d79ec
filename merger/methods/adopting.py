"""Taking over: a model becomes a part of another one, and learns alone to answer its own question with it.

Where nothing is left of any query once all is tied, as with models that were trained apart and are no larger than
their tasks ask for, a joint training has to find one weight for all of them and hurts them all. Here whoever gives
stays as it is. Whoever takes begins as a part of the giver, blocks left out and norms among it
(merger.methods.parts), so that its layers fit each other from the start, and trains what is its own: first its
norms and head alone, at a high rate, the shared weights standing still (merger.mending.private). Where that is not
enough it keeps the lightest of its layers to itself, a quarter of the bytes, then half, then more; where it is nearly
enough, a sixteenth first. The largest gives first; who can take nothing may give, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from merger.checkpoint import snapshots
from merger.core.merged import Merged
from merger.core.snapshot import training_flops
from merger.mending.private import GENTLE, train_private
from merger.methods.parts import Parts
from merger.outcomes import LEAVES, NO_TIME
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan

KEPT = (0.0, 0.0625, 0.25, 0.5, 0.75)
"""The part of the bytes it could take that a query keeps to itself, at most, at one training after the other; so
little as a sixteenth only where it was near."""
BOLD = 20
"""How many times the rate of a joint training: norms and heads alone bear it, and need it to come so far."""
GENTLER = 4
"""Where layers train that a query keeps to itself, the rate is so many times lower, and once more where it was near;
with each of these trainings it falls by half."""
NEAR = 0.98
"""A training that ends with this part of what is required was near, and goes on once more at half the rate."""
PART = 1 / 3
"""A training takes at most this part of the work that is there for its query."""
LONG = 16
"""An epoch has at most so many times the frames of one in a joint training: one model learns, and much."""
TAKES = "takes over"
"""The step of a log that says which layers a query kept to itself."""


@dataclass(frozen=True)
class Adopting(Parts):
    """Parts that train by a `recipe`, one after the other, each until it has what is required."""

    recipe: Recipe

    def run(self) -> tuple[Merged, dict[str, float]]:
        """What is merged in the end, and every query's ratio on val; the plan may be empty.

        The log has a row for each training, one for what each query kept to itself, and one of the sets tried.
        """
        now = self.checkpoint.state("adopting")
        if not now:
            queries = self.largest_first()
            originals = snapshots({query: self.ctx.originals[query] for query in queries})
            now.update(
                merged=Merged(SharingPlan(), originals).to_plain(), ratios=dict.fromkeys(sorted(queries), 1.0),
                givers=[], turns=queries, rows=[], tried=[],
            )  # fmt: skip
        while now["turns"]:
            query, *others = now["turns"]
            found = self.checkpoint.step(f"{query} takes", partial(self._taking, query, now))
            if found["merged"] is None:
                now["givers"] = [*now["givers"], query]
            else:
                now["merged"], now["ratios"] = found["merged"], {**now["ratios"], query: found["ratio"]}
            now["tried"], now["rows"] = [*now["tried"], *found["tried"]], [*now["rows"], *found["rows"]]
            now["turns"] = others
            self.checkpoint.discard(f"{query} takes")
        for row in now["rows"]:
            self.checkpoint.add_row(row)
        sets = SharingPlan().with_pairs(now["tried"]).shared
        self.checkpoint.add_row({"sets": [[list(member) for member in members] for members in sets]})
        return Merged.from_plain(now["merged"]), now["ratios"]

    def _taking(self, query: str, now: Mapping[str, Any]) -> dict[str, Any]:
        """What a query comes to that takes over from the best giver; `merged` is None where it takes nothing."""
        before, rows = Merged.from_plain(now["merged"]), list[dict[str, Any]]()
        found: dict[str, Any] = {"merged": None, "rows": rows, "tried": []}
        if now["givers"] and self.checkpoint.step("over", lambda: self.budget.over):
            return {**found, "rows": [self._said(query, LEAVES, [], NO_TIME, None)]}
        if (best := self.best(query, now["givers"], before.states)) is None:
            return found
        giver, pairs, state = best.giver, best.pairs, best.state
        found["tried"] = [[(giver, theirs), (query, path)] for path, theirs in pairs.items()]
        ratio, after, failed, taken, falls = None, NO_TIME, (NO_TIME, None), list[str](), 0
        for kept in KEPT:
            far, left = (ratio or 0.0) < NEAR * self.required[query], self._all_but(query, pairs, kept)
            if kept and (left == taken or (far and kept < KEPT[2])):
                continue
            taken = left
            plan = before.plan.with_pairs([(giver, pairs[path]), (query, path)] for path in taken)
            own = [path for path in pairs if path not in taken]
            gentler = 1 if not own else GENTLER if far else GENTLER**2
            for turn in range(2):
                name, slower = f"{kept:g}, turn {turn}", gentler * 2 ** (falls + turn)
                recipe = self.checkpoint.step(f"recipe of {name}", partial(self._recipe, query, now["turns"], slower))
                if recipe is None or not taken:
                    return {**found, "rows": [*rows, self._said(query, LEAVES, [], after, ratio)]}
                train = partial(
                    train_private, self.ctx, [state], plan, query, Recipe(**recipe), self.required[query],
                    self.checkpoint,
                )  # fmt: skip
                learnt = self.checkpoint.step(name, train)
                state, ratio, after = learnt["state"], learnt["ratio"], f"taking over {len(taken)} layers"
                accepted = plan if ratio >= self.required[query] else before.plan
                rows.append(self.row(query, giver, taken, ratio, learnt["trained"], accepted))
                self.ctx.progress("takes", **{**rows[-1], "layers": len(taken)})
                if accepted is plan:
                    said = [self._said(query, TAKES, own, *failed)] if own else []
                    merged = Merged(plan, {**before.states, query: state})
                    return {**found, "merged": merged.to_plain(), "ratio": ratio, "rows": [*rows, *said]}
                if ratio < NEAR * self.required[query]:
                    break
            failed, falls = (after, ratio), falls + turn + 1 if own else 0
        return {**found, "rows": [*rows, self._said(query, LEAVES, [], after, ratio)]}

    def _said(self, query: str, how: str, own: Sequence[str], after: str, ratio: float | None) -> dict[str, Any]:
        """The row that says what a query kept to itself, or that it left, and after what."""
        return {
            "query": query, "repair": how, "private": list(own), "after": after, "ratio": ratio,
            "required": self.required[query], "flops": self.ctx.flops.total,
        }  # fmt: skip

    def _all_but(self, query: str, pairs: Mapping[str, str], kept: float) -> list[str]:
        """The layers of these pairs but the lightest, which are this part of their bytes at most."""
        size = self.takeable(query)
        left, taken = kept * sum(size[path] for path in pairs), list[str]()
        for path in sorted(pairs, key=lambda path: size[path]):
            left -= size[path]
            if left < 0:
                taken.append(path)
        return taken

    def _recipe(self, query: str, turns: Sequence[str], slower: int) -> dict[str, Any] | None:
        """How a query is trained next, so many times slower than at first; None where too little work is left."""
        ctx, cost = self.ctx, {one: self.ctx.flops.of(self.ctx.queries[one]) for one in turns}
        mine = PART * self.budget.flops_left * cost[query] / sum(cost.values())
        frames = (mine / (cost[query] * self.recipe.epochs) - len(ctx.val[query])) / self.recipe.passes()
        least, most = self.recipe.frames_per_epoch, min(len(ctx.train[query]), LONG * self.recipe.frames_per_epoch)
        recipe = replace(
            self.recipe, rate=BOLD * self.recipe.rate / GENTLE / slower, features=0.0,
            frames_per_epoch=int(min(most, max(least, frames))),
        )  # fmt: skip
        fits = not self.budget.over and training_flops(ctx, [query], recipe) <= self.budget.flops_left
        return asdict(recipe) if fits else None
