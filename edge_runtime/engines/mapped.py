"""The engine `onnx`: sessions of ONNX Runtime over prepared weights in one mapped file, equal ones once.

Memory is the page cache's: `memory.page_memory` reads in what the schedule loads and gives back what it evicts.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from gemel.edge_runtime.engines.base import EngineError, FrameEngine
from gemel.edge_runtime.engines.prepared import WEIGHTS, PreparedBundle, page_segments
from gemel.edge_runtime.engines.providers import CPU, PROVIDERS, unavailable_reason
from gemel.edge_runtime.memory.binding import TensorOf, WaitFor
from gemel.edge_runtime.memory.page_memory import PageStore
from gemel.edge_runtime.memory.pages import MappedWeights
from gemel.edge_runtime.memory.usage import interpolate_workspace
from gemel.edge_runtime.scheduler.costs import stored_name
from gemel.models.bundle import Bundle
from gemel.models.errors import InputError, message_of
from gemel.models.export.network_outputs import OutputReader
from gemel.models.predictions import Prediction
from gemel.models.process import count_threads, trim_heap

if TYPE_CHECKING:
    from gemel.edge_runtime.engines.mapped_session import MappedSession

NAME = "onnx"
ARENA_FULL = "Available memory of"
"""In the text of ONNX Runtime's error where an arena is at its maximum."""
FRAMES_IN_WORKSPACE = 16
"""Times the input that a run takes at most where the system does not let it be measured."""


class WorkspaceExceeded(Exception):
    """A run needed more memory than the arena of all sessions may take; other queries run on."""


class OpenedWeights:
    """The mapped weights of a prepared bundle, and the sessions that are open over them."""

    def __init__(self, prepared: PreparedBundle) -> None:
        self.prepared = prepared
        self.weights = MappedWeights(prepared.folder / WEIGHTS)
        self.extents, self.names = page_segments(prepared.index)
        self.sessions: weakref.WeakValueDictionary[str, MappedSession] = weakref.WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that runs of the open sessions read, those of several once."""
        names = {name for query in list(self.sessions) for name in self.names[query]}
        return sum(self.extents[name].nbytes for name in names)

    def open(self, query: str, threads: int) -> MappedSession:
        """The session of a query, opened unless it is; EngineError where ONNX Runtime refuses it."""
        from gemel.edge_runtime.engines.mapped_session import open_session

        session = self.sessions.get(query)
        if session is None:
            try:
                session = open_session(self.prepared, query, self.weights, threads)
            except Exception as error:  # ONNX Runtime's errors have no common type
                raise EngineError(f"its session cannot be opened: {message_of(error)}"[:200]) from error
            self.sessions[query] = session
        return session


_opened: weakref.WeakValueDictionary[Path, OpenedWeights] = weakref.WeakValueDictionary()
"""By folder: engines of one bundle share a mapping, also those of a reload."""


def open_weights(prepared: PreparedBundle) -> OpenedWeights:
    """The mapped weights of a prepared bundle, once for all its engines; EngineError where they cannot be mapped."""
    opened = _opened.get(prepared.folder)
    if opened is None or opened.prepared.index != prepared.index:
        try:
            opened = _opened[prepared.folder] = OpenedWeights(prepared)
        except (OSError, ValueError) as error:
            raise EngineError(f"{prepared.folder / WEIGHTS} cannot be mapped: {message_of(error)}") from error
    return opened


class SessionEngine(FrameEngine):
    """One query over a session of ONNX Runtime; it needs no tensor of the arena.

    Outputs are NumPy's arrays as the query's task reads them.
    """

    in_pages = True

    def __init__(self, bundle: Bundle, query_id: str, session: MappedSession) -> None:
        """Raises InputError where no decoder fits the session's outputs."""
        super().__init__(bundle, query_id)
        self._session = session
        self._reader = OutputReader(self.query, session.query.outputs)

    def _check_packed(self, bundle: Bundle) -> None:
        """Weights of any width are taken."""

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
        """Nothing to bind."""

    def unbind(self) -> None:
        """Nothing to drop."""

    def forward(self, batch: np.ndarray) -> Any:
        """What `decode` takes, for frames f32 (N, 3, H, W), contiguous."""
        is_single = self._reader.is_single or self._session.query.batch == 1
        parts = np.split(batch, len(batch)) if is_single and len(batch) > 1 else [batch]
        try:
            return self._reader.join([self._session.run(part) for part in parts])
        except Exception as error:  # ONNX Runtime's errors have no common type
            if ARENA_FULL not in str(error):
                raise
        raise WorkspaceExceeded(f"a run of {len(batch)} frames takes more memory than the box may use for runs")

    def decode(self, outputs: Any, sizes: Sequence[tuple[int, int]], least_score: float) -> list[Prediction]:
        return self._reader.predictions(outputs, sizes, least_score)

    def workspace_of(self, count: int) -> int:
        """As measured when the graph was prepared; where it could not be, what its input and outputs say."""
        measured = self._session.query.workspace
        if measured:
            return interpolate_workspace(measured, count)
        return count * FRAMES_IN_WORKSPACE * self.query.preprocess.size[0] * self.query.preprocess.size[1] * 12


