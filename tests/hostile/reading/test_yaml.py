"""Workloads and box configs that mean harm: one line with file and place, at once, whatever they are made of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hostile.harness import refused, tried

WORKLOAD = """
name: one
cameras: {gate: {source: gate.mp4, fps: 5}}
queries:
  - {id: a, camera: gate, task: classification, classes: [x, y], model: cifar_resnet20, input_size: 32, extra: VALUE}
"""
MEBIBYTE = 2**20
LAUGHS = "\n".join(
    ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10)]
)
MERGED_LAUGHS = "\n".join(
    ["l0: &l0 {a: 1}"] + [f"l{n}: &l{n} {{<<: [{', '.join([f'*l{n - 1}'] * 10)}]}}" for n in range(1, 10)]
)

NO_DOCUMENTS = {
    "lists in lists": "[" * 3000,
    "mappings in mappings": "{a: " * 3000 + "1" + "}" * 3000,
    "blocks in blocks": "\n".join(" " * depth + "a:" for depth in range(1000)),
    "dashes in dashes": "- " * 3000,
    "anchors in anchors": "a: &a [[[[[[[[[[1]]]]]]]]]]\nb: &b [[[[[[[[[[*a]]]]]]]]]]\nc: &c [[[[[[[[[[*b]]]]]]]]]]\n"
    "d: &d [[[[[[[[[[*c]]]]]]]]]]\ne: &e [[[[[[[[[[*d]]]]]]]]]]\n",
    "a billion laughs": LAUGHS,
    "a billion merged laughs": MERGED_LAUGHS,
    "many aliases of many values": "a: &a [" + "1," * 4000 + "]\nb: [" + "*a, " * 4000 + "]",
    "an anchor within itself": "a: &a [*a]",
    "a mapping within itself": "&a {a: *a}",
    "a mapping merged into itself": "&a {<<: *a}",
    "an alias of nothing": "a: *nothing",
    "a key twice": "name: one\nname: two",
    "a key twice, written otherwise": "1: a\n0x1: b",
    "a list as a key": "? [a]\n: b",
    "two documents": "name: one\n---\nname: two",
    "many values": "[" + "1," * 400_000 + "]",
    "many keys": "{" + ",".join(f"k{n}: 1" for n in range(90_000)) + "}",
    "python": "a: !!python/object/apply:os.system [id]",
    "a tag of nobody": "a: !harm x",
    "a NUL": "a: b\0c",
    "an escape": "a: \x1b[2J",
    "no UTF-8": b"a: b\nc: \xff",
    "UTF-16": "name: one".encode("utf-16"),
}
NO_VALUES = {
    "an int of 5,000 digits": "1" * 5000,
    "an int in sixties": "1" + ":1" * 50_000,
    "a hexadecimal of nothing": "0x_",
    "a binary of nothing": "0b_",
    "a float that is none": "!!float abc",
    "a float of nothing": '!!float ""',
    "an int of nothing": '!!int ""',
    "an int that is none": "!!int abc",
    "a truth that is none": "!!bool foo",
    "a time that is none": "!!timestamp abc",
    "a day that was not": "2026-02-31",
    "a month that was not": "2026-13-01",
    "an hour that was not": "2026-01-01 25:00:00",
    "a year that was not": "0000-01-01",
    "bytes that are none": '!!binary "a"',
    "a list that is none": "!!seq abc",
    "a mapping that is none": "!!map abc",
    "a text that is a list": "!!str [a]",
    "a NUL in a text": '"a\\0b"',
    "half a character": '"\\ud800"',
}


@pytest.mark.parametrize("text", NO_DOCUMENTS.values(), ids=NO_DOCUMENTS)
def test_what_is_no_document_within_the_bounds_is_one_line(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refused(["inspect", path], tmp_path)
    assert said.startswith(f"gemel: {path}: is not YAML: line ") and len(said) < 600, said


@pytest.mark.parametrize("value", NO_VALUES.values(), ids=NO_VALUES)
def test_a_value_that_is_none_of_its_kind_is_told_with_its_place(tmp_path: Path, value: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(WORKLOAD.replace("VALUE", value))
    said = refused(["inspect", path], tmp_path)
    assert said.startswith(f"gemel: {path}: is not YAML: line 5, column ") and len(said) < 600, said


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("fps: 5", f"fps: {'x' * 100_000}"), "cameras.gate.fps: input should be a valid number"),
        (("id: a", f"{'k' * 1000}: a"), "kkkk..: unknown key"),
        (("id: a", f"id: {'a' * 100_000}"), "queries[0]"),
        (("name: one", "1: one"), "keys should be strings"),
        (("name: one", "!!binary aaaa: one"), "keys should be strings"),
        (("name: one", "null: one"), "keys should be strings"),
    ],
)
def test_what_does_not_fit_is_told_in_a_line_of_bearable_length(
    tmp_path: Path, change: tuple[str, str], expected: str
) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(WORKLOAD.replace(", extra: VALUE", "").replace(*change))
    said = refused(["inspect", path], tmp_path)
    assert said.startswith(f"gemel: {path}: ") and expected in said and len(said) < 600, said


@pytest.mark.parametrize("command", [["inspect"], ["run", "--check"], ["merge", "-o", "out"]], ids=" ".join)
@pytest.mark.parametrize("kind", ["fifo", "zero", "directory", "endless", "large", "missing"])
def test_what_is_no_file_of_bearable_size_is_not_read(tmp_path: Path, command: list[str], kind: str) -> None:
    path = tmp_path / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to(path)
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(10_000 * MEBIBYTE)
    said = refused([*command, path], tmp_path)
    assert said.startswith(f"gemel: {path}: ") and "; " in said


def test_a_path_with_a_nul_is_one_line(tmp_path: Path) -> None:
    assert "workload: 'a\\x00b' is nothing that could be given here" in refused(["inspect", "a\0b"], tmp_path)


def test_aliases_within_the_bounds_stay_allowed(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    first = "{id: a, camera: gate, task: classification, classes: [x, y], model: cifar_resnet20, input_size: 32}"
    query = "{id: ID, camera: gate, <<: *same}"
    path.write_text(
        f"name: one\ncameras: {{gate: {{source: gate.mp4}}}}\nqueries:\n  - &same {first}\n"
        + "".join(f"  - {query.replace('ID', one)}\n" for one in "bcd")
    )
    seen = tried(["inspect", path, "--json"], tmp_path).held()
    assert seen.code == 0 and '"d"' in seen.out
