"""Files: bounded reading, JSON, YAML against a schema, atomic writing, appending, locks, the cache folder, path checks.

A file that the user names is read only if it is a regular file and within a size cap. Every problem is an InputError of
one line: file, key, problem, hint.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import math
import os
import re
import secrets
import select
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar, get_args

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemel.models.errors import InputError, LockedError, is_interrupt, join_errors, size_text
from gemel.models.files.documents import ParseError, parse_json, parse_yaml
from gemel.models.notes import add_note

MAX_JSON_BYTES = 32 * 2**20
MAX_JSON_LINES_BYTES = 2**30
"""Of a file with a JSON document in each line, of which one is in memory at a time."""
MAX_YAML_BYTES = 2**20


def read_bounded(path: Path, max_bytes: int, hint: str) -> bytes:
    """All of a regular file of at most `max_bytes`; InputError for any other."""
    with open_regular(path, hint) as file:
        size = os.fstat(file.fileno()).st_size  # a read reserves as much memory as it may give
        data = file.read(min(size, max_bytes) + 1)
        # It has grown, or is one of the system's that say nothing of their size.
        if len(data) > size:
            data += file.read(max_bytes + 1 - len(data))
    if len(data) > max_bytes:
        raise InputError(path, f"is larger than {size_text(max_bytes)}", hint)
    return data


@contextmanager
def open_regular(path: Path, hint: str, key: str = "") -> Iterator[BinaryIO]:
    """A regular file, open for reading; InputError for any other, and for I/O errors while it is read.

    `key` is the key that names the file.
    """
    try:
        # Not blocking, so that a pipe without a writer is refused and not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
                raise InputError(path, f"cannot be read: is {kind}", hint, key)
            yield file
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}", hint, key) from error


# JSON


def read_json(
    path: Path, hint: str, max_bytes: int = MAX_JSON_BYTES, foreign: bool = False
) -> dict[str, Any]:
    """The JSON object in a file; InputError for a file that cannot be read or holds none within bounds."""
    return _json_object(path, "", read_bounded(path, max_bytes, hint), hint, foreign)


def read_json_lines(
    path: Path,
    hint: str,
    max_bytes: int = MAX_JSON_LINES_BYTES,
    max_line_bytes: int = MAX_JSON_BYTES,
    torn: bool = True,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects in the lines of a file, each with its number from 1; InputError as `read_json`.

    With `torn`, a last line without a newline that is no JSON is left out: its writer was interrupted.
    """
    with open_regular(path, hint) as file:
        number = total = 0
        while line := file.readline(max_line_bytes + 1):
            number = number + 1
            total = total + len(line)
            if len(line) > max_line_bytes:
                raise InputError(
                    path, f"line {number} is longer than {size_text(max_line_bytes)}", hint
                )
            if total > max_bytes:
                raise InputError(path, f"is larger than {size_text(max_bytes)}", hint)
            try:
                row = _json_object(path, f"line {number} ", line, hint)
            except InputError:
                if line.endswith(b"\n") or not torn:
                    raise
                add_note(path, f"line {number}, the last, is incomplete and left out")
                return
            yield number, row


def finite(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinities become null, tuples and sets lists."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [finite(item) for item in sorted(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _json_object(
    path: Path, where: str, data: bytes, hint: str, foreign: bool = False
) -> dict[str, Any]:
    try:
        document = parse_json(data, foreign)
    except ParseError as error:
        text = str(error).removeprefix("line 1, ") if where else str(error)
        raise InputError(path, f"{where}is not JSON: {text}", hint) from error
    if not isinstance(document, dict):
        raise InputError(path, f"{where}is not a mapping", hint)
    return document


# YAML and schemas

NO_TEXT = {".safetensors": "a bundle or weights", ".onnx": "a model", ".pt2": "a model"}
"""By suffix, what is taken for a YAML file by mistake."""
MARKS: dict[str, tuple[type, str]] = {
    "bundle": (str, "box config"), "boxes": (list, "fleet file"), "workloads": (list, "fleet file"),
    "queries": (list, "workload file"),
}  # fmt: skip
"""A key, its type, and the kind of file that has it; the first that fits."""
UNKNOWN_KEY = "unknown key"
"""The problem of a key that a schema lacks."""
Keys = TypeVar("Keys", bound=BaseModel)


