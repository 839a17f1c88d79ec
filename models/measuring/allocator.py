"""The memory that a process frees on the CPU: kept for what it asks for next, and in how many places."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # glibc's malloc.h
NEVER = 2**31 - 1
ARENAS = 2


@cache
def keep_freed_memory() -> bool:
    """Let this process keep what is freed; whether its C library can (glibc does).

    Left to itself, glibc gives a large block back to the system as soon as it is freed, and the system clears every
    page of it again for the next layer that asks: half the time of a batch of large frames
    (benchmarks/engines/step.py). The process stays as large as it was at its largest, which for batches of one size is
    what it needs again anyway.
    """
    return _told((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER))


@cache
def keep_few_arenas() -> bool:
    """Let all threads of this process have their memory from two arenas; whether its C library can (glibc does).

    Left to itself, glibc makes another for each thread that asks while others do, up to eight a core, and each keeps
    what was freed in it. A process of many threads, as a box with cameras, holds more so, and its memory rises for
    longer (docs/figures.md, "A box at work").
    """
    return _told((M_ARENA_MAX, ARENAS))


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
