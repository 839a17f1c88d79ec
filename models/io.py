"""Files: bounded reading, JSON, YAML against a schema, atomic writing, appending, locks, the cache folder, path checks.

A file that the user names is read only if it is a regular file and within a size cap; JSON and YAML are parsed within
bounds of depth and count. Every problem is an InputError of one line: file, key, problem, hint.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import math
import os
import re
import secrets
import select
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn, TypeVar, get_args

import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from models.errors import InputError, is_interrupt, size_text

MAX_JSON_BYTES, MAX_JSON_VALUES = 32 * 2**20, 1_000_000
MAX_JSON_LINES_BYTES = 2**30
"""Of a file with a JSON document in each line, of which one is in memory at a time."""
MAX_YAML_BYTES, MAX_YAML_VALUES = 2**20, 50_000
"""Values of a YAML document, those that aliases repeat counted each time."""
MAX_DEPTH = 50
MAX_QUOTED = 80
"""Characters of a value or a key that a message quotes."""


class ParseError(Exception):
    """Why bytes are no valid document; the reader adds which file."""


def read_bounded(path: Path, max_bytes: int, hint: str) -> bytes:
    """All of a regular file of at most `max_bytes`; InputError for any other."""
    with open_regular(path, hint) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InputError(path, f"is larger than {size_text(max_bytes)}", hint)
    return data


@contextmanager
def open_regular(path: Path, hint: str) -> Iterator[BinaryIO]:
    """A regular file, open for reading; InputError for any other, and for I/O errors while it is read."""
    try:
        # Not blocking, so that a pipe without a writer is refused and not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
                raise InputError(path, f"cannot be read: is {kind}", hint)
            yield file
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}", hint) from error
    except UnicodeEncodeError as error:  # half a character in the path
        raise InputError(path, f"cannot be read: {error.reason}", hint) from error


# JSON


def parse_json(data: bytes, max_values: int = MAX_JSON_VALUES) -> Any:
    """A JSON document as plain values: finite numbers, unique keys, text without NUL; raises ParseError."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > 2 * max_values:
        raise ParseError(f"more than {max_values} values")
    try:
        document = _DECODER.decode(data.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ParseError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of thousands of digits, endless nesting
        raise ParseError(str(error)) from error
    _check_document(document, max_values)
    return document


def read_json(
    path: Path, hint: str, max_bytes: int = MAX_JSON_BYTES, max_values: int = MAX_JSON_VALUES
) -> dict[str, Any]:
    """The JSON object in a file; InputError for a file that cannot be read or holds none within bounds."""
    return _json_object(path, "", read_bounded(path, max_bytes, hint), hint, max_values)


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
            number, total = number + 1, total + len(line)
            if len(line) > max_line_bytes:
                raise InputError(path, f"line {number} is longer than {size_text(max_line_bytes)}", hint)
            if total > max_bytes:
                raise InputError(path, f"is larger than {size_text(max_bytes)}", hint)
            try:
                row = _json_object(path, f"line {number} ", line, hint, MAX_JSON_VALUES)
            except InputError:
                if line.endswith(b"\n") or not torn:
                    raise
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


def _json_object(path: Path, where: str, data: bytes, hint: str, max_values: int) -> dict[str, Any]:
    try:
        document = parse_json(data, max_values)
    except ParseError as error:
        text = str(error).removeprefix("line 1, ") if where else str(error)
        raise InputError(path, f"{where}is not JSON: {text}", hint) from error
    if not isinstance(document, dict):
        raise InputError(path, f"{where}is not a mapping", hint)
    return document


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ParseError(f"the key '{_quote(twice)}' occurs twice")
    return found


def _finite_number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ParseError(f"{_quote(digits)} is too large for a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ParseError(f"{name} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_float=_finite_number, parse_constant=_refuse_constant)


def _check_document(document: Any, max_values: int) -> None:
    """Raise ParseError for a document that is too deep or too large, or holds a NUL or half a character."""
    level, count = [document], 0
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str) and (
                "\0" in value or (not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value))
            ):
                raise ParseError("a text with a NUL or half a character in it")
            if isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list):
                below += value
            if count + len(below) > 2 * max_values:
                raise ParseError(f"more than {max_values} values")
        if not below:
            return
        level, count = below, count + len(below)
    raise ParseError(f"nested more than {MAX_DEPTH} deep")


