"""What a workbench holds: the originals of a workload and their frames, each loaded when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from merger.training.device import default_device
from merger.training.loop import TrainingSet
from models.errors import InputError
from models.frames.data import load_split
from models.frames.prepared import Prepared
from models.sharing.layers import Layer, layers_of_all
from models.weights.reading import load_weights
from models.workload import Query, Workload
from models.zoo import build_query

T = TypeVar("T")


class OnDemand(Mapping[str, T]):
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


class Stock:
    """Query -> its original, and its frames of each split, on one device.

    What is loaded is checked: InputError for a weights file that is missing or does not fit, or a frame that does not
    decode. A worker's jobs need little of it; `load` loads all.
    """

    def __init__(self, workload: Workload, device: torch.device | None = None) -> None:
        self.workload, self.device = workload, device or default_device()
        self.queries: dict[str, Query] = {query.id: query for query in workload.queries}
        self.layers: list[Layer] = layers_of_all(workload.queries)
        self.originals: Mapping[str, nn.Module] = OnDemand(self.queries, self._original)
        self.test: Mapping[str, Prepared] = OnDemand(self.queries, partial(self._decoded, "test"))
        self.train: Mapping[str, TrainingSet] = OnDemand(self.queries, self._training_set)
        self.val: Mapping[str, Prepared] = OnDemand(self.queries, partial(self._decoded, "val"))
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
        return TrainingSet(query, self._decoded("train", query))

    def _decoded(self, name: str, query: Query) -> Prepared:
        return Prepared(query, load_split(query, name)).load(self._told)
