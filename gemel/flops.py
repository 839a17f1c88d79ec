"""FLOPs a second of a box: each query for itself, and with the prefixes that queries of one camera have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.sharing.joint import joint_queries

if TYPE_CHECKING:
    from models.bundle import Bundle, BundleQuery


@dataclass(frozen=True)
class FlopRates:
    """FLOPs a second (a multiply-add counts as 2): of every query alone, and with a common prefix run once a frame.

    Merging shares bytes and leaves FLOPs as they are; a prefix saves FLOPs where its norms are tied, too.
    """

    alone: float
    with_prefix: float

    def to_json(self) -> dict[str, float]:
        return {"flops_per_s": self.alone, "flops_per_s_with_prefix": self.with_prefix}

    def to_text(self) -> str:
        """One line."""
        saved = 1 - self.with_prefix / self.alone if self.alone else 0.0
        prefix = f"{self.with_prefix / 1e9:.1f} with common prefixes ({100 * saved:.0f} % less)"
        return f"{self.alone / 1e9:.1f} GFLOPs a second; {prefix if saved else 'no common prefix'}"


def flop_rates(bundle: Bundle, fps: Mapping[str, float]) -> FlopRates:
    """The rates of these queries at these frames a second; slower queries take frames that faster ones take, too."""
    from models.cost import layer_flops

    found: dict[tuple[Any, ...], list[tuple[str, int]]] = {}
    layers: dict[str, list[tuple[str, int]]] = {}
    for query in bundle.queries:
        key = (query.task, query.network, repr(query.model_args), query.input_size, len(query.classes))
        if key not in found:
            found[key] = layer_flops(bundle.build(query.id, "meta"), query.input_size)
        layers[query.id] = found[key]
    alone = sum(fps[query] * (done[-1][1] if done else 0) for query, done in layers.items())
    saved = 0.0
    queries = {query.id: query for query in bundle.queries}
    for alike in joint_queries(bundle.queries, bundle.nbytes):
        views: dict[tuple[Any, ...], list[BundleQuery]] = {}
        for query in map(queries.__getitem__, alike):
            views.setdefault((query.camera, query.region), []).append(query)
        for own in views.values():
            rates = [fps[query.id] for query in own]
            saved += (sum(rates) - max(rates)) * prefix_flops(layers[own[0].id], own)
    return FlopRates(alone, alone - saved)


def prefix_flops(layers: Collection[tuple[str, int]], queries: Collection[BundleQuery]) -> int:
    """The operations of one frame before the first layer that is not tied between all of these queries."""
    first, *others = queries
    private = {
        key.rpartition(".")[0]
        for key, name in first.tensors.items()
        if not key.endswith("num_batches_tracked") and any(other.tensors[key] != name for other in others)
    }
    done = 0
    for path, flops in layers:
        if path in private:
            return done
        done = flops
    return done
