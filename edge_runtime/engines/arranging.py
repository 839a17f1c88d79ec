"""In which order the weights of convolutions lie for the engines that run here, and an arena that holds them so."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edge_runtime.engines.base import FrameEngine
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.layout import Kinds, Layouts, Order, convolutions
from edge_runtime.memory.movers.base import arranges_ahead
from edge_runtime.memory.placing import footprint_bytes
from edge_runtime.memory.store import Store
from edge_runtime.scheduler.costs import Costs, all_bytes
from models.bundle import Bundle


def order_for(engines: Collection[FrameEngine], stays: bool = True) -> Order:
    """The order that all these engines take: the fastest to run where weights stay, else the cheapest to load.

    To arrange weights takes longer than to copy them, so what comes and goes is arranged only for engines that take
    it in no other order; or where it arrives as it is wanted (`arranges_ahead`).
    """
    taken = frozenset(Order).intersection(*(engine.orders for engine in engines))
    return max(taken) if stays or all(arranges_ahead(engine.device) for engine in engines) else min(taken)


def layouts_for(kinds: Kinds, order: Order) -> Layouts:
    """The layouts of the tensors of these `kinds` that do not lie as stored."""
    return convolutions(kinds) if order == Order.CHANNELS_LAST else {}


def arranged(engines: Collection[FrameEngine], kinds: Kinds, costs: Costs, budget_bytes: int) -> Layouts:
    """The layouts of the tensors of these `kinds` for these engines within a budget."""
    return layouts_for(kinds, order_for(engines, all_bytes(costs) <= budget_bytes))


def resident(bundle: Bundle, engines: Mapping[str, FrameEngine]) -> Arena:
    """An arena with all that these engines' queries need in the fastest order they all take, and the engines bound."""
    arena = Arena(Store.of_bundle(bundle), 0, next(iter(engines.values())).device)
    hold(arena, bundle, engines)
    return arena


def hold(arena: Arena, bundle: Bundle, engines: Mapping[str, FrameEngine]) -> None:
    """Let an arena of this bundle hold the same for these engines; what was bound to it before must be unbound."""
    names = tuple(dict.fromkeys(name for query in engines for name in bundle.names_in_order(query)))
    kinds = {name: arena.store.kinds[name] for name in names}
    layouts = layouts_for(kinds, order_for(engines.values()))
    arena.resize(sum(footprint_bytes(bundle.nbytes(name)) for name in names), None, layouts)
    arena.change((), names)
    for engine in engines.values():
        engine.bind(arena.tensor)
