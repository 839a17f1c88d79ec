"""The device: brings in what a query needs and runs it, within the budget; a second try when memory ran out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from edge_runtime.engines.base import Engine, no_op
from edge_runtime.memory.allocator import NoSpaceError
from edge_runtime.memory.arena import Arena
from edge_runtime.scheduler.costs import Costs, tensor_groups
from models.device import is_out_of_memory
from models.errors import exact_text
from models.predictions import Prediction

# How much less memory the runtime asks for once the device had none left: the failed query's workspace, or this.
MIN_CUT_SHARE = 1 / 16

Result = TypeVar("Result")

log = logging.getLogger("gemel.run")


class Device:
    """Loads and runs queries, each by its engine, with their tensors in the arena.

    `costs` are those over tensors; what it is told and tells are pieces of these (`Pieces`). `budget_bytes` becomes
    less when the device had no memory left. Call it from one thread.
    """

    def __init__(self, arena: Arena, engines: Mapping[str, Engine], costs: Costs, budget_bytes: int) -> None:
        self.arena, self.budget_bytes = arena, budget_bytes
        self.max_used_bytes = 0
        self.engines = engines
        self.pieces = tensor_groups(costs)
        self._tensors = {query: cost.tensors for query, cost in costs.queries.items()}
        self._held: frozenset[str] | None = None
        self._held_bytes = 0
        self._loose: frozenset[str] = frozenset()

    @property
    def costs(self) -> Costs:
        """The costs over pieces, as they were known at the start."""
        return self.pieces.costs

    @property
    def overlaps(self) -> bool:
        """Whether it is worth loading weights while a query runs."""
        return self.arena.transfer.overlaps

    def starts_early(self, query: str) -> bool:
        """Whether a run of this query may begin before its last tensors are there."""
        return self.arena.starts_early(self.engines[query])

    def is_resident(self, query: str) -> bool:
        """Whether all that a query needs is in memory; may be asked from any thread."""
        resident = self.arena.residency.resident
        return all(name in resident for name in self._tensors[query])

    def held(self) -> tuple[frozenset[str], int]:
        """The pieces that are whole in memory, and their bytes; looked up anew only when something came or went.

        Tensors of pieces that are not whole (after a load that failed, or in another bundle) are noted: they stay until
        there is no room for them.
        """
        if self._held is None:
            resident = self.arena.residency.resident
            self._held = self.pieces.resident_groups(resident)
            self._held_bytes = self.costs.resident_bytes(self._held)
            self._loose = resident.difference(self.pieces.tensor_names(self._held))
        return self._held, self._held_bytes

    def load(self, query: str, count: int, evict: Iterable[str], changes: bool, early: bool = False) -> None:
        """Bring all that a run of `count` frames of this query needs, once the pieces of `evict` are gone.

        `changes` says whether anything is to be loaded; where the query starts `early` it may still be arriving on
        return.
        """
        workspace_bytes = self.costs.queries[query].workspace_of(max(1, count))
        gone = self.pieces.tensor_names(evict)
        loose = tuple(self._loose.difference(self._tensors[query]))
        try:
            self._twice(query, lambda: self._bring(query, workspace_bytes, gone, loose, early))
        finally:
            if changes or gone or loose:
                self._held = None
        self.max_used_bytes = max(self.max_used_bytes, self.arena.residency.resident_bytes + workspace_bytes)

    def run(self, query: str, images: Sequence[np.ndarray], beside: Callable[[], None] = no_op) -> list[Prediction]:
        """The answers of the query to RGB frames (H, W, 3), once all it needs is resident or arriving.

        `beside` is called when the run is about to begin, on a device where loads overlap runs: behind the upload of
        the frames, which would wait for all that it begins to copy.
        """
        return self._twice(query, lambda: self._answers(query, images, beside))

    def prefetch(self, load: Iterable[str], evict: Iterable[str]) -> None:
        """Begin to load pieces beside what runs, if there is room."""
        self._held = None
        self.arena.prefetch(self.pieces.tensor_names(load), self.pieces.tensor_names(evict))

    def forget_held(self) -> None:
        """Look up anew what is in memory: something failed."""
        self._held = None

    def _bring(self, query: str, workspace_bytes: int, evict: Sequence[str], loose: Sequence[str], early: bool) -> None:
        names = self._tensors[query]
        try:
            self.arena.start(names, workspace_bytes, evict, waits=not early)
        except NoSpaceError:
            if not loose:
                raise
            self.arena.start(names, workspace_bytes, (*evict, *loose), waits=not early)
        if not early:
            self.arena.finish(self._tensors[query])

    def _answers(self, query: str, images: Sequence[np.ndarray], beside: Callable[[], None]) -> list[Prediction]:
        engine, names = self.engines[query], self._tensors[query]
        workspace = self.costs.queries[query].workspace_of(len(images))
        residency = self.arena.residency
        if self.arena.start(names, workspace, waits=not self.arena.starts_early(engine)):
            self._held = None
        residency.hold(names, workspace)
        try:
            self.arena.bind(engine, names)
            answers = engine.run(images, beside) if self.overlaps else engine.run(images)
            self.arena.synchronise()
        finally:
            residency.release(names, workspace)
        self.arena.finish(names)
        return answers

    def _twice(self, query: str, attempt: Callable[[], Result]) -> Result:
        """Try; when the device has no memory left, make room and try once more."""
        try:
            return attempt()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            told = f"{type(error).__name__}: {error}"
        # Not while the error is handled: its traceback keeps all that the failed run had allocated.
        self._make_way(query, told)
        return attempt()

    def _make_way(self, query: str, told: str) -> None:
        """Give all resident weights back to the device and ask for less from now on, never for too little."""
        cut = max(self.costs.queries[query].workspace_bytes, int(self.budget_bytes * MIN_CUT_SHARE))
        least = max(map(self.costs.alone_bytes, self.costs.queries))
        self.budget_bytes = min(self.budget_bytes, max(least, self.budget_bytes - cut))
        log.warning(
            "out of memory at query %s (%s): everything is evicted, the budget is now %s",
            query,
            told,
            exact_text(self.budget_bytes),
        )
        for engine in self.engines.values():
            self.arena.unbind(engine)
        self._held = None
        self.arena.resize(arena_bytes(self.costs, self.budget_bytes), self.budget_bytes)


def arena_bytes(costs: Costs, budget_bytes: int) -> int:
    """Room for all weights, or for as many as the budget leaves beside the smallest workspace.

    A query with a larger workspace runs with less resident; residency sees to that, and the arena's free pages go
    back to the system meanwhile. A card's memory is one piece: there the process holds more than the budget then, by
    up to the difference between the workspaces.
    """
    smallest = min(cost.workspace_bytes for cost in costs.queries.values())
    return min(costs.resident_bytes(costs.tensor_bytes.keys()), budget_bytes - smallest)
