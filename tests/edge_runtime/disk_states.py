"""What a disk may hold after a power loss: file operations of a process, recorded by strace, and the states they allow.

After the manner of ALICE and CrashMonkey. Data that no fsync of its file followed may be absent, cut, zero or there in
any part; names that no fsync of their folder followed may have changed or not, each by itself.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

MARK = "MARK:"
CALLS = (
    "open,openat,creat,close,dup,dup2,dup3,lseek,write,pwrite64,writev,pwritev,ftruncate,truncate,fallocate,rename,"
    "renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,link,linkat,symlink,symlinkat,copy_file_range,sendfile,"
    "splice,fsync,fdatasync"
)
MAX_SUBSETS = 64
"""Of pending changes of names at one moment; where there are more, so many are drawn."""

Tree = Mapping[str, bytes | None]
"""Files by path below the folder, None for a folder."""


@dataclass(frozen=True)
class Write:
    """Data that came into a file: `inode` from `offset`; `size` None, or the size that the file was cut to."""

    inode: int
    offset: int
    data: bytes
    size: int | None = None


@dataclass(frozen=True)
class Change:
    """A change of names: (folder, name) leads to an inode, or to none."""

    names: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True)
class Sync:
    """The data of a file, or the names in a folder, are on the disk."""

    inode: int


@dataclass(frozen=True)
class Mark:
    """A mark of the recorded program."""

    name: str


Operation = Write | Change | Sync | Mark


def record(command: Sequence[str], log: Path) -> list[str]:
    """Run a program under strace; its calls, one a line."""
    strace = shutil.which("strace")
    assert strace is not None
    given = ["-f", "-y", "-xx", "-s", "16000000", "--seccomp-bpf", "-e", f"trace={CALLS}", "-o", str(log)]
    ended = subprocess.run([strace, *given, *command], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return list(_join_lines(log.read_text().splitlines()))


def _join_lines(lines: Iterable[str]) -> Iterator[str]:
    """Calls without their process, those that another thread interrupted in one piece."""
    begun: dict[str, str] = {}
    for line in lines:
        process, _, text = line.partition(" ")
        text = text.strip()
        if text.endswith("<unfinished ...>"):
            begun[process] = text.removesuffix("<unfinished ...>")
        elif text.startswith("<... "):
            yield begun.pop(process) + text.partition(" resumed>")[2]
        else:
            yield text


class Recording:
    """The operations of a program on the files of a folder, out of its calls; AssertionError for a call unknown here.

    Inode 0 is the folder.
    """

    def __init__(self, folder: Path, lines: Iterable[str]) -> None:
        self._folder = folder
        self._names: dict[int, dict[str, int]] = {0: {}}
        self._sizes: dict[int, int] = {}
        self._open: dict[int, tuple[int, int, bool]] = {}
        """By descriptor: inode, offset, and whether it appends."""
        self.operations: list[Operation] = []
        for line in lines:
            found = re.fullmatch(r"(\w+)\((.*)\)\s+= (-?\d+)(.*)", line)
            if found is not None:
                self._take(found[1], found[2].split(", "), int(found[3]))

    @property
    def folders(self) -> frozenset[int]:
        """The inodes of folders."""
        return frozenset(self._names)

    def _take(self, call: str, given: list[str], result: int) -> None:
        if call == "unlink" and (text := _decode(given[0])).startswith(MARK):
            self.operations.append(Mark(text.removeprefix(MARK)))
        elif result >= 0 and call in ("open", "openat", "creat"):
            at, path = (given[0], given[1]) if call == "openat" else ("", given[0])
            flags = "O_CREAT|O_TRUNC|O_WRONLY" if call == "creat" else given[2 if call == "openat" else 1]
            self._open_file(self._path(at, path), flags, result)
        elif result >= 0 and call in ("write", "pwrite64", "ftruncate", "lseek", "close", "fsync", "fdatasync"):
            self._use(call, given, result)
        elif result >= 0 and call in ("rename", "renameat", "renameat2", "link", "linkat"):
            places = given[:2] if call in ("rename", "link") else [*given[:4]]
            if len(places) == 2:
                places = ["", places[0], "", places[1]]
            self._move(self._path(*places[:2]), self._path(*places[2:]), is_link=call.startswith("link"))
        elif result >= 0 and call in ("unlink", "rmdir", "unlinkat", "mkdir", "mkdirat"):
            at, path = (given[0], given[1]) if call.endswith("at") else ("", given[0])
            self._change_name(self._path(at, path), call.startswith("mkdir"))
        elif result >= 0:
            assert not any(self._is_ours(Path(_decode(text))) for text in given), call

    def _path(self, at: str, text: str) -> Path:
        return Path(_decode(at)) / _decode(text)

    def _is_ours(self, path: Path) -> bool:
        return path.is_relative_to(self._folder)

    def _find(self, path: Path) -> tuple[int, int | None]:
        """The inode of a path's folder, and its own."""
        folder, inode = 0, None
        parts = path.relative_to(self._folder).parts
        for part in parts[:-1]:
            folder = self._names[folder][part]
        if parts:
            inode = self._names[folder].get(parts[-1])
        return folder, inode if parts else 0

    def _set_names(self, *changes: tuple[int, str, int | None]) -> None:
        for folder, name, inode in changes:
            if inode is None:
                self._names[folder].pop(name)
            else:
                self._names[folder][name] = inode
        self.operations.append(Change(changes))

    def _make(self, folder: int, name: str) -> int:
        inode = len(self._sizes) + 1
        self._sizes[inode] = 0
        self._set_names((folder, name, inode))
        return inode

    def _open_file(self, path: Path, flags: str, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        if not self._is_ours(path):
            return
        folder, inode = self._find(path)
        if inode is None:
            inode = self._make(folder, path.name)
        elif "O_TRUNC" in flags and self._sizes[inode]:
            self._sizes[inode] = 0
            self.operations.append(Write(inode, 0, b"", 0))
        self._open[descriptor] = (inode, 0, "O_APPEND" in flags)

    def _use(self, call: str, given: list[str], result: int) -> None:
        descriptor = int(given[0].partition("<")[0])
        if descriptor not in self._open:
            return
        inode, offset, appends = self._open[descriptor]
        if call == "close":
            del self._open[descriptor]
        elif call == "lseek":
            self._open[descriptor] = (inode, result, appends)
        elif call == "ftruncate":
            self._sizes[inode] = int(given[1])
            self.operations.append(Write(inode, 0, b"", self._sizes[inode]))
        elif call in ("fsync", "fdatasync"):
            self.operations.append(Sync(inode))
        else:
            data = _decode_bytes(given[1])[:result]
            start = int(given[3]) if call == "pwrite64" else self._sizes[inode] if appends else offset
            self.operations.append(Write(inode, start, data))
            self._sizes[inode] = max(self._sizes[inode], start + result)
            if call == "write":
                self._open[descriptor] = (inode, start + result, appends)

    def _move(self, source: Path, target: Path, is_link: bool) -> None:
        if not (self._is_ours(source) and self._is_ours(target)):
            assert not self._is_ours(source) and not self._is_ours(target)
            return
        (folder, inode), (into, _) = self._find(source), self._find(target)
        new = (into, target.name, inode)
        self._set_names(*([new] if is_link else [(folder, source.name, None), new]))

    def _change_name(self, path: Path, is_made: bool) -> None:
        if not self._is_ours(path) or path == self._folder:
            return
        folder, _ = self._find(path)
        if is_made:
            self._names[self._make(folder, path.name)] = {}
        else:
            self._set_names((folder, path.name, None))


def _decode(text: str) -> str:
    """A path: quoted, or that of a descriptor between angle brackets."""
    inner = re.search(r"[<\"]([^>\"]*)[>\"]", text)
    return "" if inner is None else _unescape(inner[1]).decode(errors="surrogateescape").removesuffix(" (deleted)")


def _decode_bytes(text: str) -> bytes:
    assert text.startswith('"') and text.endswith('"'), "strace has cut the data"
    return _unescape(text[1:-1])


def _unescape(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


@dataclass(frozen=True)
class DiskState:
    """What a disk holds after a loss of power: the files, and the last mark that the program had passed."""

    mark: str
    tree: Tree


def disk_states(operations: Sequence[Operation], folders: frozenset[int], start: str) -> Iterator[DiskState]:
    """All legal states at all moments after the mark `start`, each once; what came before that is on the disk."""
    begin = operations.index(Mark(start))
    seen: set[tuple[str, frozenset[tuple[str, bytes | None]]]] = set()
    mark = start
    for end in range(begin, len(operations) + 1):
        if end > begin and isinstance(operation := operations[end - 1], Mark):
            mark = operation.name
        for tree in _trees(operations[:end], begin, folders):
            identity = (mark, frozenset(tree.items()))
            if identity not in seen:
                seen.add(identity)
                yield DiskState(mark, tree)


def _trees(operations: Sequence[Operation], begin: int, folders: frozenset[int]) -> Iterator[Tree]:
    """The states at one moment."""
    synced_at: dict[int, int] = {}
    for index, operation in enumerate(operations):
        if isinstance(operation, Sync):
            synced_at[operation.inode] = index

    def is_pending(index: int, inode: int) -> bool:
        return index >= begin and synced_at.get(inode, -1) < index

    pending_names = [
        index
        for index, operation in enumerate(operations)
        if isinstance(operation, Change) and is_pending(index, operation.names[-1][0])
    ]
    durable: dict[int, list[Write]] = {}
    loose: dict[int, list[Write]] = {}
    for index, operation in enumerate(operations):
        if isinstance(operation, Write):
            kind = loose if is_pending(index, operation.inode) else durable
            kind.setdefault(operation.inode, []).append(operation)
    contents = {inode: [_content(writes)] for inode, writes in durable.items()}
    for inode, writes in loose.items():
        contents[inode] = list(_contents(durable.get(inode, []), writes))
    for lost in _subsets(pending_names):
        names = _names_without(operations, lost, folders)
        paths = dict(_paths(names, 0, ""))
        files = [path for path, inode in paths.items() if inode not in folders]
        choices = [contents.get(paths[path], [b""]) for path in files]
        base: dict[str, bytes | None] = {path: None for path, inode in paths.items() if inode in folders}
        for chosen in product(*choices):
            yield {**base, **dict(zip(files, chosen, strict=True))}


def _subsets(indices: Sequence[int]) -> Iterator[frozenset[int]]:
    """Sets of changes that are lost: all, or some of very many."""
    if 2 ** len(indices) <= MAX_SUBSETS:
        for kept in product((False, True), repeat=len(indices)):
            yield frozenset(index for index, is_kept in zip(indices, kept, strict=True) if not is_kept)
        return
    chance = random.Random(0)
    yield from (frozenset(), frozenset(indices))
    for _ in range(MAX_SUBSETS):
        yield frozenset(index for index in indices if chance.random() < 0.5)


def _names_without(
    operations: Sequence[Operation], lost: frozenset[int], folders: frozenset[int]
) -> dict[int, dict[str, int]]:
    names: dict[int, dict[str, int]] = {folder: {} for folder in folders}
    for index, operation in enumerate(operations):
        if isinstance(operation, Change) and index not in lost:
            for folder, name, inode in operation.names:
                if inode is None:
                    names[folder].pop(name, None)
                else:
                    names[folder][name] = inode
    return names


def _paths(names: Mapping[int, Mapping[str, int]], folder: int, above: str) -> Iterator[tuple[str, int]]:
    for name, inode in names[folder].items():
        yield f"{above}{name}", inode
        if inode in names:
            yield from _paths(names, inode, f"{above}{name}/")


def _content(writes: Iterable[Write]) -> bytes:
    content = bytearray()
    for write in writes:
        if write.size is not None:
            content = content[: write.size].ljust(write.size, b"\0")
        else:
            content = content.ljust(write.offset, b"\0")
            content[write.offset : write.offset + len(write.data)] = write.data
    return bytes(content)


def _contents(durable: Sequence[Write], loose: Sequence[Write]) -> Iterator[bytes]:
    """What a file may hold: without its loose data, with all of it, cut, as zeros, and with a hole."""
    before, after = _content(durable), _content([*durable, *loose])
    middle = (len(before) + len(after)) // 2
    hole_bytes = max(0, middle - len(before))
    cut = [before, after, after[:middle], before.ljust(len(after), b"\0")]
    hole = after[: len(before)] + bytes(hole_bytes) + after[middle:]
    yield from dict.fromkeys([*cut, hole])


def write_tree(tree: Tree, folder: Path) -> None:
    """Make a folder hold exactly a state."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
