"""JSON that means harm: refused before it is parsed, in one line with the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from models.errors import InputError
from models.io import (
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    ParseError,
    parse_json,
    read_json,
    read_json_lines,
)

NO_DOCUMENTS = {
    "nothing": (b"", "line 1, column 1: "),
    "garbage": (b"\x80\x04\x95", "this byte is no UTF-8"),
    "half a byte": (b'{"a":\n "\xc3"}', "line 2, column 3: this byte is no UTF-8"),
    "a mark of order": (b"\xef\xbb\xbf{}", "line 1, column 1: "),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "no UTF-8"),
    "torn": (b'{"a": [1, 2', "line 1, column 12: "),
    "more after it": (b"{}\n{}", "line 2, column 1: Extra data"),
    "lists in lists": (b"[" * 100_000, "nested more than 50 deep"),
    "lists in lists, whole": (b"[" * 100_000 + b"]" * 100_000, "nested more than 50 deep"),
    "mappings in mappings": (b'{"a":' * 100_000, "nested more than 50 deep"),
    "brackets after a quoted quote": (b'["\\"", "\\\\", ' + b"[" * 100_000, "nested more than 50 deep"),
    "many values": (b"[" + b"1," * MAX_JSON_VALUES + b"1]", "more than 1000000 values"),
    "many lists": (b"[" + b"[]," * MAX_JSON_VALUES + b"[]]", "more than 1000000 values"),
    "many texts": (b'"a"' * (4 * MAX_JSON_VALUES), "more than 1000000 values"),
    "a key twice": (b'{"a": {"b": 1, "c": 2, "b": 1}}', "the key 'b' occurs twice"),
    "a key twice, written otherwise": (b'{"a": 1, "\\u0061": 1}', "the key 'a' occurs twice"),
    "not a number": (b'{"a": NaN}', "NaN is no number"),
    "without end": (b'{"a": -Infinity}', "-Infinity is no number"),
    "too large": (b'{"a": 1e999}', "1e999 is too large for a number"),
    "an integer without end": (b"[" + b"9" * 100_000 + b"]", "is longer than 20 digits"),
    "a NUL": (b'{"a": ["\\u0000"]}', "a text with a NUL or half a character in it"),
    "a raw NUL": (b'{"a": "\0"}', "Invalid control character"),
    "half a character": (b'{"\\ud83d": 1}', "a text with a NUL or half a character in it"),
    "the other half": (b'{"a": {"b": "\\udc00\\ud83d"}}', "a text with a NUL or half a character in it"),
}
FILES = ("fifo", "/dev/zero", "directory", "endless", "large", "missing")


@pytest.mark.parametrize(("data", "said"), NO_DOCUMENTS.values(), ids=NO_DOCUMENTS)
def test_what_is_no_document_within_the_bounds_is_a_fault(data: bytes, said: str) -> None:
    with pytest.raises(ParseError) as refused:
        parse_json(data)
    assert said in refused.value.text and len(refused.value.text) < 200


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'{"a": [1, -2.5, 1e3, true, null, "[[\\"{\\\\"]}\n', {"a": [1, -2.5, 1000.0, True, None, '[["{\\']}),
        (b'{"\\ud83d\\ude00": "\\\\u0000"}', {"\U0001f600": "\\u0000"}),
        (b'"' + b"[" * 1000 + b'"', "[" * 1000),
        (b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH, None),
        (b"[" + b"1," * (MAX_JSON_VALUES - 2) + b"1]", [1] * (MAX_JSON_VALUES - 1)),
        (b"[99999999999999999999]", [10**20 - 1]),
    ],
    ids=["values", "escapes", "brackets in a text", "deep", "many", "digits"],
)
def test_what_is_within_the_bounds_is_read(data: bytes, value: object) -> None:
    found = parse_json(data)
    assert value is None or found == value


def make_special(path: Path, kind: str) -> None:
    """What is no file that could be read."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind in ("endless", "/dev/zero"):
        path.symlink_to(path if kind == "endless" else kind)
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(100 * MAX_JSON_BYTES)


@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_file_of_bearable_size_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file.json"
    make_special(path, kind)
    for read in (read_json, lambda *given: list(read_json_lines(*given))):
        with pytest.raises(InputError) as refused:
            read(path, "make it again")
        assert str(refused.value).startswith(f"{path}: ") and str(refused.value).endswith("; make it again")


def test_a_document_is_a_mapping_and_what_is_wrong_has_a_place(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for text, said in {"[]": "is not a mapping", '{"a": 1,\n}': "is not JSON: line 2, column 1: "}.items():
        path.write_text(text)
        with pytest.raises(InputError, match=said):
            read_json(path, "make it again")
    for text, said in {
        '{}\n{"a":}\n': "line 2 is not JSON: column 6: ",
        "{}\n\n{}\n": "line 2 is not",
        "{}\n3\n": "2 is not a",
    }.items():
        path.write_text(text)
        with pytest.raises(InputError, match=said):
            list(read_json_lines(path, "make it again"))


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a')
    assert list(read_json_lines(path, "")) == [(1, {"a": 1}), (2, {"a": 2})]
    path.write_text('{"a": 1}\n{"a": 2}')
    assert [row["a"] for _, row in read_json_lines(path, "")] == [1, 2]
