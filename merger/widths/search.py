"""The width of every weight of a merge: the fewest bits that all the queries that use it can bear, on val.

Queries that share are fitted together, one such party after the other. At first everything is stored in the fewest bits
that were asked for. A query that falls short has its norms measured again, then trained alone (merger.widths.learning).
Where one still does, the party trains for its bits (merger.widths.training), and some weights become wider as long as
that takes less, step by step up to float32: those first whose rounding moves the inputs of its heads most per byte that
is given back, and as few as do (by bisection). A weight that is shared widens for all who share it. What was met with
wide weights is met in the end: wide weights are the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from merger.checkpoint import State, StepCache, snapshot
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.snapshot import training_flops
from merger.training.distillation import feature_loss, record_inputs, watched_layers
from merger.widths.learning import AGAIN, FIRST, learn_norms, rest_codes
from merger.widths.learning import max_flops as work_of_learning
from merger.widths.storing import Storage, Weight, nbytes_of, store, tied_models, weights_of, widths_of
from merger.widths.training import FOR_BITS, ForBits
from models.bits import BIT_WIDTHS, FP32, Bits
from models.quantization import pack
from models.sharing.plan import SharingPlan

KEPT = 0.99
"""A query that misses what is required with wide weights may lose no more than to this part of what it reaches."""
FRAMES = 16
"""Train frames of a query on which the error of rounding a weight is measured: there is a run for each weight."""

ROUNDS = 12
"""Every query is judged about so often at most: with wide weights, in each width, and in a bisection."""
TRAININGS = 2
"""And trained about as long as this many times at first, its norms alone and all for their bits: in each width."""


def fit_widths(
    ctx: MergeContext, merged: Merged, width: Bits, required: Mapping[str, float], journal: StepCache, budget: Budget
) -> dict[str, Any]:
    """The `storage` (plain) of what is merged for the `width` asked for, the `states` of those who trained for it, the
    `stored_bytes` by width, and log `rows`.

    Once the bounds are over, all weights of a query that falls short are widened at once.
    """
    return _Search(ctx, merged, required, journal, budget).run(width)


def packed_bytes(found: Mapping[str, Any]) -> int:
    """The bytes of all weights that may be stored in fewer bits, as a search `found` them, each once."""
    return sum(found["stored_bytes"].values())


def max_flops(ctx: MergeContext) -> float:
    """About what the search takes at most."""
    evaluated = sum(ctx.flops.of(query) * len(ctx.val[query.id]) for query in ctx.queries.values())
    alone = sum(work_of_learning(ctx, query) for query in ctx.queries)
    return ROUNDS * evaluated + TRAININGS * (alone + training_flops(ctx, list(ctx.queries), FOR_BITS))


def needed(target: float, required: float, reached: float) -> float:
    """The ratio on val that a query must keep when its weights get fewer bits, from what it reached with wide ones."""
    if reached >= required:
        return required
    kept = KEPT * reached
    return max(kept, target) if reached >= target else kept


def _as_it_is(ratio: float) -> dict[str, Any]:
    """What was found of a query that is stored as it was trained."""
    return {"ratio": ratio, "norms": None, "learnt": False}


@dataclass(frozen=True)
class _Fitted:
    """How the weights of a party are stored, norms that changed, the states of who trained for it, and log rows."""

    weights: list[Weight]
    norms: dict[str, State]
    states: dict[str, State]
    rows: list[dict[str, Any]]
    left: list[str] = field(default_factory=list)


def _by_width(weights: Sequence[Weight]) -> dict[str, int]:
    sizes = dict[str, int]()
    for weight in weights:
        stored = weight.width or FP32
        sizes[stored] = sizes.get(stored, 0) + weight.nbytes
    return sizes


@dataclass
class _Search:
    ctx: MergeContext
    merged: Merged
    required: Mapping[str, float]
    journal: StepCache
    budget: Budget
    evaluated: int = 0
    learnt: dict[str, State] = field(default_factory=dict)
    """The norms that each query learnt last."""
    originals: dict[str, _Fitted] = field(default_factory=dict)
    """Those whose bits are known, alone."""

    def run(self, asked_for: Bits) -> dict[str, Any]:
        """Fit the weights of those who share with each other, one such party after the other."""
        weights, done = weights_of(self.ctx, self.merged, asked_for), set[str]()
        fitted, norms, states, rows = list[Weight](), dict[str, State](), dict[str, State](), list[dict[str, Any]]()
        left = list[str]()
        for query in self.ctx.queries:
            if query in done:
                continue
            party = sorted(self.merged.plan.tied_to([query]))
            done |= set(party)
            found = self._fitted(asked_for, [one for one in weights if one.used_by(set(party))], party)
            fitted += found.weights
            states |= found.states
            rows += found.rows
            norms |= found.norms
            left += found.left
        storage = Storage(widths_of(fitted), norms).to_plain()
        return {
            "storage": storage, "rows": rows, "states": states, "left": left, "stored_bytes": _by_width(fitted),
        }  # fmt: skip

    def _fitted(self, asked_for: Bits, weights: list[Weight], party: list[str]) -> _Fitted:
        """The weights of a party in as few bits as all bear: rounded, or trained where that takes less."""
        wide = {query: self.journal.step(f"wide {query}", partial(self._wide, query)) for query in party}
        need = {
            query: needed(self.ctx.queries[query].accuracy_target, self.required[query], ratio)
            for query, ratio in wide.items()
        }
        found = self._evaluate(weights, party, need)
        rows, trained = [self._row(asked_for, weights, found, need)], None
        if any(one["ratio"] < need[query] for query, one in found.items()):
            trained = self._trained(asked_for, weights, need, rows)
        tried = len(rows)
        while short := {query for query, one in found.items() if one["ratio"] < need[query]}:
            if trained is not None and nbytes_of(weights) >= nbytes_of(trained.weights):
                return replace(trained, rows=[rows[0], *rows[tried:], *trained.rows[1:]])  # what is stored comes last
            weights, widened, again = self._widened(weights, short, need)
            found |= again
            touched = {query for weight in widened for query, _ in weight.places}
            found |= self._evaluate(weights, sorted(touched - set(again)), need)
            rows.append(self._row(asked_for, weights, found, need, widened))
        return _Fitted(weights, {query: one["norms"] for query, one in found.items() if one["norms"]}, {}, rows)

    def _trained(
        self, asked_for: Bits, weights: Sequence[Weight], need: Mapping[str, float], rows: list[dict[str, Any]]
    ) -> _Fitted | None:
        """What training a party for its bits came to, None where that was not enough; `rows` hear of each try."""
        party, alone = sorted(need), partial(self._alone, asked_for)
        cost = (lambda query: nbytes_of(alone(query).weights)) if len(party) > 1 else None
        training = ForBits(self.ctx, self.merged, party, need, self.journal, self.budget, cost)
        found = self.journal.step(f"bits of {party[0]}", partial(training.run, weights))
        for one in found["tried"]:
            tried = [weight.at(level) for weight, level in zip(weights, one["levels"], strict=True)]
            now = {query: _as_it_is(ratio) for query, ratio in one["ratios"].items()}
            rows.append({**self._row(asked_for, tried, now, need), "trained": party})
        if not found["states"]:
            return None
        left = {query: alone(query) for query in found["left"]}
        at = [weight.at(level).without(left) for weight, level in zip(weights, found["levels"], strict=True)]
        stored = [weight for weight in at if weight.places] + [
            weight for one in left.values() for weight in one.weights
        ]
        norms = {query: norms for one in left.values() for query, norms in one.norms.items()}
        states = {query: one.states.get(query, snapshot(self.ctx.originals[query])) for query, one in left.items()}
        told = [*rows, *(row for one in left.values() for row in one.rows)]
        return _Fitted(stored, norms, {**found["states"], **states}, told, sorted(left))

    def _alone(self, asked_for: Bits, query: str) -> _Fitted:
        """The weights of a query's original, which shares nothing."""
        if query in self.originals:
            return self.originals[query]
        merged = Merged(SharingPlan(), {query: snapshot(self.ctx.originals[query])})
        weights = [one for one in weights_of(self.ctx, merged, asked_for) if one.used_by({query})]
        search = _Search(self.ctx, merged, self.required, self.journal, self.budget)

        def plain() -> dict[str, Any]:
            found = search._fitted(asked_for, weights, [query])
            return {**found.__dict__, "weights": [one.level for one in found.weights]}

        found = self.journal.step(f"{query} alone", plain)
        at = [one.at(level) for one, level in zip(weights, found["weights"], strict=True)]
        self.originals[query] = _Fitted(**{**found, "weights": at})
        return self.originals[query]

    def _widened(
        self, weights: Sequence[Weight], short: set[str], need: Mapping[str, float]
    ) -> tuple[list[Weight], list[Weight], dict[str, Any]]:
        """As few weights as do one step wider, those among them that changed, and how the queries then do.

        When not even all of one width do, all of them are wider, and the next width is tried from there.
        """
        of_short = [at for at, weight in enumerate(weights) if weight.width is not None and weight.used_by(short)]
        present = {weights[at].width for at in of_short}
        width = next(one for one in BIT_WIDTHS if one in present)
        open_ = [at for at in of_short if weights[at].width == width]

        def wider(chosen: Sequence[int]) -> list[Weight]:
            return [weight.wider if at in chosen else weight for at, weight in enumerate(weights)]

        best = self._evaluate(wider(open_), sorted(short), need)
        if self.budget.over or any(best[query]["ratio"] < need[query] for query in short):
            return wider(open_), [weights[at] for at in open_], best
        order = self._most_error_first(weights, open_, short)
        low, high = 1, len(order)
        while low < high:
            middle = (low + high) // 2
            found = self._evaluate(wider(order[:middle]), sorted(short), need)
            if all(found[query]["ratio"] >= need[query] for query in short):
                high, best = middle, found
            else:
                low = middle + 1
        return wider(order[:high]), [weights[at] for at in order[:high]], best

    def _most_error_first(self, weights: Sequence[Weight], open_: Sequence[int], short: set[str]) -> list[int]:
        """These weights, the largest error per byte that the next width costs first."""
        errors = [0.0] * len(open_)
        for query in sorted(short):
            measure = partial(self._errors, [weights[at] for at in open_], query)
            of_query = self.journal.step(f"errors of {query} before {self.evaluated}", measure)
            errors = [one + other for one, other in zip(errors, of_query, strict=True)]
        worth = {
            at: error / (weights[at].wider.nbytes - weights[at].nbytes) for at, error in zip(open_, errors, strict=True)
        }
        return sorted(open_, key=lambda at: -worth[at])

    @torch.no_grad()
    def _errors(self, weights: Sequence[Weight], query: str) -> list[float]:
        """How far the inputs of a query's heads move when one weight alone has fewer bits."""
        ctx, errors = self.ctx, [0.0] * len(weights)
        model = tied_models(ctx, self.merged, [query])[query].eval()
        data, state = ctx.train[query], model.state_dict(keep_vars=True)
        chosen = torch.linspace(0, len(data) - 1, min(FRAMES, len(data))).long().tolist()
        frames = data.frames(chosen, ctx.device)
        paths = watched_layers(ctx.queries[query], model)
        wanted = self._seen(query, model, frames, paths)
        for at, weight in enumerate(weights):
            own = {key: state[key] for name, key in weight.places if name == query}
            kept = {key: tensor.detach().clone() for key, tensor in own.items()}
            assert weight.width is not None
            for key, tensor in own.items():
                tensor.copy_(pack(kept[key], weight.width).wide())
            if own:
                errors[at] = float(feature_loss(self._seen(query, model, frames, paths), wanted))
            for key, tensor in own.items():
                tensor.copy_(kept[key])
        return errors

    def _seen(self, query: str, model: nn.Module, frames: Tensor, paths: Sequence[str]) -> list[Tensor]:
        with record_inputs(model, paths) as seen:
            model(frames)
        self.ctx.flops.add(self.ctx.queries[query], len(frames))
        return list(seen)

    def _evaluate(self, weights: Sequence[Weight], queries: list[str], need: Mapping[str, float]) -> dict[str, Any]:
        """Query -> `ratio` on val with its weights stored so, the `norms` where these changed, and whether `learnt`."""
        self.evaluated += 1
        found = {}
        for query in queries:
            evaluate = partial(self._evaluated, weights, query, need[query])
            found[query] = self.journal.step(f"judged {self.evaluated} {query}", evaluate)
            if found[query]["learnt"]:
                self.learnt[query] = found[query]["norms"]
        return found

    def _evaluated(self, weights: Sequence[Weight], query: str, need: float) -> dict[str, Any]:
        """How a query does with its weights stored so: its norms as they are, else as they were learnt before, else
        measured again, else learnt anew from the best of these. A detector's scores are matched to its original's.
        """
        ctx, own = self.ctx, widths_of(weights).get(query, {})
        model, pack = self._stored(own, query)
        best = _as_it_is(ctx.ratio(query, model))
        learnt = [(self.learnt[query], False)] if query in self.learnt else []
        begins: list[tuple[State | None, bool]] = [(None, False), *learnt, (None, True)]
        for norms, again in begins:
            if best["ratio"] >= need or not pack:
                return best
            model, _ = self._stored(own, query, norms)
            moved = dict(norms or {})
            if again:
                ctx.calibrate(query, model)
                moved |= {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
            moved |= ctx.match_scores(query, model)
            if moved and (ratio := ctx.ratio(query, model)) > best["ratio"]:
                best = {"ratio": ratio, "norms": moved, "learnt": norms is not None}
        if best["ratio"] >= need or self.budget.over:
            return best
        model, _ = self._stored(own, query, best["norms"])
        rest_codes(query, model, self.merged.plan, pack)
        recipe = AGAIN if query in self.learnt else FIRST
        found = learn_norms(ctx, query, model, self.merged.plan, recipe, need, self.journal)
        return {**found, "learnt": True} if found["ratio"] > best["ratio"] else best

    def _stored(
        self, widths: Mapping[str, Bits], query: str, norms: State | None = None
    ) -> tuple[nn.Module, list[str]]:
        """A fresh model of a query with its weights stored so and these norms, and the keys that are packed."""
        model = tied_models(self.ctx, self.merged, [query])[query]
        stored = store({query: model}, Storage({query: widths}, {query: norms or {}}))
        return model, list(stored.get(query, {}))

    def _wide(self, query: str) -> float:
        return self.ctx.ratio(query, tied_models(self.ctx, self.merged, [query])[query])

    def _row(
        self,
        asked_for: str,
        weights: Sequence[Weight],
        found: Mapping[str, Any],
        need: Mapping[str, float],
        widened: Sequence[Weight] = (),
    ) -> dict[str, Any]:
        """A row of the log: how everything is stored now and how the queries do."""
        ratios = {query: one["ratio"] for query, one in found.items()}
        row = {
            "width": asked_for, "stored_bytes": _by_width(weights), "ratios": ratios,
            "widened": [f"{weight.places[0][0]}: {weight.places[0][1]}" for weight in widened],
            "in_the_way": [query for query, ratio in ratios.items() if ratio < need[query]],
            "norms_again": [query for query, one in found.items() if one["norms"] and not one["learnt"]],
            "norms_learnt": [query for query, one in found.items() if one["learnt"]],
            "flops": self.ctx.flops.total,
        }  # fmt: skip
        self.ctx.progress("widths", **{key: row[key] for key in ("width", "stored_bytes", "ratios", "in_the_way")})
        return row
