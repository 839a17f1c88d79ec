"""The engine `onnx` with an execution provider: sessions of ONNX Runtime that hold their weights themselves.

The provider compiles the graph of each query for its device, so what is written for it is not optimised for a
processor, and weights are not mapped: they stay as long as the session does. Those for a device of DEVICES lie there
once for all queries that share them. Needs no torch.
"""

from __future__ import annotations

import hashlib
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from gemel.edge_runtime.engines.base import EngineError
from gemel.edge_runtime.engines.mapped import NAME, SessionEngine
from gemel.edge_runtime.engines.mapped_session import MappedSession, bound_arena, session_options
from gemel.edge_runtime.engines.prepare_child import MIN_EXTERNAL_BYTES
from gemel.edge_runtime.engines.prepared import MAKING, PreparedQuery, prepared_folder, remove_tree
from gemel.edge_runtime.engines.providers import CPU, CUDA, PROVIDERS
from gemel.models.bundle import Bundle
from gemel.models.bundle.stored_arrays import BundleArrays
from gemel.models.errors import message_of
from gemel.models.export.network_outputs import NetworkOutputs, describe_outputs
from gemel.models.files.io import describe_problem
from gemel.models.graph.activations import use_exact_products
from gemel.models.graph.proto_graph import ProtoGraph
from gemel.models.graph.query_graph import build_query_graph, count_norm_uses
from gemel.models.process import count_threads, trim_heap

DEVICES = {CUDA: "cuda", CPU: "cpu"}
"""By provider the device, as ONNX Runtime names it, on which equal weights of several sessions lie once."""


class ModelFiles:
    """A folder beside the prepared graphs, which goes with the last engine that holds it.

    Some providers read the weights only in the first run.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=MAKING, dir=prepared_folder()))
        weakref.finalize(self, remove_tree, self.folder)


class DeviceWeights:
    """Weights on a device, equal ones once: since version 1.28 ONNX Runtime reads such initialisers in place."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._values: dict[tuple[str, tuple[int, ...], bytes], onnxruntime.OrtValue] = {}

    def bind(self, graph: ProtoGraph, options: onnxruntime.SessionOptions) -> tuple[list[onnxruntime.OrtValue], int]:
        """Let a session read the large constants of a graph here; those values, and the bytes that it adds."""
        values, new_bytes = [], graph.constant_bytes
        for name, constant in graph.constants.items():
            array = constant.array
            if array is None or array.nbytes < MIN_EXTERNAL_BYTES:
                continue
            array = np.ascontiguousarray(array)
            key = (str(array.dtype), array.shape, hashlib.sha256(array.data).digest())
            if key in self._values:
                new_bytes -= array.nbytes
            else:
                self._values[key] = onnxruntime.OrtValue.ortvalue_from_numpy(array, self._device, 0)
            options.add_initializer(name, self._values[key])
            values.append(self._values[key])
        return values, new_bytes


class ProviderEngine(SessionEngine):
    """One query over a session that holds its weights; `open_provider_sessions` makes it."""

    def __init__(
        self, bundle: Bundle, query_id: str, session: MappedSession, provider: str, nbytes: int, files: ModelFiles
    ) -> None:
        """`nbytes` are those of its weights. Raises InputError where no decoder fits the session's outputs."""
        super().__init__(bundle, query_id, session)
        self.name, self._nbytes, self._files = f"{NAME}-{provider}", nbytes, files

    @property
    def weights(self) -> dict[str, int]:
        """Nothing that has to be loaded before a run."""
        return {}

    @property
    def held_bytes(self) -> int:
        return self._nbytes


def open_provider_sessions(
    bundle: Bundle, query_ids: Sequence[str], provider: str, max_workspace_bytes: int = 0, shares_weights: bool = True
) -> Iterator[dict[str, ProviderEngine]]:
    """The engines of these queries with a provider of PROVIDERS, opened one after the other.

    `max_workspace_bytes` is as of `mapped.open_sessions`; without `shares_weights` each session has its own. Raises
    EngineError at the end for queries whose network the bundle does not hold or the provider cannot run; InputError
    where there is no folder for the files.
    """
    if max_workspace_bytes:
        bound_arena(max_workspace_bytes)
    tensors = BundleArrays(bundle)
    queries = [query for query in bundle.queries if query.network_document is not None]
    uses = count_norm_uses(queries, tensors.document_of)
    weights = DeviceWeights(DEVICES[provider]) if shares_weights and provider in DEVICES else None
    files = ModelFiles()
    reasons: dict[str, str] = {}
    for place, query_id in enumerate(query_ids):
        query, path = bundle.query(query_id), files.folder / f"{place}.onnx"
        if query.network_document is None:
            reasons[query_id] = "the bundle does not hold its network"
            continue
        try:
            graph = build_query_graph(query, tensors.document_of(query), tensors.array_of, uses, tensors.header)
            with describe_problem(path):
                graph.save(path, MIN_EXTERNAL_BYTES)
            outputs = describe_outputs(query, tensors.array_of(str(query.network_document)).tobytes())
            session, nbytes = open_session(graph, path, outputs, provider, weights)
            engine = ProviderEngine(bundle, query_id, session, provider, nbytes, files)
        except Exception as error:  # ONNX Runtime's errors have no common type
            reasons[query_id] = message_of(error)[:300]
            continue
        yield {query_id: engine}
    trim_heap()  # building graphs leaves as much free memory as they took
    if reasons:
        query_id, reason = next(iter(reasons.items()))
        raise EngineError(f"query {query_id}: {reason}")


def open_session(
    graph: ProtoGraph, path: Path, outputs: NetworkOutputs, provider: str, weights: DeviceWeights | None = None
) -> tuple[MappedSession, int]:
    """Open a graph that was saved at a path, over `weights` where given; the session, and the bytes that it adds.

    Raises EngineError where the provider cannot be started here.
    """
    name, _ = PROVIDERS[provider]
    options = session_options(count_threads())
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if weights is None else level.ORT_ENABLE_EXTENDED
    use_exact_products(options)
    values, nbytes = ([], graph.constant_bytes) if weights is None else weights.bind(graph, options)
    others = [] if provider == CPU else [PROVIDERS[CPU][0]]
    session = onnxruntime.InferenceSession(str(path), options, providers=[name, *others])
    session.disable_fallback()
    if name not in session.get_providers():
        raise EngineError(f"ONNX Runtime cannot start {name} here")
    frames = session.get_inputs()[0]
    batch = frames.shape[0] if isinstance(frames.shape[0], int) else None
    described = PreparedQuery(path.name, "", frames.name, tuple(frames.shape), outputs, batch, (), (), {})
    return MappedSession(described, session, values), nbytes
