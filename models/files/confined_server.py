"""The process that reads models of strangers in children of its own, each without rights and within limits.

It imports torch once, where that is installed, and never runs a thread, so that a child is a fork of some ten
milliseconds. Started by `confined.py`, which sends it a file of a request, a file for the answer and a socket for each
child.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from gemel.models.files.extras import is_installed

PRELOADED = (
    "torch", "torchvision", "gemel.models.graph.program", "gemel.models.files.foreign_checkpoint",
    "gemel.models.bundle.confined_bundle",
)  # fmt: skip
"""Modules that children find imported."""
WARMED = "gemel.models.graph.packing:warm_up"
"""What is called once, so that not every child does what is done at first use."""
ANSWER, TENSOR = "answer", "tensor."
"""The name of the answer's text in its file, and what begins the names of its tensors."""
MAX_OPEN_FILES = 256
CPU_END_S = 2
"""A child that goes on after the signal of its limit of processor time is killed after so many seconds more."""
DIE_WITH_PARENT = 1
MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "unable to allocate",
    "cannot allocate",
)
"""In the text of an error of a library that got no memory, in small letters."""


@dataclass(frozen=True)
class ConfinedResult:
    """What a function in a child returns: plain values as JSON has them, and tensors by name."""

    value: Any
    tensors: Mapping[str, Any]


@dataclass
class _Child:
    """A child that runs: the socket to who waits for it, and when it is killed."""

    link: socket.socket
    deadline_s: float
    is_late: bool = False


def serve(descriptor: int) -> None:
    """Start a child for each request on this socket, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _ignore)
    _preload()
    children: dict[int, _Child] = {}
    while True:
        links = {child.link: pid for pid, child in children.items()}
        ready, _, _ = select.select(
            [control, woken, *links], [], [], _seconds_left(children.values())
        )
        if woken in ready:
            os.read(woken, 4096)
        for link in ready:
            if link in links:  # the process that asked has left
                os.kill(links[link], signal.SIGKILL)
        if control in ready:
            request, files, _, _ = socket.recv_fds(control, 1, 3)
            if not request:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return
            pid, child = _start(files)
            children[pid] = child
        for pid, child in children.items():
            if child.deadline_s <= time.monotonic() and not child.is_late:
                child.is_late = True
                os.kill(pid, signal.SIGKILL)
        _reap(children)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing: a signal wakes `select` by its descriptor."""


def _preload() -> None:
    if is_installed("torch"):
        import torch

        torch.set_num_threads(1)
    for name in PRELOADED:
        with suppress(ImportError):  # a child that needs it says so
            importlib.import_module(name)
    with suppress(Exception):
        _find_function(WARMED)()
    gc.collect()
    gc.freeze()  # a collection in a child would touch all pages that it shares with this process


def _seconds_left(children: Iterable[_Child]) -> float | None:
    deadlines = [child.deadline_s for child in children if not child.is_late]
    return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


def _reap(children: dict[int, _Child]) -> None:
    """Tell who waits how each child that has ended did."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        child = children.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        with suppress(OSError):
            child.link.send(json.dumps({"code": code, "is_late": child.is_late}).encode())
        child.link.close()


def _start(files: list[int]) -> tuple[int, _Child]:
    request_file, answer_file, link_file = files
    request = _read_request(request_file)
    pid = os.fork()
    if not pid:
        _run(request, answer_file)
    os.close(request_file)
    os.close(answer_file)
    return pid, _Child(
        socket.socket(fileno=link_file), time.monotonic() + request["limits"]["wall_s"]
    )


def _read_request(descriptor: int) -> dict[str, Any]:
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return json.loads(file.read())


# In the child


def _run(request: dict[str, Any], answer_file: int) -> NoReturn:
    """Give up all rights, call the function, write its answer and end."""
    code = 1
    try:
        _confine(request, answer_file)
        _answer(request, answer_file)
        code = 0
    finally:
        os._exit(code)


def _find_function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _confine(request: dict[str, Any], answer_file: int) -> None:
    from gemel.models.files.landlock import restrict_to_reading

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, answer_file)
    os.closerange(answer_file + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir(request["folder"])
    _set_limits(request["limits"])
    restrict_to_reading(map(Path, request["readable"]))


def _set_limits(limits: Mapping[str, int]) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _lower(resource.RLIMIT_NPROC, 0)  # which root is not held to
    _lower(resource.RLIMIT_FSIZE, limits["answer_bytes"])
    _lower(resource.RLIMIT_CPU, limits["cpu_s"], CPU_END_S)
    _lower(resource.RLIMIT_DATA, _data_bytes() + limits["memory_bytes"])


def _lower(kind: int, value: int, margin: int = 0) -> None:
    """Set a limit for good, unless a lower one is set already."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard - margin)
    resource.setrlimit(kind, (value, value + margin))


def _data_bytes() -> int:
    """Memory of this process that is no mapped file, as RLIMIT_DATA counts it."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return 0


def _answer(request: Mapping[str, Any], answer_file: int) -> None:
    from gemel.models.errors import InputError, message_of
    from gemel.models.notes import collect_notes

    result = ConfinedResult(None, {})
    outcome: dict[str, Any] = {}
    with collect_notes() as notes:
        try:
            result = _find_function(request["function"])(*request["arguments"])
            outcome["value"] = result.value
        except BaseException as error:
            if _is_for_memory(error):
                outcome["limit"] = "memory"
            elif isinstance(error, InputError):
                outcome["refusal"] = [error.where, error.problem, error.hint, error.key]
            else:
                outcome["fault"] = message_of(error)
    outcome["notes"] = notes
    try:
        _write(answer_file, outcome, result.tensors)
    except (MemoryError, OSError):  # larger than it may be
        os.ftruncate(answer_file, 0)
        _write(answer_file, {"limit": "answer", "notes": []}, {})


def _is_for_memory(error: BaseException | None) -> bool:
    """Whether memory was refused, whatever other errors a library or a reader made of it."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error).lower()
        if isinstance(error, MemoryError) or any(part in text for part in MEMORY_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _write(descriptor: int, outcome: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write the answer in the container of bundles: its text as JSON, and the tensors."""
    from gemel.models.bundle.format import code_of, encode_header, place, raw_bytes

    text = json.dumps(outcome).encode()
    described = [(ANSWER, "U8", (len(text),))]
    described += [
        (f"{TENSOR}{name}", code_of(tensor.dtype), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    contents = {
        ANSWER: memoryview(text),
        **{f"{TENSOR}{name}": tensor for name, tensor in tensors.items()},
    }
    entries = place(described)
    with open(os.dup(descriptor), "wb") as file:
        file.seek(0)
        file.write(encode_header(entries, {}))
        for entry in entries:
            if entry.is_pad:
                file.write(bytes(entry.nbytes))
            else:
                content = contents[entry.name]
                file.write(content if isinstance(content, memoryview) else raw_bytes(content))
