"""Reads a model of a stranger in a child process that can neither hurt this one nor outgrow it.

The child has limits of processor time, memory and output, and by Landlock, where the system has it, opens nothing but
the model's own folder and what Python needs, to read. Its answer is a file that is checked like any other stranger's:
plain values and tensors, never a pickle. The children are forks of one process of their own (`confined_server.py`),
since this one may have threads.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import mmap
import os
import signal
import site
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gemel.models.bundle.format import dtype_of, parse_header
from gemel.models.errors import InputError, one_line, size_text
from gemel.models.files.confined_server import ANSWER, TENSOR
from gemel.models.files.documents import ParseError, parse_json
from gemel.models.files.extras import find_package
from gemel.models.files.landlock import NETWORK_VERSION, landlock_version
from gemel.models.notes import LOGGER, MAX_NOTES

if TYPE_CHECKING:
    from torch import Tensor

BASE_CPU_S, CPU_BYTES_PER_S = 120, 4 * 2**20
"""Processor time of a child, and the bytes of the model for which it gets a second more."""
WALL_FACTOR = 5
"""A child may take so many times its processor time, since other processes take theirs."""
BASE_MEMORY_BYTES, MEMORY_FACTOR = 2 * 2**30, 10
"""Memory of a child, and for each byte of the model: it holds the file, its parts, the tensors and the folded ones."""
BASE_ANSWER_BYTES, ANSWER_FACTOR = 256 * 2**20, 4
"""Of what a child writes: half precision becomes single, and constants are computed."""
MAX_COUNTED_BYTES = 2**34
"""Of a model and the files beside it, as far as they raise the limits."""
MAX_FOLDER_FILES = 10_000
SYSTEM_FOLDERS = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
)
SYSTEM_FILES = ("/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
PACKAGES = ("torch", "onnx")
"""Packages whose folders hold what readers import, wherever they are installed."""
ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "TZ", "XDG_CACHE_HOME")
ENVIRONMENT_STARTS = ("PYTHON", "LD_", "LC_")
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
"""A process with threads cannot be forked safely."""
START = """import json, sys
sys.path[:] = json.loads(sys.argv[2])
from gemel.models.files.confined_server import serve
serve(int(sys.argv[1]))"""
MORE_HINT = "if you trust it, read it on a larger machine or export a simpler model"


@dataclass(frozen=True)
class Limits:
    """What a child may use: seconds of processor time and by the clock, bytes of memory and of its answer."""

    cpu_s: int
    wall_s: int
    memory_bytes: int
    answer_bytes: int

    @classmethod
    def of_size(cls, nbytes: int) -> Limits:
        """The limits for a model of so many bytes."""
        nbytes = min(nbytes, MAX_COUNTED_BYTES)
        cpu_s = BASE_CPU_S + nbytes // CPU_BYTES_PER_S
        memory_bytes = min(BASE_MEMORY_BYTES + MEMORY_FACTOR * nbytes, _machine_bytes())
        return cls(
            cpu_s, WALL_FACTOR * cpu_s, memory_bytes, BASE_ANSWER_BYTES + ANSWER_FACTOR * nbytes
        )


@dataclass(frozen=True)
class ChildAnswer:
    """What a child answered: plain values, and tensors by name, whose memory is the answer's own."""

    value: Any
    tensors: dict[str, Tensor]


def run_confined(
    function: str,
    arguments: Sequence[Any],
    path: Path,
    beside: bool = False,
    limits: Limits | None = None,
) -> ChildAnswer:
    """Call `module:name` with plain arguments in a child that may read the file `path`; with `beside`, its folder too.

    The function returns a `ConfinedResult`. Its notes are noted here. Raises InputError for what it refused, and where
    it failed or passed a limit: by default those of the file's size, or of its folder's.
    """
    readable, nbytes = _readable_beside(path) if beside else ([path], _size_of(path))
    limits = limits or Limits.of_size(nbytes)
    request = {
        "function": function,
        "arguments": list(arguments),
        "folder": os.getcwd(),
        "limits": asdict(limits),
        "readable": [*_list_needed(), *map(os.path.realpath, readable)],
    }
    with _memory_file() as request_file, _memory_file() as answer_file:
        request_file.write(json.dumps(request).encode())
        request_file.flush()
        ended = _wait(_start_child(path, request_file.fileno(), answer_file.fileno()))
        _check_end(path, ended, limits)
        return _read_answer(path, answer_file, limits)


