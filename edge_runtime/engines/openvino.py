"""The engine `openvino`: sessions as ONNX Runtime's, of the same graph, on Intel's runtime for its processors."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from edge_runtime.engines.base import EngineError
from edge_runtime.engines.package_cache import EngineCache
from edge_runtime.engines.session import SessionEngine, SessionKind, open_sessions_of
from edge_runtime.engines.torch_engine import FULL
from models.bundle import Bundle

HINTS = {FULL: "f32", "bf16": "bf16", "fp16": "f16"}
"""By precision: its own choice would be bf16 on processors that have it."""


def _import_runtime() -> ModuleType:
    """The optional package; by name, since a type checker need not have it."""
    return importlib.import_module("openvino")


def missing_reason(device: str) -> str | None:
    """Why OpenVINO cannot run on a device; None when it can."""
    if device != "cpu":
        return f"it does not run on {device}"
    try:
        _import_runtime()
    except ImportError:
        return "the package openvino is not installed (pip install 'gemel[openvino]')"
    return None


def supports_precision(precision: str) -> bool:
    """Whether this CPU computes in it; float32 always."""
    capabilities = _import_runtime().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return precision == FULL or precision.upper() in capabilities


class OpenvinoRequest:
    """A compiled model as a session: what `SessionEngine` and its measurement need of one."""

    def __init__(self, path: str, precision: str) -> None:
        openvino = _import_runtime()
        core = openvino.Core()
        hints = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": HINTS[precision]}
        self._tensor = openvino.Tensor
        self._request = core.compile_model(core.read_model(path), "CPU", hints).create_infer_request()

    def run(self, outputs: None, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs for these inputs, which are not copied."""
        for name, value in feed.items():
            self._request.set_tensor(name, self._tensor(value, shared_memory=True))
        self._request.infer()
        return [np.array(one.data) for one in self._request.output_tensors]


class OpenvinoEngine(SessionEngine):
    """One query over a session of OpenVINO."""

    name = "openvino"
    session_of: ClassVar[str] = "openvino"

    def _open(self) -> None:
        self._private = {name: tensor.numpy() for name, tensor in self.shared.inputs[self.query.id].items()}

    def _run(self, frames: Tensor) -> tuple[Tensor, ...]:
        feed = {self.shared.frames_input: frames.contiguous().numpy(), **self._private}
        return tuple(map(torch.from_numpy, self.shared.session.run(None, feed)))

    @classmethod
    def missing(cls, device: str) -> str | None:
        return missing_reason(device)

    @classmethod
    def detail(cls, device: str) -> str:
        return f"OpenVINO {_import_runtime().__version__}"

    def prepare(self) -> None:
        """Sessions are opened by `open_sessions`."""


def open_sessions(
    bundle: Bundle,
    query_ids: Sequence[str],
    device: str | torch.device = "cpu",
    cache: EngineCache | None = None,
    precision: str = FULL,
) -> Iterator[dict[str, SessionEngine]]:
    """As those of ONNX Runtime; on a CPU alone."""
    reason = missing_reason(torch.device(device).type)
    if reason is not None:
        raise EngineError(reason)
    if not supports_precision(precision):
        raise EngineError(f"this CPU does not compute in {precision}")

    def create(path: Any, name: Any) -> OpenvinoRequest:
        return OpenvinoRequest(str(path), precision)

    kind = SessionKind(f"openvino {precision}", OpenvinoEngine, create, is_optimised=False)
    return open_sessions_of(kind, bundle, query_ids, torch.device(device), cache)
