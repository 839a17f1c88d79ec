"""Heartbeats of the processes of a merge: one that hangs ends the others within a minute, instead of holding them.

A rank may work alone for hours, so no limit on a collective can tell a hanging rank from a busy one. A thread of each
rank counts up in the group's store instead, and ends its process once another rank's count has stood still. It stops
with its process: killed, stopped, swapped out, or holding the interpreter's lock for ever.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from gemel.models.errors import GemelError

RESTART_HINT = "torchrun --max-restarts starts all again; else go on with --resume, with any number of processes"


@dataclass(frozen=True)
class HeartbeatConfig:
    """How often a rank counts up, and how long one may be silent."""

    interval_s: float = 2.0
    timeout_s: float = 45.0


CONFIG = HeartbeatConfig()
LAST = "end"
"""The count of a rank that has ended as it should."""


class BeatStore(Protocol):
    """What is used of torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


class PeerWatch:
    """When each other rank was last seen to count up; a rank that never did counts from the beginning.

    `problem` is a pure function of what `see` took up.
    """

    def __init__(self, peers: Mapping[int, float], timeout_s: float) -> None:
        self._seen, self._counts, self._timeout_s = dict(peers), dict[int, str](), timeout_s

    def see(self, rank: int, count: str, now: float) -> None:
        """Take up a count that was read at `now` (monotonic seconds)."""
        if self._counts.get(rank) != count:
            self._counts[rank], self._seen[rank] = count, now

    def problem(self, now: float) -> str:
        """Which rank has been silent for too long; empty if none."""
        for rank, seen in self._seen.items():
            if self._counts.get(rank) != LAST and now - seen > self._timeout_s:
                return f"process {rank} has been silent for {now - seen:.0f} s"
        return ""


class Heartbeat:
    """The thread that counts up and watches; `stop` ends it, and tells the others that this rank is done."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        end: Callable[[str], None] | None = None,
        config: HeartbeatConfig | None = None,
    ) -> None:
        self._store: BeatStore = store
        self._rank, self._peers = rank, [other for other in range(size) if other != rank]
        self._end, self._config, self._over = end or end_process, config or CONFIG, threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self, done: bool) -> None:
        """End the thread; `done` unless this rank ends by an error."""
        self._over.set()
        self._thread.join(self._config.interval_s)
        if done:
            with suppress(RuntimeError):  # the store went with the first process
                self._store.set(f"heartbeat/{self._rank}", LAST)

    def _run(self) -> None:
        now = time.monotonic()
        watch, count, reached = PeerWatch(dict.fromkeys(self._peers, now), self._config.timeout_s), 0, now
        while not self._over.wait(self._config.interval_s):
            try:
                count += 1
                self._store.set(f"heartbeat/{self._rank}", str(count))
                for peer in self._peers:
                    if self._store.check([key := f"heartbeat/{peer}"]):
                        watch.see(peer, self._store.get(key).decode(), time.monotonic())
                reached = time.monotonic()
            except RuntimeError:
                if time.monotonic() - reached > self._config.timeout_s:
                    self._end("the machine that keeps the group together does not answer")
                    return
                continue
            if problem := watch.problem(time.monotonic()):
                self._end(problem)
                return


def end_process(problem: str) -> None:
    """Say what happened and end the process at once: nothing else interrupts a thread that waits for another rank."""
    print(f"error: {problem}; {RESTART_HINT}", file=sys.stderr, flush=True)
    os._exit(GemelError.exit_code)
