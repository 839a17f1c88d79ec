"""Sessions of ONNX Runtime over graphs that hold no weights; queries of one architecture use one session."""

from __future__ import annotations

import functools
import logging
import weakref
from pathlib import Path
from typing import Any

import torch

from edge_runtime.engines.base import EngineError

CPU = "CPUExecutionProvider"
PROVIDERS = {"cpu": CPU, "cuda": "CUDAExecutionProvider"}
"""By device. TensorRT is not among them: it keeps weights in engines of its own (docs/onnx.md)."""
ONLY_ERRORS = 3

log = logging.getLogger("gemel.run")


class Session:
    """One graph, ready to run on `device` ("cpu" or "cuda"), which is not always the one that was asked for."""

    def __init__(self, session: Any, device: torch.device) -> None:
        self.runtime, self.device = session, device
        self.inputs = tuple(one.name for one in session.get_inputs())
        self.outputs = tuple(one.name for one in session.get_outputs())


_sessions: weakref.WeakValueDictionary[tuple[Path, torch.device, int], Session] = weakref.WeakValueDictionary()


def available(device: str) -> str | None:
    """Why ONNX Runtime cannot run on this device; None when it can."""
    try:
        import onnxruntime
    except ImportError:
        return "the package onnxruntime is not installed"
    if PROVIDERS[device] not in onnxruntime.get_available_providers():
        return f"this onnxruntime has no {PROVIDERS[device]} (onnxruntime-gpu has)"
    return None


def session_of(path: Path, device: torch.device) -> Session:
    """The session of a graph's file on a device, made unless somebody has it already.

    A provider that fails gives way to the CPU's, and the log says so once. Raises EngineError where that fails too.
    """
    key = path, device, torch.get_num_threads()
    session = _sessions.get(key)
    if session is None:
        session = _sessions[key] = _made(path, device)
    return session


def _made(path: Path, device: torch.device) -> Session:
    why = available(device.type)
    if why is None:
        try:
            runtime = _runtime(path, device)
            if PROVIDERS[device.type] in runtime.get_providers():
                return Session(runtime, device)
            why = "its libraries did not load"
        except Exception as error:  # ONNX Runtime's errors have no common type
            why = " ".join(str(error).split())[:200]
    if device.type == "cpu":
        raise EngineError(f"ONNX Runtime cannot run its graph: {why}")
    _tell_once(device.type, why)
    return _made(path, torch.device("cpu"))


def _runtime(path: Path, device: torch.device) -> Any:
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
    providers: list[Any] = [CPU]
    if device.type == "cuda":
        providers = [(PROVIDERS["cuda"], _cuda_options(device)), CPU]
    return onnxruntime.InferenceSession(str(path), options, providers=providers)


def _cuda_options(device: torch.device) -> dict[str, str]:
    """On torch's own stream, so that what it has queued (copies into the arena, frames) comes first."""
    stream = torch.cuda.current_stream(device).cuda_stream
    return {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(stream),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
    }


@functools.cache
def _tell_once(device: str, why: str) -> None:
    log.warning("ONNX Runtime cannot use %s (%s): it runs on the processor, with copies of the weights there",
                device, why)
