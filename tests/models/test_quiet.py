"""What native code prints stays away from standard output, and what comes after it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import ctypes
from models.process import without_native_output
c = ctypes.CDLL(None)
print("before")
with without_native_output():
    c.puts(b"chatter")
c.puts(b"native")
c.fflush(None)
print("after")
"""


def test_native_code_is_silent_within_and_heard_again_afterwards(repository: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=repository, capture_output=True, text=True, check=True)
    assert "chatter" not in done.stdout and sorted(done.stdout.split()) == ["after", "before", "native"]
