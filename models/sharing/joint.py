"""Which queries of a bundle one pass can serve: one architecture, fed alike, most of their weights tied."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.bundle import BundleQuery

MIN_TIED_SHARE = 0.5
"""Share of a query's bytes that it must tie with another one: the rest runs query by query."""


def joint_queries(queries: Iterable[BundleQuery], nbytes: Callable[[str], int]) -> tuple[tuple[str, ...], ...]:
    """The sets of two queries or more that can run as one batch; `nbytes` gives the bytes of a tensor.

    The tensors' names alone decide: a query joins the first set whose first query has most of its bytes. Networks may
    differ in the classes of a classifier; packed weights keep a query out.
    """
    sets: dict[Hashable, list[list[BundleQuery]]] = {}
    for query in queries:
        if not query.stored and query.tensors:
            alike = sets.setdefault(_architecture(query), [])
            found = next((one for one in alike if _tied_share(query, one[0], nbytes) >= MIN_TIED_SHARE), None)
            if found is None:
                alike.append([query])
            else:
                found.append(query)
    return tuple(tuple(query.id for query in one) for alike in sets.values() for one in alike if len(one) > 1)


def _architecture(query: BundleQuery) -> Hashable:
    """What must be equal: the network, the preparation of frames, and where outputs depend on them, the classes."""
    classes = 0 if query.task == "classification" else len(query.classes)
    args = json.dumps(query.model_args, sort_keys=True)
    return query.task, query.network, args, query.input_size, query.preprocess, classes, frozenset(query.tensors)


def _tied_share(query: BundleQuery, other: BundleQuery, nbytes: Callable[[str], int]) -> float:
    tied = sum(nbytes(name) for key, name in query.tensors.items() if other.tensors[key] == name)
    return tied / sum(map(nbytes, query.tensors.values()))