class Exact(BaseModel):
    """A schema of files that a program writes: no unknown keys, no coercion of types, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def read_yaml(path: Path, schema: type[Keys], kind: str, start: str) -> Keys:
    """The file as an instance of `schema`; `kind` names such files and `start` the keys one begins with.

    Raises InputError for a file that cannot be read, is not YAML or no mapping, or does not fit the schema.
    """
    return validate(path, read_mapping(path, kind, start), schema)


def read_mapping(path: Path, kind: str, start: str) -> dict[str, Any]:
    """The file as a mapping, not yet validated; otherwise like `read_yaml`."""
    if (other := NO_TEXT.get(path.suffix.lower())) and path.is_file():
        raise InputError(
            path, f"is {other}, no {kind}", f"give a YAML file that starts with {start}"
        )
    data = read_bounded(path, MAX_YAML_BYTES, f"give an existing {kind}")
    try:
        document = parse_yaml(data)
    except ParseError as error:
        raise InputError(path, f"is not YAML: {error}", "correct the file") from error
    if not isinstance(document, dict):
        raise InputError(path, "is not a mapping", f"start with {start}")
    other = next(
        (name for key, (of, name) in MARKS.items() if isinstance(document.get(key), of)), kind
    )
    if other.split()[0] not in kind.split() and any(
        name.split()[0] in kind.split() for _, name in MARKS.values()
    ):
        raise InputError(path, f"is a {other}, no {kind}", f"give one that starts with {start}")
    return document


def validate(
    path: str | Path, value: Any, schema: type[Keys], at: str = "", hint: str = ""
) -> Keys:
    """A value of a file as an instance of `schema`; `at` is the key that holds it.

    Raises InputError naming every key that does not fit; `hint` replaces the default one, for a file that
    programs write, of which the first fault alone is named.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        faults = sorted(error.errors(), key=lambda fault: fault["type"] not in MISSPELT)
        # A misspelt key is both unknown and missing; name the misspelling.
        misspelt = {fault["loc"][:-1] for fault in faults if fault["type"] in MISSPELT}
        if any(fault["type"] == EMPTY and len(fault["loc"]) == 1 for fault in faults):
            misspelt.add(())  # a file that is yet to be filled in
        faults = [
            fault
            for fault in faults
            if fault["type"] != "missing" or fault["loc"][:-1] not in misspelt
        ]
        by_key = dict[str, InputError]()  # each type of a union has its fault; the first counts
        for fault in faults[: 1 if hint else MAX_FAULTS]:
            key = ".".join(part for part in (at, _key_text(fault["loc"], value)) if part)
            by_key.setdefault(key, InputError(path, *_describe_fault(fault, schema, hint), key))
        raise join_errors(list(by_key.values())) from error


def _describe_fault(fault: Any, schema: type[BaseModel], hint: str) -> tuple[str, str]:
    """The problem and the remedy of one of pydantic's errors."""
    if fault["type"] == "extra_forbidden":
        return UNKNOWN_KEY, hint or _near_key_hint(schema, fault["loc"])
    # A key that is missing has no value that could be shown.
    if fault["type"] == "missing":
        return "this key is missing", hint or "add it"
    if fault["type"] == EMPTY and not fault["input"]:
        return "is empty", hint or "add at least one"
    input_text = (
        "" if isinstance(fault["input"], dict | list) else f" (given: {fault['input']!r:.80})"
    )
    text = fault["msg"].removeprefix("Value error, ").replace("a valid dictionary", "a mapping")
    return f"{text[0].lower()}{text[1:]}{input_text}", hint or "correct the value"


def _near_key_hint(schema: type[BaseModel], location: Sequence[int | str]) -> str:
    for step in location[:-1]:
        if isinstance(step, str) and step in schema.model_fields:
            schema = next(_schemas_in(schema.model_fields[step].annotation), schema)
    keys = list(schema.model_fields)
    near = difflib.get_close_matches(f"{location[-1]:.80}".lower(), keys, n=1, cutoff=0.65)
    return f"did you mean {near[0]}?" if near else f"remove it; the keys here are {', '.join(keys)}"


def _schemas_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The schemas in a type such as dict[str, Camera] or list[Query] | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _schemas_in(inner)


def _key_text(location: Sequence[int | str], document: Any) -> str:
    """`queries[2].roi (bridge-cars)`: a key and the id of the query that it belongs to."""
    text = ""
    node = document
    owner = ""
    for step in location:
        if not isinstance(node, dict | list):  # one of the types of a union
            break
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
        try:
            node = node[step]  # type: ignore[index]
        except (LookupError, TypeError):
            node = None
        if isinstance(node, dict) and isinstance(node.get("id"), str):
            owner = f" ({node['id']})"
    return text + owner


