"""Landlock, by which a process of Linux gives up its access to files and network; asked of the kernel itself.

Three system calls, which glibc has no functions for: <https://docs.kernel.org/userspace-api/landlock.html>. Packages
that wrap them exist, but none has left its beta or has more than one author.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_SET_NO_NEW_PRIVILEGES = 38
_VERSION_FLAG, _BENEATH_RULE = 1, 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
NETWORK_VERSION, _SCOPE_VERSION = 4, 6
"""The versions from which Landlock has rules for TCP, and for signals and abstract sockets."""
_TCP = 0b11
"""Binding and connecting."""
_SCOPES = 0b11
"""Abstract Unix sockets and signals of processes outside."""


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _BeneathAttributes(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


@cache
def landlock_version() -> int:
    """The version of Landlock's interface in this kernel; 0 where there is none."""
    if not sys.platform.startswith("linux"):
        return 0
    version = _call(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    return max(version, 0)


def restrict_to_reading(paths: Iterable[Path]) -> bool:
    """Let this process, for ever, open nothing but these files and what lies in these folders, and that for reading.

    TCP and signals to other processes end, too, where the kernel's Landlock has rules for them. Files that are open
    stay as they are. Returns whether there is Landlock; raises OSError where it refuses.
    """
    version = landlock_version()
    if not version:
        return False
    attributes = _RulesetAttributes(
        _file_rights(version),
        _TCP if version >= NETWORK_VERSION else 0,
        _SCOPES if version >= _SCOPE_VERSION else 0,
    )
    ruleset = _check(_call(_CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0))
    try:
        for path in paths:
            _allow_reading(ruleset, path)
        _check(_libc().prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _check(_call(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


def _allow_reading(ruleset: int, path: Path) -> None:
    """Add a file or folder to a ruleset; one that is not there cannot be opened anyway."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            rule = _BeneathAttributes(
                _READ_FILE | _READ_FOLDER if is_folder else _READ_FILE, descriptor
            )
            _check(_call(_ADD_RULE, ruleset, _BENEATH_RULE, ctypes.byref(rule), 0))
        finally:
            os.close(descriptor)


def _file_rights(version: int) -> int:
    """All rights to files that a version knows, which are then denied unless a rule grants them."""
    count = 13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16
    return (1 << count) - 1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return _libc().syscall(ctypes.c_long(number), *words)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
