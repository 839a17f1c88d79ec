"""The engine `onnx`: ONNX Runtime, every weight an input of the graph, bound by address to the arena's tensor."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from edge_runtime.engines.base import EngineError, FrameEngine
from edge_runtime.engines.cache import EngineCache, Kept
from edge_runtime.engines.onnx.graph import SUFFIX, graph_key, write_graph
from edge_runtime.engines.onnx.session import CPU, CUDA, TENSORRT, Session, available, session_of
from edge_runtime.memory.binding import TensorOf, Wait
from edge_runtime.memory.streams import computing
from models.bits import Bits
from models.bundle import Bundle
from models.detector import OneStage
from models.export import INPUT
from models.predictions import Prediction


class OnnxEngine(FrameEngine):
    """One query's architecture in ONNX Runtime, on the CPU or by CUDA.

    The graph is exported once per architecture (`EngineCache`), and queries of one architecture share its session:
    what is theirs is a table of addresses. Nothing is folded or packed, since no weight is known before a run.
    Outputs: a classifier's logits; a one-stage detector's boxes and scores, decoded; a two-stage detector's boxes,
    scores and labels. Preparing raises EngineError for an architecture that cannot be exported.
    """

    name = "onnx"
    runs_packed = frozenset[Bits]({"fp16", "int8"})
    providers: ClassVar[Mapping[str, str]] = {"cpu": CPU, "cuda": CUDA}
    """By device."""

    def __init__(
        self, bundle: Bundle, query_id: str, device: str | torch.device = "cpu", cache: EngineCache | None = None
    ) -> None:
        super().__init__(bundle, query_id, device)
        self._bundle, self._cache = bundle, cache
        self._kept: Kept | None = None
        self._session: Session | None = None
        self._binding: Any = None
        self._bound: dict[str, tuple[Tensor, Tensor]] = {}
        self._wanted: list[tuple[str, str]] = []
        self._decoded = _Decoded(self.model) if isinstance(self.model, OneStage) else None

    @classmethod
    def missing(cls, device: str) -> str | None:
        """ONNX Runtime itself, or its provider for the device."""
        if device not in cls.providers:
            return f"it does not run on {device}"
        return available(cls.providers[device])

    @classmethod
    def detail(cls, device: str) -> str:
        import onnxruntime

        return f"ONNX Runtime {onnxruntime.__version__}, {cls.providers[device]}"

    @property
    def runs_on(self) -> torch.device:
        """Where it runs once it is prepared: on the processor where the device's provider had to give way."""
        assert self._session is not None
        return self._session.device

    def prepare(self) -> None:
        """Export this architecture, or find its graph, and make the session unless another query has it."""
        if self._session is not None:
            return
        if self._kept is None:
            self._cache = self._cache or EngineCache()
            self._kept = self._cache.fetch(
                graph_key(self.query, self.model), SUFFIX, lambda path: write_graph(self._bundle, self.query, path)
            )
        provider = self.providers.get(self.device.type)
        if provider is None:
            raise EngineError(f"it does not run on {self.device.type}")
        self._session = session_of(self._kept.path, provider, self.device)
        places = self.query.places()
        self._wanted = [(name, places[name]) for name in self._session.inputs if name != INPUT]
        self._binding = self._session.runtime.io_binding()
        self._workspace_bytes = None

    def bind(self, tensor_of: TensorOf, wait: Wait | None = None) -> None:
        """Hand over addresses in the arena; where a tensor still lies where it did, nothing is done."""
        self.prepare()
        assert self._session is not None
        for place, name in self._wanted:
            tensor, bound = tensor_of(name), self._bound.get(place)
            if bound is None or tensor is not bound[0]:
                used = tensor.to(self._session.device)  # itself, unless the provider had to give way
                self._bind_input(place, used)
                self._bound[place] = tensor, used

    def unbind(self) -> None:
        """Forget all addresses."""
        if self._binding is not None:
            self._binding.clear_binding_inputs()
        self._bound.clear()

    def forward(self, batch: Tensor) -> Any:
        """The graph's outputs, on the processor: logits, or a tuple."""
        if not self._bound:
            raise RuntimeError("bind comes before the first run")
        assert self._kept is not None
        if self._kept.notes["batch"] == 1 and len(batch) > 1:
            each = [self._run(frame) for frame in batch.split(1)]
            outputs = [torch.cat(parts) for parts in zip(*each, strict=True)]
        else:
            outputs = self._run(batch)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def decode(self, outputs: Any, sizes: Sequence[tuple[int, int]], least_score: float) -> list[Prediction]:
        """As every engine; a one-stage detector's boxes and scores come decoded from the graph."""
        return self._task.predictions(self._decoded or self.model, outputs, sizes, self.query.classes, least_score)

    def workspace_of(self, count: int) -> int:
        """As measured on the processor when the graph was made, on a card no less than what torch takes there with its
        libraries; torch's alone before the graph is made, and where nothing could be measured.
        """
        found = {} if self._kept is None else {int(at): peak for at, peak in self._kept.notes["workspace"].items()}
        torchs = 0 if found and self.device.type == "cpu" else super().workspace_of(count)
        if not found:
            return torchs
        first, last = min(found), max(found)
        per_frame = (found[last] - found[first]) / (last - first) if last > first else 0
        return max(torchs, found[first], round(found[first] + per_frame * (count - first)))

    def _run(self, batch: Tensor) -> list[Tensor]:
        assert self._session is not None
        with computing(self._session.device):  # which is the session's stream
            frames = batch.contiguous().to(self._session.device)
            self._bind_input(INPUT, frames)
            for name in self._session.outputs:
                self._binding.bind_output(name, "cpu")
            self._session.runtime.run_with_iobinding(self._binding, self._session.options)
        return [torch.from_numpy(value.numpy()) for value in self._binding.get_outputs()]

    def _bind_input(self, name: str, tensor: Tensor) -> None:
        device = tensor.device
        self._binding.bind_input(
            name, device.type, device.index or 0, _as_numpy(tensor.dtype), tensor.shape, tensor.data_ptr()
        )


class TensorrtEngine(OnnxEngine):
    """The same graph by ONNX Runtime's TensorRT provider; what that does not take runs by CUDA's.

    Weights are inputs here too. How many layers TensorRT takes so, and what memory it holds beside the arena, was never
    seen (docs/onnx.md), so `auto` leaves it out.
    """

    name = "tensorrt"
    automatic = False
    proved_on = frozenset()
    providers: ClassVar[Mapping[str, str]] = {"cuda": TENSORRT}


@functools.cache
def _as_numpy(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


class _Decoded(OneStage):
    """Stands for a one-stage detector whose outputs are decoded already."""

    def __init__(self, model: OneStage) -> None:
        super().__init__()
        self.nms_iou, self.most_candidates = model.nms_iou, model.most_candidates

    def decode(self, outputs: Any) -> tuple[Tensor, Tensor]:
        """They are what is asked for."""
        return outputs
