"""Files: bounded reading, JSON, YAML against a schema, atomic writing, appending, locks, the cache folder, path checks.

A file that the user names is read only if it is a regular file and within a size cap; JSON and YAML are parsed within
bounds of depth and count. Every problem is an InputError of one line: file, key, problem, hint.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import io
import json
import math
import os
import secrets
import select
import stat
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode
from yaml.reader import ReaderError

from models.errors import InputError, is_interrupt, size_text


class ParseError(Exception):
    """Why bytes are no document, and where if that is known: line and column from 1; the reader adds which file."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def read_bounded(path: Path, most_bytes: int, remedy: str) -> bytes:
    """All of a regular file of at most `most_bytes`; InputError for every other, which is not waited for either."""
    with opened(path, remedy) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise InputError(path, f"is larger than {size_text(most_bytes)}", remedy)
    return data


def lines_bounded(path: Path, most_bytes: int, most_line_bytes: int, remedy: str) -> Iterator[bytes]:
    """The lines of a regular file of at most `most_bytes`, one at a time, each with its newline but perhaps the last.

    Raises InputError as `read_bounded` does, and for a longer line.
    """
    with opened(path, remedy) as file:
        number = total = 0
        while line := file.readline(most_line_bytes + 1):
            number, total = number + 1, total + len(line)
            if len(line) > most_line_bytes:
                raise InputError(path, f"line {number} is longer than {size_text(most_line_bytes)}", remedy)
            if total > most_bytes:
                raise InputError(path, f"is larger than {size_text(most_bytes)}", remedy)
            yield line


@contextmanager
def opened(path: Path, remedy: str) -> Iterator[BinaryIO]:
    """A regular file, open for reading; InputError for every other, and for what goes wrong while it is read."""
    try:
        descriptor = _descriptor(path, remedy)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
                raise InputError(path, f"cannot be read: is {kind}", remedy)
            yield file
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}", remedy) from error


