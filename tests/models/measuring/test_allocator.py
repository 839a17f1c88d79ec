"""Freed memory is kept or returned on demand; all threads allocate from one arena."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from models.process import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory() and keep_freed_memory()
for _ in range(40):  # until the heap has found its size
    torch.ones(1 << 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


ARENAS = """
import ctypes, re, sys, tempfile, threading
from models.process import use_one_arena
if sys.argv[1] == "one":
    use_one_arena()
libc = ctypes.CDLL(None)  # which lets go of the interpreter's lock
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
together = threading.Barrier(12)
def work():
    together.wait()
    for _ in range(1000):
        libc.free(libc.malloc(50000))
    together.wait()
threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
with tempfile.NamedTemporaryFile() as file:
    told = libc.fopen(file.name.encode(), b"w")
    libc.malloc_info(0, told)
    libc.fclose(told)
    print(len(re.findall(rb"<heap nr", file.read())))
"""


HELD = """
import ctypes, sys
from benchmarks.machine import held_bytes
from models.process import trim_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(size) for _ in range(400) for size in (100000, 16)]
for block in blocks: ctypes.memset(block, 1, 16)
for block in blocks[::2]: ctypes.memset(block, 1, 100000)
for block in blocks[:-2:2]: libc.free(block)
before = held_bytes()["anonymous"]
if sys.argv[1] == "given back":
    assert trim_heap()
print(before - held_bytes()["anonymous"])
"""


def given_back(variant: str) -> int:
    """Bytes that a process holds less, having freed 40 MB between things that it still uses."""
    done = subprocess.run([sys.executable, "-c", HELD, variant], capture_output=True, text=True, check=True)
    return int(done.stdout)


def arenas(variant: str) -> int:
    """How many arenas twelve threads have their memory from."""
    done = subprocess.run([sys.executable, "-c", ARENAS, variant], capture_output=True, text=True, check=True)
    return int(done.stdout)


def faults(variant: str) -> int:
    """Pages that a process of its own was given anew while it asked ten times for as much as it had just freed."""
    done = subprocess.run([sys.executable, "-c", FAULTS, variant], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep what is freed")
def test_keep_freed_memory_reuses_pages() -> None:
    plain, kept = faults("plain"), faults("kept")
    assert kept < plain / 10 and plain > 10 * 1000, (plain, kept)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_use_one_arena_holds_for_all_threads() -> None:
    plain, one = arenas("plain"), arenas("one")
    assert one == 1 < plain, (plain, one)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives back what lies between")
def test_trim_heap_returns_free_pages() -> None:
    assert given_back("kept") < 1e6 and given_back("given back") > 30e6