# Writing

_HINTS = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of the quota, or choose another disk",
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose another disk",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "choose a directory that can be written",
}


def check_output(path: str | Path, overwrite: bool = False) -> Path:
    """Refuse an output path that could not be written later; call it before any work is done.

    Raises InputError when the directory is missing or not writable, or when the path exists already (with
    `overwrite`: when it is a directory).
    """
    path = Path(path)
    parent = path.parent
    if not parent.is_dir():
        raise InputError(
            path, f"there is no directory {parent}", "create it, or choose another path"
        )
    with describe_problem(path):  # a name too long, say
        if path.is_dir():
            raise InputError(path, "is a directory", "give the path of a file")
    if os.path.lexists(path) and not overwrite:
        raise InputError(path, "exists already", "move it away, or choose another path")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(path, f"the directory {parent} cannot be written", _HINTS[errno.EACCES])
    return path


def cannot_be_written(path: str | Path, error: OSError, key: str = "") -> InputError:
    """The InputError of an OSError that occurred while `path` was written."""
    problem = f"cannot be written: {error.strerror or error}"
    return InputError(path, problem, _HINTS.get(error.errno or 0, "check the disk"), key)


@contextmanager
def describe_problem(path: str | Path, key: str = "") -> Iterator[None]:
    """Turn an OSError of this block into an InputError of `path`, or of the file that the error names."""
    try:
        yield
    except OSError as error:
        raise cannot_be_written(error.filename or path, error, key) from error


_temporaries: set[Path] = set()
MAX_WRITERS = 16
"""Of one output at a time whose temporaries the next writer removes if they are killed."""
TEMPORARY_NAME_BYTES = 200
"""Of an output's name, in that of its temporary."""


