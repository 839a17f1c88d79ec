"""Runs one gemel command in this process and asserts what holds for every input from others."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import resource
import signal
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cv2  # noqa: F401  imported here, so that no case is charged with it
import pytest
import torchvision  # noqa: F401

from gemel.cli import main
from gemel.models.errors import one_line
from gemel.models.process import trim_heap

MAX_SECONDS, MAX_BYTES, MAX_CHARACTERS = 10.0, 500 * 2**20, 1000
RUNAWAY_SECONDS, RUNAWAY_BYTES = 20, 4 * 2**30
"""Limits at which a case is stopped, so that the others still run."""
HASHED_BYTES = 2**24
TRACEBACK = "Traceback (most recent call last)"


class Runaway(BaseException):
    """A case that did not end by itself."""


@dataclass(frozen=True)
class CommandResult:
    """A command's exit code, output, CPU seconds, bytes above the start, and the files it made, changed or removed."""

    command: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float
    nbytes: int
    changed: tuple[str, ...]

    def check_bounds(self) -> CommandResult:
        """Assert no traceback and bounds of time and memory; returns itself."""
        assert TRACEBACK not in self.err + self.out, self.err + self.out
        assert self.seconds < MAX_SECONDS, f"{self.seconds:.1f} s of CPU time: {self}"
        assert self.nbytes < MAX_BYTES, f"{self.nbytes >> 20} MiB of memory: {self}"
        return self

    def check_refused(self, *names: object) -> str:
        """Assert that the command was refused in one line, after notes, that holds these names; returns the line."""
        self.check_bounds()
        assert self.code == 2, self
        refusals = [line for line in self.err.splitlines(keepends=True) if not line.startswith("note: ")]
        assert len(refusals) == 1 and refusals[0].endswith("\n"), self
        line = refusals[0][:-1]
        assert line.isprintable() and len(line) < MAX_CHARACTERS, self
        for name in names:
            assert one_line(name) in line, f"{name!r} is not named: {line}"
        assert self.out == "" and not self.changed, self
        return line


def run_command(command: Sequence[object], folder: Path) -> CommandResult:
    """Run a command here, in `folder`; exceptions that escape it escape this."""
    words = tuple(map(str, command))
    with (
        tempfile.TemporaryDirectory() as temporary,
        _captured_output() as (out, err),
        pytest.MonkeyPatch.context() as patch,
    ):
        before = _snapshot(folder, Path(temporary))
        patch.chdir(folder)
        patch.setattr(tempfile, "tempdir", temporary)
        with _plain_logging(), limits():
            start_bytes, start_s = reset_peak(), sum(os.times()[:4])
            try:
                code = main(words)
            except SystemExit as end:
                code = int(end.code or 0)
            seconds, nbytes = sum(os.times()[:4]) - start_s, status_bytes("VmHWM") - start_bytes
        after = _snapshot(folder, Path(temporary))
        changed = tuple(sorted(path for path in {*before, *after} if before.get(path) != after.get(path)))
        return CommandResult(words, code, _text(out), _text(err), seconds, nbytes, changed)


def check_refused(command: Sequence[object], folder: Path, *names: object) -> str:
    """The line with which a command is refused (see CommandResult.check_refused)."""
    return run_command(command, folder).check_refused(*names)


def _snapshot(*folders: Path) -> Mapping[str, tuple[Any, ...]]:
    """Mode and content of everything in these folders by path; links are not followed."""
    found: dict[str, tuple[Any, ...]] = {}
    for folder in folders:
        for root, names, files in os.walk(os.fsencode(folder)):
            for name in (*names, *files):
                path = os.path.join(root, name)
                status = os.lstat(path)
                content: tuple[Any, ...] = ()
                if stat.S_ISREG(status.st_mode):
                    content = (status.st_size, status.st_mtime_ns)
                    if status.st_size <= HASHED_BYTES:
                        content = (hashlib.sha1(Path(os.fsdecode(path)).read_bytes()).hexdigest(),)
                found[os.fsdecode(path)] = (status.st_mode, *content)
    return found


@contextlib.contextmanager
def _captured_output() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Files that take stdout and stderr, of native libraries too."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, contextlib.ExitStack() as stack:
        for number, file, redirect in ((1, out, contextlib.redirect_stdout), (2, err, contextlib.redirect_stderr)):
            original = os.dup(number)
            stack.callback(os.close, original)
            stack.callback(os.dup2, original, number)
            os.dup2(file.fileno(), number)
            text = os.fdopen(os.dup(number), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
            stack.enter_context(redirect(stack.enter_context(text)))
        yield out, err


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "backslashreplace")


@contextlib.contextmanager
def _plain_logging() -> Iterator[None]:
    """Warnings and logs go to stderr, as they do without pytest."""

    def show(message: Any, category: type[Warning], filename: str, line: int, *_: Any) -> None:
        print(warnings.formatwarning(message, category, filename, line), file=sys.stderr)

    root = logging.getLogger()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(root, "handlers", [])
        patch.setattr(root, "level", root.level)
        warnings.simplefilter("always")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Stop a case after RUNAWAY_SECONDS of CPU time, and refuse memory beyond RUNAWAY_BYTES more than now."""

    def stop(*_: Any) -> None:
        raise Runaway(f"more than {RUNAWAY_SECONDS} s of CPU time")

    before = resource.getrlimit(resource.RLIMIT_DATA)
    handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, RUNAWAY_SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + RUNAWAY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


def reset_peak() -> int:
    """Resident bytes now, without garbage and free pages; the peak counts from here."""
    gc.collect()
    gc.freeze()
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