# YAML and schemas

Keys = TypeVar("Keys", bound=BaseModel)


class Exact(BaseModel):
    """A schema of files that a program writes: no unknown keys, no coercion of types, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def parse_yaml(data: bytes) -> Any:
    """A YAML document as plain values with unique keys; raises ParseError."""
    try:
        loader = _SafeLoader(data.decode("utf-8"))
        try:
            document = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        parts = [getattr(error, "context", None), getattr(error, "problem", None) or " ".join(str(error).split())]
        text = ", ".join(part for part in parts if part)[:200]
        raise ParseError(text if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {text}") from error
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ParseError(f"a value that is none of its kind: {error}"[:200]) from error
    _check_document(document, MAX_YAML_VALUES)
    return document


class _SafeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with unique keys and a bound of nodes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self._nodes += 1
        if self._nodes > MAX_YAML_VALUES:
            mark = self.peek_event().start_mark
            raise ConstructorError(None, None, f"more than {MAX_YAML_VALUES} values", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, ScalarNode) else None
            if name in seen:
                raise ConstructorError(None, None, f"the key '{_quote(str(name))}' occurs twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, schema: type[Keys], kind: str, start: str) -> Keys:
    """The file as an instance of `schema`; `kind` names such files and `start` the keys one begins with.

    Raises InputError for a file that cannot be read, is not YAML or no mapping, or does not fit the schema.
    """
    return validate(path, read_mapping(path, kind, start), schema)


def read_mapping(path: Path, kind: str, start: str) -> dict[str, Any]:
    """The file as a mapping, not yet validated; otherwise like `read_yaml`."""
    data = read_bounded(path, MAX_YAML_BYTES, f"give an existing {kind}")
    try:
        document = parse_yaml(data)
    except ParseError as error:
        raise InputError(path, f"is not YAML: {error}", "correct the file") from error
    if not isinstance(document, dict):
        raise InputError(path, "is not a mapping", f"start with {start}")
    return document


def validate(path: str | Path, value: Any, schema: type[Keys], at: str = "", hint: str = "") -> Keys:
    """A value of a file as an instance of `schema`; `at` is the key that holds it.

    Raises InputError naming the first key that does not fit; `hint` replaces the default one, for a file that
    programs write.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        problem = _first_problem(path, error, value, schema, f"{at}." if at else "")
        raise InputError(path, problem.problem, hint or problem.hint, problem.key) from error


