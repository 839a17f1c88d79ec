"""Store each weight of a merge in the fewest bits (int4, int8, fp16) with which every query that uses it still holds.

All weights start in the requested bits, int4 with codes that keep what layers answer (merger.rounding). A query that
falls short first gets its BatchNorm layers recalibrated, then its norms and biases trained (not by `--weights auto`),
which are private and stay float32. If it still falls short, weights are widened step by step, up to float32: in order
of sensitivity per byte (how far packing one weight alone moves the inputs of the query's heads), as few as suffice,
found by bisection. A shared weight is widened for all who share it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from gemel.merger.budget import Budget
from gemel.merger.checkpoint import State, Step, StepCache, snapshot, storable
from gemel.merger.context import MergeContext, Merged
from gemel.merger.evaluate import changed_tensors, evaluation_flops, training_flops
from gemel.merger.methods.epochs import train_epochs
from gemel.merger.rounding import RECONSTRUCTION, round_weights
from gemel.merger.training.distillation import feature_loss, record_inputs, watched_layers
from gemel.merger.training.loop import Diverged
from gemel.merger.training.recipe import Recipe
from gemel.models.bits import BIT_WIDTHS, Bits, stored_bytes
from gemel.models.quantization import WIDE, PackedWeight, choices, pack
from gemel.models.sharing.layers import layers_of, weight_key
from gemel.models.sharing.plan import tie

MAX_FP16 = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class QuantizeConfig:
    """Tunables of the search.

    A query that misses its requirement in float32 may lose at most 1 - `kept_fraction` of what it reaches. Norms alone
    tolerate and need a high learning rate (benchmarks/NOTES.md); `tune_again` is for norms that were tuned for other
    bits. Tuning stops after an epoch below `hopeless_fraction` of the need. The last two
    bound the estimate of the FLOPs.
    """

    kept_fraction: float = 0.99
    sensitivity_frames: int = 16
    tune: Recipe = field(default_factory=lambda: Recipe(rate=1e-2, epochs=4, frames_per_epoch=2048))
    tune_again: Recipe = field(default_factory=lambda: Recipe(rate=5e-3, epochs=2, frames_per_epoch=1024))
    hopeless_fraction: float = 0.85
    max_evaluations: int = 12
    max_tunings: int = 2


CONFIG = QuantizeConfig()


@storable
@dataclass(frozen=True)
class Quantized:
    """The bits of each query's tensors (by state dict key), changed norms, codes that are not the nearest, and ratios.

    `nbytes` are those of all tensors that could have fewer bits, as they are stored; `needs` are the required ratios.
    """

    bits: dict[str, dict[str, Bits]] = field(default_factory=dict)
    norms: dict[str, State] = field(default_factory=dict)
    codes: dict[str, State] = field(default_factory=dict)
    nbytes: int = 0
    ratios: dict[str, float] = field(default_factory=dict)
    needs: dict[str, float] = field(default_factory=dict)


@storable
@dataclass(frozen=True)
class _Fit:
    """A query's ratio, its norms if they changed, and whether they were tuned."""

    ratio: float
    norms: State | None = None
    tuned: bool = False


