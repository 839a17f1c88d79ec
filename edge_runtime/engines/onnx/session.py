"""Sessions of ONNX Runtime over graphs that hold no weights; queries of one architecture use one session."""

from __future__ import annotations

import functools
import logging
import weakref
from pathlib import Path
from typing import Any

import torch

from edge_runtime.engines.base import EngineError
from edge_runtime.memory.streams import compute_stream

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
DEVICES = {CPU: "cpu", CUDA: "cuda", TENSORRT: "cuda"}
NEXT = {TENSORRT: CUDA, CUDA: CPU}
"""Who takes what a provider does not, and all of it where that one fails."""
ONLY_ERRORS = 3

log = logging.getLogger("gemel.run")


class Session:
    """One graph, ready to run on `device` ("cpu" or "cuda"), which is not always the one that was asked for."""

    def __init__(self, session: Any, device: torch.device) -> None:
        self.runtime, self.device = session, device
        self.options = _run_options(device)
        self.inputs = tuple(one.name for one in session.get_inputs())
        self.outputs = tuple(one.name for one in session.get_outputs())


_sessions: weakref.WeakValueDictionary[tuple[Any, ...], Session] = weakref.WeakValueDictionary()


def available(provider: str) -> str | None:
    """Why ONNX Runtime cannot use this provider; None when it can."""
    try:
        import onnxruntime
    except ImportError:
        return "the package onnxruntime is not installed (pip install 'gemel[cpu]' or 'gemel[gpu]')"
    if provider not in onnxruntime.get_available_providers():
        return f"this onnxruntime has no {provider} (onnxruntime-gpu has: gemel[gpu] in place of gemel[cpu])"
    return None


def session_of(path: Path, provider: str, device: torch.device) -> Session:
    """The session of a graph's file by a provider on a device, made unless somebody has it already.

    A provider that fails gives way to the next one, and the log says so once. Raises EngineError where the CPU's fails.
    """
    key = path, provider, device, torch.get_num_threads(), _in_tf32()
    session = _sessions.get(key)
    if session is None:
        session = _sessions[key] = _made(path, provider, device)
    return session


def _made(path: Path, provider: str, device: torch.device) -> Session:
    why = available(provider)
    if why is None:
        try:
            runtime = _runtime(path, provider, device)
            if provider in runtime.get_providers():
                return Session(runtime, device)
            why = "its libraries did not load"
        except Exception as error:  # ONNX Runtime's errors have no common type
            why = " ".join(str(error).split())[:200]
    following = NEXT.get(provider)
    if following is None:
        raise EngineError(f"ONNX Runtime cannot run its graph: {why}")
    _tell_once(provider, why)
    return _made(path, following, device if DEVICES[following] == device.type else torch.device("cpu"))


def _runtime(path: Path, provider: str, device: torch.device) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.log_severity_level = ONLY_ERRORS
    # A pool of its own would keep every session's largest workspace for good; without, runs are as fast.
    options.enable_cpu_mem_arena = False
    # Threads that wait busily take the cores from the other models and from the decoders.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # The level above reorders activations for kernels whose weights would have to be reordered copies.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    return onnxruntime.InferenceSession(str(path), options, providers=in_order(provider, path, device))


def in_order(provider: str, path: Path, device: torch.device) -> list[Any]:
    """The provider with its options, then those that take what it does not."""
    found: list[Any] = []
    while provider != CPU:
        make = _tensorrt_options if provider == TENSORRT else _cuda_options
        found.append((provider, make(path, device)))
        provider = NEXT[provider]
    return [*found, CPU]


def _cuda_options(path: Path, device: torch.device) -> dict[str, str]:
    return {
        **_on_our_stream(device),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": str(int(_in_tf32())),
    }


def _tensorrt_options(path: Path, device: torch.device) -> dict[str, str]:
    """What TensorRT builds takes minutes and is run as code: it is kept beside the graph, in the private folder."""
    return {
        **_on_our_stream(device),
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(path.parent),
        "trt_engine_cache_prefix": path.stem,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(path.parent),
    }


def _in_tf32() -> bool:
    """Whether torch convolves so here (`models.device.disable_tf32`); ONNX Runtime has one setting for all products."""
    return torch.backends.cudnn.allow_tf32


def _on_our_stream(device: torch.device) -> dict[str, str]:
    """So that what was queued there (copies into the arena, frames) comes first."""
    return {"device_id": str(device.index or 0), "user_compute_stream": str(compute_stream(device).cuda_stream)}


def _run_options(device: torch.device) -> Any:
    """On a card every session has a pool that torch's allocator does not see: it goes back after each run."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    if device.type == "cuda":
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", f"gpu:{device.index or 0}")
    return options


@functools.cache
def _tell_once(provider: str, why: str) -> None:
    on_card = NEXT[provider] == CUDA
    instead = f"{CUDA} takes all" if on_card else "it runs on the processor, with copies of the weights there"
    log.warning("ONNX Runtime cannot use %s (%s): %s", provider, why, instead)