@contextmanager
def open_atomic(path: str | Path, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` when the block succeeds, and vanishes when it does not.

    The bytes are on the disk before the name appears; any failure leaves `path` as it was. What a killed process left
    is removed by the next that writes `path`. Raises InputError when the file cannot be written, and KeyboardInterrupt
    for an interrupt that a library turned into another error.
    """
    path = check_output(path, overwrite)
    temporary: Path | None = None
    try:
        temporary, file = _open_temporary(path)
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not overwrite and os.path.lexists(path):
                raise InputError(
                    path, "was created by another process meanwhile", "choose another path"
                )
            # While it is locked: unlocked, it would pass for a killed writer's.
            os.replace(temporary, path)
    except BaseException as error:
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise cannot_be_written(path, error) from error
        raise
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
            _temporaries.discard(temporary)
    with contextlib.suppress(OSError):  # some file systems refuse to sync a directory
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_temporary(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside `path`, named after it and locked until it is closed; those of killed writers are removed.

    The kernel drops the lock however a process ends: so a temporary that can be locked belongs to a killed one.
    """
    name = os.fsdecode(os.fsencode(path.name)[:TEMPORARY_NAME_BYTES])
    names = [f".{name}.{number}.tmp" for number in range(MAX_WRITERS)]
    for number, temporary in enumerate(
        map(path.with_name, [*names, f".{name}.{secrets.token_hex(8)}.tmp"])
    ):
        _remove_if_dead(temporary)
        _temporaries.add(temporary)
        try:
            file = open(temporary, "xb")  # noqa: SIM115  the caller closes it
        except FileExistsError:
            _temporaries.discard(temporary)
            continue
        except OSError as error:
            _temporaries.discard(temporary)
            raise cannot_be_written(path, error) from error
        # Another writer may have removed the file between its creation and the lock.
        if _try_lock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
            for other in names[number + 1 :]:
                if not _remove_if_dead(path.with_name(other)):
                    break
            return temporary, file
        file.close()  # another writer took it for a dead one's in the moment before it was locked
    raise cannot_be_written(path, FileExistsError(errno.EEXIST, "too many others write it"))


def _remove_if_dead(temporary: Path) -> bool:
    """Remove a temporary that no process has locked; whether there was one to remove."""
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or not _try_lock(descriptor)
        ):
            return False
        if os.fstat(descriptor).st_nlink:  # a process that removed it meanwhile held the lock
            temporary.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Lock a file for this process unless another has; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_temporaries() -> None:
    """Remove unfinished files, for a second interrupt that came while the first one cleaned up."""
    for temporary in list(_temporaries):
        with contextlib.suppress(OSError):
            temporary.unlink()


PIPE_BYTES = 4096
"""A pipe that poll calls writable takes this many bytes at once (PIPE_BUF of Linux)."""


class AppendFile:
    """A file that lines are appended to, from any thread, each handed to the system at once.

    `fresh` empties the file first; `descriptor` is an open file that `path` only names. A pipe without a reader is not
    waited for when it is opened, and `timeout_s` for each part of a line (None: for ever). Raises InputError, naming
    the file and the `key` that names it.
    """

    def __init__(
        self,
        path: Path,
        fresh: bool = False,
        key: str = "",
        timeout_s: float | None = None,
        descriptor: int | None = None,
    ) -> None:
        self._path = path
        self._key = key
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        # Of a pipe, the last line and what it did not take of that yet.
        self._line, self._rest = (
            b"",
            b"",
        )
        flags = (
            os.O_WRONLY
            | os.O_CREAT
            | os.O_APPEND
            | os.O_CLOEXEC
            | os.O_NONBLOCK
            | (os.O_TRUNC if fresh else 0)
        )
        with describe_problem(path, key):
            opened = os.open(path, flags, 0o666) if descriptor is None else os.dup(descriptor)
        if descriptor is None:
            os.set_blocking(opened, True)
        self._descriptor: int | None = opened
        self.is_regular = stat.S_ISREG(os.fstat(opened).st_mode)

    @property
    def size(self) -> int:
        """Bytes in the file; 0 once it is closed."""
        return 0 if self._descriptor is None else os.fstat(self._descriptor).st_size

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to this file: it was not deleted, moved away or replaced."""
        try:
            return self._descriptor is not None and os.path.samestat(
                os.stat(self._path), os.fstat(self._descriptor)
            )
        except OSError:
            return False

    def add(self, line: str) -> None:
        """Append a line; does nothing once the file is closed.

        InputError when it cannot be written; a file then holds nothing of it. A pipe that took a part gets the rest
        before anything else, and adding the same line again completes it.
        """
        with self._lock, describe_problem(self._path, self._key):
            if self._descriptor is None:
                return
            data = (line + "\n").encode()
            if self.is_regular:
                _write_whole(self._descriptor, data)
                return
            resumed = bool(self._rest) and data == self._line
            self._push(self._descriptor)
            if not resumed:
                self._line = self._rest = data
                self._push(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._descriptor is not None:
                descriptor = self._descriptor
                self._descriptor = None
                with describe_problem(self._path, self._key):
                    os.close(descriptor)

    def _push(self, descriptor: int) -> None:
        """Write the rest of the last line to a pipe or device; forget a line that it took nothing of."""
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        try:
            while self._rest:
                if not ready.poll(None if self._timeout_s is None else 1000 * self._timeout_s):
                    raise TimeoutError(None, "it has no reader")
                self._rest = self._rest[os.write(descriptor, self._rest[:PIPE_BYTES]) :]
        finally:
            if len(self._rest) == len(self._line):
                self._rest = b""


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write to a regular file all of it or nothing."""
    before = os.fstat(descriptor).st_size
    remaining = memoryview(data)
    try:
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


# Locks, the cache, path checks


@contextmanager
def hold_locks(*outputs: str | Path) -> Iterator[None]:
    """Hold a lock `.NAME.lock` beside each of these files for the block; missing folders are created.

    The kernel releases a lock however its process ends. Raises InputError where another process holds one.
    """
    with contextlib.ExitStack() as stack:
        for output in map(Path, outputs):
            with describe_problem(output.parent):
                output.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_lock(output, output.with_name(f".{output.name}.lock")))
        yield


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of an existing folder for the block; LockedError where another process holds it."""
    with _lock(folder, folder / ".lock"):
        yield


@contextmanager
def _lock(output: Path, path: Path) -> Iterator[None]:
    lock = FileLock(path, timeout=0)
    with describe_problem(path):
        try:
            lock.acquire()
        except Timeout:
            problem = "is being written by another process"
            hint = "wait until it is done, or choose another path"
            raise LockedError(output, problem, hint) from None
    try:
        yield
    finally:
        # While it is held; FileLock notices a file that was unlinked meanwhile.
        path.unlink(missing_ok=True)
        lock.release()


PRIVATE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Where this project caches: `gemel` in $XDG_CACHE_HOME (~/.cache unless set); not yet created or checked.

    Raises InputError where neither that nor a home is known.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemel"
    except RuntimeError as error:
        raise InputError(
            "HOME", "this user has no home", "set XDG_CACHE_HOME to a folder of your own"
        ) from error


def private_folder(folder: Path) -> Path:
    """The resolved folder, created if need be (mode 0700), once only this user can write to it or replace it.

    Raises InputError when it or a folder above belongs to another user or is writable by others, or when it cannot be
    created. Files in it are trusted: some hold code.
    """
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        real = folder.resolve(strict=True)
        for level in (real, *real.parents):
            status = os.stat(level, follow_symlinks=False)
            is_sticky = level != real and status.st_mode & stat.S_ISVTX
            if status.st_uid not in (os.getuid(), *(() if level == real else (0,))):
                raise InputError(
                    folder,
                    f"{level} belongs to another user",
                    "set XDG_CACHE_HOME to a folder of your own",
                )
            if status.st_mode & WRITABLE_BY_OTHERS and not is_sticky:
                raise InputError(
                    folder,
                    f"others may write to {level}",
                    f"chmod go-w {level}, or set XDG_CACHE_HOME",
                )
        os.chmod(real, PRIVATE)
    except OSError as error:
        problem = f"cannot be used as a cache: {error.strerror}"
        raise InputError(
            folder, problem, "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return real


def own_bytes(path: Path, max_bytes: int) -> bytes:
    """A file of the cache; OSError for a link, a file that others own or may write, or one that is larger."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.getuid()
            or status.st_mode & WRITABLE_BY_OTHERS
        ):
            raise PermissionError(errno.EACCES, "is not this user's own", str(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, "is too large", str(path))
        return file.read(max_bytes)


NamedPaths = Iterable[tuple[str, str | Path | None]]
"""A description, or the key that names it, and the path of a file; None where there is none."""


def check_apart(outputs: NamedPaths, inputs: NamedPaths, where: str | Path = "") -> None:
    """Refuse an output that is one of the inputs, is inside an input folder, or is another output.

    Links are followed; hard links of one file are the same file. Raises InputError naming the output's key and both
    files; `where` is the file that holds the key.
    """
    names: dict[str | tuple[int, int], str] = {}
    for name, path in inputs:
        for identity in [] if path is None else _identities(path):
            names.setdefault(identity, name)
    for key, path in outputs:
        if path is None or (
            os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
        ):
            continue  # /dev/null and pipes hold nothing that could be lost
        identities = _identities(path)
        same = [f"is {names[identity]}" for identity in identities if identity in names]
        parents = map(str, Path(os.path.realpath(path)).parents)
        inside = [f"lies in {names[parent]}" for parent in parents if parent in names]
        if same or inside:
            problem = (same + inside)[0]
            raise InputError(
                where or path, f"{path} {problem}" if where else problem, "choose another path", key
            )
        names.update(dict.fromkeys(identities, f"what '{key}' names"))


def _identities(path: str | Path) -> list[str | tuple[int, int]]:
    """Values that two paths share where they are one file: the resolved path, and device and inode if it exists."""
    real = os.path.realpath(path)
    try:
        status = os.stat(real)
    except OSError:
        return [real]
    return [real, (status.st_dev, status.st_ino)]


# Sources of cameras

DEVICE = re.compile("[0-9]{1,3}")


def is_readable_by_others(path: Path) -> bool:
    """Whether every user of this machine can read a file."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def is_path(source: str) -> bool:
    """Whether a camera's source is a file or folder, neither an address nor the number of a device."""
    return "://" not in source and DEVICE.fullmatch(source) is None


# Bounds of numbers in workloads and box configs

MAX_VALUES = 2**16
"""Values of a network's output that a result holds."""
Agreement = Literal["argmax", "cosine", "relative-error"]
MAX_FAULTS = 20
"""Faults of one file that an error names."""
MISSPELT = ("extra_forbidden", "invalid_key")
"""Pydantic's faults of a key that is none."""
EMPTY = "too_short"
"""Pydantic's fault of a list or mapping with too few entries."""
MAX_CAMERAS, MAX_QUERIES, MAX_CLASSES = 1000, 1000, 10_000
Fps = Annotated[float, Field(ge=0.0001, le=1000)]
"""Frames a second, from one in about three hours."""
SlaMs = Annotated[float, Field(ge=1, le=86_400_000)]
"""Milliseconds, up to a day."""
Priority = Annotated[int, Field(ge=1, le=1000)]
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""An id of a query, camera or box; also part of file names and addresses."""
ClassName = Annotated[str, Field(min_length=1, max_length=200)]
PathText = Annotated[str, Field(min_length=1, max_length=4096)]
"""A path or an address."""
