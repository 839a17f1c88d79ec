"""Engines: an architecture without weights, bound to tensors of the arena before it runs."""

from __future__ import annotations

import copy
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from edge_runtime.engines.joint_pass import JointForward
from edge_runtime.memory.arena import Bindable, TensorOf, WaitFor
from edge_runtime.memory.store import WeightFormat
from edge_runtime.memory.transfer import on_compute_stream
from models.bits import Bits
from models.bundle import Bundle, BundleQuery
from models.cost import workspace_bytes
from models.errors import InputError
from models.predictions import Prediction
from models.preprocess import Size
from models.tasks import task_of

_WORKSPACES: dict[tuple[Any, ...], int] = {}
"""By architecture and batch: counting takes a tenth of a second, and a reload needs the same ones again."""

log = logging.getLogger("gemel.run")


def no_op() -> None:
    """Do nothing beside a run."""


class EngineError(Exception):
    """An engine cannot run this query's architecture here; the message is the reason, in a few words."""


class Engine(Bindable, Protocol):
    """What a device needs of an engine; see `FrameEngine`."""

    def run(self, frames: Sequence[np.ndarray], beside: Callable[[], object] = no_op) -> list[Prediction]: ...


class HeldWeights(Protocol):
    """Weights outside the arena, of one engine or several, for as long as they serve."""

    nbytes: int


