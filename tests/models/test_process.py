"""The allocator keeps or returns memory on request; native output can be silenced."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gemel.models.process import name_threads, without_native_output

FAULTS = """
import resource, sys, torch
from gemel.models.process import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory() and keep_freed_memory()
for _ in range(20):  # until the heap has found its size
    torch.ones(9 << 20)  # above the largest mmap threshold of glibc, 32 MiB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(9 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
TRIM = """
import ctypes
from gemel.models.process import freeze_garbage_collector, trim_heap, use_one_arena
assert use_one_arena()
freeze_garbage_collector()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
blocks = [libc.malloc(size) for _ in range(400) for size in (100000, 16)]
for block in blocks[::2]: ctypes.memset(block, 1, 100000)
for block in blocks[:-2:2]: libc.free(block)
before = resident()
assert trim_heap()
print(before - resident())
"""
IMPORT = """
import gc
from gemel.models.process import import_torch
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
import_torch()
assert gc.isenabled() and gc.get_freeze_count() > 100000
print(len(collections))
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")


def run(code: str, *words: str) -> int:
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return int(done.stdout)


@glibc
def test_keep_freed_memory_reuses_pages() -> None:
    assert run(FAULTS, "keep") < run(FAULTS, "plain") / 10


@glibc
def test_trim_heap_returns_free_pages() -> None:
    assert run(TRIM) > 30e6


def test_import_torch_collects_no_garbage_meanwhile() -> None:
    assert run(IMPORT) == 2  # the start and the end of one, once all is imported


def test_native_output_is_dropped_inside_the_block_only(capfd: pytest.CaptureFixture[str]) -> None:
    with without_native_output():
        os.write(1, b"hidden\n")
    os.write(1, b"shown\n")
    assert capfd.readouterr().out == "shown\n"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux has names of threads in files")
def test_threads_have_their_names_at_the_kernel() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="reader-of-a-camera", daemon=True)
    thread.start()
    process_name = Path("/proc/self/comm").read_text()
    name_threads()
    assert Path("/proc/self/comm").read_text() == process_name
    name = Path(f"/proc/self/task/{thread.native_id}/comm").read_text().strip()
    done.set()
    assert name == "reader-of-a-cam"
