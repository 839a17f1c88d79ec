"""Small files whose words make a reader work: their readers end within bounds of time and memory, in one line."""

from __future__ import annotations

import json
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gemel.models.errors import InputError
from gemel.models.files.documents import ParseError, parse_json, parse_yaml
from gemel.models.files.weights import load_matching
from gemel.models.labels.layouts import _read_table
from tests.hostile.harness import limits, reset_peak, status_bytes

MAX_SECONDS, MAX_BYTES = 8.0, 300 * 2**20
START = b"\x80\x02"
STORAGE = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\1tQ"


def text(value: str) -> bytes:
    """A text in a pickle."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name_of(module: str, name: str) -> bytes:
    """A class or function in a pickle, by its name."""
    return f"c{module}\n{name}\n".encode()


def widest_integer(nbytes: int) -> bytes:
    """An integer of so many bytes in a pickle."""
    return b"\x8b" + struct.pack("<i", nbytes) + b"\xff" * (nbytes - 1) + b"\x7f"


def tensor(storage: bytes, shape: bytes, strides: bytes) -> bytes:
    """A call that describes a tensor."""
    return name_of("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + b"K\0" + shape + strides + b"\x89NtR"


def module(parameters: bytes, modules: bytes) -> bytes:
    """A network's part in a pickle, with these mappings."""
    return b"h\x07)\x81}(" + text("_parameters") + parameters + text("_modules") + modules + b"ub"


