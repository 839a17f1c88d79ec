"""The engine `onnx`: ONNX Runtime over graphs without weights, every weight an input bound to the arena's tensor."""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from edge_runtime.engines.base import EngineError, FrameEngine
from edge_runtime.engines.package_cache import CachedFile, EngineCache, architecture_key
from edge_runtime.memory.arena import TensorOf, WaitFor
from edge_runtime.memory.transfer import compute_stream, on_compute_stream
from models.bits import Bits
from models.bundle import Bundle, BundleQuery
from models.detector import Detector, OneStage
from models.errors import InputError
from models.export import INPUT
from models.predictions import Prediction
from models.preprocess import Size

if TYPE_CHECKING:
    import onnx

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
PROVIDERS = {CPU: [CPU], CUDA: [CUDA, CPU], TENSORRT: [TENSORRT, CUDA, CPU]}
"""A provider, and those that run the nodes that it refuses."""
ONLY_ERRORS = 3
GRAPH_SUFFIX = ".onnx"
GRAPH_FORMAT = 1
"""Incremented when graphs are made differently, so that older ones are made anew."""
MEASURED_BATCHES = (1, 4)
"""The batches whose workspace is measured; others lie on the line through them."""

_sessions: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


def unavailable_reason(provider: str) -> str | None:
    """Why ONNX Runtime cannot use this provider; None when it can."""
    try:
        import onnxruntime
    except ImportError:
        return "the package onnxruntime is not installed (pip install 'gemel[cpu]' or 'gemel[gpu]')"
    if provider not in onnxruntime.get_available_providers():
        return f"this onnxruntime has no {provider} (onnxruntime-gpu has: gemel[gpu] in place of gemel[cpu])"
    return None


def session_for(path: Path, provider: str, device: torch.device) -> Any:
    """The InferenceSession of a graph's file by a provider on a device; queries of one architecture share it.

    Raises EngineError where the provider cannot be used.
    """
    tf32 = torch.backends.cudnn.allow_tf32
    key = path, provider, device, torch.get_num_threads(), tf32
    session, reason = _sessions.get(key), unavailable_reason(provider)
    if session is None and reason is None:
        try:
            session = create_session(path, provider, device)
            reason = None if provider in session.get_providers() else "its libraries did not load"
        except Exception as error:  # ONNX Runtime's errors have no common type
            reason = " ".join(str(error).split())[:200]
    if reason is not None:
        raise EngineError(f"ONNX Runtime cannot use {provider}: {reason}")
    _sessions[key] = session
    return session


def create_session(path: Path, provider: str, device: torch.device, level: Any = None, name: Path | None = None) -> Any:
    """An InferenceSession of a graph's file; `name` is its name where a provider caches what it makes.

    Without a `level` no kernel is used that needs reordered copies of the weights.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.log_severity_level = ONLY_ERRORS
    # A pool of its own would keep every session's largest workspace for good; without, runs are as fast.
    options.enable_cpu_mem_arena = False
    # Spinning threads take the cores from the other models and from the decoders.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    extended = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.graph_optimization_level = extended if level is None else level
    providers = [(one, provider_options(one, name or path, device)) for one in PROVIDERS[provider]]
    return onnxruntime.InferenceSession(str(path), options, providers=providers)


def provider_options(provider: str, path: Path, device: torch.device) -> dict[str, str]:
    """The options of a provider for the graph at `path`.

    A GPU's gets the compute stream, where copies into the arena and frames were queued before. TensorRT's engines take
    minutes to build and are run as code: cached beside the graph, in the private folder.
    """
    if provider == CPU:
        return {}
    stream = {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(compute_stream(device).cuda_stream),
    }
    if provider == TENSORRT:
        return {
            **stream,
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(path.parent),
            "trt_engine_cache_prefix": path.stem,
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(path.parent),
        }
    return {
        **stream,
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        # As torch convolves here; ONNX Runtime has one setting for all products.
        "use_tf32": str(int(torch.backends.cudnn.allow_tf32)),
    }


def run_options(device: torch.device) -> Any:
    """On a GPU every session has a memory pool outside torch's allocator, which is freed after each run."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    if device.type == "cuda":
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", f"gpu:{device.index or 0}")
    return options


