"""FLOPs a second of a box: every query alone, and with the prefixes that queries of one camera have in common.

Merging shares bytes and leaves FLOPs as they are. A prefix saves FLOPs where its norms are tied, too: equal tensors on
an equal input. It may branch: queries that differ from some layer on still run once what they have in common after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from gemel.models.export.document_costs import count_document
from gemel.models.files.extras import is_installed
from gemel.models.sharing.passes import fed_alike, joint_queries

if TYPE_CHECKING:
    from gemel.models.bundle import Bundle, BundleQuery
    from gemel.models.workload import Query

LayerFlops = Sequence[tuple[str, int]]
"""The leaf modules in order, each with the operations of a frame up to its end (`models.export.cost.layer_flops`)."""


@dataclass(frozen=True)
class FlopRates:
    """FLOPs a second (a multiply-add counts as 2): of every query alone, and with common prefixes run once a frame."""

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
    """The rates of a bundle's queries at these frames a second; slower queries take frames that faster ones take, too.

    InputError where a model is neither in the zoo nor allowed by the bundle's `factories`.
    """
    return prefix_rates(
        bundle.queries, layers_by_record(bundle, bundle.queries), fps, bundle.nbytes
    )


def layers_by_record(bundle: Bundle, queries: Iterable[BundleQuery]) -> dict[str, LayerFlops]:
    """The layers of the networks of a bundle's queries, counted once for each architecture."""
    if not is_installed("torchvision"):
        return {
            query.id: count_document(query, bundle.document_of(query.id)).layers
            for query in queries
        }
    from gemel.models.export.cost import layer_flops

    by_architecture: dict[Hashable, LayerFlops] = {}

    def layers_of(query: BundleQuery) -> LayerFlops:
        key = (
            query.task,
            query.network,
            repr(query.model_args),
            query.input_size,
            len(query.classes),
        )
        if key not in by_architecture:
            by_architecture[key] = layer_flops(bundle.build(query.id, "meta"), query.input_size)
        return by_architecture[key]

    return {query.id: layers_of(query) for query in queries}


def layers_by_query(queries: Iterable[Query]) -> dict[str, LayerFlops]:
    """The layers of each query's network, counted once for each architecture; none where it fails on meta."""
    from gemel.models.export.cost import layer_flops
    from gemel.models.zoo import build_query, input_size_of

    by_architecture: dict[Hashable, LayerFlops] = {}
    layers: dict[str, LayerFlops] = {}
    for query in queries:
        size = input_size_of(query)
        key = (query.task, query.model, repr(query.model_args), size, len(query.classes))
        if key not in by_architecture:
            by_architecture[key] = ()
            with suppress(Exception):  # a user's module may fail there in any way
                by_architecture[key] = layer_flops(build_query(query, device="meta"), size)
        layers[query.id] = by_architecture[key]
    return layers


def flops_before(layers: LayerFlops, paths: Collection[str]) -> int:
    """The operations of a frame before the first of these modules, all operations where there is none of them."""
    done = 0
    for path, total in layers:
        if path in paths:
            break
        done = total
    return done


def prefix_rates(
    queries: Sequence[BundleQuery],
    layers: Mapping[str, LayerFlops],
    fps: Mapping[str, float],
    nbytes: Callable[[str], int],
) -> FlopRates:
    """The rates of queries with these `layers`; `nbytes` gives the bytes of a tensor."""
    alone = sum(fps[query.id] * _whole(layers[query.id]) for query in queries)
    by_id = {query.id: query for query in queries}
    passes = ([by_id[query] for query in ids] for ids in joint_queries(queries, nbytes))
    return FlopRates(
        alone, alone - sum(saved_operations(members, layers, fps) for members in passes)
    )


def saved_operations(
    queries: Iterable[BundleQuery], layers: Mapping[str, LayerFlops], frames: Mapping[str, float]
) -> float:
    """The operations that one pass of these queries saves on so many frames (or frames a second) of each.

    Queries with one view take the same frames.
    """
    saved = 0.0
    views: dict[Hashable, list[BundleQuery]] = defaultdict(list)
    for query in queries:
        views[query.view].append(query)
    for members in views.values():
        for flops, groups in prefix_groups(layers[members[0].id], members):
            saved += sum(
                flops * _common_frames([frames[query] for query in group]) for group in groups
            )
    return saved


def prefix_groups(
    layers: LayerFlops, queries: Collection[BundleQuery]
) -> Iterator[tuple[int, list[list[str]]]]:
    """For each layer in order its operations, and the ids of queries that have had equal tensors up to its end.

    It ends where no two queries are left together.
    """
    keys: dict[str, list[str]] = defaultdict(list)
    paths = dict.fromkeys(path for path, _ in layers)
    for key in next(iter(queries)).tensors:
        owner = key.rpartition(".")[0]
        # A module of modules with a tensor of its own, which its first one may need.
        if owner not in paths:
            owner = next(
                (path for path in paths if f"{path}.".startswith(f"{owner}." if owner else "")),
                owner,
            )
        if not key.endswith("num_batches_tracked"):
            keys[owner].append(key)
    groups = [list(queries)]
    for (_, before), (path, done) in pairwise([("", 0), *layers]):
        groups = [part for group in groups for part in _split(group, keys[path])]
        if len(groups) == len(queries):
            return
        yield done - before, [[query.id for query in group] for group in groups]


def whole_prefix_rates(
    queries: Iterable[Query], fps: Mapping[str, float], layers: Mapping[str, LayerFlops]
) -> FlopRates:
    """The rates of a workload's originals, and what they would be if queries of one camera that are fed alike had all
    layers before their heads in common."""
    from gemel.models.bundle import BundleQuery
    from gemel.models.sharing.layers import layers_of

    alone = saved = 0.0
    by_feed: dict[Hashable, list[Query]] = defaultdict(list)
    for query in queries:
        by_feed[query.model, fed_alike(BundleQuery.of(query))].append(query)
        alone += fps[query.id] * _whole(layers[query.id])
    for members in by_feed.values():
        heads = {layer.path for layer in layers_of(members[0]) if layer.head}
        saved += flops_before(layers[members[0].id], heads) * _common_frames(
            [fps[query.id] for query in members]
        )
    return FlopRates(alone, alone - saved)


def _whole(layers: LayerFlops) -> int:
    return layers[-1][1] if layers else 0


def _common_frames(rates: Sequence[float]) -> float:
    """Frames a second that another query takes, too."""
    return sum(rates) - max(rates)


def _split(queries: Sequence[BundleQuery], keys: Sequence[str]) -> list[list[BundleQuery]]:
    """The queries by their tensors at these keys."""
    by_tensors: dict[Hashable, list[BundleQuery]] = defaultdict(list)
    for query in queries:
        by_tensors[tuple(query.tensors.get(key) for key in keys)].append(query)
    return list(by_tensors.values())
