"""Workers on the machines of a Ray cluster (Moritz et al., Ray, OSDI 2018): one actor each, jobs by the object store.

Nothing else in Gemel knows of Ray. An actor that is lost loses nothing but time: its job begins again elsewhere. A job
that two were lost with, or that fails, is left to the main process, which shows an error with its whole trace.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from merger.events import Progress
from merger.jobs import Done, Job, Order
from models.errors import InputError

TIMEOUT_S = 10.0
"""How long a cluster may take to answer at all."""
POLL_S = 0.5
"""How often progress is asked for."""
STARTED_HERE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}
"""No statistics are sent; GPUs stay as they are; workers are what this machine is busy with, not the least of it."""


class Desk(Protocol):
    """Where a worker does one job after the other; `merger.core.elsewhere.Desk` is one."""

    def do(self, job: Job, order: Order) -> Done:
        """The result and the work of a job."""
        ...


@dataclass(frozen=True, eq=False)
class _Hired:
    """An actor as it is seen from here."""

    name: str
    handle: Any


@dataclass(frozen=True)
class _Failed:
    """Why a job was not done, and whether its actor is lost."""

    why: str
    lost: bool = False


class Cluster:
    """The actors of a cluster (merger.jobs.Workers), as many as it has room for, hired when there are jobs.

    Each needs `each` as Ray counts it ({"CPU": threads} or {"GPU": 1}), and works at the desk that `make` makes of a
    progress. `ray` is Ray's module (`connected`). Raises InputError where there is no room for one actor.
    """

    does_all = False

    def __init__(self, ray: Any, make: Callable[[Progress], Desk], each: Mapping[str, int], progress: Progress) -> None:
        self._ray, self._make, self._progress = ray, make, progress
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.most = sum(min(int(node.get(kind, 0)) // count for kind, count in each.items()) for node in nodes)
        if not self.most:
            needed = " and ".join(f"{count} {kind}" for kind, count in each.items())
            raise InputError("--ray", f"no machine of the cluster has {needed}", "lower --threads, or add machines")
        needs = {f"num_{kind.lower()}s": count for kind, count in each.items()}
        self._kind = ray.remote(**needs, max_concurrency=2)(_Actor)
        self._actors: list[_Hired] = []
        self._hired = 0

    def do(self, jobs: Sequence[Job], order: Order, arrived: Callable[[Job, Done], None]) -> None:
        """See `Workers.do`; InputError where a job, or the machine it came to, refuses its input."""
        queue, losses = deque(jobs), Counter[str]()
        busy: dict[Any, tuple[_Hired, Job]] = {}
        while queue or busy:
            while queue and (actor := self._idle([one for one, _ in busy.values()])) is not None:
                job = queue.popleft()
                busy[actor.handle.do.remote(job, order)] = (actor, job)
            ready, _ = self._ray.wait(list(busy), timeout=POLL_S)
            for actor, _ in busy.values():
                self._tell(actor)
            for answer in ready:
                actor, job = busy.pop(answer)
                found = self._answer(answer)
                if isinstance(found, Done):
                    arrived(job, found)
                elif found.lost and not losses[job.name]:
                    self._warn(f"{actor.name} {found.why} at '{job.name}': another worker does it")
                    losses[job.name] += 1
                    queue.appendleft(job)
                else:
                    self._warn(f"{actor.name} {found.why} at '{job.name}': the main process does it")
                if isinstance(found, _Failed) and found.lost:
                    self._dismiss(actor)

    def close(self) -> None:
        """End all actors."""
        for actor in list(self._actors):
            self._dismiss(actor)

    def _answer(self, answer: Any) -> Done | _Failed:
        errors = self._ray.exceptions
        try:
            found = self._ray.get(answer)
        except errors.RayTaskError as error:
            return _Failed(f"failed ({type(error.cause).__name__}: {' '.join(str(error.cause).split())[:200]})")
        except errors.RayError as error:
            return _Failed(f"is gone ({type(error).__name__}; out of memory?)", lost=True)
        if isinstance(found, Done):
            return found
        raise InputError(*found)

    def _idle(self, busy: Sequence[_Hired]) -> _Hired | None:
        """One that has nothing to do, hired for it where there is room; None where all have a job."""
        for actor in self._actors:
            if actor not in busy:
                return actor
        if len(self._actors) == self.most:
            return None
        self._hired += 1
        self._actors.append(_Hired(f"worker {self._hired}", self._kind.remote(self._make)))
        return self._actors[-1]

    def _dismiss(self, actor: _Hired) -> None:
        self._ray.kill(actor.handle)
        self._actors.remove(actor)

    def _tell(self, actor: _Hired) -> None:
        try:
            told = self._ray.get(actor.handle.told.remote(), timeout=POLL_S)
        except self._ray.exceptions.RayError:  # it is starting, or gone, which its answer tells
            return
        for event, fields in told:
            self._progress(event, **fields)

    def _warn(self, text: str) -> None:
        self._progress("warning", text=text)


class _Actor:
    """What runs in the cluster: a desk, and the events it has told and nobody has fetched yet."""

    def __init__(self, make: Callable[[Progress], Desk]) -> None:
        self._make, self._desk = make, None
        self._events: deque[tuple[str, dict[str, Any]]] = deque()

    def do(self, job: Job, order: Order) -> Done | tuple[str, ...]:
        """What came of a job, or what an InputError says."""
        try:
            self._desk = self._desk or self._make(self._note)
            return self._desk.do(job, order)
        except InputError as error:
            return error.where, error.problem, error.hint, error.key

    def told(self) -> list[tuple[str, dict[str, Any]]]:
        """The events since it was asked last."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _note(self, event: str, **fields: Any) -> None:
        self._events.append((event, fields))


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray's module, connected to this cluster until the end.

    `address` is what ray.init takes; `local` starts Ray on this machine, with the cores there are, and shuts it down at
    the end. A cluster that the process is connected to already is used and left as it is. Raises InputError where there
    is no such cluster, or no Ray.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError("--ray", "Ray is not installed", "pip install 'gemel[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    os.environ.update({name: os.environ.get(name, value) for name, value in STARTED_HERE.items()})
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        _knock(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, RuntimeError, ValueError) as error:
        fault = f"no cluster at '{address}': {' '.join(str(error).split())[:120]}"
        raise InputError("--ray", fault, "give local, auto, HOST:PORT or ray://HOST:PORT") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT: Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), TIMEOUT_S).close()
