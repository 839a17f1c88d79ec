"""Files and headers that mean harm: whatever opens a bundle tells it in one line, and quickly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.bundle.format import MAX_HEADER_BYTES, tensor_name
from tests.exhaustive import every
from tests.hostile.bundles.opened import FEW, ONCE, OPENED_BY, VERIFY, Opened, header_text, sealed, told
from tests.hostile.harness import refused, refused_apart
from tests.hostile.reading.test_json import make_special
from tests.hostile.samples import BUNDLE, OLD

# What is no file of bytes.


@pytest.mark.parametrize("kind", ["directory", "fifo", "/dev/zero", "endless", "missing", "empty"])
@pytest.mark.parametrize("command", every(["verify", *OPENED_BY], ["verify", *FEW]))
def test_what_is_no_file_is_not_waited_for(house: Path, command: str, kind: str) -> None:
    path = house / BUNDLE
    path.unlink()
    if kind == "empty":
        path.touch()
    else:
        make_special(path, kind)
    words = VERIFY if command == "verify" else OPENED_BY[command]
    if command == "verify" and kind == "empty":
        told(house, "truncated")
    else:
        refused(words, house, BUNDLE)


@pytest.mark.parametrize("name", ["x\0y", "x\udc80y", "n" * 400])
@pytest.mark.parametrize("command", [VERIFY[:2], ("bundle", "show"), ("plan",), ("bundle", "diff", OLD)])
def test_a_path_that_is_none(house: Path, command: tuple[str, ...], name: str) -> None:
    refused([*command, name], house)


def test_a_hole_as_large_as_a_disk_is_not_read(house: Path) -> None:
    bundle = Opened(house / BUNDLE)
    for where in ("front", "behind"):
        with open(house / BUNDLE, "wb") as file:
            if where == "behind":
                name = tensor_name("F32", (1 << 38,), b"")
                end = len(bundle.data)
                offsets = [end, end + (1 << 40)]
                bundle.tensors[name] = {"dtype": "F32", "shape": [1 << 38], "data_offsets": offsets}
                file.write(sealed(header_text(json.dumps(bundle.manifest), bundle.tensors), bundle.data))
            file.truncate(file.tell() + (1 << 40))
        told(house, "was not copied whole")
        refused(OPENED_BY["show"], house, BUNDLE)


# A header that lies.

LENGTHS = {
    "none": lambda content: content[:4],
    "of nothing": lambda content: bytes(8) + content[8:],
    "one too many": lambda content: (int.from_bytes(content[:8], "little") + 1).to_bytes(8, "little") + content[8:],
    "one too few": lambda content: (int.from_bytes(content[:8], "little") - 1).to_bytes(8, "little") + content[8:],
    "longer than the file": lambda content: (len(content)).to_bytes(8, "little") + content[8:],
    "the largest": lambda content: b"\xff" * 8 + content[8:],
    "just past the most": lambda content: (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + content[8:],
    "cut off": lambda content: content[:3000],
    "without its last byte": lambda content: content[:-1],
    "with a byte more": lambda content: content + b"\0",
    "twice": lambda content: content * 2,
    "other magic": lambda content: b"PK\x03\x04" + content[4:],
}


@pytest.mark.parametrize("damage", LENGTHS.values(), ids=LENGTHS)
def test_a_length_that_lies(house: Path, damage: Callable[[bytes], bytes]) -> None:
    path = house / BUNDLE
    path.write_bytes(damage(path.read_bytes()))
    told(house)
    for command in ("show", "diff to", ONCE):
        refused(OPENED_BY[command], house, BUNDLE)


def _texts() -> dict[str, Callable[[Opened], bytes]]:
    """Header texts that are sealed and no JSON within bounds."""
    opening = b'{"__metadata__":{"gemel.digest":"' + b"0" * 64 + b'"'

    def plain(bundle: Opened) -> bytes:
        return header_text(json.dumps(bundle.manifest), bundle.tensors)

    return {
        "deep": lambda bundle: opening + b',"x":' + b"[" * 100_000,
        "deep and ended": lambda bundle: opening + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        "deep mappings": lambda bundle: opening + b"}" + b',"x":' + b'{"x":' * 100_000 + b"1" + b"}" * 100_001,
        "a key twice": lambda bundle: opening + b',"x":"1","x":"2"}}',
        "metadata twice": lambda bundle: plain(bundle)[:-1] + b',"__metadata__":{}}',
        "a tensor twice": lambda bundle: plain(bundle)[:-1] + b"," + plain(bundle).rpartition(b"},")[2],
        "not UTF-8": lambda bundle: opening + b',"x":"\xff"}}',
        "half a character": lambda bundle: opening + b',"x":"\\ud800"}}',
        "a NUL": lambda bundle: opening + b',"x":"\\u0000"}}',
        "NaN": lambda bundle: opening + b'},"x":NaN}',
        "a long number": lambda bundle: opening + b'},"x":' + b"9" * 5000 + b"}",
        "1e999": lambda bundle: opening + b'},"x":1e999}',
        "not ended": lambda bundle: opening,
        "two documents": lambda bundle: plain(bundle) + b"{}",
        "values without end": lambda bundle: opening + b'},"x":[' + b"0," * 5_000_000 + b"0]}",
        "metadata of numbers": lambda bundle: opening + b',"x":1}}',
        "no manifest": lambda bundle: opening + b"}}",
    }  # fmt: skip


@pytest.mark.parametrize("text", _texts().values(), ids=_texts())
def test_a_header_that_is_sealed_and_no_json(house: Path, text: Callable[[Opened], bytes]) -> None:
    bundle = Opened(house / BUNDLE)
    bundle.write(text=text(bundle))
    told(house)
    for command in ("show", "diff from", ONCE):
        refused(OPENED_BY[command], house, BUNDLE)


def _second(change: dict[str, Any]) -> Callable[[Opened], None]:
    def changed(bundle: Opened) -> None:
        name = sorted(bundle.tensors, key=lambda name: bundle.tensors[name]["data_offsets"])[2]
        bundle.tensors[name] |= change

    return changed


def _added(name: str, **entry: Any) -> Callable[[Opened], None]:
    return lambda bundle: bundle.tensors.update({name: entry})


def _renamed(name: str) -> Callable[[Opened], None]:
    def changed(bundle: Opened) -> None:
        bundle.tensors[name] = bundle.tensors.pop(next(iter(bundle.tensors)))

    return changed


ENTRIES: dict[str, Callable[[Opened], Any]] = {
    "overlaps": _second({"data_offsets": [0, 8]}),
    "past the end": _second({"data_offsets": [0, 1 << 60]}),
    "backwards": _second({"data_offsets": [512, 0]}),
    "negative": _second({"data_offsets": [-8, 0]}),
    "offsets of floats": _second({"data_offsets": [0.0, 8.0]}),
    "offsets of truth": _second({"data_offsets": [False, True]}),
    "a product that overflows": _second({"shape": [1 << 32, 1 << 32, 1 << 32]}),
    "nothing, much of it": _second({"shape": [0, 1 << 62]}),
    "nothing": _second({"shape": [0]}),
    "negative shape": _second({"shape": [-1, -8]}),
    "a shape of text": _second({"shape": "8"}),
    "many dimensions": _second({"shape": [1] * 1000}),
    "unknown dtype": _second({"dtype": "F8_E4M3"}),
    "dtype of a list": _second({"dtype": ["F32"]}),
    "one key more": _second({"x": 1}),
    "an empty tensor that nobody uses": _added("f" * 64, dtype="F32", shape=[0], data_offsets=[0, 0]),
    "a name of controls": _renamed("x\n/path: sound"),
    "a name of ten thousand": _renamed("f" * 10_000),
    "no name": _renamed(""),
    "a gap filler's name": _renamed("pad.9"),
    "no tensors": lambda bundle: bundle.tensors.clear(),
    "text for a tensor": lambda bundle: bundle.tensors.update({next(iter(bundle.tensors)): "x"}),
}  # fmt: skip


@pytest.mark.parametrize("change", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_that_lies(house: Path, change: Callable[[Opened], Any]) -> None:
    bundle = Opened(house / BUNDLE)
    change(bundle)
    bundle.write()
    told(house)
    for command in ("show", "diff to", ONCE):
        refused(OPENED_BY[command], house, BUNDLE)


def test_a_pipe_that_is_written_to_is_not_read_either(house: Path) -> None:
    (house / BUNDLE).unlink()
    os.mkfifo(house / BUNDLE)
    refused_apart(OPENED_BY["show"], house, BUNDLE)


def test_a_box_whose_every_query_is_damaged_says_so_in_one_line(house: Path) -> None:
    bundle = Opened(house / BUNDLE)
    bundle.data = bytes(byte ^ 1 for byte in bundle.data)
    bundle.write()
    line = refused(OPENED_BY["run"], house)
    assert "every query has damaged tensors" in line
