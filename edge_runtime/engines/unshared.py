"""A box that does not know of merging: every query has its own copy of every tensor, as `time-sharing` wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from edge_runtime.engines.base import Engine, FrameEngine, nothing
from edge_runtime.memory.binding import Wait
from edge_runtime.memory.store import Store
from edge_runtime.scheduler.costs import Costs, stored_name
from models.predictions import Prediction


def store_for(store: Store, costs: Costs) -> Store:
    """The store under the names that `costs` uses; the bytes are those of the stored tensors."""
    names = {name: stored_name(name) for name in costs.tensor_bytes}
    return replace(
        store,
        extents={name: store.extents[stored] for name, stored in names.items()},
        kinds={name: store.kinds[stored] for name, stored in names.items()},
    )


def bound_as(engines: Mapping[str, FrameEngine], costs: Costs) -> Mapping[str, Engine]:
    """The engines as they bind the tensors that `costs` names: their queries' own copies, or what all share."""
    own = any(name != stored_name(name) for name in costs.tensor_bytes)
    return {query: UnsharedEngine(engine) for query, engine in engines.items()} if own else engines


class UnsharedEngine:
    """An engine that binds its query's own copies (`tensor@query`) where it would bind `tensor`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.query, self.workspace_bytes, self.starts_early = engine.query, engine.workspace_bytes, engine.starts_early

    def bind(self, tensor_of: Callable[[str], Tensor], wait: Wait | None = None) -> None:
        def own(name: str) -> str:
            return f"{name}@{self.query.id}"

        arrived: Wait | None = None if wait is None else lambda names: wait(map(own, names))
        self._engine.bind(lambda name: tensor_of(own(name)), arrived)

    def unbind(self) -> None:
        self._engine.unbind()

    def run(self, frames: Sequence[np.ndarray], uploaded: Callable[[], object] = nothing) -> list[Prediction]:
        return self._engine.run(frames, uploaded)