class FrameEngine(ABC):
    """What all engines share: crop frames to the roi, resize and normalise them, decode outputs to predictions.

    `model` is the query's architecture on the meta device: an engine may compile or bind it, and outputs are decoded by
    it; one that does neither may have that of another query. Raises BundleError when the bundle's tensors don't fit the
    architecture.
    """

    name: ClassVar[str]
    starts_early: bool = False
    formats: frozenset[WeightFormat] = frozenset({WeightFormat.STORED})
    """The formats in which it takes the weights of convolutions."""
    runs_packed: ClassVar[frozenset[Bits]] = frozenset()
    """The bits in which weights stay packed in the arena and are used from there."""
    takes_tensors: ClassVar[bool] = True
    """Whether it is bound to tensors of the arena; else its weights are in `shared`."""
    channels_last: ClassVar[bool] = True
    """Whether frames are channels last in memory."""
    shared: HeldWeights | None = None
    session_of: ClassVar[str] = ""
    """The engine that a config names for it, where it has weights of its own."""
    automatic: ClassVar[bool] = True
    """Whether `gemel profile` may choose it."""
    tested_on: ClassVar[frozenset[str]] = frozenset({"cpu"})
    """The devices on which it has been run; `gemel doctor` marks others."""

    def __init__(
        self, bundle: Bundle, query_id: str, device: str | torch.device = "cpu", model: nn.Module | None = None
    ) -> None:
        self.query = bundle.query(query_id)
        self.device = torch.device(device)
        self._check_packed(bundle)
        self.model = self._shape = model or bundle.build(query_id, "meta")
        self._task = task_of(self.query)

    @property
    def workspace_bytes(self) -> int:
        """The workspace of a run of one frame."""
        return self.workspace_of(1)

    @property
    def overflow_bytes(self) -> int:
        """The bytes that runs have copied from the bundle so far; only the torch engine can do that."""
        return 0

    @property
    def queues_whole_runs(self) -> bool:
        """Whether the next run is queued on the device in one step, so that host work beside it belongs after that."""
        return False

    @classmethod
    def missing(cls, device: str) -> str | None:
        """Why this engine cannot run on this machine and device ("cpu" or "cuda"); None when it can."""
        return None

    @classmethod
    def detail(cls, device: str) -> str:
        """What it runs on, for `gemel doctor`."""
        return f"torch {torch.__version__} on {device}"

    def prepare(self) -> None:  # noqa: B027 (the torch engine has nothing to prepare)
        """Make what a run needs besides tensors, which may take minutes the first time; `bind` does it if need be.

        Raises EngineError where the engine cannot run this query.
        """

    @abstractmethod
    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
        """As `Bindable.bind`."""

    @abstractmethod
    def unbind(self) -> None:
        """As `Bindable.unbind`."""

    @abstractmethod
    def forward(self, batch: Tensor) -> Any:
        """The network on a normalised batch f32 (N, 3, H, W) on the engine's device, in memory as `channels_last` says.

        Returns what `decode` takes: unless that is overridden too, what the model's forward returns.
        """

    @classmethod
    def join(cls, engines: Sequence[Any]) -> JointForward | None:
        """The joint forward of bound engines of this class and one architecture; None where there is none."""
        return None

    def decode(self, outputs: Any, sizes: Sequence[tuple[int, int]], least_score: float) -> list[Prediction]:
        """Outputs as predictions, boxes in pixels of the cropped frames, whose (width, height) are `sizes`."""
        return self._task.predictions(
            self.model, outputs, sizes, self.query.classes, least_score, self.query.preprocess
        )

    def workspace_of(self, count: int) -> int:
        """Peak bytes of intermediates of a run of `count` frames, as far as it is known at this point."""
        key = (type(self), self.device.type, _architecture(self.query, self._shape), count)
        if key not in _WORKSPACES:
            size = self.query.preprocess.size
            measured = measure_workspace(self._shape, size, count, self.device) if self.device.type != "cpu" else 0
            _WORKSPACES[key] = max(measured, workspace_bytes(self._shape, size, count))
        return _WORKSPACES[key]

    @torch.inference_mode()
    def outputs(self, frames: Sequence[np.ndarray], beside: Callable[[], object] = no_op) -> Any:
        """What `forward` returns for RGB frames (H, W, 3), each cropped to the query's roi first."""
        preprocess = self.query.preprocess
        batch = self.upload(torch.stack([self.resize(frame) for frame in frames]))
        after = self.queues_whole_runs
        if not after:
            beside()
        outputs = self.forward(preprocess.normalise(batch, self.channels_last))
        if after:
            beside()
        return outputs

    def resize(self, frame: np.ndarray) -> Tensor:
        """A frame (H, W, 3) as the network takes it, u8 (3, h, w), cropped to the query's roi first."""
        return self.query.preprocess.resize_frame(self._crop(frame))

    @torch.inference_mode()
    def run(self, frames: Sequence[np.ndarray], beside: Callable[[], object] = no_op) -> list[Prediction]:
        """One prediction per RGB frame (H, W, 3); boxes in pixels of the whole frame.

        Scores begin at the query's `min_score` or else the threshold chosen on val. `beside` is called once, when the
        frames are on their way to the device and the run is about to begin or queued.
        """
        return self.predictions(self.outputs(frames, beside), frames)

    def predictions(self, outputs: Any, frames: Sequence[np.ndarray]) -> list[Prediction]:
        """What `forward` gave for these frames as predictions, boxes in pixels of the whole frame."""
        sizes = [self._crop(frame).shape[1::-1] for frame in frames]
        least = self.query.min_score or self.query.threshold or 0.0
        found = self.decode(outputs, sizes, least)
        if self.query.roi is None:
            return found
        placed = []
        for one, frame in zip(found, frames, strict=True):
            size = (frame.shape[1], frame.shape[0])
            placed.append(one.in_frame(*self.query.region.pixels(size)[:2], size))
        return placed

    def upload(self, batch: Tensor) -> Tensor:
        """Frames u8 (N, 3, H, W) on the device; a GPU copies them from pinned memory, asynchronously."""
        return batch if self.device.type == "cpu" else batch.pin_memory().to(self.device, non_blocking=True)

    def _check_packed(self, bundle: Bundle) -> None:
        """Raise InputError for weights that this engine cannot use as they are stored."""
        if other := {own.dtype for own in self.query.stored.values()} - self.runs_packed:
            dtypes = " and ".join(sorted(other))
            problem = f"query {self.query.id} has weights stored as {dtypes}, which engine {self.name} cannot run"
            raise InputError(bundle.path, problem, "take engine torch, or merge with --weights fp32")

    def _crop(self, frame: np.ndarray) -> np.ndarray:
        cropped = self.query.region.crop(frame)
        if not cropped.size:
            height, width = frame.shape[:2]
            raise ValueError(f"roi {list(self.query.roi or ())} lies outside a frame of {width}x{height} pixels")
        return cropped


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
