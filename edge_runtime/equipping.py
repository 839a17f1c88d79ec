"""The third stage of a box: its engines, prepared, and how tensors lie in memory for them.

With engine `auto` a box begins with the fastest where that is known, else with torch, at once: what is faster is
measured while it serves.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from edge_runtime.engines.arranging import arranged
from edge_runtime.engines.base import FrameEngine
from edge_runtime.engines.choosing import Choice
from edge_runtime.engines.preparing import Wish, engines_for, ready_engines
from edge_runtime.engines.registry import AUTO, FALLBACK
from edge_runtime.engines.timing import candidates
from edge_runtime.engines.unshared import store_for
from edge_runtime.fitting import FittedBox
from edge_runtime.memory.layout import Layouts
from edge_runtime.memory.store import Store
from edge_runtime.scheduler.costs import Costs
from models.errors import InputError, message_of, size_text

MIN_GAIN = 1.05
"""How many times as fast other engines must be for a box that serves to go over to them."""
CONTEXT_BYTES = 2**30
"""What a second process takes of a card's memory beside weights and workspace."""

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, eq=False)
class EquippedBox:
    """A box that can serve: its engines, unbound, the store of its tensors and how these lie for the engines.

    `costs` are as the policy sees them, with what tensors occupy in these `layouts`. Where nobody measured yet which
    engines are fastest, `wish` says what is to be measured while it serves.
    """

    fitted: FittedBox
    engines: Mapping[str, FrameEngine]
    store: Store
    costs: Costs
    layouts: Layouts
    wish: Wish | None = None

    def faster(self) -> tuple[EquippedBox, Choice] | None:
        """The same box with the fastest engines, once they were measured and made; None where these gain too little.

        Queries that stay on torch keep their engines. Raises InputError where the others need more than the budget.
        """
        assert self.wish is not None
        ready = ready_engines(self.fitted.box.bundle, self.wish)
        if ready is None:
            raise InputError("engines", "what was measured is not in the cache", "measure with `gemel profile`")
        engines, choice = ready
        if choice.gain < MIN_GAIN:
            return None
        kept = {
            query: self.engines[query] if one.name == self.engines[query].name else one
            for query, one in engines.items()
        }
        return _equipped(self.fitted.on(kept), kept), choice

    def names(self) -> dict[str, str]:
        """The engine of each query by name."""
        return {query: engine.name for query, engine in self.engines.items()}


def equip(fitted: FittedBox) -> EquippedBox:
    """Prepare the engines that the config asks for; the log says what takes long.

    Raises InputError where an engine named there does not fit the budget.
    """
    config, bundle = fitted.box.config, fitted.box.bundle
    wish = Wish(config.device, config.precision, fitted.stays, fitted.within.tensors)
    for query, nbytes in fitted.within.run_bytes.items():
        log.info("query %s overflows: %s are copied in every run", query, size_text(nbytes))
    if config.engine != AUTO:
        engines = engines_for(bundle, config.engine, wish)
        return _equipped(fitted.on(engines), engines)
    ready = ready_engines(bundle, wish)
    if ready is None and _measures_beside(fitted):
        engines = engines_for(bundle, FALLBACK, wish)
        return _equipped(fitted, engines, wish)
    try:
        engines = engines_for(bundle, AUTO, wish) if ready is None else ready[0]
        return _equipped(fitted.on(engines), engines)
    except Exception as error:  # a library that is measured can fail in any way
        log.warning("%s; engine %s runs all queries", message_of(error), FALLBACK)
        return _equipped(fitted, engines_for(bundle, FALLBACK, wish))


def engines_text(names: Mapping[str, str], link: str = "on") -> str:
    """How many queries run on which engine: `3 queries on compiled and 1 query on torch`."""
    counted = Counter(names.values()).most_common()
    return " and ".join(f"{count} {'query' if count == 1 else 'queries'} {link} {name}" for name, count in counted)


def _equipped(fitted: FittedBox, engines: Mapping[str, FrameEngine], wish: Wish | None = None) -> EquippedBox:
    costs = fitted.policy.view(fitted.within.costs)
    store = store_for(Store.of_bundle(fitted.box.bundle), costs)
    layouts, costs = arranged(engines.values(), store.kinds, costs, fitted.box.config.budget_bytes)
    return EquippedBox(fitted, engines, store, costs, layouts, wish)


def _measures_beside(fitted: FittedBox) -> bool:
    """Whether engines may be measured while the box serves.

    A trace holds one set of costs, so a box that records one measures first; so does one on a card that has no room
    for that beside the budget.
    """
    config = fitted.box.config
    if config.trace is not None:
        return False
    if config.device == "cpu":
        return True
    largest = max(map(fitted.whole.alone_bytes, fitted.whole.queries))
    # Every candidate with weights of its own, and two copies more while one is compiled and compared.
    needed = CONTEXT_BYTES + (2 + len(candidates(config.device, fitted.stays))) * largest
    free, _ = torch.cuda.mem_get_info()
    return free >= config.budget_bytes + needed
