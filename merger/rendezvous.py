"""How the ranks of one start find each other in a store that keeps the keys of earlier starts.

torchrun's store outlives a restart, and with it the addresses of ranks that have ended: who reads one of these waits
for ever, or is refused. So the ranks first agree on a name for this start, under which the group keeps its keys.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

INTERVAL_S = 0.05


def agree_on_start(
    store: Any,
    rank: int,
    size: int,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> str:
    """A name that all ranks of this start have, and no other start had; TimeoutError without all ranks.

    Every rank writes a number that it drew. Rank 0 names the start after all numbers that it reads, some of which may
    be of an earlier start; a rank confirms only a name with its own number; the start begins once all confirmed.
    """
    own, ends = secrets.token_hex(8), clock() + timeout_s
    store.set(f"hello/{rank}", own)
    while clock() < ends:
        if rank == 0:
            numbers = [_read(store, f"hello/{other}") for other in range(size)]
            if all(numbers):
                store.set("start", " ".join(numbers))
        name = _read(store, "start")
        if own in name.split():
            store.set(f"confirmed/{name}/{rank}", "1")
            if rank == 0 and store.check([f"confirmed/{name}/{other}" for other in range(size)]):
                store.set(f"begun/{name}", "1")
            if store.check([f"begun/{name}"]):
                return name.replace(" ", "-")
        wait(INTERVAL_S)
    raise TimeoutError(f"not all {size} processes came within {timeout_s:.0f} s")


def _read(store: Any, key: str) -> str:
    """What stands there; empty if nothing."""
    return store.get(key).decode() if store.check([key]) else ""