def _first_problem(
    path: str | Path, error: ValidationError, document: Any, schema: type[BaseModel], prefix: str
) -> InputError:
    # A misspelt key is both unknown and missing; name the misspelling.
    first = min(error.errors(), key=lambda found: found["type"] not in ("extra_forbidden", "invalid_key"))
    key = (prefix + _key_text(first["loc"], document)).removesuffix(".")
    if first["type"] == "extra_forbidden":
        known = _known_keys(schema, first["loc"])
        near = difflib.get_close_matches(_quote(str(first["loc"][-1])).lower(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"remove it; the keys here are {', '.join(known)}"
        return InputError(path, "unknown key", hint, key)
    if first["type"] == "missing":
        return InputError(path, "this key is missing", "add it", key)
    given = "" if isinstance(first["input"], dict | list) else f" (given: {_quote(repr(first['input']))})"
    text = first["msg"].removeprefix("Value error, ")
    return InputError(path, f"{text[0].lower()}{text[1:]}{given}", "correct the value", key)


def _known_keys(schema: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys that are allowed where the last step of a location is."""
    for step in location[:-1]:
        if isinstance(step, str) and step in schema.model_fields:
            schema = next(_schemas_in(schema.model_fields[step].annotation), schema)
    return list(schema.model_fields)


def _schemas_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The schemas in a type such as dict[str, Camera] or list[Query] | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _schemas_in(inner)


def _key_text(location: Sequence[int | str], document: Any) -> str:
    """`queries[2].roi (bridge-cars)`: a key and the id of the query that it belongs to."""
    text, node, owner = "", document, ""
    for step in location:
        if not isinstance(node, dict | list):  # one of the types of a union
            break
        name = _quote(str(step))
        text += f"[{name}]" if isinstance(step, int) else f".{name}" if text else name
        try:
            node = node[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            node = None
        if isinstance(node, dict) and isinstance(node.get("id"), str):
            owner = f" ({_quote(node['id'])})"
    return text + owner


def _quote(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


# Writing

_HINTS = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of the quota, or choose another disk",
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose another disk",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "choose a directory that can be written",
}
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}


def check_output(path: str | Path, overwrite: bool = False) -> Path:
    """Refuse an output path that could not be written later; call it before any work is done.

    Raises InputError when the directory is missing or not writable, or when the path exists already (with
    `overwrite`: when it is a directory).
    """
    path = Path(path)
    if "\0" in str(path):
        raise InputError(path, "a path holds no NUL", "choose another path")
    parent = path.parent
    if not parent.is_dir():
        raise InputError(path, f"there is no directory {parent}", "create it, or choose another path")
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


@contextmanager
def open_atomic(path: str | Path, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` when the block succeeds, and vanishes when it does not.

    The bytes are on the disk before the name appears; any failure leaves `path` as it was. Raises InputError when the
    file cannot be written, and KeyboardInterrupt for an interrupt that a library turned into another error.
    """
    path = check_output(path, overwrite)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    _temporaries.add(temporary)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path, overwrite)
    except BaseException as error:
        _remove(temporary)
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise cannot_be_written(path, error) from error
        raise
    _temporaries.discard(temporary)
    with contextlib.suppress(OSError):  # some file systems refuse to sync a directory
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_temporaries: set[Path] = set()


def remove_temporaries() -> None:
    """Remove unfinished files, for a second interrupt that came while the first one cleaned up."""
    for temporary in list(_temporaries):
        _remove(temporary)


def _remove(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary)
    _temporaries.discard(temporary)


def _publish(temporary: Path, path: Path, overwrite: bool) -> None:
    """Give the finished file its name; without `overwrite`, not one that another process took meanwhile."""
    if overwrite:
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise InputError(path, "was created by another process meanwhile", "choose another path") from None
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


PIPE_BYTES = 4096
"""A pipe that poll calls writable takes this many bytes at once (PIPE_BUF of Linux)."""


class AppendFile:
    """A file that lines are appended to, from any thread, each handed to the system at once.

    `fresh` empties the file first. A pipe without a reader is not waited for when it is opened, and `timeout_s` for
    each line (None: for ever). Raises InputError, naming the file and the `key` that names it.
    """

    def __init__(self, path: Path, fresh: bool = False, key: str = "", timeout_s: float | None = None) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_TRUNC if fresh else 0)
        with describe_problem(path, key):
            descriptor = os.open(path, flags, 0o666)
        os.set_blocking(descriptor, True)
        self._init(descriptor, path, key, timeout_s)

    @classmethod
    def on(cls, descriptor: int, name: str, timeout_s: float | None = None) -> AppendFile:
        """An AppendFile on a copy of an open descriptor."""
        file = cls.__new__(cls)
        file._init(os.dup(descriptor), Path(name), "", timeout_s)
        return file

    def _init(self, descriptor: int, path: Path, key: str, timeout_s: float | None) -> None:
        self._path, self._key, self._timeout_s = path, key, timeout_s
        self._descriptor: int | None = descriptor
        self._lock = threading.Lock()
        self._line, self._rest = b"", b""
        self.is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)

    @property
    def size(self) -> int:
        """Bytes in the file; 0 once it is closed."""
        return 0 if self._descriptor is None else os.fstat(self._descriptor).st_size

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to this file: it was not deleted, moved away or replaced."""
        try:
            return self._descriptor is not None and os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
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
            else:
                self._push(self._descriptor, data)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._descriptor is not None:
                descriptor, self._descriptor = self._descriptor, None
                with describe_problem(self._path, self._key):
                    os.close(descriptor)

    def _push(self, descriptor: int, data: bytes) -> None:
        """Write the rest of an unfinished line to a pipe or device, then `data` unless it is that line."""
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        pending = [] if self._rest and data == self._line else [data]
        for line in ([self._rest] if self._rest else []) + pending:
            if line is data:
                self._line = data
            self._rest = line
            self._push_rest(descriptor, deadline)

    def _push_rest(self, descriptor: int, deadline: float | None) -> None:
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        size = len(self._rest)
        try:
            while self._rest:
                if not ready.poll(None if deadline is None else max(0.0, 1000 * (deadline - time.monotonic()))):
                    raise TimeoutError(None, "it has no reader")
                self._rest = self._rest[os.write(descriptor, self._rest[:PIPE_BYTES]) :]
        finally:
            if len(self._rest) == size == len(self._line):  # nothing of the line was taken
                self._rest = b""


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write to a regular file all of it or nothing."""
    before, left = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
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
    """Hold the lock of an existing folder for the block; InputError where another process holds it."""
    with _lock(folder, folder / ".lock"):
        yield


