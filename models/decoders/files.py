"""The models that .onnx and .pt2 files hold: what a file says about itself, and the model of a query."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from gemel.models.decoders import (
    AUTO,
    choose_columns,
    choose_decoder,
    find_misnaming,
    known_names,
    task_of_metadata,
)
from gemel.models.decoders.classifier import Classifier
from gemel.models.decoders.decoder import GraphHead, class_names
from gemel.models.decoders.detr import Detr
from gemel.models.decoders.families import PLAIN
from gemel.models.decoders.graph_model import GraphModel, build_model
from gemel.models.decoders.heads import head_of
from gemel.models.decoders.outputs import find_outputs
from gemel.models.errors import InputError, join_names
from gemel.models.labels.class_names import ASKED, UNUSED, find_other_names, parse
from gemel.models.notes import add_note
from gemel.models.predictor import Predictor, TensorPreprocess, add_predictor
from gemel.models.preprocess import Preprocess, Size
from gemel.models.tasks import TASKS
from gemel.models.zoo.user_models import check_suffix, is_model_file

if TYPE_CHECKING:
    from gemel.models.graph import Graph
    from gemel.models.predictor import FrameModel

Stamp = tuple[int, int, int]
YAML_KEY = re.compile(r"`(\w+): ([\w-]+)`")
GEMEL_PREPROCESS = "gemel.preprocess"
PREPARED = re.compile(
    r"(.*[._])?(mean|std|scale|norm\w*|rescale\w*|input_range|colou?r\w*|channel_order|bgr|preprocess\w*|resize\w*)"
)
MIN_SCORE = re.compile(r"(.*[._])?(conf|confidence|score)(_?thresh(old)?)?", re.IGNORECASE)
"""Keys of metadata that say how frames are prepared, and from which score detections count."""
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
        if task is not None and not TASKS.find(task, self.path, "task").has_decoder:
            classes = self.classes or class_names(head.metadata) or ()
            raw = find_outputs(head, task, len(classes), self.path)
            self._note_unread(head, range(len(head.outputs)) if raw.index is None else (raw.index,))
            return replace(self, size=head.size, task=task, classes=classes)
        chosen = choose_decoder(self.decoder, head, task, len(self.classes) or None, self.path)
        names = known_names(chosen, head.metadata)
        if not self.classes and names is None:
            problem = f"answers with {chosen.counted}, as the decoder {chosen.name} reads it, and names none"
            problem = find_misnaming(chosen, head.metadata) or problem
            hint = "name them in their order"
            if isinstance(chosen, Classifier) and not chosen.activation and not chosen.is_single:
                hint += "; a vector of features is no class: `task: embedding`"
            if (
                isinstance(chosen, Detr)
                and chosen.activation == "sigmoid"
                and not chosen.has_corners
            ):
                hint += "; the last column of a DETR with softmax is no object, and has no name"
            raise InputError(self.path, problem, hint, "classes")
        classes = self.classes or _default_classes(head.metadata, names or ())
        choose_columns(chosen, head.metadata, classes, self.path)
        self._note_unread(head, chosen.places)
        if other := find_other_names(head.metadata):
            text = f"names its classes twice; `{other.key}` has others ({join_names(other.names, 4)}) and is not read"
            add_note(self.path, text, "name the right ones in `classes`")
        for key in (key for key in head.metadata if MIN_SCORE.fullmatch(key)):
            add_note(
                self.path, f"`{key}: {head.metadata[key]:.20}` is not followed", "set `min_score`"
            )
        if class_names(head.metadata) is None and names is not None and set(classes) <= set(names):
            whose = "ImageNet's" if chosen.task == "classification" else "COCO's"
            text = f"names no classes; its {chosen.width} are taken for {whose}"
            add_note(self.path, text, "else name all in `classes`")
        return replace(self, size=head.size, task=chosen.task, classes=classes)

    def _note_unread(self, head: GraphHead, places: Collection[int]) -> None:
        """Say which outputs of the file are not read."""
        feeds = head.cut.inputs if head.cut else ()
        outputs = (
            (place, output.name)
            for place, output in enumerate(head.outputs)
            if output.name not in feeds
        )
        unread = [name for place, name in outputs if place not in places]
        if unread:
            read = join_names([head.outputs[place].name for place in sorted(places)])
            text = f"its answer is read from {read}; not read: {join_names(unread, 4)}"
            add_note(
                self.path, text, "export it with the outputs that count alone if that is not meant"
            )

    def build(self, device: str | torch.device = "cpu") -> GraphModel:
        """The model with the file's weights, without values on the device "meta"."""
        read = _describe if torch.device(device).type == "meta" else _load
        graph = read(self.path, self.size, self._stamp())
        return build_model(graph, self.decoder, str(self.task), self.classes, self.path, device)

    def weights(self) -> dict[str, Tensor]:
        """The weights under the names of the model."""
        state = _load(self.path, self.size, self._stamp()).state
        return {f"{NETWORK}{name}": tensor for name, tensor in state.items()}

    def has_outlines(self) -> bool:
        """Whether its objects have masks, or rotated boxes."""
        return choose_decoder(
            self.decoder, self._head(), self.task, len(self.classes), self.path
        ).has_outlines

    def preprocess(self) -> Preprocess | None:
        """How frames are prepared, as the metadata or the decoder's family say; None where neither does."""
        head = self._head()
        written = parse(head.metadata.get(GEMEL_PREPROCESS))
        if isinstance(written, dict):
            try:
                return TypeAdapter(Preprocess).validate_python({**written, "size": head.size})
            except ValidationError as error:
                raise InputError(
                    self.path, f"its {GEMEL_PREPROCESS} is damaged", "export it again", "model"
                ) from error
        if self.task is None or not TASKS[self.task].has_decoder:
            return None
        chosen = choose_decoder(self.decoder, head, self.task, len(self.classes), self.path)
        preprocess = chosen.preprocess(head.metadata, head.size)
        unread = [key for key in head.metadata if PREPARED.fullmatch(key)]
        if preprocess is not None and unread and "norm_mean" not in head.metadata:
            text = f"its metadata {join_names(unread, 4)} may say how frames are prepared, and are not read"
            add_note(self.path, text, "set `preprocess` as they say")
        whole: dict[str, Any] = {"scale": 255, **PLAIN}
        return (
            replace(preprocess, **whole) if head.is_whole and preprocess is not None else preprocess
        )

    def _head(self) -> GraphHead:
        return _heads(self.path, self.size, self._stamp())

    def _stamp(self) -> Stamp:
        """What changes when the file does."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise InputError(
                self.path, f"cannot be read: {error.strerror}", "check the path", "model"
            ) from error
        return status.st_ino, status.st_size, status.st_mtime_ns


def _default_classes(metadata: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, ...]:
    """The classes that an exported query asked for, else all of the file's."""
    classes = parse(metadata.get(ASKED))
    if isinstance(classes, list) and classes and set(classes) <= set(names):
        return tuple(classes)
    return tuple(name for name in names if not name.startswith(UNUSED))


