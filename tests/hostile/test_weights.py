"""Weights files from others: refused in one line that names the file; nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.hostile.codecs import Bomb
from tests.hostile.harness import check_refused, run_command
from tests.parameters import one_in

FIRST, SHAPE = "conv1.weight", (16, 3, 3, 3)
Make = Callable[[Path], Any]


def _container(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _tensor(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


MANY = [f"tensor{i:060}" for i in range(50_000)]
DEEP = b"[" * 100_000 + b"]" * 100_000
HEADERS: dict[str, bytes] = {
    "empty": b"",
    "header longer than the file": _container({}, length=1000),
    "header of 2^63": _container({}, length=2**63),
    "deep header": _container(b'{"a":' + DEEP + b"}"),
    "shape overflows": _container({"x": _tensor(shape=[2**62, 8])}, bytes(4)),
    "offsets beyond the file": _container({"x": _tensor(offsets=[0, 4 * 10**12], shape=[10**12])}, bytes(4)),
    "50,000 tensors": _container(dict.fromkeys(MANY, _tensor(shape=[0], offsets=[0, 0]))),
    "name forges a line": _container({"x\n/etc/passwd: sound": _tensor()}, bytes(4)),
    "name of 1e5 letters": _container({"x" * 100_000: _tensor()}, bytes(4)),
}


def _save_changed(change: Callable[[dict[str, Any]], Any]) -> Make:
    """Save the weights with a change."""

    def make(path: Path) -> None:
        state = dict(torch.load(path, weights_only=True))
        other = change(state)
        torch.save(state if other is None else other, path)

    return make


def _first(value: Callable[[], Any]) -> Make:
    """Another value in place of the first tensor."""
    return _save_changed(lambda state: state.update({FIRST: value()}))


def _rezip(change: Callable[[str, bytes], bytes], kind: int = zipfile.ZIP_STORED) -> Make:
    """The parts of the zip, each changed."""

    def make(path: Path) -> None:
        made = BytesIO()
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", kind) as new:
            for part in old.infolist():
                new.writestr(part.filename, change(part.filename, old.read(part)))
        path.write_bytes(made.getvalue())

    return make


def _pickle(data: bytes) -> Make:
    return _rezip(lambda name, old: data if name.endswith("data.pkl") else old)


PICKLES: dict[str, Make] = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zip of something else": _rezip(lambda name, data: b"text"),
    "zip bomb": _rezip(lambda name, data: bytes(10**9) if name.endswith("/0") else data, zipfile.ZIP_DEFLATED),
    "storage cut short": _rezip(lambda name, data: data[:-4] if name.endswith("data/0") else data),
    "code": lambda path: torch.save({FIRST: Bomb()}, path),
    "code in an old pickle": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "code in a key": _pickle(b"\x80\2}cposix\nsystem\n(X\5\0\0\0touchtRK\1s."),
    "whole module": lambda path: torch.save(nn.Linear(2, 2), path),
    "1e5 lists in lists": _pickle(b"\x80\2}X\1\0\0\0a" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"s."),
    "claims 1e12 bytes": _pickle(b"\x80\2\x8e" + struct.pack("<Q", 10**12) + b"x."),
    "keys of numbers": _save_changed(lambda state: {1: torch.zeros(1)}),
    "name forges a line": _save_changed(lambda state: {"x\n/etc/passwd: sound": torch.zeros(1)}),
    "meta tensor": _first(lambda: torch.zeros(SHAPE, device="meta")),
    "sparse tensor": _first(lambda: torch.zeros(SHAPE).to_sparse()),
    "complex numbers": _first(lambda: torch.zeros(SHAPE, dtype=torch.complex64)),
    "integers": _first(lambda: torch.zeros(SHAPE, dtype=torch.int8)),
    "too large for 32 bits": _first(lambda: torch.full(SHAPE, 1e300, dtype=torch.float64)),
    "1e12 numbers that are one": _first(lambda: torch.zeros(1).expand(10**12)),
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_damaged_safetensors_is_refused(house: Path, data: bytes) -> None:
    (house / "weights" / "a.safetensors").write_bytes(data)
    check_refused(["inspect", "one.yaml", "--weights"], house, house / "weights" / "a.safetensors", "weights (a)")


@pytest.mark.parametrize("make", one_in(2, PICKLES.values()), ids=PICKLES)
def test_damaged_pickle_is_refused_and_not_executed(house: Path, make: Make) -> None:
    make(house / "weights" / "b.pt")
    check_refused(["inspect", "merge.yaml", "--weights"], house, house / "weights" / "b.pt", "weights (b)")
    assert not (house / "was-run").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_code_beside_the_state_is_left_out_and_not_executed(house: Path, zipped: bool) -> None:
    path = house / "weights" / "b.pt"
    state = torch.load(path, weights_only=True)
    torch.save({"state_dict": state, "hook": Bomb(), "w": [Bomb()]}, path, _use_new_zipfile_serialization=zipped)
    assert run_command(["inspect", "merge.yaml", "--weights"], house).check_bounds().code == 0
    assert not (house / "was-run").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "endless"])
def test_weights_that_are_no_regular_file_are_refused(house: Path, kind: str) -> None:
    path = house / "weights" / "a.safetensors"
    path.unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "endless": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    check_refused(["inspect", "one.yaml", "--weights"], house, "weights (a)")
