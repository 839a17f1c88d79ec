"""Files: bounded reading, strict JSON and YAML, atomic writing, appending, locks, the cache, path checks."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import BaseModel

from gemel.models.errors import InputError
from gemel.models.files.documents import (
    MAX_DEPTH,
    MAX_JSON_SEPARATORS,
    MAX_YAML_VALUES,
    ParseError,
    parse_json,
    parse_yaml,
)
from gemel.models.files.io import (
    AppendFile,
    check_apart,
    finite,
    hold_locks,
    locked_folder,
    open_atomic,
    own_bytes,
    private_folder,
    read_bounded,
    read_json,
    read_json_lines,
    read_yaml,
)
from gemel.models.notes import collect_notes

BOMB = b"a: &a [x, x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + at, 98 + at, b", ".join([b"*%c" % (97 + at)] * 10)) for at in range(9)
)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "line 1, column 2"),
        (b'{"a": 1,\n "a": 2}', "the key 'a' occurs twice"),
        (b"[NaN]", "NaN is no finite number"),
        (b"[1e999]", "1e999 is no finite number"),
        (b"9" * 5000, "5000 digits"),
        (b"[18446744073709551616]", "more than 64 bits"),
        (b"[" * 100_000, "recursion"),
        (b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2), "nested more than"),
        (b"[" + b"1," * (MAX_JSON_SEPARATORS + 1) + b"1]", "more than 8000000 commas"),
        (b'["\\ud800"]', "half a character"),
        (b'{"\\u0000": 1}', "a NUL"),
        (b'"\xff"', "utf-8"),
    ],
)
def test_parse_json_refuses_what_is_not_strict_json(data: bytes, problem: str) -> None:
    with pytest.raises(ParseError, match=problem):
        parse_json(data)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"a: [", "line 1, column 5"),
        (b"a: 1\na: 2", "line 2, column 1: the key 'a' occurs twice"),
        (b"? [a]\n: 1", "line 1, column 5: a key that is a list"),
        (b"a: !!python/object/apply:os.system [ls]", "the tag .*os.system' is not read"),
        (b"a: !!binary aGVsbG8=", "the tag .*binary' is not read"),
        (b"&a [*a]", "the alias 'a' of nothing before it"),
        (b"a: &a {b: 1}\nc: {<<: *a}", "line 2, column 5: merge keys"),
        (b"--- a\n--- b", "a second document"),
        (b"a: 18446744073709551616", "more than 64 bits"),
        (b"a: 0x" + b"f" * 17, "more than 64 bits"),
        (BOMB, "more than 100000 values"),
        (b"[" + b"1," * (MAX_YAML_VALUES + 1) + b"]", "more than 100000 values"),
        (b"a: \xff", "utf-8"),
        (b'"\\0"', "a NUL"),
        (b"[" * 2000, "nested more than"),
    ],
)
def test_parse_yaml_refuses_what_is_not_safe_yaml(data: bytes, problem: str) -> None:
    with pytest.raises(ParseError, match=problem):
        parse_yaml(data)


def test_parse_yaml_gives_plain_values() -> None:
    assert parse_yaml(b"a: [1, 2.5, true, null, x]\nb: &b {c: d}\ne: *b") == {
        "a": [1, 2.5, True, None, "x"], "b": {"c": "d"}, "e": {"c": "d"},
    }  # fmt: skip


def test_parse_yaml_reads_the_core_schema_of_yaml_1_2() -> None:
    text = b"[0x1F, 0o17, 017, 1e3, -.5, .inf, ~, True, yes, off, 1:59:59, 2001-99-99, 1_000, '1', !!str 1]"
    assert parse_yaml(text) == [
        31, 15, 17, 1000.0, -0.5, math.inf, None, True, "yes", "off", "1:59:59", "2001-99-99", "1_000", "1", "1",
    ]  # fmt: skip
    assert parse_yaml(b"names:\n  0: a\n  1: b\ntext: |\n  two\n  lines\n") == {
        "names": {0: "a", 1: "b"}, "text": "two\nlines\n",
    }  # fmt: skip


class _Inner(BaseModel, extra="forbid"):
    id: str
    fps: int = 1


class _Schema(BaseModel, extra="forbid"):
    queries: list[_Inner]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("queries: [{id: a, fbs: 2}]", "queries[0].fbs (a): unknown key; did you mean fps?"),
        ("queries: [{id: a, fps: x}]", "queries[0].fps (a): input should be a valid integer"),
        ("queries: [{fps: 1}]", "queries[0].id: this key is missing; add it"),
        ("other: 1", "other: unknown key; remove it; the keys here are queries"),
        ("square: 1", "square: unknown key; remove it; the keys here are queries"),
        ("- 1", "is not a mapping; start with `queries:`"),
        ("a: [", "is not YAML: line 1"),
    ],
)
def test_read_yaml_names_file_key_problem_and_hint(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_yaml(path, _Schema, "file", "`queries:`")
    assert str(caught.value).startswith(f"{path}: {message}") and "\n" not in str(caught.value)


def test_read_bounded_refuses_anything_but_a_regular_file_within_the_cap(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"12345")
    paths = {tmp_path: "(?i)is a directory", tmp_path / "pipe": "no regular file", Path("/dev/zero"): "no regular file",
             tmp_path / "none": "No such file", tmp_path / "large": "larger than 4 bytes"}  # fmt: skip
    for path, problem in paths.items():
        with pytest.raises(InputError, match=problem):
            read_bounded(path, 4, "give another")
    assert read_bounded(tmp_path / "large", 5, "") == b"12345"


def test_read_json_lines_leaves_out_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    with collect_notes() as notes:
        assert [row for _, row in read_json_lines(path, "")] == [{"a": 1}, {"a": 2}]
    assert notes == [f"{path}: line 3, the last, is incomplete and left out"]
    with pytest.raises(InputError, match="line 3 is not JSON"):
        list(read_json_lines(path, "", torn=False))
    with pytest.raises(InputError, match="line 1 is longer than"):
        list(read_json_lines(path, "", max_line_bytes=4))
    path.write_text("[1]")
    with pytest.raises(InputError, match="is not a mapping"):
        read_json(path, "")
    assert finite({1: (float("nan"), {2})}) == {"1": [None, [2]]}


def test_open_atomic_leaves_nothing_after_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(ZeroDivisionError), open_atomic(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), open_atomic(path):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError from error
    with open_atomic(path) as file:
        file.write(b"whole")
    with pytest.raises(InputError, match="exists already"), open_atomic(path):
        pass
    assert path.read_bytes() == b"whole"


WRITER = """
import sys
from gemel.models.files.io import open_atomic
with open_atomic(sys.argv[1], overwrite=True) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    """A process that is in the middle of writing `path`."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    return process


def test_open_atomic_removes_what_killed_writers_of_the_output_left(tmp_path: Path) -> None:
    path, other = tmp_path / "out", tmp_path / "other"
    killed = [start_writer(path), start_writer(path), start_writer(other)]
    for process in killed:
        process.kill()
        process.communicate()
    assert len(list(tmp_path.glob(".*.tmp"))) == 3
    with open_atomic(path) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"
    (remaining,) = tmp_path.glob(".*.tmp")
    with open_atomic(other):
        pass
    assert not remaining.exists()


def test_open_atomic_leaves_the_temporary_of_a_live_writer(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with start_writer(path) as live:
        (temporary,) = tmp_path.glob(".*.tmp")
        with open_atomic(path, overwrite=True) as file:
            file.write(b"mine")
        assert path.read_bytes() == b"mine" and temporary.read_bytes() == b"half"
        live.communicate("")
    assert path.read_bytes() == b"half" and not list(tmp_path.glob(".*.tmp"))


def test_open_atomic_follows_no_link_in_place_of_a_temporary(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / ".out.0.tmp").symlink_to("precious")
    os.mkfifo(tmp_path / ".out.1.tmp")
    with open_atomic(tmp_path / "out") as file:
        file.write(b"whole")
    assert (tmp_path / "precious").read_bytes() == b"precious" and (tmp_path / "out").read_bytes() == b"whole"
    with open_atomic(tmp_path / ("long" * 60)) as file:
        file.write(b"whole")


def test_append_file_writes_whole_lines_and_notices_a_moved_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = AppendFile(path)
    file.add("one")
    file.add("two")
    assert path.read_text() == "one\ntwo\n" and file.size == 8 and file.is_in_place
    path.rename(tmp_path / "moved")
    assert not file.is_in_place
    file.close()
    file.add("after")
    assert (tmp_path / "moved").read_text() == "one\ntwo\n"
    with pytest.raises(InputError, match="path: cannot be written"):
        AppendFile(tmp_path, key="path")
    AppendFile(tmp_path / "moved", fresh=True).close()
    assert (tmp_path / "moved").read_text() == ""


def test_append_file_resumes_the_line_that_a_full_pipe_took_in_part() -> None:
    reading, writing = os.pipe()
    file = AppendFile(Path("pipe"), timeout_s=0.05, descriptor=writing)
    line = "x" * 100_000
    with pytest.raises(InputError, match="no reader"):
        file.add(line)
    with pytest.raises(InputError, match="no reader"):
        file.add("other")
    received = bytearray()
    reader = threading.Thread(target=lambda: received.extend(read_all(reading)))
    reader.start()
    file.add(line)
    file.add("last")
    file.close()
    os.close(writing)
    reader.join(5)
    assert received == f"{line}\nlast\n".encode()


def read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


@pytest.mark.parametrize("kind", [hold_locks, locked_folder])
def test_lock_refuses_a_second_process_and_is_released(tmp_path: Path, kind) -> None:
    target = tmp_path / "out" if kind is hold_locks else tmp_path
    code = f"from pathlib import Path\nfrom gemel.models.files.io import {kind.__name__} as lock\n" + (
        f"with lock(Path({str(target)!r})): pass"
    )
    with kind(target):
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "is being written by another process" in second.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with kind(target):
        pass


def test_private_folder_refuses_what_others_could_write(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "a" / "cache")
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "file").write_bytes(b"data")
    assert own_bytes(folder / "file", 4) == b"data"
    with pytest.raises(OSError, match="too large"):
        own_bytes(folder / "file", 3)
    (folder / "file").chmod(0o666)
    with pytest.raises(PermissionError):
        own_bytes(folder / "file", 4)
    (folder / "link").symlink_to(folder / "file")
    with pytest.raises(OSError):
        own_bytes(folder / "link", 4)
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(InputError, match="others may write"):
        private_folder(folder)


def test_check_apart_compares_thousands_of_outputs_in_time(tmp_path: Path) -> None:
    began = time.process_time()
    check_apart(
        [(f"sink {index}", tmp_path / f"results.{index}") for index in range(4000)], [("the bundle", tmp_path / "b")]
    )
    assert time.process_time() - began < 20.0


def test_check_apart_refuses_outputs_that_are_or_lie_in_inputs(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "one").write_text("1")
    (tmp_path / "link").symlink_to(data / "one")
    os.link(data / "one", tmp_path / "hard")
    inputs = [("the data", data), ("the file", data / "one"), ("nothing", None)]
    for path, problem in ((data / "new", "lies in the data"), (tmp_path / "link", "is the file"),
                          (tmp_path / "hard", "is the file"), (data, "is the data")):  # fmt: skip
        with pytest.raises(InputError, match=problem):
            check_apart([("--out", path)], inputs)
    with pytest.raises(InputError, match="is what 'a' names"):
        check_apart([("a", tmp_path / "x"), ("b", tmp_path / "x")], inputs)
    check_apart([("--out", tmp_path / "x"), ("--log", "/dev/null"), ("--more", "/dev/null")], inputs)