@lru_cache(maxsize=256)
def _heads(path: Path, size: Size | None, stamp: Stamp) -> GraphHead:
    return head_of(_describe(path, size, stamp))


@lru_cache(maxsize=256)
def _describe(path: Path, size: Size | None, stamp: Stamp) -> Graph:
    """A file's graph without its weights."""
    return replace(_load(path, size, stamp), state={})


@lru_cache(maxsize=1)
def _load(path: Path, size: Size | None, stamp: Stamp) -> Graph:
    from gemel.models.graph import load_graph
    from gemel.models.graph.unfold import unfold_norms

    return unfold_norms(load_graph(path, size))


def load_file(
    path: Path,
    classes: tuple[str, ...],
    task: str | None,
    decoder: str,
    preprocess: Preprocess | None,
    min_score: float,
) -> FrameModel:
    """A file's model with `preprocess`, `classes` and `predict`; InputError where nothing says what they are.

    Its hints name the arguments of `gemel.load_model`, where those of a workload name its keys.
    """
    try:
        if not is_model_file(str(path)):
            check_suffix(str(path), str(path), "")
            other = "open_bundle reads bundles, and a workload names weights and their network"
            hint = f"give an .onnx or .pt2 file; {other}"
            raise InputError(path, f"'{path.suffix}' files hold no network that is read", hint)
        size = None if preprocess is None else preprocess.size
        file = ModelFile(path, size, decoder, task, classes).complete()
        preprocess = preprocess or file.preprocess()
        if preprocess is None:
            problem = "nothing says the mean and the deviation with which it was trained"
            raise InputError(
                path, problem, "give them: preprocess=gemel.Preprocess((H, W), mean=..., std=...)"
            )
        model = file.build().eval()
        predictor = Predictor(
            model, str(file.task), file.classes, TensorPreprocess(preprocess), min_score
        )
        return add_predictor(model, predictor, path.name)
    except InputError as error:
        key = "" if error.key in ("model", "") else error.key
        raise type(error)(error.where, error.problem, hint_in_python(error.hint), key) from error


def hint_in_python(hint: str) -> str:
    """A hint on the keys of a workload, as arguments of a call."""
    if "input_size:" in hint:
        return "give it: preprocess=gemel.Preprocess((H, W), mean=..., std=...)"
    return YAML_KEY.sub(r"`\1='\2'`", hint)
