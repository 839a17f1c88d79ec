"""The models that .onnx and .pt2 files hold: what a file says about itself, and the model of a query."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from models.decoders import AUTO, choose_columns, choose_decoder, known_names, task_of_metadata
from models.decoders.families import PLAIN
from models.decoders.graph_model import GraphModel, build_model, head_of
from models.decoders.outputs import DECODED_TASKS, find_outputs
from models.decoders.registry import UNUSED, GraphHead, class_names, parse
from models.errors import InputError
from models.notes import add_note
from models.predictor import Predictor, add_predictor
from models.preprocess import Cropped, Preprocess, Size

if TYPE_CHECKING:
    from models.graph import Graph

Stamp = tuple[int, int, int]
GEMEL_PREPROCESS = "gemel.preprocess"
NETWORK = "network."
"""What precedes a weight's name in a model, beside its name in the graph."""


@dataclass(frozen=True)
class ModelFile:
    """A file with a graph, and what a query says about it; `size` is None where the file has one."""

    path: Path
    size: Size | None = None
    decoder: str = AUTO
    task: str | None = None
    classes: tuple[str, ...] = ()

    def complete(self) -> ModelFile:
        """What the file says where the query does not; InputError where neither says it, or where they do not fit."""
        head = self._head()
        task = self.task or task_of_metadata(head.metadata)
        self._check_task(head.metadata, task)
        if task is not None and task not in DECODED_TASKS:
            classes = self.classes or class_names(head.metadata) or ()
            find_outputs(head, task, len(classes), self.path)
            return replace(self, size=head.size, task=task, classes=classes)
        chosen = choose_decoder(self.decoder, head, task, len(self.classes) or None, self.path)
        names = known_names(chosen, head.metadata)
        if not self.classes and names is None:
            counted = "1 class" if chosen.width == 1 else f"{chosen.width} classes"
            problem = f"answers with {counted}, as the decoder {chosen.name} reads it, and names none"
            raise InputError(self.path, problem, "name them in their order", "classes")
        classes = self.classes or tuple(name for name in names or () if not name.startswith(UNUSED))
        choose_columns(chosen, head.metadata, classes, self.path)
        if class_names(head.metadata) is None and names is not None and set(classes) <= set(names):
            whose = "ImageNet's" if chosen.task == "classification" else "COCO's"
            text = f"names no classes; its {chosen.width} are taken for {whose}"
            add_note(self.path, text, "else name all in `classes`")
        return replace(self, size=head.size, task=chosen.task, classes=classes)

    def _check_task(self, metadata: Mapping[str, str], task: str | None) -> None:
        """Refuse rotated boxes, and note masks that are left out."""
        said = metadata.get("task")
        if said == "obb" and task in (None, "detection"):
            problem = "finds rotated boxes, which no task has"
            raise InputError(self.path, problem, "name `task: tensor`, or train it for upright boxes", "task")
        if said == "segment" and task == "detection":
            add_note(self.path, "finds a mask of each object; its boxes alone are read", "")

    def build(self, device: str | torch.device = "cpu") -> GraphModel:
        """The model with the file's weights, without values on the device "meta"."""
        read = _describe if torch.device(device).type == "meta" else _load
        graph = read(self.path, self.size, self._stamp())
        return build_model(graph, self.decoder, str(self.task), self.classes, self.path, device)

    def weights(self) -> dict[str, Tensor]:
        """The weights under the names of the model."""
        state = _load(self.path, self.size, self._stamp()).state
        return {f"{NETWORK}{name}": tensor for name, tensor in state.items()}

    def preprocess(self) -> Preprocess | None:
        """How frames are prepared, as the metadata or the decoder's family say; None where neither does."""
        head = self._head()
        written = parse(head.metadata.get(GEMEL_PREPROCESS))
        if isinstance(written, dict):
            try:
                return TypeAdapter(Preprocess).validate_python({**written, "size": head.size})
            except ValidationError as error:
                raise InputError(self.path, f"its {GEMEL_PREPROCESS} is damaged", "export it again", "model") from error
        if self.task not in DECODED_TASKS:
            return None
        chosen = choose_decoder(self.decoder, head, self.task, len(self.classes), self.path)
        found = chosen.preprocess(head.metadata, head.size)
        whole: dict[str, Any] = {"scale": 255, **PLAIN}
        return replace(found, **whole) if head.is_whole and found is not None else found

    def _head(self) -> GraphHead:
        return _heads(self.path, self.size, self._stamp())

    def _stamp(self) -> Stamp:
        """What changes when the file does."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise InputError(self.path, f"cannot be read: {error.strerror}", "check the path", "model") from error
        return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _heads(path: Path, size: Size | None, stamp: Stamp) -> GraphHead:
    return head_of(_describe(path, size, stamp))


@lru_cache(maxsize=256)
def _describe(path: Path, size: Size | None, stamp: Stamp) -> Graph:
    """A file's graph without its weights."""
    return replace(_load(path, size, stamp), state={})


@lru_cache(maxsize=1)
def _load(path: Path, size: Size | None, stamp: Stamp) -> Graph:
    from models.graph import load_graph
    from models.graph.unfold import unfold_norms

    return unfold_norms(load_graph(path, size))


def load_file(
    path: Path,
    classes: tuple[str, ...],
    task: str | None,
    decoder: str,
    preprocess: Preprocess | None,
    min_score: float,
) -> GraphModel:
    """A file's model with `preprocess`, `classes` and `predict`; InputError where nothing says what they are."""
    size = None if preprocess is None else preprocess.size
    file = ModelFile(path, size, decoder, task, classes).complete()
    preprocess = preprocess or file.preprocess()
    if preprocess is None:
        problem = "nothing says the mean and the deviation with which it was trained"
        raise InputError(path, problem, "give them: preprocess=gemel.Preprocess((H, W), mean=..., std=...)")
    model = file.build().eval()
    predictor = Predictor(model, str(file.task), file.classes, Cropped(preprocess), min_score)
    add_predictor(model, predictor, path.name)
    return model