def measure_onnx_workspace(runtime: Any, graph: onnx.GraphProto, size: Size, batches: Sequence[int]) -> dict[int, int]:
    """Peak bytes of a run by batch, frames included; empty where the system does not report it (Linux does).

    ONNX Runtime does not report what it allocates, so this is the peak of the process. `runtime` is a session of
    `graph`; the weights are zero pages that were never written, which take no memory.
    """
    import onnx

    inputs = {one.name: one.type.tensor_type for one in graph.input if one.name != INPUT}
    weights = {
        name: np.zeros(
            [axis.dim_value for axis in kind.shape.dim], onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        )
        for name, kind in inputs.items()
    }
    peaks = {}
    for batch in batches:
        frames = np.zeros((batch, 3, *size), np.float32)
        peak = process_peak_bytes(lambda: runtime.run(None, {INPUT: frames, **weights}))  # noqa: B023 (called in this iteration)
        if peak is None:
            return {}
        peaks[batch] = peak + frames.nbytes
    return peaks


def interpolate_workspace(measured: Mapping[int, int], count: int) -> int:
    """Bytes of a run of `count` frames, on the line through those of the smallest and the largest measured batch."""
    first, last = min(measured), max(measured)
    per_frame = (measured[last] - measured[first]) / max(1, last - first)
    return max(measured[first], round(measured[first] + per_frame * (count - first)))


def process_peak_bytes(run: Callable[[], object]) -> int | None:
    """By how much the process's memory grew during `run`; None where the system does not report it.

    It runs twice: the first run sets up more than a run needs. Allocations of other threads count too.
    """
    run()
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory would be reused unnoticed
        before = process_status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # begins a new peak (proc(5))
        run()
        return max(0, process_status("VmHWM") - before)
    except (OSError, AttributeError, StopIteration):
        return None


def process_status(field: str) -> int:
    """Bytes of a field of /proc/self/status; OSError or StopIteration where there is none."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def graph_key(query: BundleQuery, model: nn.Module) -> dict[str, Any]:
    """The cache key of this query's graph; `model` is on the meta device."""
    key = {key: value for key, value in architecture_key(query, model, torch.device("cpu")).items() if key != "machine"}
    stored = {path: own.dtype for path, own in sorted(query.stored.items())}
    return {"engine": "onnx", "format": GRAPH_FORMAT, "torch": torch.__version__, "stored": stored, **key}


def write_graph(bundle: Bundle, query: BundleQuery, path: Path) -> Mapping[str, Any]:
    """Write the graph to `path`; notes its `batch` ("dynamic" or 1) and the measured `workspace` by batch.

    Takes 2 to 17 seconds. Raises EngineError for an architecture that cannot be exported.
    """
    import onnx

    from models.export import graph_without_weights

    model = bundle.build(query.id, "meta")
    # Each parameter gets an empty tensor of its own. With the bundle's, two parameters of equal bytes would be one
    # tensor, and one input of the graph; another query of this architecture has different ones there.
    placeholders = {key: torch.empty_like(tensor, device="cpu") for key, tensor in model.state_dict().items()}
    model.load_state_dict(placeholders, assign=True)
    stored = {key: own.dtype for key, own in query.stored.items()}
    batch: int | str = "dynamic" if not isinstance(model, Detector) or isinstance(model, OneStage) else 1
    try:
        try:
            graph = graph_without_weights(model, query.input_size, batch, stored)
        except InputError:
            if batch == 1:
                raise
            batch = 1  # a user's model whose forward fixes the batch
            graph = graph_without_weights(model, query.input_size, batch, stored)
    except InputError as error:
        raise EngineError(f"it cannot be exported: {error.problem}") from error
    path.write_bytes(graph)
    batches = MEASURED_BATCHES[:1] if batch == 1 else MEASURED_BATCHES
    session = session_for(path, CPU, torch.device("cpu"))
    workspace = measure_onnx_workspace(session, onnx.load_from_string(graph).graph, query.preprocess.size, batches)
    return {"model": query.model, "batch": batch, "workspace": workspace}


