"""Who does a merge: one process, or several that run the same program, each with queries of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from models.errors import GemelError

T = TypeVar("T")


class Waiting(Protocol):
    """A sum that is on its way; torch.distributed's Work is one."""

    def wait(self) -> Any:
        """Return once it is there."""
        ...


class Link(Protocol):
    """What connects the processes of a crew; `merger.crew.joining.Processes` is one.

    All of them call the same methods in the same order. Raises CrewError when one of them is gone.
    """

    rank: int
    size: int

    def broadcast(self, value: Any, by: int) -> Any:
        """What the process `by` has: plain values and tensors, in the processor's memory."""
        ...

    def gather(self, value: Any, to: int | None) -> list[Any]:
        """What each process has, in order of rank; only for one process where `to` names it, empty for the others."""
        ...

    def numbers(self, own: Sequence[float], *, by: int | None = None) -> list[float]:
        """The sums over all processes of some numbers, the same bits everywhere; or those of the process `by`."""
        ...

    def reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Waiting:
        """Begin to sum a contiguous tensor in place over these processes; this one is among them."""
        ...

    def meet(self, ranks: tuple[int, ...]) -> None:
        """Prepare for sums over these processes; all processes call it, those that are not among them, too."""
        ...


class CrewError(GemelError):
    """Another process of the crew is gone, or failed; what it was is told there."""


class ToldElsewhere(SystemExit):
    """The same error is told by another process; this one ends with its exit code, silently."""


class Crew:
    """The processes of a merge, seen from one of them; without a `link` there is no other.

    `rank` is this one's number: 0 writes and tells, the others follow it. Everything a process decides by comes from
    what all know. Apart (`apart`) a process is alone for a while: it has all queries and tells nobody. `given` are the
    bytes of gradients that this one has handed over to be summed, in so many `steps`.
    """

    def __init__(self, link: Link | None = None) -> None:
        self._link = link
        self.given, self.steps = 0, 0
        self._owner: Mapping[str, int] = {}
        self._apart = 0

    @property
    def rank(self) -> int:
        """The number of this process, from 0 on, apart or not."""
        return self._link.rank if self._link is not None else 0

    @property
    def size(self) -> int:
        """How many processes work together now: 1 apart from the others."""
        return self._link.size if self._link is not None and not self._apart else 1

    @property
    def link(self) -> Link:
        """What connects this process with the others, of which there are some."""
        assert self._link is not None and not self._apart
        return self._link

    def place(self, parts: Sequence[Collection[str]]) -> None:
        """Let the processes have these queries, in order of rank."""
        self._owner = {query: rank for rank, part in enumerate(parts) for query in part}

    def owner(self, query: str) -> int:
        """The number of the process that works on this query now: the one that has it, or this one when it is alone."""
        return self._owner.get(query, 0) if self.size > 1 else self.rank

    def has(self, query: str) -> bool:
        """Whether this process has this query, be it apart or not."""
        return self._link is None or self._owner.get(query, 0) == self._link.rank

    def mine(self, queries: Iterable[str]) -> list[str]:
        """Those of these queries that this process has."""
        return [query for query in queries if self.owner(query) == self.rank]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, this process is alone."""
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1

    def once(self, compute: Callable[[], T], by: int = 0) -> T:
        """What one process computes, apart from the others, for all of them; so is an error meant for the user."""
        if self.size == 1:
            return compute()
        own = _Tried()
        if self.rank == by:
            with self.apart():
                own = _tried(compute)
        told: _Tried = self.link.broadcast(own, by)
        self._raise(told)
        return own.value if self.rank == by else told.value

    def each(self, compute: Callable[[], T]) -> list[T]:
        """What every process computes apart from the others, in order of rank; the first error is all processes'."""
        if self.size == 1:
            return [compute()]
        with self.apart():
            own = _tried(compute)
        everyones: list[_Tried] = self.link.gather(own, None)
        for one in everyones:
            self._raise(one)
        return [one.value for one in everyones]

    def _raise(self, one: _Tried) -> None:
        if one.fault:
            raise GemelError(one.fault) if self.rank == 0 else ToldElsewhere(GemelError.exit_code)

    def first(self, number: float) -> float:
        """The number that the first process has."""
        return number if self.size == 1 else self.link.numbers([number], by=0)[0]

    def clock(self) -> float:
        """Seconds of a monotonic clock: the first process's, so that all see the same time."""
        return self.first(time.monotonic())


ALONE = Crew()
"""One process, as always where nobody says otherwise."""


@dataclass(frozen=True)
class _Tried:
    """What came of something: a value, or what was wrong with that, in words: errors do not travel."""

    value: Any = None
    fault: str = ""


def _tried(compute: Callable[[], Any]) -> _Tried:
    try:
        return _Tried(compute())
    except GemelError as error:
        return _Tried(fault=str(error))
