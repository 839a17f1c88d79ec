"""The engines of a bundle's queries, prepared: those asked for, or the fastest; torch where one cannot run a query."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from edge_runtime.engines.base import EngineError, FrameEngine
from edge_runtime.engines.choosing import Choice, fastest, known_fastest
from edge_runtime.engines.eager.engine import FULL
from edge_runtime.engines.registry import AUTO, FALLBACK, make_engine
from edge_runtime.engines.telling import told_while
from models.bundle import Bundle
from models.errors import message_of, one_line

log = logging.getLogger("gemel.run")


@dataclass(frozen=True)
class Wish:
    """What engines are asked for: on which device, in which precision (`PRECISIONS` of the engine torch).

    `stays` says that weights are loaded once (`candidates`); `overflow` names tensors of queries that overflow. Both
    those queries and all where the precision is not fp32 are for the engine torch alone.
    """

    device: str = "cpu"
    precision: str = FULL
    stays: bool = True
    overflow: Mapping[str, Collection[str]] = field(default_factory=dict)

    def free(self, bundle: Bundle) -> list[str]:
        """The queries that any engine may run."""
        return [query.id for query in bundle.queries if self.precision == FULL and query.id not in self.overflow]


def engines_for(bundle: Bundle, wanted: str, wish: Wish | None = None) -> dict[str, FrameEngine]:
    """The engine of each query, prepared and unbound; `wanted` is a name of ENGINES or "auto".

    Where an engine cannot run an architecture, torch does, and one line per architecture says why. What takes long
    the first time (compiling, measuring) is said before it begins and while it lasts. All take the weights in one
    order.
    """
    wish = wish or Wish()
    free = wish.free(bundle)
    if wanted not in (AUTO, FALLBACK):
        for query in wish.overflow:
            log.warning("engine %s cannot run query %s with an overflow; engine %s does", wanted, query, FALLBACK)
    choice = fastest(bundle, wish.device, wish.stays, free) if wanted == AUTO else Choice(dict.fromkeys(free, wanted))
    return prepared(bundle, choice.engines, wish)


def ready_engines(bundle: Bundle, wish: Wish | None = None) -> tuple[dict[str, FrameEngine], Choice] | None:
    """The fastest engines where what was measured and made before says and holds them all; None otherwise.

    Nothing is measured or compiled.
    """
    wish = wish or Wish()
    choice = known_fastest(bundle, wish.device, wish.stays, wish.free(bundle))
    if choice is None:
        return None
    made = [make_engine(name, bundle, query, wish.device) for query, name in choice.engines.items()]
    if not all(engine.ready() for engine in made):
        return None
    return prepared(bundle, choice.engines, wish, made), choice


def prepared(
    bundle: Bundle, chosen: Mapping[str, str], wish: Wish, made: Iterable[FrameEngine] = ()
) -> dict[str, FrameEngine]:
    """The engines of these names (query -> name), prepared; queries that are not named run on torch as wished for.

    `made` are engines that there are already.
    """
    there = {engine.query.id: engine for engine in made}
    told: set[str] = set()
    return {
        query.id: _prepared(chosen[query.id], bundle, query.id, wish.device, told, there.get(query.id))
        if query.id in chosen
        else make_engine(
            FALLBACK,
            bundle,
            query.id,
            wish.device,
            precision=wish.precision,
            overflow=wish.overflow.get(query.id, ()),
        )
        for query in bundle.queries
    }


def _prepared(
    name: str, bundle: Bundle, query: str, device: str, told: set[str], there: FrameEngine | None
) -> FrameEngine:
    model = bundle.query(query).model
    try:
        engine = there or make_engine(name, bundle, query, device)
        if engine.ready():
            engine.prepare()
            return engine
        log.info("preparing engine %s for %s: takes a minute or so, once for this architecture", name, model)
        with told_while(f"preparing engine {name} for {model}"):
            engine.prepare()
        return engine
    except Exception as error:  # a library can fail in any way
        if name == FALLBACK:
            raise
        said = one_line(error) if isinstance(error, EngineError) else message_of(error)
        line = f"engine {name} cannot run {model}: {said}; engine {FALLBACK} does"
        if line not in told:
            log.warning("%s", line)
            told.add(line)
        return make_engine(FALLBACK, bundle, query, device)