class OnnxEngine(FrameEngine):
    """One query's architecture in ONNX Runtime, on the CPU or by CUDA.

    The graph is exported once per architecture (`EngineCache`), and queries of one architecture share its session: each
    has a table of addresses. Nothing is folded or packed, since no weight is known before a run. Outputs: a
    classifier's logits; a one-stage detector's decoded boxes and scores; a two-stage detector's boxes, scores and
    labels. Preparing raises EngineError for an architecture that cannot be exported, or without its provider.
    """

    name = "onnx"
    channels_last = False
    runs_packed = frozenset[Bits]({"fp16", "int8"})
    providers: ClassVar[Mapping[str, str]] = {"cpu": CPU, "cuda": CUDA}
    """By device."""

    def __init__(
        self, bundle: Bundle, query_id: str, device: str | torch.device = "cpu", cache: EngineCache | None = None
    ) -> None:
        super().__init__(bundle, query_id, device)
        self._bundle, self._cache = bundle, cache
        self._file: CachedFile | None = None
        self._session: Any = None
        self._binding: Any = None
        self._options: Any = None
        self._inputs: list[tuple[str, str]] = []
        self._outputs: list[str] = []
        self._bound: dict[str, Tensor] = {}
        self._decoded = DecodedOutputs(self.model) if isinstance(self.model, OneStage) else None

    @classmethod
    def missing(cls, device: str) -> str | None:
        """ONNX Runtime itself, or its provider for the device."""
        if device not in cls.providers:
            return f"it does not run on {device}"
        return unavailable_reason(cls.providers[device])

    @classmethod
    def detail(cls, device: str) -> str:
        import onnxruntime

        return f"ONNX Runtime {onnxruntime.__version__}, {cls.providers[device]}"

    def prepare(self) -> None:
        """Export this architecture, or find its graph, and make the session unless another query has it."""
        if self._session is not None:
            return
        reason = self.missing(self.device.type)
        if reason is not None:
            raise EngineError(reason)
        self._cache = self._cache or EngineCache()
        self._file = self._cache.fetch(
            graph_key(self.query, self.model),
            GRAPH_SUFFIX,
            lambda path: write_graph(self._bundle, self.query, path),
        )
        session = session_for(self._file.path, self.providers[self.device.type], self.device)
        places = self.query.places()
        self._inputs = [(one.name, places[one.name]) for one in session.get_inputs() if one.name != INPUT]
        self._outputs = [one.name for one in session.get_outputs()]
        self._options, self._binding, self._session = run_options(self.device), session.io_binding(), session

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
        """Bind addresses in the arena; a tensor that is where it was is left alone."""
        self.prepare()
        for key, name in self._inputs:
            tensor = tensor_of(name)
            if tensor is not self._bound.get(key):
                self._bind_input(key, tensor)
                self._bound[key] = tensor

    def unbind(self) -> None:
        """Forget all addresses."""
        if self._binding is not None:
            self._binding.clear_binding_inputs()
        self._bound.clear()

    def forward(self, batch: Tensor) -> Any:
        """The graph's outputs, on the CPU: logits, or a tuple."""
        if not self._bound or self._file is None:
            raise RuntimeError("bind comes before the first run")
        if self._file.notes["batch"] == 1 and len(batch) > 1:
            each = [self._run(frame) for frame in batch.split(1)]
            outputs = [torch.cat(parts) for parts in zip(*each, strict=True)]
        else:
            outputs = self._run(batch)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def decode(self, outputs: Any, sizes: Sequence[tuple[int, int]], least_score: float) -> list[Prediction]:
        """As every engine; a one-stage detector's boxes and scores come decoded from the graph."""
        model, query = self._decoded or self.model, self.query
        return self._task.predictions(model, outputs, sizes, query.classes, least_score, query.preprocess)

    def workspace_of(self, count: int) -> int:
        """As measured on the CPU when the graph was made, on a GPU at least what torch takes; torch's alone before
        the graph is made, and where nothing could be measured.
        """
        found = {} if self._file is None else {int(at): peak for at, peak in self._file.notes["workspace"].items()}
        estimated = 0 if found and self.device.type == "cpu" else super().workspace_of(count)
        if not found:
            return estimated
        return max(estimated, interpolate_workspace(found, count))

    def _run(self, batch: Tensor) -> list[Tensor]:
        with on_compute_stream(self.device):  # which is the session's stream
            frames = batch.contiguous()
            self._bind_input(INPUT, frames)
            for name in self._outputs:
                self._binding.bind_output(name, "cpu")
            self._session.run_with_iobinding(self._binding, self._options)
        return [torch.from_numpy(value.numpy()) for value in self._binding.get_outputs()]

    def _bind_input(self, name: str, tensor: Tensor) -> None:
        device, dtype = tensor.device, _numpy_dtype(tensor.dtype)
        self._binding.bind_input(name, device.type, device.index or 0, dtype, tensor.shape, tensor.data_ptr())


class TensorrtEngine(OnnxEngine):
    """The same graph by ONNX Runtime's TensorRT provider; what that refuses runs by CUDA's.

    It has never run: how many layers TensorRT takes with weights as inputs, and what memory it holds beside the arena,
    is not known (docs/engines.md).
    """

    name = "tensorrt"
    automatic = False
    tested_on = frozenset()
    providers: ClassVar[Mapping[str, str]] = {"cuda": TENSORRT}


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


class DecodedOutputs(OneStage):
    """A one-stage detector whose outputs are decoded already."""

    def __init__(self, model: OneStage) -> None:
        super().__init__()
        self.nms_iou, self.most_candidates = model.nms_iou, model.most_candidates

    def decode(self, outputs: Any) -> tuple[Tensor, Tensor]:
        """The outputs are decoded already."""
        return outputs
