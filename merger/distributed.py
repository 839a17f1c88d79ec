"""Who does a merge: one process, or several that run the same program, each with queries of its own.

What the processes of a merge must have in common.

Joining the processes that `torchrun` started, and what connects them: gloo on processors, NCCL between cards.

Which process has which queries: about the same FLOPs each, and few bytes of weights that several must agree on.

Gradients of weights that several processes train, each summed over just these while the backward pass goes on.
"""

from __future__ import annotations

import io
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.errors import GemelError, InputError

T = TypeVar("T")


class PendingSum(Protocol):
    """A sum that is on its way; torch.distributed's Work is one."""

    def wait(self) -> Any:
        """Return once it is there."""
        ...


class Communicator(Protocol):
    """What connects the processes of a crew; `merger.distributed.Processes` is one.

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

    def reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> PendingSum:
        """Begin to sum a contiguous tensor in place over these processes; this one is among them."""
        ...

    def meet(self, ranks: tuple[int, ...]) -> None:
        """Prepare for sums over these processes; all processes call it, those that are not among them, too."""
        ...


class PeerError(GemelError):
    """Another process of the crew is gone, or failed; what it was is told there."""


class PeerExit(SystemExit):
    """The same error is told by another process; this one ends with its exit code, silently."""


class ProcessGroup:
    """The processes of a merge, seen from one of them; without a `link` there is no other.

    `rank` is this one's number: 0 writes and tells, the others follow it. Everything a process decides by comes from
    what all know. Apart (`apart`) a process is alone for a while: it has all queries and tells nobody. `given` are the
    bytes of gradients that this one has handed over to be summed, in so many `steps`.
    """

    def __init__(self, link: Communicator | None = None) -> None:
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
    def link(self) -> Communicator:
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
    def local(self) -> Iterator[None]:
        """Within, this process is alone."""
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1

    def run_on_rank0(self, compute: Callable[[], T], by: int = 0) -> T:
        """What one process computes, apart from the others, for all of them; so is an error meant for the user."""
        if self.size == 1:
            return compute()
        own = _Tried()
        if self.rank == by:
            with self.local():
                own = _tried(compute)
        told: _Tried = self.link.broadcast(own, by)
        self._raise(told)
        return own.value if self.rank == by else told.value

    def all_gather_object(self, compute: Callable[[], T]) -> list[T]:
        """What every process computes apart from the others, in order of rank; the first error is all processes'."""
        if self.size == 1:
            return [compute()]
        with self.local():
            own = _tried(compute)
        everyones: list[_Tried] = self.link.gather(own, None)
        for one in everyones:
            self._raise(one)
        return [one.value for one in everyones]

    def _raise(self, one: _Tried) -> None:
        if one.fault:
            raise GemelError(one.fault) if self.rank == 0 else PeerExit(GemelError.exit_code)

    def first(self, number: float) -> float:
        """The number that the first process has."""
        return number if self.size == 1 else self.link.numbers([number], by=0)[0]

    def clock(self) -> float:
        """Seconds of a monotonic clock: the first process's, so that all see the same time."""
        return self.first(time.monotonic())


SINGLE_PROCESS = ProcessGroup()
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


def check_consistent(crew: ProcessGroup, identity: Mapping[str, Any]) -> None:
    """Raise InputError where another process has other files, options or another version of torch."""
    own = {**identity, "torch": torch.__version__}
    everyones = crew.all_gather_object(lambda: own)
    crew.run_on_rank0(partial(_compare, everyones))


def _compare(everyones: Sequence[Mapping[str, Any]]) -> None:
    for rank, other in enumerate(everyones):
        differs = [key for key, value in other.items() if value != everyones[0][key]]
        if differs:
            fault = f"process {rank} has another {' and '.join(differs)} than the first"
            raise InputError("torchrun", fault, "start all with the same command, files and version of torch")


NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process that it starts."""
MAX_PROCESSES = 4096
PATIENCE = timedelta(days=7)
"""The others may wait for long while one does what only one does."""
POLL_INTERVAL_S = (1e-4, 0.02)
"""How often it is looked whether something has arrived: first, and later. An interrupt is heeded between."""


@contextmanager
def process_group(environment: Mapping[str, str] = os.environ) -> Iterator[ProcessGroup]:
    """The crew of this process: that of torchrun, where it started several, else this process alone."""
    rank, size = _numbers(environment)
    if size == 1:
        yield ProcessGroup()
        return
    cards = torch.cuda.is_available()
    if cards:
        torch.cuda.set_device(_card(environment, rank, torch.cuda.device_count()))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cards else "gloo", rank=rank, world_size=size)
        link = Processes()
    except (RuntimeError, ValueError) as error:
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        said = " ".join(str(error).split())[:120]
        raise InputError("torchrun", f"the processes do not find each other at {where} ({said})") from error
    try:
        yield ProcessGroup(link)
    finally:
        link.leave()


def _numbers(environment: Mapping[str, str]) -> tuple[int, int]:
    """Rank and number of processes; (0, 1) where nobody says so. InputError for what torchrun never says."""
    if any(name not in environment for name in NAMES):
        return 0, 1
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size <= MAX_PROCESSES:
        told = f"{environment['RANK']} of {environment['WORLD_SIZE']}"
        raise InputError("RANK", f"{told} processes makes no sense", "start with torchrun, or unset WORLD_SIZE")
    return rank, size


def _card(environment: Mapping[str, str], rank: int, cards: int) -> int:
    """The card of this process, one of so many on this machine: NCCL does not let two processes share one."""
    local, processes = int(environment.get("LOCAL_RANK", rank % cards)), int(environment.get("LOCAL_WORLD_SIZE", 1))
    if max(local + 1, processes) > cards:
        fault, remedy = f"starts more processes here than there are cards ({cards})", "lower --nproc-per-node"
        raise InputError("torchrun", fault, f"{remedy}, or set CUDA_VISIBLE_DEVICES= to merge on the processor")
    return local


class Processes:
    """The processes of torch.distributed (merger.distributed.Communicator): gradients between cards, all else between processors.

    What travels was made by the same program: it is unpickled.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._words: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._groups: dict[tuple[int, ...], Any] = {}

    def leave(self) -> None:
        """Let the others go."""
        dist.destroy_process_group()

    def broadcast(self, value: Any, by: int) -> Any:
        """See `Link.broadcast`."""
        content = _packed(value) if self.rank == by else torch.empty(0, dtype=torch.uint8)
        count = self.numbers([len(content)], by=by)[0]
        if self.rank != by:
            content = torch.empty(int(count), dtype=torch.uint8)
        self._wait(lambda: dist.broadcast(content, by, group=self._words, async_op=True))
        return value if self.rank == by else _unpacked(content)

    def gather(self, value: Any, to: int | None) -> list[Any]:
        """See `Link.gather`."""
        content = _packed(value)
        mine = [len(content) if rank == self.rank else 0 for rank in range(self.size)]
        counts = list(map(int, self.numbers(mine)))
        most = max(counts)
        own = torch.cat([content, torch.zeros(most - len(content), dtype=torch.uint8)])
        wanted = to is None or to == self.rank
        rows = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)] if wanted else []
        if to is None:
            self._wait(lambda: dist.all_gather(rows, own, group=self._words, async_op=True))
        else:
            self._wait(lambda: dist.gather(own, rows or None, to, group=self._words, async_op=True))
        return [_unpacked(row[:count]) for row, count in zip(rows, counts, strict=False)]

    def numbers(self, own: Sequence[float], *, by: int | None = None) -> list[float]:
        """See `Link.numbers`."""
        found = torch.tensor(own, dtype=torch.float64)
        if by is None:
            self._wait(lambda: dist.all_reduce(found, group=self._words, async_op=True))
        else:
            self._wait(lambda: dist.broadcast(found, by, group=self._words, async_op=True))
        return found.tolist()

    def reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> _Sum:
        """See `Link.reduce`."""
        with _told():
            return _Sum(dist.all_reduce(tensor, group=self._groups[ranks], async_op=True))

    def meet(self, ranks: tuple[int, ...]) -> None:
        """See `Link.meet`: a group is made once."""
        if ranks not in self._groups:
            with _told():
                self._groups[ranks] = dist.new_group(list(ranks), timeout=PATIENCE)

    def _wait(self, begin: Any) -> None:
        """Until it is there; a wait in torch itself would hold interrupts up."""
        pause, longest = POLL_INTERVAL_S
        with _told():
            flops = begin()
            while not flops.is_completed():
                time.sleep(pause)
                pause = min(longest, 1.5 * pause)
            flops.wait()


