"""In which order the weights of convolutions lie for the engines that run here, and an arena that holds them so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from edge_runtime.engines.base import FrameEngine
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.layout import Kinds, Layouts, Order, convolutions
from edge_runtime.memory.movers.base import arranges_ahead
from edge_runtime.memory.onednn import Blocked, blocked
from edge_runtime.memory.placing import footprint_bytes
from edge_runtime.memory.store import Store
from edge_runtime.scheduler.costs import Costs, all_bytes, stored_name
from models.bundle import Bundle


def order_for(engines: Collection[FrameEngine], stays: bool = True) -> Order:
    """The order that all these engines take: the fastest to run where weights stay, else the cheapest to load.

    To arrange weights takes longer than to copy them, so what comes and goes is arranged only for engines that take
    it in no other order; or where it arrives as it is wanted (`arranges_ahead`).
    """
    taken = frozenset(Order).intersection(*(engine.orders for engine in engines))
    return max(taken) if stays or all(arranges_ahead(engine.device) for engine in engines) else min(taken)


def layouts_for(engines: Collection[FrameEngine], kinds: Kinds, order: Order) -> Layouts:
    """The layouts of the tensors of these `kinds` that do not lie as stored.

    Blocked are weights with which all of their queries do nothing but convolve; other convolutions' lie channels last.
    """
    if order == Order.STORED:
        return {}
    found = convolutions(kinds)
    return {**found, **_blocked(engines, kinds)} if order == Order.BLOCKED else found


def occupying(costs: Costs, layouts: Layouts) -> Costs:
    """The costs where tensors occupy what they take in these layouts; what a load moves stays the same."""
    taken = {name: footprint_bytes(layout.nbytes) for name, layout in layouts.items()}
    return replace(costs, footprints={**costs.footprints, **taken})


def arranged(engines: Collection[FrameEngine], kinds: Kinds, costs: Costs, budget_bytes: int) -> tuple[Layouts, Costs]:
    """In which layouts the tensors of these `kinds` lie for these engines, and the costs with what they occupy so."""
    order = order_for(engines, all_bytes(costs) <= budget_bytes)
    layouts = layouts_for(engines, kinds, order)
    if all_bytes(occupying(costs, layouts)) > budget_bytes >= all_bytes(costs):  # blocks need some room
        layouts = layouts_for(engines, kinds, min(order, Order.CHANNELS_LAST))
    return layouts, occupying(costs, layouts)


def resident(bundle: Bundle, engines: Mapping[str, FrameEngine]) -> Arena:
    """An arena with all that these engines' queries need in the fastest order they all take, and the engines bound."""
    arena = Arena(Store.of_bundle(bundle), 0, next(iter(engines.values())).device)
    hold(arena, bundle, engines)
    return arena


def hold(arena: Arena, bundle: Bundle, engines: Mapping[str, FrameEngine]) -> None:
    """Let an arena of this bundle hold the same for these engines; what was bound to it before must be unbound."""
    names = tuple(dict.fromkeys(name for query in engines for name in bundle.names_in_order(query)))
    kinds = {name: arena.store.kinds[name] for name in names}
    layouts = layouts_for(engines.values(), kinds, order_for(engines.values()))
    sizes = {name: bundle.nbytes(name) for name in names} | {name: one.nbytes for name, one in layouts.items()}
    arena.resize(sum(map(footprint_bytes, sizes.values())), None, layouts)
    arena.change((), names)
    for engine in engines.values():
        engine.bind(arena.tensor)


def _blocked(engines: Collection[FrameEngine], kinds: Kinds) -> dict[str, Blocked]:
    """Layouts by content name; the first query's convolution decides where several have different frames."""
    uses: dict[str, list[Blocked | None]] = defaultdict(list)
    for engine in engines:
        known = engine.convolutions()
        for key, name in engine.query.tensors.items():
            convolution = known.get(key)
            plain = convolution is not None and key not in engine.query.stored
            uses[name].append(blocked(convolution) if convolution is not None and plain else None)
    found = {}
    for name in kinds:
        layouts = uses.get(stored_name(name), [])
        first = layouts[0] if layouts else None
        if first is not None and all(
            one is not None and one.convolution.groups == first.convolution.groups for one in layouts
        ):
            found[name] = first
    return found
