"""Pieces: tensors that come and go together, so that a schedule has a hundred names to look at, not thousands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from edge_runtime.schedule.costs import Costs, QueryCost

PIECES = 256


@dataclass(frozen=True, eq=False)
class Pieces:
    """The costs over pieces, and the tensors of each piece in load order."""

    costs: Costs
    tensors: Mapping[str, tuple[str, ...]]

    def held(self, resident: Set[str]) -> frozenset[str]:
        """The pieces of which every tensor is resident."""
        return frozenset(piece for piece, names in self.tensors.items() if all(name in resident for name in names))

    def names(self, pieces: Iterable[str]) -> tuple[str, ...]:
        """The tensors of these pieces."""
        return tuple(name for piece in pieces for name in self.tensors[piece])


def pieces_of(costs: Costs, piece_bytes: int | None = None) -> Pieces:
    """Tensors that the same queries need become one piece, in load order.

    Pieces hold at most `piece_bytes` (PIECES-th of all bytes unless given) or a single tensor; what a query needs, its
    bytes and its footprint stay exactly the same.
    """
    limit = piece_bytes or max(1, sum(costs.tensor_bytes.values()) // PIECES)
    users: dict[str, list[str]] = {}
    for query, cost in costs.queries.items():
        for name in cost.tensors:
            users.setdefault(name, []).append(query)
    tensors: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    piece_of: dict[str, str] = {}
    unfilled: dict[tuple[str, ...], str] = {}
    for name, by in users.items():
        key, nbytes = tuple(by), costs.tensor_bytes[name]
        piece = unfilled.get(key)
        if piece is None or sizes[piece] + nbytes > limit:
            piece = unfilled[key] = name
            sizes[piece], tensors[piece] = 0, []
        piece_of[name] = piece
        sizes[piece] += nbytes
        tensors[piece].append(name)
    footprints = {piece: costs.resident_bytes(names) for piece, names in tensors.items()}
    queries = {
        query: QueryCost(
            tuple(piece_of[name] for name in cost.tensors), cost.run_s, cost.workspace_bytes, cost.sla_s, cost.larger
        )
        for query, cost in costs.queries.items()
    }
    small = Costs(queries, sizes, costs.copy_bytes_per_s, costs.load_latency_s, footprints)
    return Pieces(small, {piece: tuple(names) for piece, names in tensors.items()})


def condensed(costs: Costs) -> Costs:
    """The same costs over pieces."""
    return pieces_of(costs).costs
