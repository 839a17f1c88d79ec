"""The memory that a process frees on the CPU: kept for what it asks for next, or given back."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from contextlib import suppress
from functools import cache
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h
NEVER = 2**31 - 1
TUNABLES, ONE_HEAP = "GLIBC_TUNABLES", "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
BEGAN = "GEMEL_BEGAN"
"""The id of a process that begins anew, and the tunables that it had; some C libraries cut these short as they read."""


@cache
def keep_freed_memory() -> bool:
    """Let this process keep what is freed; whether its C library can (glibc does).

    Left to itself, glibc gives a large block back to the system as soon as it is freed, and the system clears every
    page of it again for the next layer that asks: half the time of a batch of large frames
    (benchmarks/engines/step.py). The process stays as large as it was at its largest, which for batches of one size is
    what it needs again anyway.
    """
    return _told((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER))


def begin_with_one_heap() -> None:
    """Begin this process anew, with the same id and command line, so that its C library keeps no memory by thread.

    Left to itself, glibc makes another heap for a thread that asks while others do, up to eight a core, and gives
    nothing back of what lies at the end of one; and each thread keeps up to seven freed blocks of every small size,
    which hold the pages that they lie in. A process of many threads, as a box with cameras, then never holds less again
    than in its worst moment, and rises for hours (docs/figures.md, "A box at work"). Both can be set before a process
    begins and not later. Other processes that this one starts are as they would be. To be called before anything else;
    nothing happens where the C library is another or the process cannot begin anew.
    """
    began, _, given = os.environ.pop(BEGAN, "").partition(" ")
    if began != str(os.getpid()):
        if _libc("gnu_get_libc_version") is None or not sys.executable:
            return
        given = os.environ.get(TUNABLES, "")
        os.environ[BEGAN] = f"{os.getpid()} {given}"
        os.environ[TUNABLES] = f"{given}:{ONE_HEAP}" if given else ONE_HEAP
        with suppress(OSError):
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        del os.environ[BEGAN]
    os.environ.pop(TUNABLES, None)
    if given:
        os.environ[TUNABLES] = given


def look_no_more_at_what_is_there() -> None:
    """Collect garbage among all objects, and leave those that are in use out of every later collection.

    Left to itself, Python looks for objects that only use each other among all of them, and puts that off until a
    quarter as many again have gathered: torch and torchvision alone bring 340,000, through which it looks in 0.15 s. To
    be called again once much of what was there is not in use any more.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def give_back_freed() -> bool:
    """Give all pages that hold nothing any more back to the system; whether this C library can (glibc does).

    Left to itself, glibc keeps what lies below something still in use: a process whose moments of most memory come
    seldom stays as large as in the worst of them. It takes about a millisecond.
    """
    trim = _libc("malloc_trim")
    return trim is not None and trim(0) >= 0


def _told(*options: tuple[int, int]) -> bool:
    mallopt = _libc("mallopt")
    return mallopt is not None and all(mallopt(*option) for option in options)


@cache
def _libc(function: str) -> Any | None:
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None
