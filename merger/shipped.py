"""What a bundle holds of a merge: weights in their bits, ranges of activations; and the models that answer so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from gemel.merger.checkpoint import snapshot
from gemel.merger.computed import open_network
from gemel.merger.context import MergeContext, Merged
from gemel.merger.quantize import Quantized, pack_models, tied_models
from gemel.models.bits import FP32, main_bits
from gemel.models.bundle.manifest import ActivationRange
from gemel.models.quantization import PackedWeight
from gemel.models.sharing.similarity import equal_states


@dataclass(frozen=True)
class Shipped:
    """A merge, how its weights are stored, and the ranges of activations of queries that are computed in integers.

    `bits` are the fewest that it has; `why` says of a query why it has no fewer.
    """

    merged: Merged
    storage: Quantized = field(default_factory=Quantized)
    activations: Mapping[str, Mapping[str, ActivationRange]] = field(default_factory=dict)
    bits: str = FP32
    why: Mapping[str, str] = field(default_factory=dict)

    def models(
        self, ctx: MergeContext, queries: Iterable[str]
    ) -> tuple[dict[str, nn.Module], dict[str, dict[str, PackedWeight]]]:
        """Fresh models of these queries with the weights that a box will run, and those that are stored packed."""
        models = tied_models(ctx, self.merged, queries)
        return models, ctx.donors.add_packed(models, pack_models(models, self.storage))

    def answerer(self, ctx: MergeContext, query: str) -> nn.Module:
        """What answers a query as a box will, fresh."""
        models, packed = self.models(ctx, [query])
        ranges, model = self.activations.get(query), models[query]
        network = open_network(ctx, query, model, packed.get(query, {})) if ranges else None
        return model if network is None or ranges is None else network.answerer(model, ranges)

    def main_bits(self, ctx: MergeContext, query: str) -> str:
        """The bits of most of a query's weights, those that a donor of a bundle gives included."""
        _, packed = self.models(ctx, [query])
        return main_bits(weight.width for weight in packed.get(query, {}).values())

    def is_packed(self, query: str) -> bool:
        """Whether any weight of a query has fewer bits, or its norms changed with that."""
        return bool(self.storage.bits.get(query) or self.storage.norms.get(query))

    def is_changed(self, ctx: MergeContext, query: str) -> bool:
        """Whether anything but the query's own original answers it."""
        if query in ctx.networks or self.is_packed(query) or self.activations.get(query):
            return True
        return not equal_states(snapshot(ctx.originals[query]), self.merged.states[query])

    def only(self, queries: Iterable[str]) -> Shipped:
        """What it holds of these queries alone."""
        kept = set(queries)
        merged, storage = self.merged, self.storage
        return Shipped(
            Merged(
                merged.plan.without(*(merged.states.keys() - kept)), _select(merged.states, kept),
                _select(merged.networks, kept),
            ),
            replace(
                storage, bits=_select(storage.bits, kept), norms=_select(storage.norms, kept),
                codes=_select(storage.codes, kept),
            ),
            _select(self.activations, kept), self.bits, _select(self.why, kept),
        )  # fmt: skip

    def join(self, other: Shipped) -> Shipped:
        """This and what another one holds of other queries."""
        storage = replace(
            self.storage, bits={**self.storage.bits, **other.storage.bits},
            norms={**self.storage.norms, **other.storage.norms}, codes={**self.storage.codes, **other.storage.codes},
        )  # fmt: skip
        activations, why = {**self.activations, **other.activations}, {**self.why, **other.why}
        return Shipped(self.merged.join(other.merged), storage, activations, self.bits, why)


def _select(values: Mapping[str, object], queries: set[str]) -> dict:  # type: ignore[type-arg]
    return {query: value for query, value in values.items() if query in queries}
