"""Sessions: ONNX Runtime with the weights inside, folded and packed, once for all queries of an architecture.

What the queries have in common is constant in the session, the rest are its inputs. The arena holds nothing of such a
query: its bytes are the session's, which are measured.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from edge_runtime.engines.base import EngineError, FrameEngine
from edge_runtime.engines.onnx import (
    CPU,
    CUDA,
    GRAPH_SUFFIX,
    MEASURED_BATCHES,
    DecodedOutputs,
    create_session,
    graph_key,
    interpolate_workspace,
    process_peak_bytes,
    process_status,
    run_options,
    unavailable_reason,
    write_graph,
)
from edge_runtime.engines.package_cache import EngineCache
from edge_runtime.engines.session_graph import (
    UnequalGraphs,
    filled_graphs,
    optimised_graph,
    query_groups,
    share_graph,
)
from edge_runtime.engines.torch_engine import FULL
from edge_runtime.memory.arena import TensorOf, WaitFor
from edge_runtime.memory.transfer import on_compute_stream
from models.bundle import Bundle, BundleQuery
from models.decoders.graph_model import GraphAnswers
from models.detector import OneStage
from models.errors import InputError, message_of
from models.process import trim_heap

if TYPE_CHECKING:
    import onnx

PROVIDERS = {"cpu": CPU, "cuda": CUDA}
"""By device."""
Value = TypeVar("Value")


@dataclass(eq=False)
class SharedSession:
    """A session of some queries, and the values of the inputs in which they differ.

    `nbytes` is what the process grew by when it was made, packed copies included, and the private inputs; `workspace`
    the peak of a run by batch, frames included, where the system reports it.
    """

    session: Any
    inputs: Mapping[str, Mapping[str, Tensor]]
    frames_input: str
    outputs: Sequence[str]
    one_by_one: bool
    nbytes: int
    workspace: dict[int, int] = field(default_factory=dict)


_known: weakref.WeakValueDictionary[str, SharedSession] = weakref.WeakValueDictionary()
"""By queries and tensors: a reload takes the sessions that it does not change."""


class SessionEngine(FrameEngine):
    """One query over a session that it may share; it needs no tensor of the arena.

    Outputs are the architecture's; a one-stage detector of the zoo gives decoded boxes and scores. `open_sessions`
    makes it.
    """

    name = "onnx-session"
    session_of: ClassVar[str] = "onnx"
    takes_tensors = False
    channels_last = False
    automatic = False

    def __init__(
        self,
        bundle: Bundle,
        query_id: str,
        device: str | torch.device,
        shared: SharedSession,
        alike: SessionEngine | None = None,
    ) -> None:
        """`alike` is an engine of the same session whose outputs are decoded in the same way."""
        super().__init__(bundle, query_id, device, alike and alike._shape)
        self.shared: SharedSession = shared
        self._open()
        self._graph: GraphAnswers | None = None
        if isinstance(self.model, GraphAnswers):
            self._graph = copy.copy(self.model)
            self._graph._run = self._run  # type: ignore[assignment]  # in place of the network on the meta device
        elif isinstance(self.model, OneStage):
            self.model = DecodedOutputs(self.model)

    def _open(self) -> None:
        """Bind the private inputs."""
        self._options, self._binding = run_options(self.device), self.shared.session.io_binding()
        for name, tensor in self.shared.inputs[self.query.id].items():
            self._bind_input(name, tensor)

    def _check_packed(self, bundle: Bundle) -> None:
        """Weights of any width are taken: the session has them in float32."""

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
        """Nothing to bind."""

    def unbind(self) -> None:
        """Nothing to drop."""

    def forward(self, batch: Tensor) -> Any:
        """What `decode` takes, on the CPU."""
        if self._graph is not None:
            return self._graph(batch)
        frames = batch.split(1) if self.shared.one_by_one else (batch,)
        each = [self._run(one) for one in frames]
        outputs = each[0] if len(each) == 1 else tuple(torch.cat(parts) for parts in zip(*each, strict=True))
        return outputs[0] if len(outputs) == 1 else outputs

    def workspace_of(self, count: int) -> int:
        """As measured when the session was made; torch's where it could not be."""
        if self.shared.workspace and self.device.type == "cpu":
            return interpolate_workspace(self.shared.workspace, count)
        return super().workspace_of(count)

    def _run(self, frames: Tensor) -> tuple[Tensor, ...]:
        with on_compute_stream(self.device):
            frames = frames.contiguous()
            self._bind_input(self.shared.frames_input, frames)
            for name in self.shared.outputs:
                self._binding.bind_output(name, "cpu")
            self.shared.session.run_with_iobinding(self._binding, self._options)
        outputs = tuple(torch.from_numpy(value.numpy()) for value in self._binding.get_outputs())
        self._binding.clear_binding_outputs()  # which would keep a copy for each query
        return outputs

    def _bind_input(self, name: str, tensor: Tensor) -> None:
        device = tensor.device
        self._binding.bind_input(name, device.type, device.index or 0, np.float32, tensor.shape, tensor.data_ptr())