@contextmanager
def _lock(output: Path, path: Path) -> Iterator[None]:
    lock = FileLock(path, timeout=0)
    with describe_problem(path):
        try:
            lock.acquire()
        except Timeout:
            problem, hint = "is being written by another process", "wait until it is done, or choose another path"
            raise InputError(output, problem, hint) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held; FileLock notices a file that was unlinked meanwhile
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
        raise InputError("HOME", "this user has no home", "set XDG_CACHE_HOME to a folder of your own") from error


def private_folder(folder: Path) -> Path:
    """The resolved folder, created if need be (mode 0700), once only this user can write to it or replace it.

    Raises InputError when it or a folder above belongs to another user or is writable by others, or when it cannot be
    created. Files in it are trusted: some hold code.
    """
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        real = folder.resolve(strict=True)
        for one in (real, *real.parents):
            status = os.stat(one, follow_symlinks=False)
            is_sticky = one != real and status.st_mode & stat.S_ISVTX
            if status.st_uid not in (os.getuid(), *(() if one == real else (0,))):
                raise InputError(folder, f"{one} belongs to another user", "set XDG_CACHE_HOME to a folder of your own")
            if status.st_mode & WRITABLE_BY_OTHERS and not is_sticky:
                raise InputError(folder, f"others may write to {one}", f"chmod go-w {one}, or set XDG_CACHE_HOME")
        os.chmod(real, PRIVATE)
    except OSError as error:
        problem = f"cannot be used as a cache: {error.strerror}"
        raise InputError(folder, problem, "set XDG_CACHE_HOME to a folder that can be written") from error
    return real


def own_bytes(path: Path, max_bytes: int) -> bytes:
    """A file of the cache; OSError for a link, a file that others own or may write, or one that is larger."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & WRITABLE_BY_OTHERS:
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
    names: list[str] = []
    places: dict[Path | tuple[int, int], int] = {}  # identity of a file: the first place of its name in `names`

    def add(name: str, path: Path) -> None:
        names.append(name)
        for identity in _identities(path):
            places.setdefault(identity, len(names) - 1)

    for name, path in inputs:
        if path is not None:
            add(name, Path(path))
    for key, path in outputs:
        if path is None or _is_special(Path(path)):  # /dev/null and pipes hold nothing that could be lost
            continue
        same = [places[one] for one in _identities(Path(path)) if one in places]
        folders = [places[parent] for parent in _resolve(Path(path)).parents if parent in places]
        if same or folders:
            first = min(same + folders)
            problem = f"{path} {'is' if first in same else 'lies in'} {names[first]}"
            text = problem if where else problem.removeprefix(f"{path} ")
            raise InputError(where or path, text, "choose another path", key)
        add(f"what '{key}' names", Path(path))


def _is_special(path: Path) -> bool:
    try:
        return not (path.is_file() or path.is_dir()) and path.exists()
    except (OSError, ValueError):
        return False


def _identities(path: Path) -> list[Path | tuple[int, int]]:
    """Values that two paths share where they are one file: the resolved path, and device and inode if it exists."""
    identities: list[Path | tuple[int, int]] = [_resolve(path)]
    with contextlib.suppress(OSError, ValueError):
        found = os.stat(path)
        identities.append((found.st_dev, found.st_ino))
    return identities


def _resolve(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError):  # links in a circle, or no valid path
        return path.absolute()


# Sources of cameras

DEVICE = re.compile("[0-9]{1,3}")


def is_path(source: str) -> bool:
    """Whether a camera's source is a file or folder, neither an address nor the number of a device."""
    return "://" not in source and DEVICE.fullmatch(source) is None


# Bounds of numbers in workloads and box configs

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