def describe_confinement() -> str:
    """What holds a child on this system, for `gemel doctor`."""
    version = landlock_version()
    if not version:
        lock = "without Landlock, which this system lacks: it could read any file"
    elif version < NETWORK_VERSION:
        lock = f"Landlock (version {version}), without rules for the network"
    else:
        lock = f"Landlock (version {version})"
    return f"models of others are read in a child with limits of memory and time, {lock}"


# The child's rights


def _size_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _readable_beside(path: Path) -> tuple[list[Path], int]:
    """What a child may read beside a file, and the bytes of the file and of all in its folder.

    The folder with all in it; but of a home, or a folder above one, only its own files that are not hidden.
    """
    folder = path.parent
    sizes: list[int] = []
    files: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry, _ in zip(entries, range(MAX_FOLDER_FILES)):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and not entry.name.startswith("."):
                files.append(folder / entry.name)
                sizes.append(status.st_size)
    return [path, *(files if _holds_home(folder) else [folder])], max(sum(sizes), _size_of(path))


def _holds_home(folder: Path) -> bool:
    try:
        return Path.home().resolve().is_relative_to(folder.resolve())
    except RuntimeError:  # this user has none
        return False


@cache
def _list_needed() -> tuple[str, ...]:
    """The folders and files of Python, of the packages that readers use and of the system's libraries."""
    folders = [sys.prefix, sys.base_prefix, sys.exec_prefix, *SYSTEM_FOLDERS, *SYSTEM_FILES]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    for name in PACKAGES:
        spec = find_package(name)
        if spec is not None and spec.origin is not None:
            folders.append(os.path.dirname(os.path.dirname(spec.origin)))
    for folder in sys.modules["gemel"].__path__:
        folders.append(folder)
        # In a checkout.
        folders += [entry.path for entry in os.scandir(folder) if entry.is_symlink()]
    return tuple(dict.fromkeys(map(os.path.realpath, folders)))


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# The process that forks the children

_lock = threading.Lock()
_server: tuple[socket.socket, subprocess.Popen[bytes]] | None = None


def _start_child(path: Path, request: int, answer: int) -> socket.socket:
    """Ask for a child; returns the socket that says how it ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, _lock:
        for is_last in (False, True):
            try:
                socket.send_fds(_find_server(), [b"1"], [request, answer, theirs.fileno()])
                return ours
            except OSError as error:  # it was killed, most likely for memory
                _stop_server()
                if is_last:
                    ours.close()
                    raise _no_reader(path) from error
    raise AssertionError


def _find_server() -> socket.socket:
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    START,
                    str(theirs.fileno()),
                    json.dumps(list(map(os.path.abspath, sys.path))),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
                start_new_session=True,  # a Ctrl-C is for this process, which ends it
            )
        _server = ours, process
    return _server[0]


def _environment() -> dict[str, str]:
    """This process's environment without what a child need not know, such as tokens."""
    names = [
        name for name in os.environ if name in ENVIRONMENT or name.startswith(ENVIRONMENT_STARTS)
    ]
    return {**{name: os.environ[name] for name in names}, **ONE_THREAD}


def _stop_server() -> None:
    """End the process that forks the children, if it runs, and so its children."""
    global _server
    if _server is not None:
        link, process = _server
        _server = None
        link.close()
        process.kill()
        process.wait()


def _forget_server() -> None:
    """Leave it to the process that this one is a fork of."""
    global _server, _lock
    _lock = threading.Lock()
    if _server is not None:
        link, process = _server
        _server = None
        link.close()
        process.returncode = 0  # it is no child of this process


atexit.register(_stop_server)
os.register_at_fork(after_in_child=_forget_server)