@dataclass(frozen=True)
class SessionKind:
    """How sessions are made: `create` makes one of a graph's file and the name for what a provider caches.

    `is_optimised`: the graph is made for ONNX Runtime's kernels on this CPU first.
    """

    name: str
    engine: type[SessionEngine]
    create: Callable[[Path, Path], Any]
    is_optimised: bool


def open_sessions(
    bundle: Bundle,
    query_ids: Sequence[str],
    device: str | torch.device = "cpu",
    cache: EngineCache | None = None,
    precision: str = FULL,
) -> Iterator[dict[str, SessionEngine]]:
    """The engines of these queries over sessions of ONNX Runtime, one session after the other: seconds each.

    Queries share a session where they have one architecture and most of their weights in common. Raises EngineError
    for an architecture that cannot be exported, for another precision than fp32, or without ONNX Runtime.
    """
    device = torch.device(device)
    provider, on_cpu = PROVIDERS[device.type], device.type == "cpu"
    reason = unavailable_reason(provider) or (None if precision == FULL else f"it does not compute in {precision}")
    if reason is not None:
        raise EngineError(reason)

    def create(path: Path, name: Path) -> Any:
        import onnxruntime

        levels = onnxruntime.GraphOptimizationLevel
        level = levels.ORT_DISABLE_ALL if on_cpu else levels.ORT_ENABLE_ALL
        return create_session(path, provider, device, level, name)

    return open_sessions_of(SessionKind(provider, SessionEngine, create, on_cpu), bundle, query_ids, device, cache)


def open_sessions_of(
    kind: SessionKind, bundle: Bundle, query_ids: Sequence[str], device: torch.device, cache: EngineCache | None
) -> Iterator[dict[str, SessionEngine]]:
    """The same of any kind."""
    cache = cache or EngineCache()
    architectures: dict[str, list[BundleQuery]] = {}
    for query in map(bundle.query, query_ids):
        architectures.setdefault(_architecture(bundle, query), []).append(query)
    for architecture, queries in architectures.items():
        for ids in query_groups(bundle, queries):
            members = [bundle.query(one) for one in ids]
            try:
                shared = [(_open_shared(kind, bundle, members, device, cache, architecture), ids)]
            except UnequalGraphs:
                shared = [(_open_shared(kind, bundle, [one], device, cache, architecture), [one.id]) for one in members]
            for session, own in shared:
                yield _make_engines(kind, bundle, own, device, session)


def _make_engines(
    kind: SessionKind, bundle: Bundle, ids: Sequence[str], device: torch.device, shared: SharedSession
) -> dict[str, SessionEngine]:
    engines: dict[str, SessionEngine] = {}
    known: dict[tuple[Any, ...], SessionEngine] = {}
    for one in ids:
        query = bundle.query(one)
        key = query.classes, query.decoder
        engines[one] = kind.engine(bundle, one, device, shared, known.get(key))
        known.setdefault(key, engines[one])
    return engines


def _architecture(bundle: Bundle, query: BundleQuery) -> str:
    """Equal for queries of one architecture."""
    shapes = {key: bundle.header.entries[name].shape for key, name in query.tensors.items()}
    stored = {key: own.dtype for key, own in query.stored.items()}
    arguments = query.network, query.model_args, query.input_size, len(query.classes), query.task
    return json.dumps([arguments, shapes, stored], sort_keys=True)


