"""The originals of a workload and their frames of each split: what trains, what a search goes by, what proves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from gemel.merger.config import SEARCH
from gemel.merger.distributed import ProcessGroup
from gemel.merger.observe import ValAnswers, compare_answers, observe
from gemel.merger.proof import Observed
from gemel.merger.training.data import TrainingSet
from gemel.models.data import Frames, PreparedFrames, Split, load_split
from gemel.models.errors import InputError
from gemel.models.files.weights import load_weights
from gemel.models.footage import FootageCut, ProofFrames, footage_of, load_footage, prepare_proof
from gemel.models.measures.evaluation import count_samples, load_labels, predict, threshold_without_labels
from gemel.models.predictions import Prediction
from gemel.models.tasks import task_of
from gemel.models.workload import Query, Workload
from gemel.models.zoo import build_query

Made = TypeVar("Made")


class LazyDict(Mapping[str, Made]):
    """Query id -> what `make` makes of the query, once."""

    def __init__(self, queries: Mapping[str, Query], make: Callable[[Query], Made]) -> None:
        self._queries, self._make = queries, make
        self._made: dict[str, Made] = {}

    def __getitem__(self, query: str) -> Made:
        if query not in self._made:
            self._made[query] = self._make(self._queries[query])
        return self._made[query]

    def drop(self, queries: Iterable[str]) -> None:
        """Forget what was made of these queries; it is made again on its next use."""
        for query in queries:
            self._made.pop(query, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)


@dataclass(frozen=True)
class TrainCut:
    """The train split of a query without the frames that a search goes by, those, and the footage."""

    train: Split
    search: Split
    footage: FootageCut | None


class WorkloadData:
    """Everything that a merge reads, query by query, on first use.

    `train` trains, together with a part of the footage, which the original labels; a search goes by `search`; `val` and
    `footage` prove. In a group of processes frames of other ranks' queries are decoded on demand. `reach` gets the
    decoded fraction of a split, `add` the number of frames that an original has answered. InputError for a weights file
    that is missing or does not fit, or a frame that does not decode.
    """

    def __init__(self, workload: Workload, device: torch.device, group: ProcessGroup) -> None:
        self.workload, self.device, self.group = workload, device, group
        self.reach: Callable[[float], None] = lambda done: None
        self.add: Callable[[int], None] = lambda frames: None
        queries = self.queries = {query.id: query for query in workload.queries}
        self.originals: LazyDict[nn.Module] = LazyDict(queries, self._load_original)
        self.test: Mapping[str, PreparedFrames] = LazyDict(queries, partial(self._decode_split, "test"))
        self.val: Mapping[str, PreparedFrames] = LazyDict(queries, partial(self._decode_split, "val"))
        self.val_answers: Mapping[str, ValAnswers] = LazyDict(queries, self._answer_val)
        self.cuts: Mapping[str, TrainCut] = LazyDict(queries, self._cut_train)
        self.train: Mapping[str, TrainingSet] = LazyDict(queries, self._load_training_set)
        self.search: Mapping[str, PreparedFrames] = LazyDict(queries, self._prepare_search)
        self.footage: Mapping[str, ProofFrames | None] = LazyDict(queries, self._prepare_footage)
        self.footage_answers: Mapping[str, list[Prediction]] = LazyDict(queries, self._answer_footage)

    @property
    def parts(self) -> tuple[Mapping[str, Any], ...]:
        """What is read before a merge begins."""
        return self.originals, self.test, self.val, self.train, self.search

    def drop_originals(self) -> None:
        """Free the originals of other ranks' queries."""
        self.originals.drop(query for query in self.queries if not self.group.owns(query))

    def count_frames(self, query: str, proves: bool) -> int:
        """The frames that an original answers: of val, of the search and, where a merge `proves`, of the footage."""
        cut, val = self.cuts[query].footage, self.val[query].split
        proof = cut or (footage_of(val) if val.labels is None else None)
        return len(val) + len(self.search[query]) + (len(proof.proof) if proves and proof is not None else 0)

    def observe_original(self, query: str) -> Observed:
        """What val and footage say of an original compared with itself: what they could say at best."""
        own, val, proof = self.queries[query], self.val_answers[query], self.footage[query]
        blocks = None
        if proof is not None and proof.places:
            answers = self.footage_answers[query]
            same = compare_answers(own, answers, answers, val.threshold)
            blocks = same.by_block(proof.blocks, proof.seconds)
        return observe(own, val, val.answers if val.is_labelled else None, blocks)

    def _load_original(self, query: Query) -> nn.Module:
        if query.weights is None:
            raise InputError(self.workload.path, "no weights are named", "add `weights:`", f"queries.{query.id}")
        if not query.weights.exists():
            hint = f"correct the path, or run `gemel train {self.workload.path.name}`"
            raise InputError(str(query.weights), f"does not exist (query {query.id})", hint, "weights")
        model = build_query(query)
        load_weights(query, model)
        return model.to(self.device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore

    def _answer_val(self, query: Query) -> ValAnswers:
        task, val = task_of(query), self.val[query.id]
        answers = predict(self.originals[query.id], query, val, progress=self.add)
        labels = val.split.labels
        threshold = task.choose_threshold(answers, labels) if labels is not None else threshold_without_labels(query)
        return ValAnswers(val.split, load_labels(query, val.split, answers, threshold), answers, threshold)

    def _cut_train(self, query: Query) -> TrainCut:
        train, search = cut_search(query, load_split(query, "train"))
        footage = load_footage(query)
        if footage is not None and footage.training is not None:
            more = footage.training
            if train.labels is not None:
                threshold, task = self.val_answers[query.id].threshold, task_of(query)
                answers = predict(self.originals[query.id], query, more)
                more = replace(more, labels=tuple(task.labels_of(answer, threshold) for answer in answers))
            half = len(more) // 2  # in time
            train = join_splits(train, more.at(range(half)))
            search = join_splits(search, more.at(range(half, len(more))))
        return TrainCut(train, search, footage)

    def _load_training_set(self, query: Query) -> TrainingSet:
        training = TrainingSet(query, self._prepare(query, self.cuts[query.id].train))
        if self.group.owns(query.id):
            _ = training.targets  # labels that are none are found now
        return training

    def _prepare_search(self, query: Query) -> PreparedFrames:
        return self._prepare(query, self.cuts[query.id].search)

    def _prepare_footage(self, query: Query) -> ProofFrames | None:
        """The frames that prove; those of val, where that is footage without labels itself."""
        cut, val = self.cuts[query.id].footage, self.val[query.id]
        if cut is not None:
            return prepare_proof(query, cut, [self.train[query.id].prepared, self.search[query.id]], val)
        if val.split.labels is not None:
            return None
        return prepare_proof(query, footage_of(val.split), [])

    def _answer_footage(self, query: Query) -> list[Prediction]:
        proof = self.footage[query.id]
        if proof is None or not proof.places:
            return []
        return predict(self.originals[query.id], query, proof.frames, progress=self.add, places=proof.places)

    def _decode_split(self, name: str, query: Query) -> PreparedFrames:
        return self._prepare(query, load_split(query, name))

    def _prepare(self, query: Query, split: Split) -> PreparedFrames:
        frames = PreparedFrames(query, split)
        return frames.load(self.reach) if self.group.owns(query.id) else frames


def cut_search(query: Query, split: Split) -> tuple[Split, Split]:
    """The frames of train that train, and those that a search goes by: about every fifth clip, of each class too.

    Fewer clips than that are each cut in time. A small split is used for both.
    """
    every, units = SEARCH.every, list(dict.fromkeys(split.units))
    if len(split) < SEARCH.min_frames:
        return split, split
    if len(units) < every:
        searched = set[int]()
        for unit in units:
            places = [place for place, name in enumerate(split.units) if name == unit]
            searched.update(places[len(places) - len(places) // every :])
    else:
        shown = {unit: Counter[str]() for unit in units}
        for place, unit in enumerate(split.units):
            shown[unit][EVERY_FRAME] += 1
            if split.labels is not None:
                shown[unit].update(count_samples(query, [split.labels[place]]))
        chosen = _draw_units(shown)
        searched = {place for place, unit in enumerate(split.units) if unit in chosen}
    trained = [place for place in range(len(split)) if place not in searched]
    return split.at(trained), split.at(sorted(searched))


EVERY_FRAME = ""
"""In place of a class."""


def _draw_units(shown: Mapping[str, Counter[str]]) -> set[str]:
    """The units that together hold about one of `every` frames, of each class too."""
    seen, drawn, chosen = Counter[str](), Counter[str](), set[str]()
    for unit, counts in shown.items():
        seen.update(counts)
        lacking = {name: seen[name] / SEARCH.every - drawn[name] for name in counts}
        if sum(abs(lacking[name] - counts[name]) - abs(lacking[name]) for name in counts) < 0:
            chosen.add(unit)
            drawn.update(counts)
    return chosen


def join_splits(first: Split, second: Split) -> Split:
    """The frames of two splits one after the other; labels of both, or none."""
    loaders = [partial(split.frames.__getitem__, place) for split in (first, second) for place in range(len(split))]
    labels: Sequence[Any] | None = None
    if first.labels is not None and second.labels is not None:
        labels = (*first.labels, *second.labels)
    units, times_s = (*first.units, *second.units), (*first.times_s, *second.times_s)
    return Split(first.name, Frames(loaders), labels, units, times_s)  # type: ignore[arg-type]
