"""What every hostile case is tried with.

`refused(command, folder, names...)` runs one gemel command in this process, in `folder`, and asserts all that bad
input is promised: exit code 2 (or `code`), exactly one line on stderr which holds each of `names` (the file, the key),
nothing on stdout, no traceback, no file of `folder` made, changed or removed, nothing left in the temporary folder,
less than MAX_SECONDS of processor time and MAX_BYTES of memory. It gives the line. `refused_apart` does the same in
a process of its own: for what may kill or hang one (pipes, signals, limits, the environment); `meanwhile` is called
with the running process. `tried` and `tried_apart` give what was seen and assert nothing, for cases that are not
refused: `Seen.held()` asserts the bounds alone. The folder `house` (see samples.py) holds a small valid file of every
kind, one copy for each test; damage one and name it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import logging
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cv2  # noqa: F401  imported here, so that no case is charged with it
import torchvision  # noqa: F401

from gemel.cli import main
from models.errors import one_line

REPOSITORY = Path(__file__).resolve().parent.parent.parent
MAX_SECONDS, MAX_BYTES, MAX_CHARACTERS = 5.0, 500 * 2**20, 1000
RUNAWAY_SECONDS, RUNAWAY_BYTES = 20, 4 * 2**30
"""Where a case in this process is ended, so that the others still run."""
HASHED_BYTES = 2**24
PEAK = re.compile(r"VmHWM:\s+(\d+) kB")
TRACEBACK = "Traceback (most recent call last)"


class Runaway(BaseException):
    """A case that did not end by itself."""


@dataclass(frozen=True)
class Seen:
    """What came of a command: its exit code, what it wrote, processor seconds and bytes above the start, and which
    files it made, changed or removed.
    """

    command: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float
    nbytes: int
    changed: tuple[str, ...]

    def held(self) -> Seen:
        """Itself, if it stayed within the bounds of time and memory and told no traceback."""
        assert TRACEBACK not in self.err + self.out, self.err + self.out
        assert self.seconds < MAX_SECONDS, f"{self.seconds:.1f} s of processor time: {self}"
        assert self.nbytes < MAX_BYTES, f"{self.nbytes >> 20} MiB of memory: {self}"
        return self

    def refused(self, *names: object, code: int = 2) -> str:
        """The one line, if that is all that came of it and it holds the names."""
        self.held()
        assert self.code == code, self
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), self
        line = self.err[:-1]
        assert line.isprintable() and len(line) < MAX_CHARACTERS, self
        for name in names:
            assert one_line(name) in line, f"{name!r} is not named: {line}"
        assert self.out == "", self
        assert not self.changed, self
        return line


def refused(command: Sequence[object], folder: Path, *names: object, code: int = 2) -> str:
    """The line with which a command is refused, in this process (see above)."""
    return tried(command, folder).refused(*names, code=code)


def refused_apart(
    command: Sequence[object], folder: Path, *names: object, code: int = 2, env: Mapping[str, str | None] | None = None,
    meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> str:  # fmt: skip
    """The line with which a command is refused, in a process of its own (see above)."""
    return tried_apart(command, folder, env, meanwhile).refused(*names, code=code)


def tried(command: Sequence[object], folder: Path) -> Seen:
    """Run a command here, in `folder`; what escapes it escapes this."""
    said = tuple(map(str, command))
    with tempfile.TemporaryDirectory() as temporary, _written() as (out, err):
        before = snapshot(folder, Path(temporary))
        with _within(folder), _temporary(temporary), _as_run_alone(), _bounded():
            at, started = _settled_bytes(), _seconds(os.times())
            try:
                code = main(said)
            except SystemExit as left:
                code = int(left.code or 0)
            seconds, nbytes = _seconds(os.times()) - started, _peak_bytes() - at
        changed = _changed(before, snapshot(folder, Path(temporary)))
        return Seen(said, code, _text(out), _text(err), seconds, nbytes, changed)


@contextlib.contextmanager
def _within(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def tried_apart(
    command: Sequence[object], folder: Path, env: Mapping[str, str | None] | None = None,
    meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None, timeout_s: float = 60.0,
) -> Seen:  # fmt: skip
    """Run a command in a process of its own, in `folder`, ended (with an AssertionError) after `timeout_s`.

    `env` changes variables, None removes one. Seconds and bytes are those above a process that only imports.
    """
    said = tuple(os.fspath(part) if isinstance(part, Path) else str(part) for part in command)
    idle_s, idle_bytes = _idle()
    with tempfile.TemporaryDirectory() as temporary:
        before = snapshot(folder, Path(temporary))
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TMPDIR": temporary}
        for name, value in (env or {}).items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        line = [sys.executable, "-m", "gemel", *said]
        code, out, err, seconds, nbytes = _process(line, folder, environment, meanwhile, timeout_s)
        changed = _changed(before, snapshot(folder, Path(temporary)))
    return Seen(said, code, out, err, max(0.0, seconds - idle_s), max(0, nbytes - idle_bytes), changed)


def snapshot(*folders: Path) -> dict[str, tuple[Any, ...]]:
    """Everything in these folders, by path: its kind and mode, and what is in it; links are not followed."""
    found: dict[str, tuple[Any, ...]] = {}
    for folder in folders:
        for root, names, files in os.walk(os.fsencode(folder)):
            for name in (*names, *files):
                path = os.path.join(root, name)
                status = os.lstat(path)
                found[os.fsdecode(path)] = (status.st_mode, *_content(path, status))
    return found


def _content(path: bytes, status: os.stat_result) -> tuple[Any, ...]:
    if stat.S_ISLNK(status.st_mode):
        return (os.readlink(path),)
    if not stat.S_ISREG(status.st_mode):
        return ()
    if status.st_size > HASHED_BYTES or not os.access(path, os.R_OK):
        return (status.st_size, status.st_mtime_ns)
    with open(path, "rb") as file:
        return (status.st_size, hashlib.sha1(file.read()).hexdigest())


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(path for path in {*before, *after} if before.get(path) != after.get(path)))


@functools.cache
def _idle() -> tuple[float, int]:
    """Seconds and bytes of a process that only imports what most commands do."""
    line = [sys.executable, "-c", "import gemel.cli, torch, torchvision, cv2"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    code, _, err, seconds, nbytes = _process(line, REPOSITORY, environment, None, 120.0)
    assert code == 0, err
    return seconds, nbytes


def _process(
    line: Sequence[str], folder: Path, env: Mapping[str, str], meanwhile: Callable[[Any], None] | None, timeout_s: float
) -> tuple[int, str, str, float, int]:
    """Its exit code (negative: the signal that ended it), what it wrote, processor seconds and most bytes resident."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            line, cwd=folder, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        late = threading.Timer(timeout_s, lambda: os.killpg(process.pid, signal.SIGKILL))
        late.start()
        try:
            if meanwhile is not None:
                meanwhile(process)
            status, used, peak_bytes = _ended(process.pid)
        finally:
            in_time = late.is_alive()
            late.cancel()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert in_time, f"still running after {timeout_s} s: {list(line)}\n{_text(err)}"
        seconds = used.ru_utime + used.ru_stime
        return process.returncode, _text(out), _text(err), seconds, peak_bytes


