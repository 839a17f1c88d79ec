"""Engines in torch: the architecture on the meta device, frames and outputs as tensors."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gemel.edge_runtime.engines.base import FrameEngine, no_op
from gemel.edge_runtime.frames.part_times import PART_TIMES, Part
from gemel.edge_runtime.memory.transfer import on_compute_stream
from gemel.models.bundle import Bundle, BundleQuery
from gemel.models.detector import read_outputs
from gemel.models.export.cost import workspace_bytes
from gemel.models.predictions import Prediction
from gemel.models.preprocess import Size
from gemel.models.tensors import normalise_frames

_WORKSPACES: dict[tuple[Any, ...], int] = {}
"""By architecture and batch: counting takes a tenth of a second, and a reload needs the same ones again."""

log = logging.getLogger("gemel.run")


class TensorEngine(FrameEngine):
    """What engines in torch share.

    `model` is the query's architecture on the meta device: an engine may compile or bind it, and outputs are decoded by
    it; one that does neither may have that of another query. Raises BundleError when the bundle's tensors don't fit the
    architecture.
    """

    channels_last: bool = True
    """Whether frames are channels last in memory."""

    def __init__(
        self, bundle: Bundle, query_id: str, device: str | torch.device = "cpu", model: nn.Module | None = None
    ) -> None:
        super().__init__(bundle, query_id, torch.device(device))
        self.model = self._shape = model or bundle.build(query_id, "meta")
        self._weights = {name: bundle.nbytes(name) for name in bundle.names_in_order(query_id)}

    @property
    def weights(self) -> dict[str, int]:
        return self._weights

    @property
    def queues_whole_runs(self) -> bool:
        """Whether the next run is queued on the device in one step, so that host work beside it belongs after that."""
        return False

    @classmethod
    def detail(cls, device: str) -> str:
        return f"torch {torch.__version__} on {device}"

    def decode(self, outputs: Any, sizes: Sequence[tuple[int, int]], least_score: float) -> list[Prediction]:
        query = self.query
        return read_outputs(self._task, self.model, outputs, sizes, query.classes, least_score, query.preprocess)

    def workspace_of(self, count: int) -> int:
        key = (type(self), self.device.type, _architecture(self.query, self._shape), count)
        if key not in _WORKSPACES:
            size = self.query.preprocess.size
            measured = measure_workspace(self._shape, size, count, self.device) if self.device.type != "cpu" else 0
            _WORKSPACES[key] = max(measured, workspace_bytes(self._shape, size, count))
        return _WORKSPACES[key]

    @torch.inference_mode()
    def infer(self, pictures: np.ndarray, beside: Callable[[], object] = no_op) -> Any:
        preprocess = self.query.preprocess
        batch = self.upload(pictures)
        after = self.queues_whole_runs
        if not after:
            beside()
        with PART_TIMES.count(Part.RUN):
            outputs = self.forward(normalise_frames(preprocess, batch, self.channels_last))
        if after:
            beside()
        return outputs

    @torch.inference_mode()
    def run(self, frames: Sequence[np.ndarray], beside: Callable[[], object] = no_op) -> list[Prediction]:
        return super().run(frames, beside)

    def upload(self, batch: np.ndarray) -> Tensor:
        """Frames u8 (N, 3, H, W) on the device; a GPU copies them from pinned memory, asynchronously."""
        frames = torch.from_numpy(batch)
        return frames if self.device.type == "cpu" else frames.pin_memory().to(self.device, non_blocking=True)


def _architecture(query: BundleQuery, model: nn.Module) -> tuple[Any, ...]:
    """What intermediates depend on: the same for two queries of one architecture."""
    parts = tuple((name, type(module)) for name, module in model.named_modules())
    tensors = tuple((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())
    return query.network, json.dumps(query.model_args, sort_keys=True), query.input_size, parts, tensors


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak bytes that torch's allocator had given out during `run`, beyond what it had before.

    What a library allocates by itself (ONNX Runtime, oneDNN's caches) is not included. Run it once before: the first
    run sets up more than a run needs.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports on stderr that there is no GPU
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        run()
    live = peak = 0
    for event in traced.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()  # type: ignore[attr-defined]
            peak = max(peak, live)
    return peak


def measure_workspace(model: nn.Module, size: Size, count: int, device: torch.device) -> int:
    """Peak bytes of a run of `count` frames of an architecture (on the meta device), its weights excluded.

    This includes what cuDNN takes on top of intermediates, which depends on the format of frames and weights. 0 where
    it cannot be measured: for lack of memory, for a model that fails on all-zero weights, or because a box serves
    within a memory limit meanwhile.
    """
    if device.type == "cuda" and torch.cuda.get_per_process_memory_fraction(device.index or 0) < 1.0:
        return 0
    try:
        with torch.inference_mode(), on_compute_stream(device):
            there = copy.deepcopy(model).to_empty(device=device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            for tensor in there.state_dict().values():
                tensor.zero_()
            frames = torch.zeros(count, 3, *size, device=device)
            frames = frames.contiguous(memory_format=torch.channels_last)
            there(frames)
            return frames.nbytes + peak_bytes(lambda: there(frames), device)
    except Exception as error:
        log.debug("the workspace of %s could not be measured: %s", type(model).__name__, error)
        return 0