class _Sum:
    """A sum on its way (merger.distributed.PendingSum)."""

    def __init__(self, flops: Any) -> None:
        self._work = flops

    def wait(self) -> None:
        """CrewError when the others are gone."""
        with _told():
            self._work.wait()


@contextmanager
def _told() -> Iterator[None]:
    """What torch.distributed says of a process that is gone is many lines, different on every system."""
    try:
        yield
    except RuntimeError as error:
        remedy = "start again with --resume, with any number of processes"
        raise PeerError(f"another process of this merge has ended; {remedy}") from error


def _packed(value: Any) -> Tensor:
    """Bytes as a tensor; storages that several tensors share stand there once."""
    content = io.BytesIO()
    torch.save(value, content)
    return torch.frombuffer(content.getbuffer(), dtype=torch.uint8)


def _unpacked(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=False)


SLACK = 0.05
"""How much more than the most even placement's largest load a process may have, so that fewer bytes cross."""

ROUNDS = 10
"""How often all are asked whether they would sit better elsewhere."""

Shares = Sequence[tuple[Collection[str], int]]
"""Sets of queries that share something, and its bytes."""


def partition(flops: Mapping[str, float], shares: Shares, processes: int) -> list[list[str]]:
    """The queries of each process, of which `flops` tells what a frame takes.

    The heaviest first, each goes to where it makes fewest bytes cross, of those processes on which it makes no load
    larger than the most even placement's (and a little more); then queries move and change places while that makes
    fewer. Queries stay in their order, and processes are numbered by their first.
    """
    table = _Table(flops, shares, processes)
    for query in sorted(flops, key=lambda query: -flops[query]):
        fits = [rank for rank in range(processes) if table.loads[rank] + flops[query] <= table.most]
        costs = {rank: (table.added(query, rank), table.loads[rank]) for rank in fits}
        table.put(query, min(costs, key=lambda rank: costs[rank]) if costs else table.loads.index(min(table.loads)))
    table.most = max(table.most, *table.loads)
    for _ in range(ROUNDS):
        if not sum(table.improve(query) for query in flops):
            break
    order = list(flops)
    parts = [[query for query in order if table.where[query] == rank] for rank in range(processes)]
    return sorted(parts, key=lambda part: order.index(part[0]) if part else len(order))


def cut_bytes(parts: Sequence[Collection[str]], shares: Shares) -> int:
    """Bytes that cross: of everything shared, once for each process beyond the first that has some of its queries."""
    users = ((sum(not set(part).isdisjoint(queries) for part in parts), nbytes) for queries, nbytes in shares)
    return sum((count - 1) * nbytes for count, nbytes in users if count > 1)