@dataclass(frozen=True)
class QuantizedWeight:
    """A tensor that is stored once: its (query, key) places, its possible bits, and the index of those in use."""

    places: tuple[tuple[str, str], ...]
    shape: tuple[int, ...]
    options: tuple[Bits, ...]
    level: int = 0

    @property
    def bits(self) -> Bits | None:
        """How it is stored; None for float32."""
        return self.options[self.level] if self.level < len(self.options) else None

    @property
    def wide_bytes(self) -> int:
        """Bytes in float32."""
        return math.prod(self.shape) * WIDE.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes as stored, with its scales."""
        if self.bits is None:
            return self.wide_bytes
        scales = 0 if self.bits == "fp16" else self.shape[0] * WIDE.itemsize
        return stored_bytes(self.bits, self.shape) + scales

    @property
    def wider(self) -> QuantizedWeight:
        """The same in the next wider bits."""
        return replace(self, level=self.level + 1)

    def used_by(self, queries: Iterable[str]) -> bool:
        """Whether any of these queries has it."""
        return not {query for query, _ in self.places}.isdisjoint(queries)


def tied_models(ctx: MergeContext, merged: Merged, queries: Iterable[str]) -> dict[str, nn.Module]:
    """Fresh models of these queries as they were merged."""
    models = ctx.models(queries, merged.states)
    tie(models, merged.plan)
    return models


@torch.no_grad()
def pack_models(models: Mapping[str, nn.Module], stored: Quantized) -> dict[str, dict[str, PackedWeight]]:
    """Give tied models the values of their packed tensors and the changed norms, in place; returns those tensors."""
    made: dict[int, PackedWeight] = {}
    packed: dict[str, dict[str, PackedWeight]] = {}
    for query, model in models.items():
        parameters = model.state_dict(keep_vars=True)
        for key, bits in stored.bits.get(query, {}).items():
            weight = parameters[key]
            if id(weight) not in made:  # a tied weight was packed with the first query that uses it
                made[id(weight)] = pack(weight, bits, stored.codes.get(query, {}).get(key))
                weight.copy_(made[id(weight)].wide())
            packed.setdefault(query, {})[key] = made[id(weight)]
        model.load_state_dict(stored.norms.get(query, {}), strict=False)
    return packed


def max_flops(ctx: MergeContext, trains: bool = True) -> float:
    """About the most FLOPs that `quantize` takes."""
    tunings = sum(training_flops(ctx, [query], CONFIG.tune) for query in ctx.queries) if trains else 0.0
    return CONFIG.max_evaluations * evaluation_flops(ctx) + CONFIG.max_tunings * tunings


def quantizable_weights(
    ctx: MergeContext, merged: Merged, bits: Bits, queries: Collection[str] | None = None
) -> list[QuantizedWeight]:
    """Every tensor of these queries (of all) that may be stored in fewer bits, each once, in the requested bits."""
    found: dict[int, QuantizedWeight] = {}
    for query, model in tied_models(ctx, merged, ctx.judged if queries is None else queries).items():
        state = model.state_dict(keep_vars=True)
        heads = {weight_key(state, row.path) for row in layers_of(ctx.queries[query]) if row.head}
        for key, tensor in state.items():
            options: tuple[Bits, ...] = ()
            if tensor.dtype == WIDE and not ctx.donors.holds(tensor):  # it is there, in the bits it has
                options = choices(key, tensor.shape, bits, key in heads)
            if options and float(tensor.detach().abs().max()) > MAX_FP16:
                options = tuple(one for one in options if one != "fp16")
            if options:
                before = found.get(id(tensor), QuantizedWeight((), tuple(tensor.shape), options))
                both = tuple(one for one in before.options if one in options)
                found[id(tensor)] = replace(before, places=(*before.places, (query, key)), options=both)
    return [weight for weight in found.values() if weight.options]


def quantize(
    ctx: MergeContext,
    merged: Merged,
    bits: Bits,
    required: Mapping[str, float],
    cache: StepCache,
    budget: Budget,
    wide: Mapping[str, float],
    trains: bool = True,
) -> Quantized:
    """How a merge's weights are stored; `required` are ratios. Without budget, short queries get float32.

    `wide` are the ratios in float32 of the queries to store; `trains`: norms, too.
    """
    search, queries = _Search(ctx, merged, bits, required, cache, budget, wide, trains), list(wide)
    weights, done, fits = quantizable_weights(ctx, merged, bits, queries), set[str](), dict[str, _Fit]()
    fitted: list[QuantizedWeight] = []
    for query in queries:
        component = sorted(merged.plan.tied_to([query]) & set(queries))  # a connected component of queries that share
        if query not in done:
            own, found = search.fit([one for one in weights if one.used_by(component)], component)
            fitted, fits, done = fitted + own, fits | found, done | set(component)
    norms = {query: fit.norms for query, fit in fits.items() if fit.norms}
    ratios, nbytes = {query: fit.ratio for query, fit in fits.items()}, sum(one.nbytes for one in fitted)
    return Quantized(_bits_by_query(fitted), norms, search.codes, nbytes, ratios, search.needs)


def _bits_by_query(weights: Sequence[QuantizedWeight]) -> dict[str, dict[str, Bits]]:
    found: dict[str, dict[str, Bits]] = {}
    for weight in weights:
        for query, key in weight.places if weight.bits is not None else ():
            found.setdefault(query, {})[key] = weight.bits  # type: ignore[assignment]
    return found


@dataclass
class _Search:
    ctx: MergeContext
    merged: Merged
    bits: Bits
    required: Mapping[str, float]
    cache: StepCache
    budget: Budget
    wide: Mapping[str, float]
    trains: bool = True
    needs: dict[str, float] = field(default_factory=dict)
    evaluations: int = 0
    tuned: dict[str, State] = field(default_factory=dict)  # the norms that each query was tuned to last
    codes: dict[str, State] = field(default_factory=dict)

    def fit(self, weights: list[QuantizedWeight], queries: list[str]) -> tuple[list[QuantizedWeight], dict[str, _Fit]]:
        """The weights of queries that share, widened until all hold, and how the queries do with them."""
        need = {query: self._need(query, self.wide[query]) for query in queries}
        self.needs |= need
        self._round(weights, queries)
        fits = self._evaluate(weights, queries, need)
        while short := {query for query, fit in fits.items() if fit.ratio < need[query]}:
            if not any(weight.bits is not None and weight.used_by(short) for weight in weights):
                break
            if self.budget.over:
                weights = [replace(weight, level=len(weight.options)) for weight in weights]
                return weights, {query: _Fit(self.wide[query]) for query in queries}
            weights, widened, again = self._widen(weights, short, need)
            fits |= again
            touched = {query for weight in widened for query, _ in weight.places} - set(again)
            fits |= self._evaluate(weights, sorted(touched), need)
        return weights, fits

    def _round(self, weights: Sequence[QuantizedWeight], queries: list[str]) -> None:
        """Choose codes of weights in int4; the first query that has a weight gives its inputs."""
        bits = _bits_by_query(weights)
        places = {weight.places[0]: weight.places for weight in weights if weight.bits == "int4"}

        def choose(_: StepCache, query: str) -> State:
            keys = [key for name, key in places if name == query]
            others: dict[str, Bits] = {key: own for key, own in bits[query].items() if key not in keys}
            data = self.ctx.train[query]
            frames = data.frames(data.spread(RECONSTRUCTION.frames), self.ctx.device)
            self.ctx.flops.add(self.ctx.queries[query], len(frames))
            return round_weights(self._model(query, others).eval(), keys, frames)

        first = dict.fromkeys(name for name, _ in places)
        found = self.ctx.for_each_query(self.cache, Step.ROUNDED, first, choose, queries[0])
        for (query, key), users in places.items():
            for name, other in users if key in found[query] else ():
                self.codes.setdefault(name, {})[other] = found[query][key]

    def _need(self, query: str, reached: float) -> float:
        target, required = self.ctx.queries[query].accuracy_target, self.required[query]
        if reached >= required:
            return required
        kept = CONFIG.kept_fraction * reached
        return max(kept, target) if reached >= target else kept

    def _widen(
        self, weights: Sequence[QuantizedWeight], short: set[str], need: Mapping[str, float]
    ) -> tuple[list[QuantizedWeight], list[QuantizedWeight], dict[str, _Fit]]:
        """Widen the fewest weights of the narrowest bits with which all short queries hold, or all of these weights."""
        candidates = [at for at, one in enumerate(weights) if one.bits is not None and one.used_by(short)]
        narrowest = next(bits for bits in BIT_WIDTHS if bits in {weights[at].bits for at in candidates})
        candidates = [at for at in candidates if weights[at].bits == narrowest]

        def widen(chosen: Sequence[int]) -> list[QuantizedWeight]:
            return [one.wider if at in chosen else one for at, one in enumerate(weights)]

        best, order = self._evaluate(widen(candidates), sorted(short), need), candidates
        low = high = len(candidates)
        if not self.budget.over and all(best[query].ratio >= need[query] for query in short):
            low, order = 1, self._by_sensitivity(weights, candidates, short)
        while low < high and not self.budget.over:
            middle = (low + high) // 2
            found = self._evaluate(widen(order[:middle]), sorted(short), need)
            if all(found[query].ratio >= need[query] for query in short):
                high, best = middle, found
            else:
                low = middle + 1
        return widen(order[:high]), [weights[at] for at in order[:high]], best

    def _by_sensitivity(
        self, weights: Sequence[QuantizedWeight], candidates: Sequence[int], short: set[str]
    ) -> list[int]:
        """These weights by the error they cause in the short queries per byte of widening, the largest first."""
        measure = partial(self._sensitivities, [weights[at] for at in candidates])
        number = str(self.evaluations)
        errors = self.ctx.for_each_query(self.cache, Step.SENSITIVITY, sorted(short), measure, number).values()
        worth = {
            at: sum(own) / (weights[at].wider.nbytes - weights[at].nbytes)
            for at, own in zip(candidates, zip(*errors, strict=True), strict=True)
        }
        return sorted(candidates, key=lambda at: -worth[at])

    @torch.no_grad()
    def _sensitivities(self, weights: Sequence[QuantizedWeight], _: StepCache, query: str) -> list[float]:
        """How far the inputs of a query's heads move when one weight alone is packed."""
        ctx, model = self.ctx, self._model(query).eval()
        data, state = ctx.train[query], model.state_dict(keep_vars=True)
        frames = data.frames(data.spread(CONFIG.sensitivity_frames), ctx.device)
        paths, errors = watched_layers(ctx.queries[query], model), [0.0] * len(weights)

        def features() -> list[Tensor]:
            with record_inputs(model, paths) as seen:
                model(frames)
            ctx.flops.add(ctx.queries[query], len(frames))
            return list(seen)

        wanted = features()
        for at, weight in enumerate(weights):
            keys = [key for name, key in weight.places if name == query]
            kept = [state[key].detach().clone() for key in keys]
            assert weight.bits is not None
            for key, before in zip(keys, kept):
                state[key].copy_(pack(before, weight.bits, self.codes.get(query, {}).get(key)).wide())
            errors[at] = float(feature_loss(features(), wanted)) if keys else 0.0
            for key, before in zip(keys, kept):
                state[key].copy_(before)
        return errors

    def _evaluate(
        self, weights: Sequence[QuantizedWeight], queries: list[str], need: Mapping[str, float]
    ) -> dict[str, _Fit]:
        self.evaluations += 1
        bits = _bits_by_query(weights)

        def fit(cache: StepCache, query: str) -> _Fit:
            return self._fit(cache, query, bits.get(query, {}), need[query])

        found = self.ctx.for_each_query(self.cache, Step.EVALUATED, queries, fit, str(self.evaluations))
        self.tuned |= {query: fit.norms for query, fit in found.items() if fit.tuned and fit.norms}
        return found

    def _fit(self, cache: StepCache, query: str, bits: Mapping[str, Bits], need: float) -> _Fit:
        """The best of the norms as they are, as tuned before, recalibrated, and tuned from the best of these."""
        ctx, tuned = self.ctx, self.tuned.get(query)
        best = _Fit(ctx.ratio(query, self._model(query, bits)))
        for norms, recalibrate in [(None, False), *([(tuned, False)] if tuned else []), (None, True)]:
            if best.ratio >= need or not bits:
                return best
            model, changed = self._model(query, bits, norms), dict(norms or {})
            if recalibrate:
                before = snapshot(model)
                ctx.recalibrate(query, model)
                changed |= changed_tensors(model, before)
            changed |= ctx.match_scores(query, model)
            if changed and (ratio := ctx.ratio(query, model)) > best.ratio:
                best = _Fit(ratio, changed, norms is not None)
        if best.ratio >= need or self.budget.over or not self.trains:
            return best
        found = self._tune_norms(cache, query, self._model(query, bits, best.norms), bits, need)
        return found if found.ratio > best.ratio else best

    def _tune_norms(
        self, cache: StepCache, query: str, model: nn.Module, bits: Mapping[str, Bits], need: float
    ) -> _Fit:
        """Train a model's private float32 parameters to the end of the schedule; ratio 0 where that fails."""
        shared = {
            weight_key(model.state_dict(), path) for one in self.merged.plan.shared for q, path in one if q == query
        }
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(parameter.requires_grad and name not in bits and name not in shared)
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        if len(frozen) == len(dict(model.named_parameters())):
            return _Fit(0.0)
        recipe, seen = CONFIG.tune_again if query in self.tuned else CONFIG.tune, cache.state(Step.TUNING)
        with suppress(Diverged):
            for ratios in train_epochs(self.ctx, {query: model}, recipe, cache, self.budget):
                seen["epochs"] = seen.get("epochs", 0) + 1
                if seen["epochs"] == recipe.epochs:
                    moved = {name: tensor for name, tensor in snapshot(model).items() if name not in frozen}
                    return _Fit(ratios[query], moved, True)
                if ratios[query] < CONFIG.hopeless_fraction * need:
                    break
        return _Fit(0.0)

    def _model(self, query: str, bits: Mapping[str, Bits] | None = None, norms: State | None = None) -> nn.Module:
        models = tied_models(self.ctx, self.merged, [query])
        pack_models(models, Quantized({query: dict(bits or {})}, {query: norms or {}}, self.codes))
        return models[query]
