"""The memory that a process frees on the CPU: kept for what it asks for next, or given back.

Keeps torch's compiler out of what compiles nothing: its import takes two CPU-seconds.

Torch and torchvision import the whole of `torch._dynamo` to ask it two small questions: whether a device can be
compiled for (torchvision, when a region is pooled deterministically), and to leave a function out of compiling (torch,
when an operation on the device "meta" is written in Python). While nothing is compiled, a stand-in answers both; asked
anything else it makes way for the compiler.

What was worked out before is told without torch (models.io). This is for the first time, and for whatever
builds models: without it, they would take twice as long to start.

Silence for libraries that talk to their own developers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType
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


def freeze_garbage_collector() -> None:
    """Collect garbage among all objects, and leave those that are in use out of every later collection.

    Left to itself, Python looks for objects that only use each other among all of them, and puts that off until a
    quarter as many again have gathered: torch and torchvision alone bring 340,000, through which it looks in 0.15 s. To
    be called again once much of what was there is not in use any more.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def trim_heap() -> bool:
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


COMPILER, UTILS = "torch._dynamo", "torch._dynamo.utils"
MARK = "__dynamo_disable"
"""Where torch keeps, on a function, the one that it calls in its place."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """What is imported, built or counted inside does not import torch's compiler; no effect once that is there."""
    if COMPILER in sys.modules or UTILS in sys.modules:
        yield
        return
    left_out: list[Callable[..., Any]] = []

    def disable(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        left_out.append(fn)
        return fn

    stand_ins = [_stand_in(COMPILER, disable=disable), _stand_in(UTILS, is_compile_supported=_is_compile_supported)]
    sys.modules.update({one.__name__: one for one in stand_ins})
    try:
        yield
    finally:
        for one in stand_ins:
            _leave(one)
        for fn in left_out:  # so that torch asks again when there is a compiler
            fn.__dict__.pop(MARK, None)


def _is_compile_supported(device_type: str) -> bool:
    return importlib.import_module(UTILS).is_compile_supported(device_type)


def _stand_in(name: str, **answers: Callable[..., Any]) -> ModuleType:
    made = ModuleType(name)

    def other(asked: str) -> Any:
        if asked.startswith("__") and (asked != "__path__" or name != COMPILER):  # what is asked of any module
            raise AttributeError(asked)
        _leave(made)
        return getattr(importlib.import_module(name), asked)

    made.__dict__.update(answers | {"__getattr__": other})
    return made


def _leave(stand_in: ModuleType) -> None:
    if sys.modules.get(stand_in.__name__) is stand_in:
        del sys.modules[stand_in.__name__]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep from the user what an exporter or compiler logs, warns of and prints: on failure, whole graphs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def without_native_output() -> Iterator[None]:
    """Drop what native code prints on the process's standard output, which Python's own redirection does not reach."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    try:
        kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # there is none
        yield
        return
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C's buffers still hold
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