def _ended(pid: int) -> tuple[int, resource.struct_rusage, int]:
    """How a child ended, what it used, and most bytes that were resident, looked at every few milliseconds: what the
    kernel reports of an ended child is never less than what its parent had when it was started.
    """
    peak_bytes = 0
    while True:
        with contextlib.suppress(OSError):
            found = PEAK.search(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
            peak_bytes = max(peak_bytes, int(found[1]) * 1024 if found else 0)
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, used, peak_bytes
        time.sleep(0.005)


@contextlib.contextmanager
def _written() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Files that take what is written to stdout and stderr meanwhile, by native libraries too."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, contextlib.ExitStack() as stack:
        for number, file, redirect in (
            (1, out, contextlib.redirect_stdout),
            (2, err, contextlib.redirect_stderr),
        ):
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(file.fileno(), number)
            text = os.fdopen(os.dup(number), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
            stack.enter_context(redirect(stack.enter_context(text)))
        yield out, err


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "backslashreplace")


@contextlib.contextmanager
def _temporary(folder: str) -> Iterator[None]:
    """Temporary files go here."""
    kept, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = kept


@contextlib.contextmanager
def _as_run_alone() -> Iterator[None]:
    """Warnings, logs and errors of threads go to stderr, as they do without pytest."""
    root = logging.getLogger()
    kept, handlers, level = (threading.excepthook, sys.unraisablehook), root.handlers[:], root.level
    root.handlers.clear()
    threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", kind)
            warnings.showwarning = lambda message, category, filename, lineno, file=None, line=None: print(
                warnings.formatwarning(message, category, filename, lineno, line), file=sys.stderr
            )
            yield
    finally:
        threading.excepthook, sys.unraisablehook = kept
        root.handlers[:] = handlers
        root.setLevel(level)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Ends what takes RUNAWAY_SECONDS of processor time, and refuses memory past RUNAWAY_BYTES more than now."""

    def end(*_: Any) -> None:
        raise Runaway(f"more than {RUNAWAY_SECONDS} s of processor time")

    before = resource.getrlimit(resource.RLIMIT_DATA)
    handler = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, RUNAWAY_SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + RUNAWAY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


def _settled_bytes() -> int:
    """Resident now, without what was freed and kept; the peak is counted from here on."""
    gc.collect()
    gc.freeze()  # what is there now is not looked at again: the next collection takes no time
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_bytes() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def _seconds(times: os.times_result) -> float:
    return times.user + times.system + times.children_user + times.children_system