LARGE, COPIES, MANY = 8_000_000, 100_000, 60_000
ORDERED = name_of("collections", "OrderedDict")
REBUILD = name_of("torch._utils", "_rebuild_tensor_v2")
PICKLES: dict[str, bytes] = {
    "shape and strides of huge integers": b"}(" + text("0.weight") + tensor(
        STORAGE, b"(" + widest_integer(LARGE) + b"q\5" + b"h\5" * 200 + b"t", b"(" + b"h\5" * 201 + b"t") + b"u",
    "a list that becomes a mapping many times":
        b"]q\0(" + b"".join(text(f"{at:x}") + b"K\0\x86" for at in range(MANY)) + b"e0"
        + ORDERED + b"q\x010(" + b"h\1h\0\x85R" * COPIES + b"t",
    "a list of no pairs that is looked through many times":
        b"]q\0(" + b")" * MANY + b"e0" + ORDERED + b"q\x010(" + b"h\1h\0\x85R" * COPIES + b"t",
    "long names joined many times":
        text("a" * LARGE) + b"q\x000" + b"(" + b"h\0h\0\x93" * 2000 + b"t",
    "a long name in the fault of many tensors":
        name_of("torch._utils", "_rebuild_" + "a_" * (LARGE // 2)) + b"q\x000(" + b"h\0)R" * 2000 + b"t",
    "a long list as the shape of many tensors":
        b"]q\0(" + b"K\0" * MANY + b"e0" + REBUILD + b"q\x010("
        + STORAGE + b"q\2K\0h\0h\0tq\x030" + b"(" + b"h\1h\3R" * COPIES + b"t",
    "a long reference to many storages": STORAGE[:-2] + b"N" * MANY + b"tq\0Q0" + b"(" + b"h\0Q" * COPIES + b"t",
    "subclasses of subclasses":
        name_of("torch._tensor", "_rebuild_from_type_v2") + b"q\x000" + name_of("a", "b") + b"N)\x87q\x010"
        + b"h\0Nh\1\x87q\x010" * 500 + b"(" + b"h\0h\1R" * COPIES + b"t",
    "a long name in many modules":
        name_of("a", "b") + b"q\x070" + text("a" * LARGE) + b"q\x080" + tensor(STORAGE, b")", b")") + b"q\x090"
        + module(b"}", b"}(" + b"".join(
            text(f"{at:x}") + module(b"}(h\x08h\tu", b"}") for at in range(2000)) + b"u"),
    "many mappings under long keys":
        b"".join(b"}" + text(letter * 400) for letter in "abcd") + b"}("
        + b"".join(text(f"{at:x}") + b"}" for at in range(4 * MANY)) + b"ussss",
}  # fmt: skip
"""The instructions of pickles."""


def write_checkpoint(path: Path, content: bytes) -> Path:
    """A zip checkpoint with this pickle and one storage of one number."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", START + content + b".")
        archive.writestr("archive/data/0", bytes(4))
    return path


def check_work(read: Callable[[], Any]) -> None:
    """Assert that reading ends within MAX_SECONDS and MAX_BYTES, whatever it says."""
    with limits():
        before, start = reset_peak(), time.process_time()
        try:
            read()
        except (InputError, ParseError) as error:
            assert "\n" not in str(error)
        seconds, nbytes = time.process_time() - start, status_bytes("VmHWM") - before
    assert seconds < MAX_SECONDS
    assert nbytes < MAX_BYTES


@pytest.mark.parametrize("case", PICKLES)
def test_load_matching_bounds_the_work_of_a_pickle(tmp_path: Path, case: str) -> None:
    path = write_checkpoint(tmp_path / "w.pt", PICKLES[case])
    module = nn.Sequential(nn.Linear(8, 8))
    check_work(lambda: load_matching(module, path))


def test_load_matching_reads_a_wide_integer_beside_the_tensors_as_nothing(tmp_path: Path) -> None:
    import numpy
    import torch

    state = nn.Sequential(nn.Linear(2, 2)).state_dict()
    torch.save({"state_dict": state, "generator": numpy.random.default_rng(1).bit_generator.state}, tmp_path / "w.pt")
    assert load_matching(nn.Sequential(nn.Linear(2, 2)), tmp_path / "w.pt") == ("0.weight", "0.bias")


def test_load_matching_refuses_names_of_storages_that_are_lists_in_lists(tmp_path: Path) -> None:
    import pickle

    parts = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {}, {"a": 1})]
    doubled = b"]q\0" + b"0(h\0h\0lq\0" * 60  # as a text of 2^60 characters
    (tmp_path / "w.pt").write_bytes(b"".join(parts) + START + b"(" + doubled + b"l.")
    check_work(lambda: load_matching(nn.Linear(2, 2), tmp_path / "w.pt"))


MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{depth}: &a{depth} {{<<: [{','.join([f'*a{depth - 1}'] * 50)}]}}\n" for depth in range(1, 8)
)
YAMLS: dict[str, bytes] = {
    "merge keys": MERGES.encode(),
    "an integer to the base of 60": b"a: 1" + b":59" * 300_000,
    "a long text by many aliases": f"a: &a {'é' * 200_000}\nb: [{'*a,' * 40_000}1]".encode(),
    "many keys": b"\n".join(b"k%d: 1" % at for at in range(100_000)),
}


@pytest.mark.parametrize("case", YAMLS)
def test_parse_yaml_bounds_the_work_of_a_document(case: str) -> None:
    check_work(lambda: parse_yaml(YAMLS[case]))


@pytest.mark.parametrize("foreign", [False, True])
def test_parse_json_finds_a_key_that_occurs_twice_in_linear_time(foreign: bool) -> None:
    keys = [f"k{at}" for at in range(100_000)]
    data = "{" + ",".join(f'"{key}":0' for key in [*keys, keys[-1]]) + "}"

    def read() -> None:
        with pytest.raises(ParseError, match="the key 'k99999' occurs twice"):
            parse_json(data.encode(), foreign)

    check_work(read)


@pytest.mark.parametrize("foreign", [False, True])
def test_parse_json_refuses_integers_of_more_than_64_bits(foreign: bool) -> None:
    assert parse_json(b"[18446744073709551615, 0.12345678901234567890]", foreign)[0] == 2**64 - 1
    with pytest.raises(ParseError, match="more than 64 bits"):
        parse_json(json.dumps([10**4000]).encode(), foreign)


@pytest.mark.parametrize(
    "data",
    [
        b"path,label\n" + b"a," * 20_000_000,
        b"path,label\n" + b'"\n",' * 10_000_000,
        b"path,label\n" + b"a\n" * 20_000_000,
    ],
    ids=["one line of many cells", "one row of many lines", "many rows"],
)
def test_read_table_bounds_rows_and_cells(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    check_work(lambda: _read_table(tmp_path / "a.csv"))