def _open_shared(
    kind: SessionKind,
    bundle: Bundle,
    queries: Sequence[BundleQuery],
    device: torch.device,
    cache: EngineCache,
    architecture: str,
) -> SharedSession:
    """The session of these queries, made unless it is in use; raises UnequalGraphs."""
    tensors = [(query.id, sorted(query.places().items())) for query in queries]
    key = hashlib.sha256(json.dumps([kind.name, architecture, str(device), tensors]).encode()).hexdigest()
    shared = _known.get(key)
    if shared is None:
        try:
            shared = _known[key] = _make_shared(kind, bundle, queries, device, cache, key)
        except (EngineError, UnequalGraphs):
            raise
        except Exception as error:  # exporters and ONNX Runtime raise errors of any type
            reason = error.problem if isinstance(error, InputError) else message_of(error)
            raise EngineError(f"it cannot be a session: {reason}"[:200]) from error
    return shared


def _make_shared(
    kind: SessionKind,
    bundle: Bundle,
    queries: Sequence[BundleQuery],
    device: torch.device,
    cache: EngineCache,
    key: str,
) -> SharedSession:
    import onnx_ir as ir

    first, one_by_one = replace(queries[0], stored={}), False
    if first.graph is not None:
        skeleton = bundle.tensor(first.graph).numpy().tobytes()
    else:
        graph = graph_key(first, bundle.build(first.id, "meta"))
        file = cache.fetch(graph, GRAPH_SUFFIX, lambda path: write_graph(bundle, first, path))
        skeleton, one_by_one = file.path.read_bytes(), file.notes["batch"] == 1
    models = filled_graphs(bundle, queries, skeleton)
    threads = torch.get_num_threads()
    graph = share_graph(optimised_graph(one, threads) if kind.is_optimised else ir.to_proto(one) for one in models)
    name = cache.folder / key[:32]
    with tempfile.TemporaryDirectory(prefix="gemel-") as folder:  # of bytes Python's session would keep a copy
        path = Path(folder) / f"session{GRAPH_SUFFIX}"
        path.write_bytes(graph.model.SerializeToString())
        session, nbytes = _measure_growth(lambda: kind.create(path, name))
    inputs = {
        query.id: {name: torch.from_numpy(value).clone().to(device) for name, value in values.items()}
        for query, values in zip(queries, graph.inputs, strict=True)
    }
    nbytes = max(nbytes, graph.constant_bytes) + len(queries) * graph.private_bytes
    frames = next(one for one in graph.model.graph.input if one.name not in graph.inputs[0])
    outputs = [one.name for one in graph.model.graph.output]
    shared = SharedSession(session, inputs, frames.name, outputs, one_by_one, nbytes)
    shared.workspace = _measure_workspace(shared, first, frames)
    return shared


def _measure_growth(make: Callable[[], Value]) -> tuple[Value, int]:
    """What it makes, and the bytes by which the process has grown; 0 where the system does not report that."""

    def resident() -> int:
        gc.collect()
        trim_heap()
        try:
            return process_status("VmRSS")
        except (OSError, StopIteration):
            return 0

    before = resident()
    made = make()
    return made, max(0, resident() - before)


def _measure_workspace(shared: SharedSession, query: BundleQuery, frames: onnx.ValueInfoProto) -> dict[int, int]:
    fixed = shared.one_by_one or frames.type.tensor_type.shape.dim[0].dim_value == 1
    private = {name: tensor.cpu().numpy() for name, tensor in shared.inputs[query.id].items()}
    peaks = {}
    for count in MEASURED_BATCHES[:1] if fixed else MEASURED_BATCHES:
        batch = np.zeros((count, 3, *query.preprocess.size), np.float32)
        feed = {shared.frames_input: batch, **private}
        peak = process_peak_bytes(lambda: shared.session.run(None, feed))  # noqa: B023 (called in this iteration)
        if peak is None:
            return {}
        peaks[count] = peak + batch.nbytes
    return peaks