class _Table:
    """Who sits where, and for every set how many of its queries each process has."""

    def __init__(self, flops: Mapping[str, float], shares: Shares, processes: int) -> None:
        self.where: dict[str, int] = {}
        self.loads = [0.0] * processes
        self.most = (1 + SLACK) * max(map(sum, _even(flops, processes)))
        self._flops = flops
        self._counts = [Counter[int]() for _ in shares]
        self._own: dict[str, list[tuple[int, int]]] = {query: [] for query in flops}
        for index, (queries, nbytes) in enumerate(shares):
            for query in set(queries) & flops.keys():
                self._own[query].append((index, nbytes))

    def added(self, query: str, rank: int) -> int:
        """The bytes that cross more with this query there."""
        mine = ((self._counts[index], nbytes) for index, nbytes in self._own[query])
        return sum(nbytes for count, nbytes in mine if count and not count[rank])

    def put(self, query: str, rank: int) -> None:
        """This query sits there now."""
        self.where[query] = rank
        self.loads[rank] += self._flops[query]
        for index, _ in self._own[query]:
            self._counts[index][rank] += 1

    def improve(self, query: str) -> bool:
        """Move a query, or let it change places with another, if fewer bytes cross then and no load is too large."""
        for rank in range(len(self.loads)):
            for partner in (None, *(other for other in self.where if self.where[other] == rank)):
                if rank != self.where[query] and self._gains(query, partner, rank):
                    return True
        return False

    def _gains(self, query: str, partner: str | None, rank: int) -> bool:
        back = self.where[query]
        shift = self._flops[query] - (self._flops[partner] if partner is not None else 0.0)
        if self.loads[rank] + shift > self.most or self.loads[back] - shift > self.most:
            return False
        more = self._moved(query, rank) + (self._moved(partner, back) if partner is not None else 0)
        if more >= 0:
            self._moved(query, back)
            if partner is not None:
                self._moved(partner, rank)
        return more < 0

    def _moved(self, query: str, rank: int) -> int:
        """Move it; the bytes that cross more now."""
        back, more = self.where[query], 0
        for index, _ in self._own[query]:
            self._counts[index][back] -= 1
            if not self._counts[index][back]:
                del self._counts[index][back]
        for index, nbytes in self._own[query]:
            count = self._counts[index]
            if count:
                more += nbytes * ((not count[rank]) - (not count[back]))
        self.loads[back] -= self._flops[query]
        self.put(query, rank)
        return more


def _even(flops: Mapping[str, float], processes: int) -> list[list[float]]:
    """The loads of a placement by FLOPs alone: the heaviest first, each where least is."""
    loads: list[list[float]] = [[] for _ in range(processes)]
    for one in sorted(flops.values(), reverse=True):
        min(loads, key=sum).append(one)
    return loads


@dataclass(frozen=True)
class SharedParam:
    """A weight that several processes train: the parameter here, and the ranks of these, in ascending order."""

    weight: nn.Parameter
    ranks: tuple[int, ...]


class GradReducer:
    """The sums of one training. `weights` stand in the same order everywhere, those first whose gradients come first.

    A sum begins as soon as the last backward pass that can touch a weight has done so, and all sums before it have
    begun: so all processes begin their sums in one order, whatever queries they have.
    """

    def __init__(self, link: Communicator, weights: Sequence[SharedParam]) -> None:
        self._link, self._weights = link, weights
        self._left = [0] * len(weights)
        self._idle: Sequence[bool] = ()
        self._begun: list[tuple[int, Tensor, PendingSum]] = []
        self._next = 0
        self._open = False
        for index, one in enumerate(weights):
            one.weight.register_post_accumulate_grad_hook(partial(self._touched, index))

    def begin(self, passes: Sequence[int], idle: Sequence[bool]) -> None:
        """A step begins: how many backward passes may touch each weight here, and which nobody trains in it."""
        self._left, self._idle = list(passes), idle
        self._begun, self._next, self._open = [], 0, True
        self._go_on()

    def finish(self) -> int:
        """All passes are done here: begin what is left, and put every sum in its weight's gradient.

        Returns the bytes that this process has handed over in this step.
        """
        self._left = [0] * len(self._weights)
        self._go_on()
        for index, total, waiting in self._begun:
            waiting.wait()
            weight = self._weights[index].weight
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.copy_(total)
        self._open = False
        return sum(total.nbytes for _, total, _ in self._begun)

    def _touched(self, index: int, weight: Tensor) -> None:
        if self._open:
            self._left[index] -= 1
            self._go_on()

    def _go_on(self) -> None:
        """Begin every sum that may."""
        while self._next < len(self._weights) and self._left[self._next] <= 0:
            index, one = self._next, self._weights[self._next]
            self._next += 1
            if self._idle[index]:
                continue
            grad = one.weight.grad
            own = torch.zeros_like(one.weight) if grad is None else grad
            # Weights lie in one order here and in another there; the sum is of values, not of places in memory.
            total = own.detach().clone(memory_format=torch.contiguous_format)
            self._begun.append((index, total, self._link.reduce(total, one.ranks)))
