"""Which queries of a bundle one pass can serve: one architecture, fed alike, with enough in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemel.models.bundle import BundleQuery

MIN_TIED_SHARE = 0.5
"""Share of a query's bytes that it must tie with another one: the rest runs query by query."""
MIN_PREFIX_SHARE = 0.2
"""Share of a query's tensors, from the first one on, that suffices in its place for two queries of one camera: early
layers have few bytes and most operations (the first fifth of a ResNet-18's tensors: 1 % and 26 %)."""


def joint_queries(
    queries: Iterable[BundleQuery], nbytes: Callable[[str], int]
) -> tuple[tuple[str, ...], ...]:
    """The sets of two queries or more that can run as one batch; `nbytes` gives the bytes of a tensor.

    The tensors' names alone decide: a query joins the first set whose first query has most of its bytes, or on the
    same camera its first layers, norms included. Networks may differ in the classes of a classifier; packed weights
    keep a query out.
    """
    sets: dict[Hashable, list[list[BundleQuery]]] = {}
    for query in queries:
        if not query.stored and query.tensors:
            members = sets.setdefault((pass_architecture(query), frozenset(query.tensors)), [])
            joint = next(
                (candidate for candidate in members if _is_joint(query, candidate[0], nbytes)), None
            )
            if joint is None:
                members.append([query])
            else:
                joint.append(query)
    return tuple(
        tuple(query.id for query in ids)
        for members in sets.values()
        for ids in members
        if len(ids) > 1
    )


def pass_architecture(query: BundleQuery) -> Hashable:
    """What must be equal: the network, the preparation of frames, and where outputs depend on them, the classes."""
    classes = 0 if query.task == "classification" else len(query.classes)
    args = json.dumps(query.model_args, sort_keys=True)
    return query.task, query.network, args, query.input_size, query.preprocess, classes


def fed_alike(query: BundleQuery) -> Hashable:
    """What queries with a common prefix have in common besides its tensors: network, preparation, camera, region."""
    return pass_architecture(query), query.view


def _is_joint(query: BundleQuery, other: BundleQuery, nbytes: Callable[[str], int]) -> bool:
    keys = list(query.tensors)
    tied = sum(
        nbytes(query.tensors[key]) for key in keys if other.tensors[key] == query.tensors[key]
    )
    if tied >= MIN_TIED_SHARE * sum(map(nbytes, query.tensors.values())):
        return True
    if fed_alike(query) != fed_alike(other):
        return False
    prefix = takewhile(lambda key: other.tensors[key] == query.tensors[key], keys)
    return sum(1 for _ in prefix) >= MIN_PREFIX_SHARE * len(keys)