class MappedEngine(SessionEngine):
    """ONNX Runtime over mapped weights, or by another `provider`; needs no torch, and a bundle that holds its networks.

    One query; `open_sessions` makes it.
    """

    name = NAME
    options: ClassVar = {"provider": Literal[tuple(PROVIDERS)]}

    def __init__(self, bundle: Bundle, query_id: str, opened: OpenedWeights, threads: int = 1) -> None:
        """Raises EngineError where the session cannot be opened, InputError where no decoder fits its outputs."""
        super().__init__(bundle, query_id, opened.open(query_id, threads))
        self.opened = opened

    @classmethod
    def missing(cls, device: str) -> str | None:
        """ONNX Runtime, or another system or device than a processor under Linux."""
        if device != "cpu":
            return f"it does not run on {device}"
        if not sys.platform.startswith("linux"):
            return "it runs on Linux"
        return unavailable_reason(CPU)

    @classmethod
    def detail(cls, device: str) -> str:
        import onnxruntime

        return f"ONNX Runtime {onnxruntime.__version__}, weights mapped"

    @property
    def weights(self) -> dict[str, int]:
        """Bytes of the ranges of pages that a run reads, by name, in order of the file."""
        return {name: self.opened.extents[name].nbytes for name in self.opened.names[self.query.id]}


def page_store(engines: Mapping[str, FrameEngine], names: Iterable[str]) -> PageStore:
    """The ranges of pages of these engines under these names, which may be those of `unshared_costs`."""
    opened = next((engine.opened for engine in engines.values() if isinstance(engine, MappedEngine)), None)
    if opened is None:
        return PageStore(None, {})
    return PageStore(opened.weights, {name: opened.extents[stored_name(name)] for name in names})


def open_sessions(
    bundle: Bundle,
    query_ids: Sequence[str],
    device: str = "cpu",
    max_workspace_bytes: int = 0,
) -> Iterator[dict[str, MappedEngine]]:
    """The engines of these queries, which share what of their weights is equal; graphs are prepared if need be.

    The first call of a process decides what runs may take at most (0: no limit). Raises EngineError where the engine
    cannot run here, and at the end for queries that have no prepared graph.
    """
    reason = MappedEngine.missing(device)
    if reason is not None:
        raise EngineError(reason)
    if max_workspace_bytes:
        from gemel.edge_runtime.engines.mapped_session import bound_arena

        bound_arena(max_workspace_bytes)
    return _open_each(bundle, query_ids)


def _open_each(bundle: Bundle, query_ids: Sequence[str]) -> Iterator[dict[str, MappedEngine]]:
    from gemel.edge_runtime.engines.prepare import prepare_bundle

    threads = count_threads()
    try:
        prepared = prepare_bundle(bundle, threads)
    except InputError as error:
        raise EngineError(f"{error.problem}; {error.hint}") from error
    opened = open_weights(prepared)
    reasons: dict[str, str] = {}
    for query in query_ids:
        if query not in prepared.index.queries:
            reasons[query] = prepared.index.failed.get(query, "the bundle does not hold its network")
            continue
        yield {query: MappedEngine(bundle, query, opened, threads)}
    trim_heap()  # opening leaves as much free memory as the graphs took
    if reasons:
        query, reason = next(iter(reasons.items()))
        raise EngineError(f"query {query}: {reason}")
