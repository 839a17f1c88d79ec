"""Engines: an architecture without weights, bound to resident weights before it runs. Needs no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from gemel.edge_runtime.frames.part_times import PART_TIMES, Part
from gemel.edge_runtime.memory.binding import Bindable, TensorOf, WaitFor, WeightFormat
from gemel.models.bits import Bits
from gemel.models.bundle import Bundle
from gemel.models.errors import InputError
from gemel.models.plugins import Registry
from gemel.models.predictions import Prediction
from gemel.models.tasks import task_of

FULL = "fp32"
"""The precision in which every engine computes."""
AUTO = "auto"
FALLBACK = "torch"
"""Runs every architecture."""
ONNX = "onnx"
"""Runs networks that a bundle holds, on a processor."""
CHECKED_FRAMES = 2
"""Frames of each query in the comparison of a joint pass with separate runs: mixed rows show from two on."""
JointPredictions = dict[str, "list[Prediction] | Exception"]


def no_op() -> None:
    """Do nothing beside a run."""


class EngineError(Exception):
    """An engine cannot run this query's architecture here; the message is the reason, in a few words."""


class Engine(Bindable, Protocol):
    """What a device needs of an engine; see `FrameEngine`."""

    def run(self, frames: Sequence[np.ndarray], beside: Callable[[], object] = no_op) -> list[Prediction]: ...


class FrameEngine(ABC):
    """What all engines share: crop frames to the roi, resize and normalise them, decode outputs to predictions."""

    name: str
    starts_early: bool = False
    formats: frozenset[WeightFormat] = frozenset({WeightFormat.STORED})
    """The formats in which it takes the weights of convolutions."""
    runs_packed: ClassVar[frozenset[Bits]] = frozenset()
    """The bits in which weights stay packed in the arena and are used from there."""
    in_pages: ClassVar[bool] = False
    """Whether its weights are pages of a mapped file, or in its session; else it is bound to tensors of an arena."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Its options with their types, which a box config gives its constructor: `engine: NAME:key=value,key=value`."""
    tested_on: ClassVar[frozenset[str]] = frozenset({"cpu"})
    """The devices on which it has been run; `gemel doctor` marks others."""

    def __init__(self, bundle: Bundle, query_id: str, device: Any = "cpu") -> None:
        self.query, self.device = bundle.query(query_id), device
        self._check_packed(bundle)
        self._task = task_of(self.query)

    weak_score = math.inf
    """From which detections are wanted that do not count, but continue a track."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, int]:
        """Bytes by name of what has to be resident for a run, in load order."""

    @property
    def workspace_bytes(self) -> int:
        """The workspace of a run of one frame."""
        return self.workspace_of(1)

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights that it always holds, which the schedule cannot evict."""
        return 0

    @property
    def overflow_bytes(self) -> int:
        """The bytes that runs have copied from the bundle so far; only the torch engine can do that."""
        return 0

    @classmethod
    def missing(cls, device: str) -> str | None:
        """Why this engine cannot run on this machine and device ("cpu" or "cuda"); None when it can."""
        return None

    @classmethod
    def detail(cls, device: str) -> str:
        """What it runs on, for `gemel doctor`."""
        return f"on {device}"

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
    def forward(self, batch: Any) -> Any:
        """The network on a normalised batch f32 (N, 3, H, W); returns what `decode` takes."""

    @classmethod
    def join(cls, engines: Sequence[Any]) -> Callable[..., Any] | None:
        """The joint forward of bound engines of this class and one architecture; None where there is none."""
        return None

    @abstractmethod
    def decode(self, outputs: Any, sizes: Sequence[tuple[int, int]], least_score: float) -> list[Prediction]:
        """Outputs as predictions, boxes in pixels of the cropped frames, whose (width, height) are `sizes`."""

    @abstractmethod
    def workspace_of(self, count: int) -> int:
        """Peak bytes of intermediates of a run of `count` frames, as far as it is known at this point."""

    def outputs(self, frames: Sequence[np.ndarray], beside: Callable[[], object] = no_op) -> Any:
        """What `forward` returns for RGB frames (H, W, 3), each cropped to the query's roi first."""
        return self.infer(np.stack([self.resize(frame) for frame in frames]), beside)

    def infer(self, pictures: np.ndarray, beside: Callable[[], object] = no_op) -> Any:
        """What `forward` returns for frames as `resize` gives them, u8 (N, 3, H, W)."""
        with PART_TIMES.count(Part.PREPROCESS):
            batch = self.query.preprocess.normalise(pictures)
        beside()
        with PART_TIMES.count(Part.RUN):
            return self.forward(batch)

    def resize(self, frame: np.ndarray) -> np.ndarray:
        """A frame (H, W, 3) as the network takes it, u8 (3, h, w), cropped to the query's roi first."""
        with PART_TIMES.count(Part.PREPROCESS):
            return self.query.preprocess.resize_frame(self._crop(frame))

    def run(self, frames: Sequence[np.ndarray], beside: Callable[[], object] = no_op) -> list[Prediction]:
        """One prediction per RGB frame (H, W, 3); boxes in pixels of the whole frame.

        Scores begin at the query's `least_score`, or lower at `weak_score`. `beside` is called once, when the
        frames are on their way to the device and the run is about to begin or queued.
        """
        return self.predictions(self.outputs(frames, beside), frames)

    def predictions(self, outputs: Any, frames: Sequence[np.ndarray]) -> list[Prediction]:
        """What `forward` gave for these frames as predictions, boxes in pixels of the whole frame."""
        sizes = [self._crop(frame).shape[1::-1] for frame in frames]
        least = min(self.query.least_score, self.weak_score)
        with PART_TIMES.count(Part.OUTPUTS):
            found = self.decode(outputs, sizes, least)
        if self.query.roi is None:
            return found
        placed = []
        for one, frame in zip(found, frames, strict=True):
            size = (frame.shape[1], frame.shape[0])
            placed.append(one.in_frame(*self.query.region.pixels(size)[:2], size))
        return placed

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


ENGINES: Registry[type[FrameEngine]] = Registry("gemel.engines", "engine", FrameEngine)


def runs_jointly(engines: Sequence[Engine]) -> bool:
    """Whether these engines have one joint pass, as far as they know unbound."""
    kinds = {type(engine) for engine in engines}
    first = engines[0]
    return len(kinds) == 1 and isinstance(first, FrameEngine) and type(first).join(engines) is not None
