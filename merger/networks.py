"""A query answered by another query's network: the query that names it, and the weights that it starts with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from torch import Tensor

from gemel.models.bundle import BundleQuery
from gemel.models.bundle.manifest import GRAPH
from gemel.models.errors import InputError
from gemel.models.sharing.layers import layers_of
from gemel.models.workload import Query
from gemel.models.zoo import build_query, is_model_file

Value = TypeVar("Value")
NETWORK_KEYS = ("model", "model_args", "input_size", "preprocess", "decoder")
"""What a query says about its network; the rest is its question."""


class Joined(Mapping[str, Value]):
    """The values of `known`, with those of `changed` in their place; both make a value on first use."""

    def __init__(self, known: Mapping[str, Value], changed: Mapping[str, Value]) -> None:
        self._known, self._changed = known, changed

    def __getitem__(self, query: str) -> Value:
        return (self._changed if query in self._changed else self._known)[query]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def answered_by(query: Query, donor: Query) -> Query:
    """The query as the donor's network answers it: its own question, classes and frames, the donor's network."""
    return replace(query, **{key: getattr(donor, key) for key in NETWORK_KEYS})


@lru_cache(maxsize=4096)
def can_answer(query: Query, donor: Query) -> bool:
    """Whether the donor's network can have the query's classes: a file has its own outputs, others get a head."""
    if not is_model_file(donor.model) or query.classes == donor.classes:
        return True
    try:
        build_query(answered_by(query, donor), "meta")
    except InputError:
        return False
    return True


def query_as_stored(query: Query, record: BundleQuery) -> Query:
    """The query with the network that a bundle answers it with; one that came as a graph is taken for its own."""
    if record.substitution is None or record.model == GRAPH:
        return query
    keys = {key: getattr(record, key) for key in NETWORK_KEYS if key != "decoder"}
    return replace(query, **keys)


def outputs_of(query: Query, donor: Query) -> list[int] | None:
    """The donor's output for each class of the query, by name, or by place where as many have other names.

    None where the donor has no output for some class. A detector's outputs keep their places.
    """
    if query.classes == donor.classes:
        return list(range(len(query.classes)))
    if query.task == "classification" and set(query.classes) <= set(donor.classes):
        return [donor.classes.index(name) for name in query.classes]
    alike = len(query.classes) == len(donor.classes) and not set(query.classes) & set(donor.classes)
    return list(range(len(query.classes))) if alike else None


def adapt_state(
    query: Query, donor: Query, fresh: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The donor's state for `query`, which names the donor's network: heads have the outputs of the query's classes.

    So do norms behind heads. Where the donor lacks an output for some class, both keep their `fresh` weights.
    """
    outputs, heads = outputs_of(query, donor), _head_keys(query, fresh)
    heads |= {key for key, own in fresh.items() if state[key].shape != own.shape}
    found = dict[str, Tensor]()
    for key, own in fresh.items():
        if key not in heads:
            found[key] = state[key]
        elif outputs is not None and query.task == "classification":
            found[key] = state[key][outputs]
        else:
            found[key] = own if outputs is None else state[key]
    return found


def _head_keys(query: Query, keys: Mapping[str, Tensor]) -> set[str]:
    heads: Sequence[str] = [layer.path for layer in layers_of(query) if layer.head]
    return {key for key in keys for path in heads if key.startswith(f"{path}.")}
