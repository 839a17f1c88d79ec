"""Engines: an architecture without weights, bound to tensors of the arena before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from edge_runtime.gate import gated
from models.bundle import Bundle, BundleQuery
from models.measure import workspace_bytes
from models.tasks import Answer, DetectionAnswer, task_of

Wait = Callable[[Iterable[str]], None]
"""Returns when what is started next may read the tensors of these names."""


class Engine(Protocol):
    """What runs one query: bind its tensors, then run it on frames.

    `streams` says whether a run may begin before its last tensors have arrived.
    """

    query: BundleQuery
    workspace_bytes: int
    streams: bool

    def bind(self, tensor_of: Callable[[str], Tensor], wait: Wait | None = None) -> None:
        """Use the tensors that `tensor_of` gives by content name from now on.

        With `wait`, which only an engine that streams is given, they are still arriving: a run calls it with the
        names of a layer's tensors before it starts the layer. Without, all are there.
        """
        ...

    def unbind(self) -> None:
        """Let go of all tensors, so that their memory can be given back; `bind` comes before the next run."""
        ...

    def run(self, frames: Sequence[np.ndarray]) -> list[Answer]:
        """One answer per RGB frame (H, W, 3); boxes in pixels of the whole frame."""
        ...


class TorchEngine:
    """Eager PyTorch: one query's module, its parameters and buffers set to the tensors it is bound to.

    The module itself holds no weights; until `bind` its tensors lie on the meta device and a run fails. Outputs
    are bit-equal to those of the module that `Bundle.build` makes. Raises BundleError when the bundle's tensors
    don't fit the architecture.
    """

    streams = True

    def __init__(self, bundle: Bundle, query_id: str, device: str | torch.device = "cpu") -> None:
        self.query = bundle.query(query_id)
        self.device = torch.device(device)
        self._task = task_of(self.query.task)
        self._model = bundle.build(query_id).to("meta")
        self.workspace_bytes = workspace_bytes(self._model, self.query.input_size)
        self._slots = [_Slot(self._model, path, name) for path, name in self.query.state().items()]
        self._layers = layers_to_wait_for(self._model, self.query.state())
        self._wait: Wait | None = None

    def bind(self, tensor_of: Callable[[str], Tensor], wait: Wait | None = None) -> None:
        """Point every parameter and buffer at the tensor of its name; those already there are left alone."""
        for slot in self._slots:
            tensor = tensor_of(slot.name)
            if tensor is not slot.bound:
                slot.set(tensor)
        self._wait = wait

    def unbind(self) -> None:
        """Put the module back on the meta device."""
        for slot in self._slots:
            slot.clear()

    @torch.inference_mode()
    def outputs(self, frames: Sequence[np.ndarray]) -> Any:
        """What the network returns for RGB frames (H, W, 3), each cropped to the query's roi first."""
        prepare = self.query.preprocess
        batch = torch.stack([prepare.resize(self._crop(frame)) for frame in frames]).to(self.device)
        with gated(self._layers, self._wait) if self._wait else nullcontext():
            return self._model(prepare.normalise(batch))

    @torch.inference_mode()
    def run(self, frames: Sequence[np.ndarray]) -> list[Answer]:
        """One answer per frame; boxes in pixels of the whole frame, scores from the query's `min_score` on.

        Where the query sets no `min_score`, the threshold chosen on val takes its place.
        """
        sizes = [self._crop(frame).shape[1::-1] for frame in frames]
        least = self.query.min_score or self.query.threshold or 0.0
        answers = self._task.answers(self._model, self.outputs(frames), sizes, self.query.classes, least)
        return [self._uncrop(answer) for answer in answers]

    def _crop(self, frame: np.ndarray) -> np.ndarray:
        if self.query.roi is None:
            return frame
        x0, y0, x1, y1 = (round(edge) for edge in self.query.roi)
        cropped = frame[y0:y1, x0:x1]
        if not cropped.size:
            height, width = frame.shape[:2]
            raise ValueError(f"roi {list(self.query.roi)} lies outside a frame of {width}x{height} pixels")
        return cropped

    def _uncrop(self, answer: Answer) -> Answer:
        if self.query.roi is None or not isinstance(answer, DetectionAnswer):
            return answer
        dx, dy = round(self.query.roi[0]), round(self.query.roi[1])
        boxes = tuple((x0 + dx, y0 + dy, x1 + dx, y1 + dy) for x0, y0, x1, y1 in answer.boxes)
        return DetectionAnswer(answer.classes, answer.scores, boxes)


def layers_to_wait_for(model: nn.Module, state: Mapping[str, str]) -> dict[nn.Module, list[str]]:
    """The modules to wait before, each with its tensors' names.

    A module that has weights of its own and children may read the children's without calling them (attention
    does), so it stands for them.
    """
    owners = {path.rpartition(".")[0] for path in state}
    layers: dict[nn.Module, list[str]] = {}
    for path, name in state.items():
        parts = path.split(".")[:-1]
        prefixes = (".".join(parts[:length]) for length in range(len(parts) + 1))
        first = next(prefix for prefix in prefixes if prefix in owners)
        layers.setdefault(model.get_submodule(first), []).append(name)
    return layers


class _Slot:
    """One parameter or buffer of a module, and the name of the tensor it takes."""

    def __init__(self, model: nn.Module, path: str, name: str) -> None:
        owner, _, self._attribute = path.rpartition(".")
        module = model.get_submodule(owner)
        self._is_parameter = self._attribute in module._parameters
        self._where: dict[str, Any] = module._parameters if self._is_parameter else module._buffers
        self.bound: Tensor | None = None
        self.name = name

    def set(self, tensor: Tensor) -> None:
        if not self._is_parameter:
            self._where[self._attribute] = tensor
        elif self.bound is not None and self.bound.device == tensor.device:
            self._where[self._attribute].data = tensor  # a tenth of what a new parameter costs
        else:
            self._where[self._attribute] = nn.Parameter(tensor, False)
        self.bound = tensor

    def clear(self) -> None:
        if self.bound is not None:
            self.set(self.bound.to("meta"))
