"""Which engine runs which query fastest, of those that take the weights in one order."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from edge_runtime.engines.registry import FALLBACK, engine_named
from edge_runtime.engines.timing import Stopwatch, Times, candidates
from edge_runtime.memory.layout import Order
from models.bundle import Bundle
from models.errors import InputError

log = logging.getLogger("gemel.run")


@dataclass(frozen=True)
class Choice:
    """The engine of each query, and the times it was chosen by; none where there was nothing to choose from."""

    engines: Mapping[str, str]
    times: Mapping[str, Times] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """How many times as fast as torch it runs one frame of every query that it takes off torch."""
        moved = [query for query, name in self.engines.items() if name != FALLBACK]
        chosen = sum(self.times[query][self.engines[query]] for query in moved)
        return sum(self.times[query][FALLBACK] for query in moved) / chosen if chosen > 0 else 1.0


def fastest(bundle: Bundle, device: str = "cpu", stays: bool = True, queries: Sequence[str] | None = None) -> Choice:
    """The fastest engine for each query (all unless named); what was never measured on this machine is measured now.

    Where the engines' cache cannot be used, nothing is measured and torch runs. `stays` as in `candidates`.
    """
    found = _chosen(bundle, device, stays, queries, measure=True)
    assert found is not None
    return found


def known_fastest(
    bundle: Bundle, device: str = "cpu", stays: bool = True, queries: Sequence[str] | None = None
) -> Choice | None:
    """As `fastest`, from what was measured before; None where that does not say."""
    return _chosen(bundle, device, stays, queries, measure=False)


def _chosen(bundle: Bundle, device: str, stays: bool, queries: Sequence[str] | None, measure: bool) -> Choice | None:
    asked = [query.id for query in bundle.queries] if queries is None else list(queries)
    names = candidates(device, stays)
    if names == [FALLBACK] or not asked:
        return Choice(dict.fromkeys(asked, FALLBACK))
    times: dict[str, Times] = {}
    try:
        stopwatch = Stopwatch(bundle, device, names)
        for query in asked:
            found = stopwatch.times(query) if measure else stopwatch.known(query)
            if found is None:
                return None
            times[query] = found
    except InputError as error:
        log.warning("%s; engine torch runs all queries", error)
        return Choice(dict.fromkeys(asked, FALLBACK))
    return Choice(best_of_one_order(times, {name: engine_named(name).orders for name in names}), times)


def best_of_one_order(times: Mapping[str, Times], orders: Mapping[str, Collection[Order]]) -> dict[str, str]:
    """The fastest engine of each query by its times, all taking weights in one order.

    `orders` is `FrameEngine.orders` by engine; the order with which the times come to less in sum is taken.
    """
    options = []
    for order in (Order.CHANNELS_LAST, Order.STORED):
        fitting = [name for name, own in orders.items() if order in own]
        if all(any(name in found for name in fitting) for found in times.values()):
            chosen = {
                query: min((name for name in fitting if name in found), key=found.__getitem__)
                for query, found in times.items()
            }
            options.append((sum(times[query][name] for query, name in chosen.items()), chosen))
    return min(options, key=lambda option: option[0])[1]
