"""What a merge takes, in a cost that is the same on every machine."""

from __future__ import annotations

from collections.abc import Callable

from models.cost import flops
from models.workload import Query
from models.zoo import build_query


class Work:
    """Image passes x FLOPs spent in retraining; a backward pass counts as two forward ones.

    `told` is called after each addition.
    """

    def __init__(self) -> None:
        self.total: float = 0  # a whole number, so that it does not depend on the order of additions
        self.told: Callable[[], None] = lambda: None
        self._flops: dict[str, int] = {}

    def add(self, query: Query, passes: int) -> None:
        """Count `passes` forward passes of one image through the query's model."""
        self.add_flops(passes * self.of(query))

    def add_flops(self, flops: int) -> None:
        """Count so many FLOPs of anything else."""
        self.total += flops
        self.told()

    def of(self, query: Query) -> int:
        """FLOPs of one forward pass of one image."""
        if query.id not in self._flops:
            self._flops[query.id] = forward_flops(query)
        return self._flops[query.id]


def forward_flops(query: Query) -> int:
    """FLOPs of one frame through the query's model, found without weights."""
    model = build_query(query, device="meta")
    return flops(model, query.input_size)
