"""Values of queries, each made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from models.workload import Query

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
