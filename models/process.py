"""Settings of this process: glibc's memory allocator, Python's garbage collector, output of native libraries."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.metadata
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # glibc's malloc.h
NEVER = 2**31 - 1
MAX_KERNEL_NAME = 15
"""Characters of a thread's name that Linux keeps."""


@cache
def keep_freed_memory() -> bool:
    """Let malloc keep large freed blocks for the next layer; returns whether the C library can (glibc).

    By default glibc returns a large block to the system as soon as it is freed, and the system clears every page again
    for the next allocation: half the time of a batch of large frames (benchmarks/engines/step.py).
    """
    return _mallopt((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER))


def use_one_arena() -> bool:
    """Let all threads allocate from one heap; call it before threads start. Returns whether the C library can (glibc).

    By default glibc makes up to eight arenas a core and never returns the end of one, so that a process of many
    threads grows for hours.
    """
    return _mallopt((M_ARENA_MAX, 1))


def name_threads() -> None:
    """Give the threads of Python their names at the kernel too, where `top -H` and `ps -L` show them (Linux).

    The main thread keeps its name, which is that of the process.
    """
    for thread in set(threading.enumerate()) - {threading.main_thread()}:
        with contextlib.suppress(OSError):  # it has ended meanwhile, or the system has no such file
            Path(f"/proc/self/task/{thread.native_id}/comm").write_text(
                thread.name[:MAX_KERNEL_NAME]
            )


@cache
def installed_version() -> str:
    """The version of Gemel; "" of a checkout that is not installed."""
    try:
        return importlib.metadata.version("gemel")
    except importlib.metadata.PackageNotFoundError:
        return ""


def freeze_garbage_collector() -> None:
    """Collect garbage once, then leave all objects in use out of later collections, this one's successors included.

    torch and torchvision alone create 340,000 objects, which a full collection walks through in 0.15 s. Call
    `gc.unfreeze` when many of the frozen objects are no longer in use. They are thawed at exit, where libraries look
    for leaks.
    """
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)


def import_torch() -> None:
    """Import torch and torchvision without collections of garbage, which take a quarter of its time and find none."""
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        importlib.import_module("torchvision")
    finally:
        gc.enable()
    freeze_garbage_collector()


def count_threads() -> int:
    """The threads that a network may take: OMP_NUM_THREADS, else one a core that this process may use."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def trim_heap() -> bool:
    """Return free pages of the heap to the system, in about a millisecond; returns whether malloc can (glibc)."""
    trim = _libc("malloc_trim")
    return trim is not None and trim(0) >= 0


def _mallopt(*options: tuple[int, int]) -> bool:
    mallopt = _libc("mallopt")
    return mallopt is not None and all(mallopt(*option) for option in options)


@cache
def _libc(function: str) -> Any | None:
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress logs, warnings and stderr of exporters and compilers, which print whole graphs on failure."""
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
    """Drop what native code prints on file descriptor 1, which Python's own redirection does not reach."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    try:
        stdout = os.dup(1)
        null = os.open(os.devnull, os.O_WRONLY)
    except OSError:  # there is no stdout
        yield
        return
    os.dup2(null, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)


def private_bytes() -> int | None:
    """Memory of this process that is no mapped file, where the system says it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None
