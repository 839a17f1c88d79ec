"""The device: loads the tensors of a query and runs it, within the budget; retries once after running out of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gemel.edge_runtime.engines.base import CHECKED_FRAMES, Engine, JointPredictions, no_op
from gemel.edge_runtime.memory.allocator import NoSpaceError
from gemel.edge_runtime.memory.page_memory import PageMemory
from gemel.edge_runtime.scheduler.costs import Costs, stored_name, tensor_groups
from gemel.edge_runtime.scheduler.joint import run_workspace
from gemel.models.errors import exact_text
from gemel.models.out_of_memory import is_out_of_memory
from gemel.models.predictions import Prediction

MIN_CUT_SHARE = 1 / 16
"""Share of the budget cut at least after the device ran out of memory."""

if TYPE_CHECKING:
    from gemel.edge_runtime.memory.arena import Arena

Value = TypeVar("Value")
Runs = Sequence[tuple[str, int]]
"""What runs together: (query, frames)."""

log = logging.getLogger("gemel.run")


class Device:
    """Loads and runs queries, each by its engine, with their tensors in the arena.

    Decisions name groups of tensors (`TensorGroups`); `costs` passed in are over tensors. `budget_bytes` shrinks when
    the device runs out of memory. Call it from one thread.
    """

    def __init__(
        self, arena: Arena | PageMemory, engines: Mapping[str, Engine], costs: Costs, budget_bytes: int
    ) -> None:
        self.arena, self.engines, self.budget_bytes = arena, engines, budget_bytes
        self.max_used_bytes = 0
        self.groups = tensor_groups(costs)
        self._tensors = {query: cost.tensors for query, cost in costs.queries.items()}
        self._own = {query: {stored_name(name): name for name in names} for query, names in self._tensors.items()}
        """By query and content name the tensor that it uses: its own copy where the policy shares none."""
        self._runners: dict[tuple[str, ...], Any] = {}
        self._resident: frozenset[str] | None = None
        self._resident_bytes = 0
        self._incomplete: frozenset[str] = frozenset()

    @property
    def costs(self) -> Costs:
        """The initial costs over groups."""
        return self.groups.costs

    @property
    def overlaps(self) -> bool:
        """Whether loads run in parallel with runs."""
        return self.arena.overlaps

    def starts_early(self, query: str) -> bool:
        """Whether a run of this query may begin before its last tensors have arrived."""
        return self.arena.starts_early(self.engines[query])

    def is_resident(self, query: str) -> bool:
        """Whether all tensors of a query are in memory; callable from any thread."""
        resident = self.arena.residency.resident
        return all(name in resident for name in self._tensors[query])

    def resident_groups(self) -> tuple[frozenset[str], int]:
        """The groups that are whole in memory, and their bytes; computed again only after a change.

        Tensors of incomplete groups (after a failed load, or of another bundle) stay until their space is needed.
        """
        if self._resident is None:
            tensors = self.arena.residency.resident
            self._resident = self.groups.resident_groups(tensors)
            self._resident_bytes = self.costs.resident_bytes(self._resident)
            self._incomplete = tensors.difference(self.groups.tensor_names(self._resident))
        return self._resident, self._resident_bytes

    def refresh_resident(self) -> None:
        """Compute the resident groups again: something failed."""
        self._resident = None

    def load(self, runs: Runs, evict: Iterable[str], changes: bool, early: bool = False) -> None:
        """Load all that one run of these (query, frames) needs, after evicting the groups of `evict`.

        `changes` says whether anything is to be loaded; with `early` tensors may still be arriving on return.
        """
        workspace_bytes, names = self._workspace(runs), self._names(runs)
        evicted = self.groups.tensor_names(evict)
        incomplete = tuple(self._incomplete.difference(names))
        try:
            self._retry(runs[0][0], lambda: self._load(names, workspace_bytes, evicted, incomplete, early))
        finally:
            if changes or evicted or incomplete:
                self._resident = None
        self.max_used_bytes = max(self.max_used_bytes, self.arena.residency.resident_bytes + workspace_bytes)

    def run(self, query: str, images: Sequence[np.ndarray], beside: Callable[[], None] = no_op) -> list[Prediction]:
        """The predictions of the query for RGB frames (H, W, 3), once all it needs is resident or arriving.

        Where loads overlap runs, `beside` is called after the upload of the frames, which it would delay.
        """
        return self._retry(query, lambda: self._run(query, images, beside))

    def run_joint(
        self, images: Mapping[str, Sequence[np.ndarray]], beside: Callable[[], None] = no_op
    ) -> JointPredictions:
        """The predictions of several queries from one pass, or the error with which one of them failed."""
        return self._retry(next(iter(images)), lambda: self._run_joint(images, beside))

    def joint_difference(self, images: Mapping[str, np.ndarray]) -> str | None:
        """How the outputs of one pass for these queries differ from those of separate runs; None where they agree."""
        runs = tuple((query, CHECKED_FRAMES) for query in images)
        self.load(runs, (), True)
        with self._hold_bound(runs):
            return self._runner(runs).differs(images)

    def prefetch(self, load: Iterable[str], evict: Iterable[str]) -> None:
        """Begin to load groups during the present run, if there is memory."""
        self._resident = None
        self.arena.prefetch(self.groups.tensor_names(load), self.groups.tensor_names(evict))

    def _load(
        self, names: Sequence[str], workspace_bytes: int, evict: Sequence[str], incomplete: Sequence[str], early: bool
    ) -> None:
        try:
            self.arena.start(names, workspace_bytes, evict, waits=not early)
        except NoSpaceError:
            if not incomplete:
                raise
            self.arena.start(names, workspace_bytes, (*evict, *incomplete), waits=not early)
        if not early:
            self.arena.finish(names)

    def _names(self, runs: Runs) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for query, _ in runs for name in self._tensors[query]))

    def _workspace(self, runs: Runs) -> int:
        return run_workspace(self.costs, tuple((query, max(1, count)) for query, count in runs))

    def _run_joint(self, images: Mapping[str, Sequence[np.ndarray]], beside: Callable[[], None]) -> JointPredictions:
        runs = tuple((query, len(own)) for query, own in images.items())
        with self._hold_bound(runs):
            found = self._runner(runs).run(images, beside if self.overlaps else no_op)
            self.arena.synchronise()
        return found

    @contextmanager
    def _hold_bound(self, runs: Runs) -> Iterator[None]:
        """Have the tensors of these queries resident and their engines bound to them."""
        names, workspace, residency = self._names(runs), self._workspace(runs), self.arena.residency
        if self.arena.start(names, workspace, waits=True):
            self._resident = None
        residency.hold(names, workspace)
        try:
            for query, _ in runs:
                self.arena.finish(self._tensors[query])
                self.arena.bind(self.engines[query], self._tensors[query], self._own[query])
            yield
        finally:
            residency.release(names, workspace)

    def _runner(self, runs: Runs) -> Any:
        from gemel.edge_runtime.engines.joint_run import JointRunner

        joint = self.costs.joint_of(runs[0][0])
        assert joint is not None, "the queries have no joint pass"
        if joint.queries not in self._runners:
            engines = {query: self.engines[query] for query in joint.queries}
            self._runners[joint.queries] = JointRunner(engines)  # type: ignore[arg-type]
        return self._runners[joint.queries]

    def _run(self, query: str, images: Sequence[np.ndarray], beside: Callable[[], None]) -> list[Prediction]:
        engine, names = self.engines[query], self._tensors[query]
        workspace = self.costs.queries[query].workspace_of(len(images))
        residency = self.arena.residency
        if self.arena.start(names, workspace, waits=not self.arena.starts_early(engine)):
            self._resident = None
        residency.hold(names, workspace)
        try:
            self.arena.bind(engine, names, self._own[query])
            predictions = engine.run(images, beside) if self.overlaps else engine.run(images)
            self.arena.synchronise()
        finally:
            residency.release(names, workspace)
        self.arena.finish(names)
        return predictions

    def _retry(self, query: str, attempt: Callable[[], Value]) -> Value:
        """Try; after running out of memory, evict everything and try once more."""
        try:
            return attempt()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = f"{type(error).__name__}: {error}"
        # Outside of the handler: the traceback keeps all that the failed run had allocated.
        self._shrink_budget(query, text)
        return attempt()

    def _shrink_budget(self, query: str, text: str) -> None:
        """Evict all weights and use a smaller budget, never too small for a query alone."""
        cut = max(self.costs.queries[query].workspace_bytes, int(self.budget_bytes * MIN_CUT_SHARE))
        least = max(map(self.costs.alone_bytes, self.costs.queries))
        self.budget_bytes = min(self.budget_bytes, max(least, self.budget_bytes - cut))
        log.warning(
            "out of memory at query %s (%s): everything is evicted, the budget is now %s",
            query, text, exact_text(self.budget_bytes),
        )  # fmt: skip
        for engine in self.engines.values():
            self.arena.unbind(engine)
        self._resident = None
        self.arena.resize(arena_bytes(self.costs, self.budget_bytes), self.budget_bytes)


def arena_bytes(costs: Costs, budget_bytes: int) -> int:
    """Bytes of all weights, or of as many as the budget leaves beside the smallest workspace.

    A query with a larger workspace runs with less resident; the arena returns free pages to the system meanwhile. GPU
    memory is one allocation: there the process exceeds the budget by up to the difference between the workspaces.
    """
    smallest = min(cost.workspace_bytes for cost in costs.queries.values())
    return min(costs.resident_bytes(costs.tensor_bytes.keys()), budget_bytes - smallest)
