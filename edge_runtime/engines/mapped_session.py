"""Sessions of ONNX Runtime over mapped weights: opened without optimising, with one arena for all.

Weights of convolutions are views of one mapping; those of matrix products ONNX Runtime maps itself, in the blocks that
it has saved, since it would keep a packed copy of any other. Needs no torch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime

from gemel.edge_runtime.engines.prepared import PreparedBundle, PreparedQuery
from gemel.edge_runtime.memory.pages import MappedWeights
from gemel.models.process import trim_heap

PROVIDER = "CPUExecutionProvider"
ONLY_ERRORS = 3
SAME_AS_REQUESTED = 1
"""Else an arena grows to the next power of two, beyond what runs need."""
SHRINK_INTERVAL_S = 60.0
"""So often a run gives back what larger batches took: 55 of 132 MB after four frames of YOLOX-nano at once."""

_arena_limit: list[int] = []
"""The most bytes that runs of all sessions may take together, once it was set."""


def bound_arena(nbytes: int) -> None:
    """Let runs of this process take at most so much memory; call it before any session is opened, and once."""
    if not _arena_limit:
        _arena_limit.append(nbytes)


@functools.cache
def share_arena() -> None:
    """Make the one arena of this process, with the maximum of `bound_arena`; sessions opened before keep their own."""
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    limit = _arena_limit[-1] if _arena_limit else 0
    config = onnxruntime.OrtArenaCfg({"max_mem": limit, "arena_extend_strategy": SAME_AS_REQUESTED})
    onnxruntime.create_and_register_allocator(memory, config)


def session_options(threads: int, has_arena: bool = True) -> onnxruntime.SessionOptions:
    """Options of a session of prepared weights; without an arena it gives memory back after each run."""
    share_arena()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = ONLY_ERRORS
    options.enable_mem_pattern = False
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.enable_cpu_mem_arena = has_arena
    options.add_session_config_entry("session.use_env_allocators", str(int(has_arena)))
    # Spinning threads take the cores from the other models and from the decoders.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


class ArenaShrinker:
    """Lets a run give the free memory of the arena back, unless one has done so within SHRINK_INTERVAL_S."""

    def __init__(self) -> None:
        self._shrunk_at = time.monotonic()
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def options(self) -> onnxruntime.RunOptions | None:
        """Options of the next run."""
        now = time.monotonic()
        if now < self._shrunk_at + SHRINK_INTERVAL_S:
            return None
        self._shrunk_at = now
        return self._options


arena_shrinker = functools.cache(ArenaShrinker)
"""That of this process, which has one arena."""


@dataclass(eq=False)
class MappedSession:
    """A session of one query; `values` and `arrays` are the weights that it reads, which must live as long.

    One that `has_arena` runs in the arena of this process.
    """

    query: PreparedQuery
    session: Any
    values: list[Any] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)
    has_arena: bool = False

    def run(self, frames: np.ndarray) -> list[np.ndarray]:
        """The outputs for frames as the graph takes them, contiguous."""
        options = arena_shrinker().options() if self.has_arena else None
        return self.session.run(None, {self.query.input: frames}, options)


def open_session(
    prepared: PreparedBundle, query_id: str, weights: MappedWeights, threads: int = 1, has_arena: bool = True
) -> MappedSession:
    """Open the session of one query; errors of ONNX Runtime have no common type."""
    query = prepared.index.queries[query_id]
    options = session_options(threads, has_arena)
    values: list[Any] = []
    arrays: list[np.ndarray] = []
    for tensor in query.tensors:
        if not tensor.is_bound:
            continue
        array = weights.view(prepared.index.contents[tensor.content].extent, tensor.dtype, tensor.shape)
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        assert value.data_ptr() == array.ctypes.data, "the weights would be copied"
        options.add_initializer(tensor.name, value)
        values.append(value)
        arrays.append(array)
    session = onnxruntime.InferenceSession(str(prepared.folder / query.file), options, providers=[PROVIDER])
    return MappedSession(query, session, values, arrays, has_arena)


def open_all(prepared: PreparedBundle, weights: MappedWeights, threads: int = 1) -> Mapping[str, MappedSession]:
    """A session for every query of a prepared bundle."""
    sessions = {query: open_session(prepared, query, weights, threads) for query in prepared.index.queries}
    trim_heap()  # reading the graphs leaves as much free memory as they take
    return sessions
