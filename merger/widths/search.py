"""The width of every weight of a merge: the fewest bits that all the queries that use it can bear, on val.

At first everything is stored in the widths that it is given. While a query falls short, some of its weights
become wider, step by step up to float32: those first whose rounding moves the inputs of its heads most per byte
that is given back, and as few as do (by bisection). A weight that is shared widens for all who share it. Statistics of
norms stay as they are unless measuring them again brings a query back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from merger.bench.bounds import Bounds
from merger.bench.merged import Merged
from merger.bench.workbench import Workbench
from merger.journal.steps import Journal
from merger.training.features import feature_loss, watched_layers, watching
from merger.widths.storing import Storage, Weight, bytes_by_width, store, tied_models, widths_of
from models.parts.terms import BITS
from models.parts.widths import packed

KEPT = 0.99
"""A query that misses what is required with wide weights may lose no more than to this part of what it reaches."""
FRAMES = 16
"""Train frames of a query on which the error of rounding a weight is measured: there is a run for each weight."""

ROUNDS = 12
"""Every query is judged about so often at most: with wide weights, in each width, and in a bisection."""


def most_judged(bench: Workbench) -> float:
    """About the work that one search takes at most."""
    return ROUNDS * sum(bench.work.of(query) * len(bench.val[query.id]) for query in bench.queries.values())


def needed(target: float, required: float, reached: float) -> float:
    """The ratio on val that a query must keep when its weights get fewer bits, from what it reached with wide ones."""
    if reached >= required:
        return required
    kept = KEPT * reached
    return max(kept, target) if reached >= target else kept


@dataclass
class Search:
    """The search for models that stand as `merged`: each must reach what it has `need` of on val.

    It ends in vain as soon as `most_bytes` are reached. Once the bounds are over, all weights of a query that falls
    short are widened at once.
    """

    bench: Workbench
    merged: Merged
    need: Mapping[str, float]
    journal: Journal
    bounds: Bounds
    most_bytes: float = math.inf
    judged: int = 0

    def run(self, weights: Sequence[Weight], training: int = 0) -> dict[str, Any]:
        """Widen until every query has what it needs: `widths`, `norms`, `bytes`, and `rows` for the log.

        It is `sound` where every query has, in fewer than the most bytes. Rows say after which `training` it was.
        """
        need = self.need
        found = self._judge(weights, list(self.merged.states), need)
        rows = [{"training": training, **self._row(weights, found, [])}]
        while short := {query for query, one in found.items() if one["ratio"] < need[query]}:
            left = any(weight.width is not None and weight.used_by(short) for weight in weights)
            if not left or _bytes(weights) >= self.most_bytes:
                break
            weights, widened, again = self._widened(weights, short, need)
            found |= again
            touched = {query for weight in widened for query, _ in weight.places}
            found |= self._judge(weights, sorted(touched - set(again)), need)
            rows.append({"training": training, **self._row(weights, found, widened)})
        norms = {query: one["norms"] for query, one in found.items() if one["norms"]}
        size = _bytes(weights)
        sound = not short and size < self.most_bytes
        return {"widths": widths_of(weights), "norms": norms, "rows": rows, "bytes": size, "sound": sound,
                "stored_bytes": rows[-1]["stored_bytes"], "ratios": rows[-1]["ratios"]}  # fmt: skip

    def _widened(
        self, weights: Sequence[Weight], short: set[str], need: Mapping[str, float]
    ) -> tuple[list[Weight], list[Weight], dict[str, Any]]:
        """As few weights as do one step wider, those among them that changed, and how the queries then do.

        When not even all of one width do, all of them are wider, and the next width is tried from there.
        """
        of_short = [at for at, weight in enumerate(weights) if weight.width is not None and weight.used_by(short)]
        present = {weights[at].width for at in of_short}
        width = next(one for one in BITS if one in present)
        open_ = [at for at in of_short if weights[at].width == width]

        def wider(chosen: Sequence[int]) -> list[Weight]:
            return [weight.wider if at in chosen else weight for at, weight in enumerate(weights)]

        best = self._judge(wider(open_), sorted(short), need)
        if self.bounds.over or any(best[query]["ratio"] < need[query] for query in short):
            return wider(open_), [weights[at] for at in open_], best
        order = self._most_error_first(weights, open_, short)
        low, high = 1, len(order)
        while low < high:
            middle = (low + high) // 2
            found = self._judge(wider(order[:middle]), sorted(short), need)
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
            of_query = self.journal.step(f"errors of {query} before {self.judged}", measure)
            errors = [one + other for one, other in zip(errors, of_query, strict=True)]
        worth = {
            at: error / (weights[at].wider.nbytes - weights[at].nbytes) for at, error in zip(open_, errors, strict=True)
        }
        return sorted(open_, key=lambda at: -worth[at])

    @torch.no_grad()
    def _errors(self, weights: Sequence[Weight], query: str) -> list[float]:
        """How far the inputs of a query's heads move when one weight alone has fewer bits."""
        bench, errors = self.bench, [0.0] * len(weights)
        model = tied_models(bench, self.merged, [query])[query].eval()
        data, state = bench.train[query], model.state_dict(keep_vars=True)
        chosen = torch.linspace(0, len(data) - 1, min(FRAMES, len(data))).long().tolist()
        frames = data.frames(chosen, bench.device)
        paths = watched_layers(bench.asked(query, self.merged.plan), model)
        wanted = self._seen(query, model, frames, paths)
        for at, weight in enumerate(weights):
            own = {key: state[key] for name, key in weight.places if name == query}
            kept = {key: tensor.detach().clone() for key, tensor in own.items()}
            assert weight.width is not None
            for key, tensor in own.items():
                tensor.copy_(packed(kept[key], weight.width).wide())
            if own:
                errors[at] = float(feature_loss(self._seen(query, model, frames, paths), wanted))
            for key, tensor in own.items():
                tensor.copy_(kept[key])
        return errors

    def _seen(self, query: str, model: nn.Module, frames: Tensor, paths: Sequence[str]) -> list[Tensor]:
        with watching(model, paths) as seen:
            model(frames)
        self.bench.work.add(self.bench.queries[query], len(frames))
        return list(seen)

    def _judge(self, weights: Sequence[Weight], queries: list[str], need: Mapping[str, float]) -> dict[str, Any]:
        """Query -> `ratio` on val with its weights stored so, and `norms` where these were measured again."""
        self.judged += 1
        found = {}
        for query in queries:
            judge = partial(self._judged, weights, query, need[query])
            found[query] = self.journal.step(f"judged {self.judged} {query}", judge)
        return found

    def _judged(self, weights: Sequence[Weight], query: str, need: float) -> dict[str, Any]:
        bench, storage = self.bench, Storage(widths_of(weights), {})
        model = tied_models(bench, self.merged, [query])[query]
        stored = store({query: model}, storage)
        ratio = bench.ratio(query, model)
        if ratio >= need or not stored:
            return {"ratio": ratio, "norms": None}
        bench.calibrate(query, model)
        again = bench.ratio(query, model)
        if again <= ratio:
            return {"ratio": ratio, "norms": None}
        return {"ratio": again, "norms": {name: buffer.detach().clone() for name, buffer in model.named_buffers()}}

    def _row(self, weights: Sequence[Weight], found: Mapping[str, Any], widened: Sequence[Weight]) -> dict[str, Any]:
        """A row of the log: how everything is stored now and how the queries do."""
        ratios = {query: one["ratio"] for query, one in found.items()}
        row = {
            "stored_bytes": bytes_by_width(weights), "ratios": ratios,
            "widened": [f"{weight.places[0][0]}: {weight.places[0][1]}" for weight in widened],
            "in_the_way": [query for query, ratio in ratios.items() if ratio < self.need[query]],
            "norms_again": [query for query, one in found.items() if one["norms"]],
            "work": self.bench.work.total,
        }  # fmt: skip
        self.bench.progress("widths", **{key: row[key] for key in ("stored_bytes", "ratios", "in_the_way")})
        return row


def _bytes(weights: Sequence[Weight]) -> int:
    return sum(weight.nbytes for weight in weights)