def _descriptor(path: Path, remedy: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL or half a character in the path
        raise InputError(path, f"cannot be read: {error}", remedy) from error


MAX_JSON_DEPTH = 50
MAX_JSON_VALUES = 1_000_000
MAX_DIGITS = 20
"""Of an integer, the sign counted: more than any of 64 bits has is no count of anything."""
MAX_JSON_REPORTED = 40
PART_BYTES = 2**20
_OPENING, _BRACKETS = b"[{", b"[]{}"
_REST = bytes(set(range(256)) - set(_BRACKETS))


def parse_json(data: bytes, most_values: int = MAX_JSON_VALUES) -> Any:
    """The document as plain values: numbers are finite, keys stand once, texts are whole; Fault where it is none."""
    _check_bounds(data, most_values)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ParseError(_at(data[: error.start].decode(), "this byte is no UTF-8")) from error
    try:
        document = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ParseError(_at(text[: error.pos], error.msg)) from error
    if "\\u" in text and not all(map(_is_whole, _texts(document))):
        raise ParseError("a text with a NUL or half a character in it")
    return document


def _check_bounds(data: bytes, most_values: int) -> None:
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * most_values:  # a key and a value for each, and both ends of them
        raise ParseError(f"more than {most_values} values")
    outside = _outside_texts(bare)
    if outside.count(b",") + sum(outside.count(one) for one in (b"[", b"{")) >= most_values:
        raise ParseError(f"more than {most_values} values")
    depth = 0
    for bracket in outside.translate(None, _REST):
        depth += 1 if bracket in _OPENING else -1
        if depth > MAX_JSON_DEPTH:
            raise ParseError(f"nested more than {MAX_JSON_DEPTH} deep")


def _outside_texts(bare: bytes) -> bytes:
    """What stands outside quotes, taken part by part, so that the pieces between them are never many at once."""
    found, inside = [], 0
    for start in range(0, len(bare), PART_BYTES):
        pieces = bare[start : start + PART_BYTES].split(b'"')
        found.append(b"".join(pieces[inside::2]))
        inside ^= (len(pieces) - 1) & 1
    return b"".join(found)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ParseError(f"the key '{_clipped(twice)}' stands twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ParseError(f"{_clipped(digits)} is longer than {MAX_DIGITS} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ParseError(f"{_clipped(digits)} is too large for a number")
    return value


def _constant(name: str) -> NoReturn:
    raise ParseError(f"{name} is no number")


def _texts(value: Any) -> Iterator[str]:
    """Every text of a document, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from _texts(one)


def _is_whole(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def _at(before: str, what: str) -> str:
    """A fault after so much of the file."""
    return f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}: {what}"


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_JSON_REPORTED else f"{text[:MAX_JSON_REPORTED]}..."


_DECODER = json.JSONDecoder(
    object_pairs_hook=_mapping, parse_int=_integer, parse_float=_finite, parse_constant=_constant
)


MAX_YAML_DEPTH = 50
MAX_YAML_VALUES = 50_000
"""Of a whole document, those that aliases repeat counted each time."""
MAX_CHARACTERS = 100
"""Of a value that is no text: a number, a date, a truth."""
MAX_YAML_REPORTED = 200
_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"


def parse_yaml(data: bytes) -> Any:
    """The one document of a YAML file, as plain values; Fault where there is none within the bounds."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ParseError(_at_bounded_yaml(data[: error.start].decode(), "this byte is no UTF-8")) from error
    try:
        return _within_bounds(text)
    except ReaderError as error:
        raise ParseError(
            _at_bounded_yaml(text[: error.position], f"the character {error.character!r} may not stand here")
        ) from error
    except yaml.YAMLError as error:
        raise ParseError(_said(error)) from error


def _within_bounds(text: str) -> Any:
    loader = _Bounded(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


@dataclass(frozen=True)
class _Extent:
    """How many values a node stands for, itself counted, and how deep they lie."""

    values: int
    depth: int


class _Bounded(yaml.SafeLoader):
    """PyYAML's safe loader, which counts, and makes a fault of all that a constructor cannot do."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._extents: dict[Node, _Extent] = {}
        self._parts: list[list[_Extent]] = [[]]
        self._composed = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        mark = self.peek_event().start_mark
        self._parts.append([])
        if len(self._parts) - 1 > MAX_YAML_DEPTH + 1:
            raise ConstructorError(None, None, f"nested more than {MAX_YAML_DEPTH} deep", mark)
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            extent = self._extents.get(node)  # type: ignore[arg-type]
            if extent is None:
                raise ConstructorError(None, None, "an anchor stands within itself", mark)
        else:
            self._composed += 1
            if self._composed > MAX_YAML_VALUES:
                raise ConstructorError(None, None, f"more than {MAX_YAML_VALUES} values", mark)
            node = super().compose_node(parent, index)
            parts = self._parts[-1]
            values, depth = 1 + sum(part.values for part in parts), 1 + max((part.depth for part in parts), default=0)
            extent = _Extent(values, depth)
            self._extents[node] = extent  # type: ignore[index]
        self._parts.pop()
        if extent.values > MAX_YAML_VALUES:
            raise ConstructorError(None, None, f"more than {MAX_YAML_VALUES} values, aliases counted", mark)
        if extent.depth + len(self._parts) - 1 > MAX_YAML_DEPTH + 1:
            raise ConstructorError(None, None, f"nested more than {MAX_YAML_DEPTH} deep, aliases counted", mark)
        self._parts[-1].append(extent)
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise ConstructorError(None, None, "a key is no plain value", key.start_mark)
            name = key.value if key.tag == _MERGE else self.construct_object(key, deep=True)
            if not isinstance(name, Hashable) or name in seen:
                raise ConstructorError(None, None, f"the key '{_clipped(key.value)}' stands twice", key.start_mark)
            seen.add(name)
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, ScalarNode):
            if node.tag != _TEXT and len(node.value) > MAX_CHARACTERS:
                fault = f"is longer than {MAX_CHARACTERS} characters, too long for a value of the kind {kind}"
                raise ConstructorError(None, None, f"'{_clipped(node.value)}' {fault}", node.start_mark)
            if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in node.value):
                raise ConstructorError(None, None, "a text with a NUL or half a character in it", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            what = f"'{_clipped(node.value)}' is" if isinstance(node, ScalarNode) else "is"
            raise ConstructorError(None, None, f"{what} no value of the kind {kind}", node.start_mark) from error


def _at_bounded_yaml(before: str, what: str) -> str:
    """A fault after so much of the file."""
    return f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}: {what}"


def _said(error: yaml.YAMLError) -> str:
    """What is wrong and where in the file; PyYAML calls the file `<unicode string>`."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return _clipped_bounded_yaml(" ".join(str(error).split()), MAX_YAML_REPORTED)
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    what = _clipped_bounded_yaml(", ".join(part for part in parts if part), MAX_YAML_REPORTED)
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}"


def _clipped_bounded_yaml(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


MAX_JSON_BYTES = 32 * 2**20
MAX_LINES_BYTES = 2**30
"""Of a file with a document in each line: one is held at a time."""


def read_json(
    path: Path, remedy: str, most_bytes: int = MAX_JSON_BYTES, most_values: int = MAX_JSON_VALUES
) -> dict[str, Any]:
    """The mapping that a file holds; InputError for one that cannot be read, is no JSON within bounds or no mapping."""
    return _mapping_json_file(path, "", read_bounded(path, most_bytes, remedy), remedy, most_values)


def read_json_lines(
    path: Path, remedy: str, most_bytes: int = MAX_LINES_BYTES, most_line_bytes: int = MAX_JSON_BYTES, torn: bool = True
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The mappings that the lines of a file hold, each with its number from 1; InputError as `read_json`.

    What whoever wrote it did not end, a last line without a newline that is no JSON, is left out; without `torn`, of a
    file that appears whole or not at all, it is a fault like any other.
    """
    for number, line in enumerate(lines_bounded(path, most_bytes, most_line_bytes, remedy), 1):
        try:
            row = _mapping_json_file(path, f"line {number} ", line, remedy, MAX_JSON_VALUES)
        except InputError:
            if line.endswith(b"\n") or not torn:
                raise
            return
        yield number, row


def finite(value: Any) -> Any:
    """`value` with what JSON cannot say (NaN, infinities) turned into null, tuples and sets into lists."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [finite(item) for item in sorted(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _mapping_json_file(path: Path, where: str, data: bytes, remedy: str, most_values: int) -> dict[str, Any]:
    try:
        document = parse_json(data, most_values)
    except ParseError as fault:
        said = fault.text.removeprefix("line 1, ") if where else fault.text
        raise InputError(path, f"{where}is not JSON: {said}", remedy) from fault
    if not isinstance(document, dict):
        raise InputError(path, f"{where}is not a mapping", remedy)
    return document


MAX_TOLD = 80
"""Characters of a value or a key that a fault repeats."""
Keys = TypeVar("Keys", bound=BaseModel)


class Exact(BaseModel):
    """Of a file that a program writes: no key that it does not know, no value taken for another kind, finite numbers.

    Lists stand for tuples, as JSON has none.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def validate(path: str | Path, value: Any, schema: type[Keys], at: str = "", remedy: str = "") -> Keys:
    """A value of a file as an instance of `schema`; `path` may name a line too, `at` is the key that it stands under.

    Raises InputError where it does not fit; `remedy` is what to do then, for a file that nobody writes by hand.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        fault = _first_fault(path, error, value, schema, f"{at}." if at else "")
        raise InputError(path, fault.fault, remedy or fault.remedy, fault.key) from error


def _first_fault(
    path: str | Path, error: ValidationError, document: Any, schema: type[BaseModel], prefix: str
) -> InputError:
    """The first fault pydantic found, as one line with a remedy."""
    # A misspelt key is both unknown and missing; name the misspelling.
    fault = min(error.errors(), key=lambda found: found["type"] not in ("extra_forbidden", "invalid_key"))
    key = (prefix + _key_of(fault["loc"], document)).removesuffix(".")
    if fault["type"] == "extra_forbidden":
        nearest = _nearest(_clipped_schema(str(fault["loc"][-1])), _keys_at(schema, fault["loc"]))
        return InputError(path, "unknown key", nearest, key)
    if fault["type"] == "missing":
        return InputError(path, "this key is missing", "add it", key)
    given = "" if isinstance(fault["input"], dict | list) else f" (given: {_clipped(repr(fault['input']))})"
    said = fault["msg"].removeprefix("Value error, ")
    return InputError(path, f"{said[0].lower()}{said[1:]}{given}", "correct the value", key)


def _nearest(key: str, known: Sequence[str]) -> str:
    """The remedy for a key that is none."""
    near = difflib.get_close_matches(key.lower(), known, n=1)
    return f"did you mean {near[0]}?" if near else f"remove it; the keys here are {', '.join(known)}"


def _keys_at(schema: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys that may stand where the last step of a location does."""
    for step in location[:-1]:
        if isinstance(step, str) and step in schema.model_fields:
            schema = next(_models_in(schema.model_fields[step].annotation), schema)
    return list(schema.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The schemas in a type such as dict[str, Camera] or list[Query] | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _key_of(location: Sequence[int | str], document: Any) -> str:
    """`queries[2].roi (bridge-cars)`: where the fault is, and which query that is."""
    text, node, owner = "", document, ""
    for step in location:
        if not isinstance(node, dict | list):  # one of the kinds that a value may be of
            break
        name = _clipped_schema(str(step))
        text += f"[{name}]" if isinstance(step, int) else f".{name}" if text else name
        try:
            node = node[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            node = None
        if isinstance(node, dict) and isinstance(node.get("id"), str):
            owner = f" ({_clipped(node['id'])})"
    return text + owner


def _clipped_schema(text: str) -> str:
    return text if len(text) <= MAX_TOLD else f"{text[:MAX_TOLD]}..."


MAX_YAML_BYTES = 2**20


def read_yaml(path: Path, schema: type[Keys], kind: str, start: str) -> Keys:
    """The file as an instance of `schema`; `kind` names such files and `start` the keys one begins with.

    Raises InputError for a file that cannot be read, is not YAML or no mapping, or does not fit the schema.
    """
    return validate(path, read_mapping(path, kind, start), schema)


def read_mapping(path: Path, kind: str, start: str) -> dict[str, Any]:
    """The file as a mapping that is held against no schema yet; otherwise like `read_yaml`."""
    data = read_bounded(path, MAX_YAML_BYTES, f"give an existing {kind}")
    try:
        document = parse_yaml(data)
    except ParseError as fault:
        raise InputError(path, f"is not YAML: {fault.text}", "mend the file") from fault
    if not isinstance(document, dict):
        raise InputError(path, "is not a mapping", f"start with {start}")
    return document


_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of the quota, or choose another disk",
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose another disk",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "choose a directory that can be written",
}
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
MAX_NAME_BYTES = 255
"""Of a file on the file systems there are."""
TEMPORARY = "..123456789012.tmp"
"""What makes a name that of a temporary file, or as long."""


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
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name too long, say
        raise cannot_be_written(path, error) from error
    if is_folder:
        raise InputError(path, "is a directory", "give the path of a file")
    if os.path.lexists(path) and not overwrite:
        raise InputError(path, "exists already", "move it away, or choose another path")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(path, f"the directory {parent} cannot be written", _REMEDIES[errno.EACCES])
    return path


def cannot_be_written(path: str | Path, error: OSError, key: str = "") -> InputError:
    """What the system refused while `path` was written, told of it."""
    return InputError(
        path, f"cannot be written: {error.strerror or error}", _REMEDIES.get(error.errno or 0, "check the disk"), key
    )


@contextlib.contextmanager
def describe_problem(path: str | Path, key: str = "") -> Iterator[None]:
    """What the system refuses in this block is an InputError of `path`, unless it names another file itself."""
    try:
        yield
    except OSError as error:
        raise cannot_be_written(error.filename or path, error, key) from error


@contextlib.contextmanager
def open_atomic(path: str | Path, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` when the block ends well, and vanishes when it does not.

    The bytes are on the disk before the name appears. Any failure, an interruption included, leaves `path` as
    it was and removes the temporary file. Raises InputError for a full disk and everything else that stops a
    write, and KeyboardInterrupt for an interrupt, whatever the library that wrote has made of them.
    """
    path = check_output(path, overwrite)
    temporary = path.with_name(f".{within_name(path.name, TEMPORARY)}.{secrets.token_hex(6)}.tmp")
    _under_way.add(temporary)
    raw = None
    try:
        raw = _Remembering(str(temporary), "xb")
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path, overwrite)
    except BaseException as error:
        _remove(temporary)
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        refused = raw.refused if raw is not None and raw.refused is not None else error
        if isinstance(refused, OSError) and refused.filename in (None, str(temporary)):
            raise cannot_be_written(path, refused) from error
        raise
    _under_way.discard(temporary)
    _sync_directory(path.parent)


_under_way: set[Path] = set()


def remove_torn() -> None:
    """Remove what an interrupt has left of files under way, where a second one came before the first was dealt with."""
    for temporary in list(_under_way):
        _remove(temporary)


def _remove(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary)
    _under_way.discard(temporary)


class _Remembering(io.FileIO):
    """A file that remembers why it could not be written; libraries make errors of their own of that."""

    refused: OSError | None = None

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            self.refused = error
            raise


def within_name(name: str, more: str) -> str:
    """As much of a file's name as leaves room for `more` characters."""
    return os.fsdecode(os.fsencode(name)[: MAX_NAME_BYTES - len(more)])


def _publish(temporary: Path, path: Path, overwrite: bool) -> None:
    """Give the finished file its name; a file that took the name meanwhile is not overwritten."""
    if overwrite:
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise InputError(path, "was created by someone else meanwhile", "choose another path") from None
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


def _sync_directory(directory: Path) -> None:
    """Make the new name durable; some file systems refuse to sync a directory, and then nothing more can
    be done.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


PIPE_BYTES = 4096
"""A pipe that is said to have room takes so many bytes at once (PIPE_BUF of Linux)."""


class Lines:
    """A file that lines are added to, from any thread, each handed to the system at once.

    `fresh` empties what was there before. InputError, naming the file and the `key` that names it, where it cannot be
    opened; a pipe that nobody reads is not waited for: not at all to open it, and `patience_s` for each line (None:
    for ever).
    """

    def __init__(self, path: Path, fresh: bool = False, key: str = "", patience_s: float | None = None) -> None:
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_TRUNC if fresh else 0)
        with describe_problem(path, key):
            descriptor = os.open(path, how, 0o666)
        os.set_blocking(descriptor, True)
        self._own(descriptor, path, key, patience_s)

    @classmethod
    def on(cls, descriptor: int, name: str, patience_s: float | None = None) -> Lines:
        """Lines for what is open already; the descriptor is copied."""
        lines = cls.__new__(cls)
        lines._own(os.dup(descriptor), Path(name), "", patience_s)
        return lines

    def _own(self, descriptor: int, path: Path, key: str, patience_s: float | None) -> None:
        self._path, self._key, self._patience_s = path, key, patience_s
        self._descriptor: int | None = descriptor
        self._lock = threading.Lock()
        self._begun, self._left = b"", memoryview(b"")
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
        """Add a line; nothing happens once the file is closed. InputError when it cannot be, as on a full disk or
        where a pipe stays full, and then nothing of it is in a file. Of what a pipe took the rest follows before
        anything else; the same line again is that line.
        """
        with self._lock:
            if self._descriptor is None:
                return
            data = (line + "\n").encode()
            try:
                if self.is_regular:
                    _write_whole(self._descriptor, data)
                else:
                    self._push(self._descriptor, data)
            except OSError as error:
                raise cannot_be_written(self._path, error, self._key) from error

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            if self._descriptor is not None:
                descriptor, self._descriptor = self._descriptor, None
                with describe_problem(self._path, self._key):
                    os.close(descriptor)

    def _push(self, descriptor: int, data: bytes) -> None:
        """Write to a pipe or a device what was begun, and then this, unless it is the same."""
        ends = None if self._patience_s is None else time.monotonic() + self._patience_s
        if self._left:
            self._push_left(descriptor, ends)
            if data == self._begun:
                return
        self._begun, self._left = data, memoryview(data)
        try:
            self._push_left(descriptor, ends)
        finally:
            if len(self._left) == len(data):  # nothing of it was taken
                self._left = memoryview(b"")

    def _push_left(self, descriptor: int, ends: float | None) -> None:
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        while self._left:
            if not ready.poll(None if ends is None else max(0.0, 1000 * (ends - time.monotonic()))):
                raise TimeoutError(None, "nobody reads it")
            self._left = self._left[os.write(descriptor, self._left[:PIPE_BYTES]) :]


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


BEFORE, BEHIND = ".", ".lock"


@contextlib.contextmanager
def locked(*outputs: str | Path) -> Iterator[None]:
    """Hold the lock of each of these files while the block lasts; their folders are made where there are none.

    A lock is a file `.NAME.lock` beside the output, locked by the process (flock): the kernel lets go of it however
    the process ends, so one that was left behind holds nobody up. Folders that were made and stay empty are removed.
    A file system without locks is written to without one. Raises InputError where another process has the lock.
    """
    with contextlib.ExitStack() as is_locked:
        for output in map(Path, outputs):
            is_locked.enter_context(_folder(output.parent))
            is_locked.enter_context(_lock(output))
        yield


@contextlib.contextmanager
def is_locked(folder: Path) -> Iterator[None]:
    """Hold a folder that is there while the block lasts, against whoever does so, too; takes no room on its disk.

    A file system without locks is used without one. Raises InputError where another process has it.
    """
    with describe_problem(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            _take(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """The folder is there while the block lasts, and later if anything is in it."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        with describe_problem(folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()


@contextlib.contextmanager
def _lock(output: Path) -> Iterator[None]:
    path = output.with_name(BEFORE + within_name(output.name, BEFORE + BEHIND) + BEHIND)
    while (descriptor := _opened(path, output)) is None:
        pass
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: who opened it meanwhile sees that it is gone
        os.close(descriptor)


def _opened(path: Path, output: Path) -> int | None:
    """The file, locked; None where another process removed it meanwhile."""
    with describe_problem(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    kept = False
    try:
        with contextlib.suppress(OSError):
            _take(descriptor, output)
        kept = os.path.lexists(path) and os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:  # between the two looks at it
        kept = False
    finally:
        if not kept:
            os.close(descriptor)
    return descriptor if kept else None


def _take(descriptor: int, output: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fault = "is being written by another process"
        raise InputError(output, fault, "wait until that is done, or choose another path") from None


PRIVATE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Where this project keeps things: `gemel` in $XDG_CACHE_HOME (~/.cache unless set); not yet made or checked.

    Raises InputError where neither that nor a home is known.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemel"
    except RuntimeError as error:
        raise InputError("HOME", "this user has no home", "set XDG_CACHE_HOME to a folder of your own") from error


def own_bytes(path: Path, most_bytes: int) -> bytes:
    """A file of the cache; OSError for a link, what somebody else wrote or may write, or what is larger."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & WRITABLE_BY_OTHERS:
            raise PermissionError(errno.EACCES, "is not this user's own", str(path))
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, "is too large", str(path))
        return file.read(most_bytes)


def private_folder(folder: Path) -> Path:
    """Where a folder really lies, made if need be (mode 0700), once nobody else can write to it or exchange it.

    Links that lead there are followed once: what was checked is what is used. Raises InputError when it belongs to
    somebody else or others may write to it, or cannot be made.
    """
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        real = folder.resolve(strict=True)
        opened = os.open(real.anchor, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for one in (*reversed(real.parents[:-1]), real):
                _check(folder, one.parent, os.fstat(opened), is_last=False)
                inner = os.open(one.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=opened)
                os.close(opened)
                opened = inner
            found = os.fstat(opened)
            if found.st_uid == os.getuid() and not found.st_mode & WRITABLE_BY_OTHERS:
                os.fchmod(opened, PRIVATE)
            _check(folder, real, found, is_last=True)
        finally:
            os.close(opened)
    except OSError as error:
        raise InputError(
            folder, f"cannot be used as a cache: {error.strerror}", "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return real


def _check(folder: Path, one: Path, found: os.stat_result, is_last: bool) -> None:
    """Refuse a folder on the way (or the last) that others own, or may write to unless its entries keep their owner."""
    if found.st_uid not in ((os.getuid(),) if is_last else (os.getuid(), 0)):
        raise InputError(
            folder,
            f"{one} belongs to another user, and what lies there is trusted",
            "set XDG_CACHE_HOME to a folder of your own",
        )
    sticky = not is_last and found.st_mode & stat.S_ISVTX
    if found.st_mode & WRITABLE_BY_OTHERS and not sticky:
        raise InputError(
            folder,
            f"others may write to {one}, and what lies there is trusted",
            f"chmod go-w {one}, or set XDG_CACHE_HOME",
        )


Named = Iterable[tuple[str, str | Path | None]]
"""What a file is, in words, or the key that names it, and where it lies; None where it is not asked for."""


def check_apart(outputs: Named, inputs: Named, where: str | Path = "") -> None:
    """Refuse an output that is one of the inputs, lies in one that is a folder, or is another output.

    Files are the same when the system says so, whatever links lead there; what does not exist yet is compared by where
    it would lie. Raises InputError naming `where` the output's key stands, if anywhere, and both files.
    """
    taken = [(name, _File.at(path)) for name, path in inputs if path is not None]
    for key, path in outputs:
        if path is None:
            continue
        mine = _File.at(path)
        if mine.is_special():  # /dev/null and pipes hold nothing that could be lost
            continue
        for name, other in taken:
            if mine.is_same(other) or other.holds(mine):
                fault = f"{path} is {name}" if mine.is_same(other) else f"{path} lies in {name}"
                remedy = "name a file that is nothing else"
                raise InputError(where or path, fault if where else fault.removeprefix(f"{path} "), remedy, key)
        taken.append((f"what '{key}' names", mine))


class _File:
    """A path that was followed to its end."""

    def __init__(self, real: Path, found: os.stat_result | None) -> None:
        self._real, self._found = real, found

    @classmethod
    def at(cls, path: str | Path) -> _File:
        found = _seen(path)
        try:
            return cls(Path(path).resolve(), found)
        except (OSError, ValueError, RuntimeError):  # links in a circle, or what is no path
            return cls(Path(path).absolute(), found)

    def is_special(self) -> bool:
        mode = stat.S_IFREG if self._found is None else self._found.st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

    def is_same(self, other: _File) -> bool:
        if self._found is not None and other._found is not None:
            return os.path.samestat(self._found, other._found)
        return self._real == other._real

    def holds(self, other: _File) -> bool:
        """Whether the other lies in this folder, by its path or by another name of it."""
        if self._real in other._real.parents:
            return True
        if self._found is None or other._found is None or not stat.S_ISDIR(self._found.st_mode):
            return False
        if stat.S_ISDIR(other._found.st_mode) or other._found.st_nlink < 2:
            return False
        inside = (os.path.join(root, name) for root, _, names in os.walk(self._real) for name in names)
        return any(os.path.samestat(found, other._found) for path in inside if (found := _seen(path)) is not None)


def _seen(path: str | Path) -> os.stat_result | None:
    """What the system says of a file; None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return os.stat(path)
    return None


MAX_CAMERAS, MAX_QUERIES, MAX_CLASSES = 1000, 1000, 10_000


def _at_least(value: float, least: float) -> float:
    if value < least:
        raise ValueError(f"less than {least:g}, the least there can be")
    return value


Fps = Annotated[float, Field(gt=0, le=1000), AfterValidator(partial(_at_least, least=0.0001))]
"""Frames a second, from one in about three hours."""
SlaMs = Annotated[float, Field(gt=0, le=86_400_000), AfterValidator(partial(_at_least, least=1.0))]
"""Milliseconds, up to a day."""
Priority = Annotated[int, Field(ge=1, le=1000)]
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""What queries, cameras and boxes are called: also a file's name, and a word in addresses."""
ClassName = Annotated[str, Field(min_length=1, max_length=200)]
PathText = Annotated[str, Field(min_length=1, max_length=4096)]
"""A path or an address, as long as the system takes one."""
