"""What queries need of a box: bytes of their own, bytes that they share with others there, workspace, time.

Queries that need the same are one sort, of which only the number counts. What a box holds of shared weights is a sum
over pieces: a piece is there where any query of certain sorts is. Of a signature that occurs n times in a model at
most, the k-th piece is there for every model that has it k times or more: so a set of queries takes the bytes of its
own ceiling (models.sharing.groups).
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gemel.analytic_costs import costs_for, workload_originals
from gemel.conditions import Shared
from gemel.fleet import Fleet
from gemel.planner import DEFAULT_FPS
from models.sharing.layers import Layer, layers_of, model_bytes
from models.workload import Query

Counts = np.ndarray
"""How many queries of each sort are together, int64 (sorts,)."""
LARGE_BYTES, LARGE_PART = 1 << 20, 0.01
"""Of a merge every weight of so many bytes, or of such a part of its model, is predicted to be shared."""


@dataclass(frozen=True)
class Sort:
    """Queries that need the same; `seconds` is what a frame takes at best, by device, infinite past the SLA."""

    queries: tuple[str, ...]
    private_bytes: int
    workspace_bytes: int
    fps: float
    seconds: Mapping[str, float]
    reach: tuple[bool, ...]


@dataclass(frozen=True)
class Piece:
    """Bytes that a box holds once where it has a query of any of these sorts."""

    nbytes: int
    sorts: frozenset[int]


@dataclass(frozen=True)
class Needs:
    """The sorts of a fleet's queries, and the pieces that they share."""

    sorts: tuple[Sort, ...]
    pieces: tuple[Piece, ...]

    @cached_property
    def asked(self) -> Counts:
        """How many there are of each sort."""
        return np.array([len(sort.queries) for sort in self.sorts])

    @cached_property
    def private(self) -> np.ndarray:
        """Bytes of each query's own, by sort."""
        return np.array([sort.private_bytes for sort in self.sorts])

    @cached_property
    def workspace(self) -> np.ndarray:
        """Bytes of intermediates, by sort."""
        return np.array([sort.workspace_bytes for sort in self.sorts])

    @cached_property
    def fps(self) -> np.ndarray:
        """Frames a second, by sort."""
        return np.array([sort.fps for sort in self.sorts])

    @cached_property
    def piece_bytes(self) -> np.ndarray:
        """Bytes of each piece."""
        return np.array([piece.nbytes for piece in self.pieces], dtype=np.int64)

    @cached_property
    def member(self) -> np.ndarray:
        """Whether a sort needs a piece: bool (sorts, pieces)."""
        found = np.zeros((len(self.sorts), len(self.pieces)), dtype=bool)
        for at, piece in enumerate(self.pieces):
            found[sorted(piece.sorts), at] = True
        return found

    @cached_property
    def own(self) -> np.ndarray:
        """Bytes of the weights of one query alone, by sort."""
        return self.private + self.member @ self.piece_bytes

    @cached_property
    def sort_of(self) -> dict[str, int]:
        """The sort of each query."""
        return {query: at for at, sort in enumerate(self.sorts) for query in sort.queries}

    def counts(self, queries: Iterable[str]) -> Counts:
        """How many of these queries are of each sort; those of no sort do not count."""
        known = [self.sort_of[query] for query in queries if query in self.sort_of]
        return np.bincount(np.array(known, dtype=np.int64), minlength=len(self.sorts))

    def there(self, counts: Counts) -> np.ndarray:
        """Whether these queries need a piece: bool (pieces,)."""
        return np.logical_or.reduce(self.member[counts > 0], axis=0)

    def seconds(self, device: str) -> np.ndarray:
        """What a frame takes at best on a device, by sort."""
        return np.array([sort.seconds[device] for sort in self.sorts])

    def weights(self, counts: Counts) -> int:
        """Bytes of the unique tensors of these queries together."""
        return int(counts @ self.private + self.there(counts) @ self.piece_bytes)

    def taken(self, counts: Counts) -> int:
        """Bytes that these queries take together: their unique tensors, and the largest workspace."""
        return self.weights(counts) + int(self.workspace[counts > 0].max(initial=0))


def needs_of(fleet: Fleet, shared: Shared, timed: bool) -> Needs:
    """What a fleet's queries need where models share as `shared` says.

    Unless it is `timed`, queries that differ only in their frames a second or their SLA are one sort.
    """
    reach = {query.id: tuple(boxes.reaches(query) for boxes in fleet.boxes) for query in fleet.queries}
    alike = defaultdict[tuple, list[Query]](list)
    for query in fleet.queries:
        alike[(*_model(query), reach[query.id], *((query.fps, query.sla_ms) if timed else ()))].append(query)
    firsts = [queries[0] for queries in alike.values()]
    models = workload_originals(firsts)
    costs = {
        name: costs_for(profile, models).queries
        for name, profile in {boxes.profile.name: boxes.profile for boxes in fleet.boxes}.items()
    }
    workspaces = next(iter(costs.values()))
    sorts, kept = list[Sort](), list[list[Layer]]()
    for first, queries in zip(firsts, alike.values(), strict=True):
        kept.append(shared_layers(first, shared))
        private = model_bytes(first) - sum(layer.bytes for layer in kept[-1])
        sorts.append(Sort(
            tuple(query.id for query in queries), private, workspaces[first.id].workspace_bytes,
            first.fps or DEFAULT_FPS,
            {name: _seconds(of_device[first.id]) for name, of_device in costs.items()}, reach[first.id],
        ))  # fmt: skip
    return Needs(tuple(sorts), _pieces(kept))


def shared_layers(query: Query, shared: Shared) -> list[Layer]:
    """The layers of a query's model whose weights others on its box can use as well.

    `predicted` are those that merges have kept shared: weights that are large, or a large part of their model. Smaller
    ones, mostly of early layers, are what merges take back (docs/fleet.md).
    """
    layers = [layer for layer in layers_of(query) if not layer.head]
    if shared == "predicted":
        least = min(LARGE_BYTES, LARGE_PART * model_bytes(query))
        return [layer for layer in layers if layer.bytes >= least]
    return layers if shared == "ceiling" else []


def _model(query: Query) -> tuple:
    args = json.dumps(query.model_args, sort_keys=True, default=str)
    folder = None if query.file is None or ":" not in query.model else query.file.parent
    return query.model, args, len(query.classes), query.input_size, query.task, folder


def _seconds(cost) -> float:
    if cost.run_s > cost.sla_s:
        return math.inf
    return min(cost.run_of(count) / count for count in range(1, cost.largest + 1))


def _pieces(layers: Sequence[Iterable[Layer]]) -> tuple[Piece, ...]:
    """Of every sort's layers that can share, what a box holds of them, what the same sorts need being one piece."""
    size, times = dict[str, int](), defaultdict[str, dict[int, int]](dict)
    for sort, of_sort in enumerate(layers):
        for signature, count in Counter(layer.wide for layer in of_sort).items():
            times[signature][sort] = count
        size |= {layer.wide: layer.bytes for layer in of_sort}
    found = Counter[frozenset[int]]()
    for signature, counts in times.items():
        for level in range(1, max(counts.values()) + 1):
            found[frozenset(sort for sort, count in counts.items() if count >= level)] += size[signature]
    return tuple(Piece(nbytes, sorts) for sorts, nbytes in found.items())
