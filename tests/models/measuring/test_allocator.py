"""Freed memory is kept: the system need not clear pages again for what is asked next."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from models.measuring.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory() and keep_freed_memory()
for _ in range(40):  # until the heap has found its size
    torch.ones(1 << 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(variant: str) -> int:
    """Pages that a process of its own was given anew while it asked ten times for as much as it had just freed."""
    done = subprocess.run([sys.executable, "-c", FAULTS, variant], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep what is freed")
def test_what_is_freed_is_used_again_without_new_pages() -> None:
    plain, kept = faults("plain"), faults("kept")
    assert kept < plain / 10 and plain > 10 * 1000, (plain, kept)
