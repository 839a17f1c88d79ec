"""What a workbench holds: originals, their frames, and what they reach, each loaded when it is first asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from merger.core.scores import scores_of
from merger.distributed import ProcessGroup
from merger.events import Progress
from merger.training.data import TrainingSet, default_device
from models.data import PreparedFrames, load_split
from models.errors import InputError, join_names
from models.evaluation import is_competent, load_labels, predict, score, tallies_by_unit
from models.predictions import GroundTruth
from models.sharing.layers import Layer, layers_of_all
from models.tasks import task_of
from models.weights import load_weights
from models.workload import Query, Workload
from models.zoo import build_query

T = TypeVar("T")
ROUNDING = 1e-6
MIN_UNITS = 10
"""Clips or tracks of val below which a query is reported: its frames are many, what they can tell is not."""


class LazyDict(Mapping[str, T]):
    """Query id -> what `make` makes of the query, once."""

    def __init__(self, queries: Mapping[str, Query], make: Callable[[Query], T]) -> None:
        self._queries, self._make = queries, make
        self._made: dict[str, T] = {}

    def __getitem__(self, query: str) -> T:
        if query not in self._made:
            self._made[query] = self._make(self._queries[query])
        return self._made[query]

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)


class MergeInputs:
    """Query -> its original, and its frames of each split, on one device.

    What is loaded is checked: InputError for a weights file that is missing or does not fit, or a frame that does not
    decode. `load` loads all; frames of other ranks' queries are decoded on demand.
    """

    def __init__(
        self, workload: Workload, device: torch.device | None = None, group: ProcessGroup | None = None
    ) -> None:
        self.workload, self.device, self.group = workload, device or default_device(), group or ProcessGroup()
        self.queries: dict[str, Query] = {query.id: query for query in workload.queries}
        self.layers: list[Layer] = layers_of_all(workload.queries)
        self.originals: Mapping[str, nn.Module] = LazyDict(self.queries, self._original)
        self.test: Mapping[str, PreparedFrames] = LazyDict(self.queries, partial(self._decoded, "test"))
        self.train: Mapping[str, TrainingSet] = LazyDict(self.queries, self._training_set)
        self.val: Mapping[str, PreparedFrames] = LazyDict(self.queries, partial(self._decoded, "val"))
        self._parts = (self.originals, self.test, self.train, self.val)
        self._told: Callable[[float], None] = lambda done: None

    @property
    def pieces(self) -> int:
        """How many models and splits there are to load."""
        return len(self._parts) * len(self.queries)

    def load(self, told: Callable[[float], None]) -> None:
        """Load everything now; `told` hears how many of the `pieces` are loaded, parts of one counted."""
        places = [(part, query) for part in self._parts for query in self.queries]
        for number, (part, query) in enumerate(places):
            self._told = lambda done, number=number: told(number + done)
            part[query]
            told(number + 1)
        self._told = lambda done: None

    def _original(self, query: Query) -> nn.Module:
        if query.weights is None:
            raise InputError(self.workload.path, "no weights are named", "add `weights:`", f"queries.{query.id}")
        if not query.weights.exists():
            remedy = f"correct the path, or run `gemel train {self.workload.path.name}`"
            raise InputError(str(query.weights), f"does not exist (query {query.id})", remedy, "weights")
        model = build_query(query)
        load_weights(query, model)
        return model.to(self.device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore

    def _training_set(self, query: Query) -> TrainingSet:
        found = TrainingSet(query, self._decoded("train", query))
        if self._here(query):
            _ = found.targets  # labels that are none are found now
        return found

    def _decoded(self, name: str, query: Query) -> PreparedFrames:
        found = PreparedFrames(query, load_split(query, name))
        return found.load(self._told) if self._here(query) else found

    def _here(self, query: Query) -> bool:
        return self.group.owns(query.id)


@dataclass(frozen=True)
class Reference:
    """What an original reaches on val, the truth it is judged by, and the score from which its detections count.

    `one_error` is the part of that score that one wrong answer can cost; `tallies` are the counts of each clip or
    track; `detections` is how many of a detector's count on some train frames (merger.core.scores).
    """

    truths: Sequence[GroundTruth]
    threshold: float
    score: float
    one_error: float
    tallies: np.ndarray
    detections: int = 0


def named_otherwise(query: Query, answers: Sequence[Any], labels: Sequence[GroundTruth]) -> tuple[str, ...] | None:
    """The order of the classes in which the answers fit the labels, where it is another one than the query's.

    An output is called what most frames that it is the answer to are labelled as; None where two outputs are called
    the same then, or where the answers would still prove nothing.
    """
    met = {name: Counter[GroundTruth]() for name in query.classes}
    for answer, label in zip(answers, labels, strict=True):
        met[answer.label][label] += 1
    most = [one.most_common(1)[0] for one in met.values() if one]
    order, right = tuple(str(label) for label, _ in most), sum(count for _, count in most) / len(labels)
    another = set(order) == set(query.classes) and order != query.classes
    return order if another and is_competent(query, right) else None


def evaluated(stock: MergeInputs, query: Query, progress: Progress, told: Callable[[int], None]) -> Reference:
    """The reference of one query; progress hears of it, and of what makes it weak evidence.

    `told` hears how many more frames were answered.
    """
    task, val = task_of(query.task), stock.val[query.id]
    answers = predict(stock.originals[query.id], query, val, progress=told)
    labelled = val.split.labels
    threshold = task.choose_threshold(answers, labelled) if labelled is not None else query.min_score
    truths = load_labels(query, val.split, answers, threshold)
    reached = score(task, answers, truths, query.classes, threshold)
    needed = query.accuracy_target * reached  # the target is a ratio, so what it asks for depends on the original
    progress("reference", query=query.id, metric=task.metric, val=reached, needed=needed)
    order = named_otherwise(query, answers, labelled) if query.task == "classification" and labelled else None
    if order is not None:
        text = f"{query.id}: its original's answers fit the labels when its outputs are called {join_names(order)}, in"
        progress("warning", text=f"{text} this order; list `classes` so, or look how the weights belong to them")
    elif not is_competent(query, reached):
        text = f"{query.id}: its original reaches {reached:.2f} {task.metric} on val, which is no evidence"
        progress("warning", text=f"{text}; train it longer, or on more frames")
    units = len(set(val.split.units))
    if units < MIN_UNITS:
        what = "clip or track" if units == 1 else "clips or tracks"
        text = f"{query.id}: all of its val comes from {units} {what}; what holds there may not hold elsewhere"
        progress("warning", text=text)
    one_error = task.one_error(truths, query.classes) * (1 + ROUNDING) / reached if reached > 0 else 1.0
    found = 0
    if query.task == "detection":
        found = int((scores_of(stock.originals[query.id], query, stock.train[query.id]) >= threshold).sum())
    tallies = tallies_by_unit(query, val.split, answers, truths, threshold)
    return Reference(truths, threshold, reached, one_error, tallies, found)
