"""Bounds of the bodies of pushed frames: of senders that have shown the token, and of those that have not yet.

DeepStack's clients send the token as a field of their form, so part of a body is read before the box knows its sender.
Such bodies have bounds of their own and never take the room of those whose token came in the head.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

MAX_BODY_BYTES = 32 * 2**20
"""Of one frame: a picture, or the pixels of 3840 x 2160."""
MAX_OPEN_BYTES = 128 * 2**20
"""Of all bodies that are received or wait for their answer, of senders with the token."""
BODY_TIMEOUT_S = 8.0
"""Before the connection is closed (`edge_runtime.http.connections`)."""
MAX_UNPROVEN_BYTES = 2**16
"""Read of a body until the token has come in it."""
TURN_S = 0.5
"""Time for the token to come in a body while others of its group wait for their turn."""
MAX_UNPROVEN_OF_GROUP, MAX_UNPROVEN = 32, 64
"""Bodies without the token that are read or wait for it, of one group of addresses and in all."""


class PushError(Exception):
    """A request that gets no answer: a status and one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class BodyRoom:
    """Bytes of all bodies of senders with the token; in the loop's thread."""

    def __init__(self) -> None:
        self.taken_bytes = 0

    @contextlib.contextmanager
    def take(self, nbytes: int | None) -> Iterator[BodyShare]:
        """Room for a body of this length, None where it is not announced; PushError where there is none."""
        if nbytes is None:
            nbytes = MAX_BODY_BYTES
        if nbytes > MAX_BODY_BYTES:
            raise too_large(MAX_BODY_BYTES)
        if self.taken_bytes + nbytes > MAX_OPEN_BYTES:
            raise PushError(429, "too many frames come at once")
        share = BodyShare(self, nbytes)
        self.taken_bytes += nbytes
        try:
            yield share
        finally:
            share.shrink(0)


class BodyShare:
    """The room of one body."""

    def __init__(self, room: BodyRoom, nbytes: int) -> None:
        self._room, self._nbytes = room, nbytes

    def shrink(self, nbytes: int) -> None:
        """Give back what the body does not need, once its length is known."""
        nbytes = min(nbytes, self._nbytes)
        self._room.taken_bytes -= self._nbytes - nbytes
        self._nbytes = nbytes


class UnprovenTurns:
    """Turns at sending a body whose token has not come: one at a time of each group of addresses, the first first."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._locks: dict[str, asyncio.Lock] = {}

    async def read(self, group: str, read: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """What `read` gives in the turn of this group; PushError where too many wait, or it takes too long."""
        if self._counts[group] >= MAX_UNPROVEN_OF_GROUP or self._counts.total() >= MAX_UNPROVEN:
            raise PushError(429, "too many frames come at once without a token in their head")
        self._counts[group] += 1
        lock = self._locks.setdefault(group, asyncio.Lock())
        try:
            async with lock:
                return await self._read_now(group, read)
        finally:
            self._counts[group] -= 1
            if not self._counts[group]:
                del self._counts[group], self._locks[group]

    async def _read_now(self, group: str, read: Callable[[], Coroutine[Any, Any, str]]) -> str:
        reading = asyncio.create_task(read())
        reading.add_done_callback(_retrieve_error)
        try:
            for _ in range(round(BODY_TIMEOUT_S / TURN_S)):
                done, _ = await asyncio.wait({reading}, timeout=TURN_S)
                if done:
                    return reading.result()
                if self._counts[group] > 1:
                    break
        finally:
            reading.cancel()
        raise too_slow()


def _retrieve_error(task: asyncio.Task[str]) -> None:
    """asyncio would log an error of a task that no handler awaits any more, as its client has left."""
    if not task.cancelled():
        task.exception()


def too_slow() -> PushError:
    """The refusal of a body that takes too long."""
    return PushError(408, "the frame took too long to arrive")


def too_large(max_bytes: int) -> PushError:
    """The refusal of a body above the bound."""
    return PushError(413, f"the body has more than {max_bytes // 2**20} MiB")
