"""Joining the processes that `torchrun` started, and what connects them: gloo on processors, NCCL between cards."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from merger.crew.crew import Crew, CrewError
from models.errors import InputError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process that it starts."""
MAX_PROCESSES = 4096
PATIENCE = timedelta(days=7)
"""The others may wait for long while one does what only one does."""
POLL_INTERVAL_S = (1e-4, 0.02)
"""How often it is looked whether something has arrived: first, and later. An interrupt is heeded between."""


@contextmanager
def joined(environment: Mapping[str, str] = os.environ) -> Iterator[Crew]:
    """The crew of this process: that of torchrun, where it started several, else this process alone."""
    rank, size = _numbers(environment)
    if size == 1:
        yield Crew()
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
        yield Crew(link)
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
    """The processes of torch.distributed (merger.crew.crew.Link): gradients between cards, all else between processors.

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
            work = begin()
            while not work.is_completed():
                time.sleep(pause)
                pause = min(longest, 1.5 * pause)
            work.wait()


class _Sum:
    """A sum on its way (merger.crew.crew.Waiting)."""

    def __init__(self, work: Any) -> None:
        self._work = work

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
        raise CrewError(f"another process of this merge has ended; {remedy}") from error


def _packed(value: Any) -> Tensor:
    """Bytes as a tensor; storages that several tensors share stand there once."""
    content = io.BytesIO()
    torch.save(value, content)
    return torch.frombuffer(content.getbuffer(), dtype=torch.uint8)


def _unpacked(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=False)