def _no_reader(path: Path) -> InputError:
    return InputError(
        path, "the process that reads models of others does not start", "run `gemel doctor`"
    )


@contextlib.contextmanager
def _memory_file() -> Iterator[BinaryIO]:
    """A file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("gemel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b") as file:
            yield file
    else:
        with tempfile.TemporaryFile() as file:
            yield file


# The answer


def _wait(link: socket.socket) -> dict[str, Any] | None:
    """How a child ended; None where the process that forks them ended before. Leaving this kills the child."""
    with link:
        data = link.recv(4096)
    return json.loads(data) if data else None


def _check_end(path: Path, ended: dict[str, Any] | None, limits: Limits) -> None:
    """Raise InputError for a child that did not end by itself."""
    # The process that forks children was itself killed: the next call starts another.
    if ended is None:
        _stop_server()
        raise _no_reader(path)
    code = ended["code"]
    if ended["is_late"]:
        raise InputError(path, f"took more than {limits.wall_s} s to read", MORE_HINT)
    # The kernel ended it at its limit of processor time.
    if code == -signal.SIGXCPU:
        raise InputError(
            path, f"took more than {limits.cpu_s} s of processor time to read", MORE_HINT
        )
    # The kernel gives no reason; lack of memory is the usual one.
    if code in (-signal.SIGKILL, -signal.SIGABRT):
        raise InputError(
            path,
            f"its reader was killed: it lacked memory, of {_memory_text(limits)} at most",
            MORE_HINT,
        )
    if code < 0:
        raise InputError(
            path, f"its reader crashed ({signal.Signals(-code).name})", "do not use this file"
        )
    if code:
        raise InputError(path, "its reader failed before it began", "run `gemel doctor`")


def _memory_text(limits: Limits) -> str:
    return size_text(limits.memory_bytes)


def _read_answer(path: Path, file: BinaryIO, limits: Limits) -> ChildAnswer:
    """The answer in a file that a child has written, which is believed nothing."""
    try:
        _seal(file)
        size = os.fstat(file.fileno()).st_size
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        header = parse_header(mapping)
        text = header.entries[ANSWER]
        outcome = parse_json(
            mapping[header.data_start + text.begin : header.data_start + text.end], foreign=True
        )
        _take_notes(outcome["notes"])
        _check_outcome(path, outcome, limits)
        tensors = {
            entry.name.removeprefix(TENSOR): _map_tensor(
                mapping, header.data_start + entry.begin, entry
            )
            for entry in header.tensors
            if entry.name.startswith(TENSOR)
        }
        return ChildAnswer(outcome["value"], tensors)
    except (ParseError, OSError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            path, "its reader gave no answer that can be read", "do not use this file"
        ) from error


def _check_outcome(path: Path, outcome: dict[str, Any], limits: Limits) -> None:
    """Raise InputError for what the child refused or could not do."""
    if "refusal" in outcome:
        where, problem, hint, key = map(str, outcome["refusal"])
        raise InputError(where, problem, hint, key)
    if "fault" in outcome:
        raise InputError(path, f"cannot be read: {outcome['fault']}", "export or save it again")
    if outcome.get("limit") == "memory":
        raise InputError(
            path, f"takes more than {_memory_text(limits)} of memory to read", MORE_HINT
        )
    if "limit" in outcome:
        raise InputError(
            path, f"holds more than {size_text(limits.answer_bytes)} once it is read", MORE_HINT
        )


def _take_notes(notes: Iterable[Any]) -> None:
    for note, _ in zip(notes, range(MAX_NOTES)):
        LOGGER.warning("%s", one_line(note))


def _seal(file: BinaryIO) -> None:
    """Make a file in memory one that cannot change; OSError where another process has it mapped to write."""
    if hasattr(os, "memfd_create"):
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, seals)


def _map_tensor(mapping: mmap.mmap, begin: int, entry: Any) -> Tensor:
    import torch

    dtype = dtype_of(entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.nbytes // dtype.itemsize
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=begin).view(entry.shape)
