"""The formats in which engines take their weights in an arena, and arenas that hold all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from gemel.edge_runtime.engines.base import FrameEngine
from gemel.edge_runtime.memory.allocator import footprint_bytes
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.binding import WeightFormat
from gemel.edge_runtime.memory.store import Kinds, Layouts, Store, channels_last_layouts
from gemel.edge_runtime.memory.transfer import arrives_reordered
from gemel.edge_runtime.scheduler.costs import Costs, all_bytes, stored_name
from gemel.models.bundle import Bundle


def common_format(engines: Collection[FrameEngine], stays: bool = True) -> WeightFormat:
    """The format that all these engines take: the fastest to run where weights stay, else the fastest to load.

    Reordering a weight takes longer than copying it, so weights that come and go are reordered only for engines that
    take no other format, or where they arrive so.
    """
    engines = [engine for engine in engines if not engine.in_pages]
    taken = frozenset(WeightFormat).intersection(*(engine.formats for engine in engines))
    return max(taken) if stays or all(arrives_reordered(engine.device) for engine in engines) else min(taken)


def layouts_for(kinds: Kinds, weight_format: WeightFormat) -> Layouts:
    """The tensors that are channels last in this format."""
    return channels_last_layouts(kinds) if weight_format == WeightFormat.CHANNELS_LAST else frozenset()


def layouts_within(engines: Collection[FrameEngine], kinds: Kinds, costs: Costs, budget_bytes: int) -> Layouts:
    """The layouts of these tensors for these engines within a budget."""
    return layouts_for(kinds, common_format(engines, all_bytes(costs) <= budget_bytes))


def resident_arena(bundle: Bundle, engines: Mapping[str, FrameEngine]) -> Arena:
    """An arena with all tensors of these engines' queries in the fastest format they all take; the engines bound."""
    arena = Arena(Store.of_bundle(bundle), 0, next(iter(engines.values())).device)
    load_all(arena, bundle, engines)
    return arena


def load_all(arena: Arena, bundle: Bundle, engines: Mapping[str, FrameEngine]) -> None:
    """The same in an arena of this bundle; engines that were bound to it before must be unbound."""
    names = tuple(dict.fromkeys(name for query in engines for name in bundle.names_in_order(query)))
    layouts = layouts_for({name: arena.store.kinds[name] for name in names}, common_format(engines.values()))
    arena.resize(sum(footprint_bytes(bundle.nbytes(name)) for name in names), None, layouts)
    arena.change((), names)
    for engine in engines.values():
        engine.bind(arena.tensor)


def unshared_store(store: Store, costs: Costs) -> Store:
    """The store under the names that `costs` uses: `tensor@query` for a policy without sharing, the same bytes."""
    names = {name: stored_name(name) for name in costs.tensor_bytes}
    return replace(
        store,
        extents={name: store.extents[stored] for name, stored in names.items()},
        kinds={name: store.kinds[stored] for name, stored in names.items()},
    )
