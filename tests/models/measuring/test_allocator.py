"""Freed memory is kept, or given back when told; all threads have it from one heap."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from models.process import TUNABLES

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
from models.process import begin_with_one_heap
if sys.argv[1] == "one":
    begin_with_one_heap()
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
from models.process import give_back_freed
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(size) for _ in range(400) for size in (100000, 16)]
for block in blocks: ctypes.memset(block, 1, 16)
for block in blocks[::2]: ctypes.memset(block, 1, 100000)
for block in blocks[:-2:2]: libc.free(block)
before = held_bytes()["anonymous"]
if sys.argv[1] == "given back":
    assert give_back_freed()
print(before - held_bytes()["anonymous"])
"""

ENDS = """
import ctypes, sys, threading
from benchmarks.machine import held_bytes
from models.process import begin_with_one_heap, give_back_freed
if sys.argv[1] == "one":
    begin_with_one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.free(libc.malloc(30 << 20))  # from then on freed memory is kept, up to twice as much
def work():
    blocks = [libc.malloc(100000) for _ in range(400)]
    for block in blocks: ctypes.memset(block, 1, 100000)
    for block in blocks: libc.free(block)
before = held_bytes()["anonymous"]
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert give_back_freed()
print(held_bytes()["anonymous"] - before)
"""


KEPT_BY_THREAD = """
import ctypes, sys
from models.process import begin_with_one_heap
if sys.argv[1] == "one":
    begin_with_one_heap()
class Info(ctypes.Structure):
    _fields_ = [(f"f{place}", ctypes.c_size_t) for place in range(10)]  # the eighth: bytes in use
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.mallinfo2.restype = [ctypes.c_void_p], Info
sizes = [size for size in range(520, 1000, 16) for _ in range(7)]
blocks = [libc.malloc(size) for size in sizes]
before = libc.mallinfo2().f7
for block in blocks: libc.free(block)
print(before - libc.mallinfo2().f7)
"""

BEGUN = """
import os, subprocess, sys
from models.process import TUNABLES, begin_with_one_heap
begin_with_one_heap()
child = "import os; print(os.environ.get('GLIBC_TUNABLES'))"
print(os.getpid(), os.environ.get(TUNABLES), sys.argv[1:], open("/proc/self/environ").read().count("tcache_count=0"))
sys.stdout.flush()
subprocess.run([sys.executable, "-c", child], check=True)
"""


def freed(variant: str) -> int:
    """Bytes less in use, as the C library sees it, once 160 kB in small blocks were freed."""
    done = subprocess.run([sys.executable, "-c", KEPT_BY_THREAD, variant], capture_output=True, text=True, check=True)
    return int(done.stdout)


def kept_at_the_end(variant: str) -> int:
    """Bytes that a process holds more after another thread had 40 MB, freed them, and all was given back."""
    done = subprocess.run([sys.executable, "-c", ENDS, variant], capture_output=True, text=True, check=True)
    return int(done.stdout)


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
def test_what_is_freed_is_used_again_without_new_pages() -> None:
    plain, kept = faults("plain"), faults("kept")
    assert kept < plain / 10 and plain > 10 * 1000, (plain, kept)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_all_threads_have_their_memory_from_one_heap() -> None:
    plain, one = arenas("plain"), arenas("one")
    assert one == 1 < plain, (plain, one)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives back what lies between")
def test_what_is_freed_between_things_in_use_goes_back_when_told() -> None:
    assert given_back("kept") < 1e6 and given_back("given back") > 30e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_what_another_thread_freed_goes_back_too_where_there_is_one_heap() -> None:
    plain, one = kept_at_the_end("plain"), kept_at_the_end("one")
    assert one < 2e6 and plain > 20e6, (plain, one)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed blocks by thread")
def test_no_thread_keeps_what_it_freed_where_there_is_one_heap() -> None:
    plain, one = freed("plain"), freed("one")
    assert plain < 20e3 and one > 140e3, (plain, one)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told so")
@pytest.mark.parametrize("given", [None, "glibc.malloc.perturb=0"])
def test_a_process_that_begins_anew_is_the_same_and_starts_others_as_they_would_be(given: str | None) -> None:
    variables = {name: value for name, value in os.environ.items() if name != TUNABLES}
    if given is not None:
        variables[TUNABLES] = given
    line = [sys.executable, "-c", BEGUN, "one word", "-x"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        said = process.stdout.read().splitlines()
    assert said == [f"{process.pid} {given} ['one word', '-x'] 1", str(given)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told so")
def test_a_process_whose_environment_says_that_it_began_anew_goes_on_as_it_is() -> None:
    said = "import os; os.environ['GEMEL_BEGAN'] = str(os.getpid()); os.environ.pop('GLIBC_TUNABLES', None)\n"
    done = subprocess.run([sys.executable, "-c", said + BEGUN], capture_output=True, text=True, check=True)
    assert " None [] 0\nNone\n" in done.stdout
