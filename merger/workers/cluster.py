"""Workers on the machines of a Ray cluster (Moritz et al., Ray, OSDI 2018): one actor each, jobs by the object store.

Nothing else in Gemel knows of Ray. What an actor had half done is lost with it: its job begins again elsewhere.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from merger.journal.steps import Journal
from merger.workers.desk import Desk, Setup, Task, packed, unpacked
from merger.workers.jobs import Done, Job, Order
from merger.workers.pool import Failed, Lost, News, Told
from models.errors import InputError

PATIENCE_S = 10.0
"""How long a cluster may take to answer at all."""
POLL_S = 0.5
"""How often progress is asked for."""
STARTED_HERE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}
"""No statistics are sent; GPUs stay as they are; workers are what this machine is busy with, not the least of it."""


class Actors:
    """Actors of a cluster (merger.workers.pool.Crew), each with `threads` processors, or one GPU.

    `address` is what ray.init takes; `local` starts a cluster here, for `count` actors where that is given. A cluster
    that the process is connected to already is used and left as it is. Raises InputError where there is none.
    """

    def __init__(self, setup: Callable[[], Setup], address: str, threads: int, gpu: bool, count: int | None) -> None:
        self._make, self._threads, self._gpu = setup, threads, gpu
        self._ray = _ray()
        self._ours = not self._ray.is_initialized()
        if self._ours:
            self._connect(address, threads * count if count else None)
        self._kind: Any = None
        self._setup: Any = None
        self._hired = 0
        self._events: deque[tuple[Actor, Told]] = deque()

    @property
    def most(self) -> int:
        """Actors for which the cluster has room."""
        room = self._ray.cluster_resources()
        return int(room.get("GPU", 0)) if self._gpu else int(room.get("CPU", 0)) // self._threads

    def hire(self) -> Actor | None:
        """One more actor, wherever the cluster has room for it."""
        if self._kind is None:
            self._setup = self._ray.put(pickle.dumps(self._make()))
            needs = {"num_gpus": 1} if self._gpu else {"num_cpus": self._threads}
            self._kind = self._ray.remote(max_concurrency=2, **needs)(_Desk)
        self._hired += 1
        return Actor(self._ray, self._kind.remote(self._setup), self._hired)

    def wait(self, busy: Sequence[Actor]) -> tuple[Actor, News]:
        """The next news of one of these."""
        by_answer = {one.answer: one for one in busy}
        while True:
            if self._events:
                return self._events.popleft()
            ready, _ = self._ray.wait(list(by_answer), timeout=POLL_S)
            self._events.extend((one, told) for one in busy for told in one.told())
            if ready and not self._events:
                found = by_answer[ready[0]]
                return found, found.news()

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._ours:
            self._ray.shutdown()

    def _connect(self, address: str, processors: int | None) -> None:
        os.environ.update({name: os.environ.get(name, value) for name, value in STARTED_HERE.items()})
        own = {"num_cpus": processors, "include_dashboard": False} if address == "local" else {}
        try:
            _knock(address)
            self._ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
        except (OSError, RuntimeError, ValueError) as error:
            fault = f"no cluster at '{address}': {' '.join(str(error).split())[:120]}"
            raise InputError("--ray", fault, "give local, auto, HOST:PORT or ray://HOST:PORT") from error


class Actor:
    """One worker in the cluster (merger.workers.pool.Hand)."""

    def __init__(self, ray: Any, actor: Any, number: int) -> None:
        self._ray, self._actor = ray, actor
        self.name = f"worker {number}"
        self.answer: Any = None

    def begin(self, job: Job, order: Order) -> None:
        """Put what the job is given into the object store and begin it."""
        self.answer = self._actor.do.remote(Task.of(job, order), packed(dict(job.given)))

    def told(self) -> list[Told]:
        """Its progress since it was asked last."""
        try:
            return [Told(event, fields) for event, fields in self._ray.get(self._actor.told.remote(), timeout=POLL_S)]
        except self._ray.exceptions.RayError:  # it is starting, or gone, which its answer tells
            return []

    def news(self) -> News:
        """How its job came out."""
        try:
            kind, *what = unpacked(self._ray.get(self.answer))
        except self._ray.exceptions.RayTaskError as error:
            return Failed(f"failed ({type(error.cause).__name__}: {' '.join(str(error.cause).split())[:200]})")
        except self._ray.exceptions.RayError as error:
            return Lost(f"is gone ({type(error).__name__}; out of memory?)")
        return Done(*what) if kind == "done" else InputError(*what)

    def end(self) -> None:
        """Kill it."""
        self._ray.kill(self._actor)


class _Desk:
    """What runs in the actor: a desk, and the events it has told and nobody has fetched yet."""

    def __init__(self, setup: bytes) -> None:
        self._setup, self._desk = setup, None
        self._events: deque[tuple[str, dict[str, Any]]] = deque()

    def do(self, task: Task, given: bytes) -> bytes:
        """The outcome of a task, packed."""
        try:
            desk = self._desk = self._desk or Desk(pickle.loads(self._setup), self._tell)
            done = desk.do(task, unpacked(given), Journal())
        except InputError as error:
            return packed(("refused", error.where, error.fault, error.remedy, error.key))
        return packed(("done", done.value, done.work))

    def told(self) -> list[tuple[str, dict[str, Any]]]:
        """The events since it was asked last."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _tell(self, event: str, **fields: Any) -> None:
        self._events.append((event, fields))


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT: Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), PATIENCE_S).close()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InputError("--ray", "Ray is not installed", "pip install 'gemel[ray]'") from error
    return ray
