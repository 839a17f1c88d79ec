"""Weights that mean harm: one line that names the file, whichever command reads them, and nothing of them is run."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from models.errors import InputError
from models.weights import load_weights, read_state
from models.workload import load_workload
from models.zoo import build_query
from tests.exhaustive import one_in
from tests.hostile.asking import A, B, Y, ask
from tests.hostile.harness import refused, tried
from tests.hostile.reading.test_json import FILES, make_special

FIRST, SHAPE = "conv1.weight", (16, 3, 3, 3)
Make = Callable[[Path], Any]


def _packed(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _tensor(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DEEP = b"[" * 100_000 + b"]" * 100_000
HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "half a length": b"\0\0\0",
    "a length alone": struct.pack("<Q", 2),
    "garbage": bytes(range(256)) * 9,
    "zeros": bytes(1000),
    "text": b"these are weights, believe me\n" * 9,
    "a header longer than the file": _packed({}, length=1000),
    "a header of 2^63": _packed({}, length=2**63),
    "a header of 90 MB": _packed({}, length=90_000_000),
    "no header": _packed(b""),
    "a header of no JSON": _packed(b"{'a': 1}"),
    "a header of no UTF-8": _packed(b'{"\xff": 1}'),
    "a header that is a list": _packed([1]),
    "a deep header": _packed(b'{"a":' + DEEP + b"}"),
    "a deep metadata": _packed(b'{"__metadata__": {"a":' + DEEP + b"}}"),
    "metadata of numbers": _packed({"__metadata__": {"a": 1}, "x": _tensor()}, bytes(4)),
    "a tensor that is a number": _packed({"x": 1}),
    "a tensor without a shape": _packed({"x": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)),
    "an unknown dtype": _packed({"x": _tensor("F33")}, bytes(4)),
    "a shape of words": _packed({"x": _tensor(shape=["a"])}, bytes(4)),
    "a shape below zero": _packed({"x": _tensor(shape=[-1])}, bytes(4)),
    "a shape that overflows": _packed({"x": _tensor(shape=[2**62, 8])}, bytes(4)),
    "a shape of 1e9 sides": _packed(b'{"x":{"dtype":"F32","shape":[' + b"1," * 10**6 + b'1],"data_offsets":[0,4]}}'),
    "offsets beyond the file": _packed({"x": _tensor(offsets=[0, 4 * 10**12], shape=[10**12])}, bytes(4)),
    "offsets the other way round": _packed({"x": _tensor(offsets=[4, 0])}, bytes(4)),
    "offsets below zero": _packed({"x": _tensor(offsets=[-4, 0])}, bytes(4)),
    "offsets of 2^64": _packed({"x": _tensor(offsets=[2**64, 2**64 + 4])}, bytes(4)),
    "tensors one over the other": _packed({"x": _tensor(), "y": _tensor()}, bytes(4)),
    "a hole between tensors": _packed({"x": _tensor(), "y": _tensor(offsets=[8, 12])}, bytes(12)),
    "bytes too few": _packed({"x": _tensor(shape=[2])}, bytes(4)),
    "bytes too many": _packed({"x": _tensor()}, bytes(400)),
    "a tensor twice": _packed(b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 2 + b'"y":1}', bytes(4)),
    "50,000 tensors": _packed({f"tensor{i:060}": _tensor(shape=[0], offsets=[0, 0]) for i in range(50_000)}),
    "no tensors": _packed({}),
    "other tensors": _packed({"x": _tensor()}, bytes(4)),
    "a name that forges a line": _packed({"x\n/etc/passwd: sound": _tensor()}, bytes(4)),
    "a name of 1e5 letters": _packed({"x" * 100_000: _tensor()}, bytes(4)),
    "an old key file of a bundle": b"PK\3\4" + bytes(100),
}


class _Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/was-run; touch was-run",)


def _saved(change: Callable[[dict[str, Any]], Any], **options: Any) -> Make:
    """The weights as torch saves them, so changed."""

    def make(path: Path) -> None:
        state = dict(torch.load(path, weights_only=True))
        kept = change(state)
        torch.save(state if kept is None else kept, path, **options)

    return make


def _first(value: Any) -> Make:
    """Another value in place of the first tensor."""
    return _saved(lambda state: state.update({FIRST: value() if callable(value) else value}))


def _bytes(data: Callable[[bytes], bytes]) -> Make:
    return lambda path: path.write_bytes(data(path.read_bytes()))


def _rezipped(
    change: Callable[[str, bytes], bytes] = lambda name, data: data, packed: int = zipfile.ZIP_STORED
) -> Make:
    """The parts of the zip, each so changed."""

    def make(path: Path) -> None:
        made = BytesIO()
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", packed) as new:
            for part in old.infolist():
                new.writestr(part.filename, change(part.filename, old.read(part)))
        path.write_bytes(made.getvalue())

    return make


def _pickled(data: bytes) -> Make:
    return _rezipped(lambda name, old: data if name.endswith("data.pkl") else old)


def _overlapping(path: Path) -> None:
    """A directory whose every entry is the same large part."""
    made = BytesIO()
    with zipfile.ZipFile(made, "w") as new:
        new.writestr("archive/data.pkl", pickle.dumps({}, 2))
        new.writestr("archive/data/0", bytes(2**20))
        for index in range(1, 1000):
            twin = zipfile.ZipInfo(f"archive/data/{index}")
            twin.file_size = twin.compress_size = 2**20
            twin.header_offset, twin.CRC = new.infolist()[1].header_offset, new.infolist()[1].CRC
            new.filelist.append(twin)
    path.write_bytes(made.getvalue())


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = 100
            tar.addfile(info, BytesIO(bytes(100)))


def _sparse_storage(path: Path) -> None:
    """600 MB of storage for a tensor of one number; the file itself is nearly empty."""
    state = torch.load(path, weights_only=True)
    state["extra"] = torch.empty(150_000_000)[:1]
    with path.open("wb") as file:
        torch.save(state, cast(Any, _Holes(file)))


class _Holes:
    """Writes zeros as holes."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> int:
        if len(data) > 10**6:
            self.file.truncate(self.file.seek(len(data), 1))
            return len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.zeros(SHAPE), 0.1, 0, torch.qint8)


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


PICKLES: dict[str, Make] = {
    "nothing": _bytes(lambda data: b""),
    "text": _bytes(lambda data: b"these are weights, believe me\n"),
    "garbage": _bytes(lambda data: bytes(range(256)) * 9),
    "half": _bytes(lambda data: data[: len(data) // 2]),
    "without its end": _bytes(lambda data: data[:-1]),
    "without its beginning": _bytes(lambda data: data[1:]),
    "a zip of something else": _rezipped(lambda name, data: b"text"),
    "a zip without a pickle": lambda path: zipfile.ZipFile(path, "w").writestr("readme", b"x"),
    "an empty zip": lambda path: zipfile.ZipFile(path, "w").close(),
    "a packed zip": _rezipped(packed=zipfile.ZIP_DEFLATED),
    "a zip bomb": _rezipped(lambda name, data: bytes(10**8) if name.endswith("/0") else data, zipfile.ZIP_DEFLATED),
    "a zip bomb for a pickle": _rezipped(
        lambda name, data: b"\x80\2" + b"N" * 10**8 if name.endswith("data.pkl") else data, zipfile.ZIP_DEFLATED
    ),
    "parts one over the other": _overlapping,
    "a storage cut short": _rezipped(lambda name, data: data[:-4] if name.endswith("data/0") else data),
    "a storage that is missing": _pickled(
        b"\x80\2}X\1\0\0\0actorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\3\0\0\0999X\3"
        b"\0\0\0cpuK\1tQK\0K\1\x85K\1\x85\x89ccollections\nOrderedDict\n)RtRs."
    ),
    "a storage far larger than its tensor": _sparse_storage,
    "code": lambda path: torch.save({FIRST: _Bomb()}, path),
    "code beside the state": _saved(lambda state: {"state_dict": state, "hook": _Bomb()}),
    "code in an old pickle": lambda path: path.write_bytes(pickle.dumps(_Bomb())),
    "code in a key": _pickled(b"\x80\2}cposix\nsystem\n(X\5\0\0\0touchtRK\1s."),
    "a whole module": lambda path: torch.save(nn.Linear(2, 2), path),
    "an old tar": _tar,
    "an old file cut short": lambda path: (
        _saved(lambda state: None, _use_new_zipfile_serialization=False)(path),
        path.write_bytes(path.read_bytes()[:-100]),
    ),
    "an old file of 2 GB": lambda path: os.truncate(path, 2**31) if not path.write_bytes(b"\x80\2N.") else None,
    "1e6 keys": _pickled(b"\x80\2}(" + b"".join(b"X\6\0\0\0%06dK\1" % i for i in range(10**6)) + b"u."),
    "1e6 values": _pickled(b"\x80\2](" + b"N" * 10**6 + b"e."),
    "1e6 tuples in tuples, as a key": _pickled(b"\x80\2})" + b"\x85" * 10**6 + b"K\1s."),
    "1e5 tuples in tuples, kept and taken again": _pickled(b"\x80\2})" + b"\x85q\0h\0" * 10**5 + b"K\1s."),
    "1e5 lists in lists": _pickled(b"\x80\2}X\1\0\0\0a" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"s."),
    "marks without end": _pickled(b"\x80\2" + b"(" * 10**5 + b"."),
    "nothing on the stack": _pickled(b"\x80\2\x85."),
    "a memo that was never made": _pickled(b"\x80\2h\7."),
    "an unknown operation": _pickled(b"\x80\2\xff."),
    "a pickle that claims 1e12 bytes": _pickled(b"\x80\2\x8e" + struct.pack("<Q", 10**12) + b"x."),
    "a pickle without an end": _pickled(b"\x80\2}"),
    "a number": _saved(lambda state: 5),
    "a tensor": _saved(lambda state: torch.zeros(3)),
    "a list": _saved(lambda state: list(state.values())),
    "nothing in it": _saved(lambda state: {}),
    "an empty state dict in it": _saved(lambda state: {"state_dict": {}}),
    "keys of numbers": _saved(lambda state: {1: torch.zeros(1)}),
    "keys of tuples": _saved(lambda state: {("a", "b"): torch.zeros(1)}),
    "a text inside": _first("weights"),
    "None inside": _first(None),
    "a mapping inside": _first({"a": torch.zeros(1)}),
    "a text of 1e6 letters for a key": _saved(lambda state: {"x" * 10**6: 1}),
    "a name that forges a line": _saved(lambda state: {"x\n/etc/passwd: sound": torch.zeros(1)}),
    "a tensor on the device meta": _first(lambda: torch.zeros(SHAPE, device="meta")),
    "a sparse tensor": _first(lambda: torch.zeros(SHAPE).to_sparse()),
    "a compressed sparse tensor": _first(lambda: torch.eye(3).to_sparse_csr()),
    "a quantised tensor": _first(_quantised),
    "a nested tensor": _first(_nested),
    "complex numbers": _first(lambda: torch.zeros(SHAPE, dtype=torch.complex64)),
    "truths": _first(lambda: torch.zeros(SHAPE, dtype=torch.bool)),
    "integers": _first(lambda: torch.zeros(SHAPE, dtype=torch.int8)),
    "eight bits": _first(lambda: torch.zeros(SHAPE).to(torch.float8_e5m2)),
    "not a number": _first(lambda: torch.full(SHAPE, torch.nan)),
    "infinity": _first(lambda: torch.full(SHAPE, -torch.inf)),
    "too large for 32 bits": _first(lambda: torch.full(SHAPE, 1e300, dtype=torch.float64)),
    "another shape": _first(lambda: torch.zeros(3, 16, 3, 3)),
    "no dimensions": _first(lambda: torch.tensor(1.0)),
    "nothing in a tensor": _first(lambda: torch.zeros(0)),
    "1e12 numbers that are one": _first(lambda: torch.zeros(1).expand(10**12)),
    "the first tensor missing": _saved(lambda state: dict(list(state.items())[1:])),
    "a tensor too many": _saved(lambda state: state.update(more=torch.zeros(1))),
}


def _darknet(head: bytes, change: int = 0) -> Make:
    """A file of this head, and so many bytes longer than it should be."""

    def make(path: Path) -> None:
        size = path.stat().st_size
        path.unlink()  # the file is linked
        path.write_bytes(head)
        os.truncate(path, size + change)

    return make


HEAD = struct.pack("<3iq", 0, 2, 5, 0)
DARKNETS: dict[str, Make] = {
    "nothing": lambda path: (path.unlink(), path.write_bytes(b"")),
    "half a header": lambda path: (path.unlink(), path.write_bytes(HEAD[:7])),
    "a header alone": lambda path: (path.unlink(), path.write_bytes(HEAD)),
    "less than a header of 0.2": lambda path: (path.unlink(), path.write_bytes(HEAD[:14])),
    "text": lambda path: (path.unlink(), path.write_bytes(b"these are weights, believe me\n")),
    "a cfg file": lambda path: (path.unlink(), path.write_bytes(b"[net]\nbatch=64\n")),
    "another format's header": _darknet(b"PK\3\4" * 5),
    "a version below zero": _darknet(struct.pack("<3iq", -1, 2, 5, 0)),
    "a version of 2^31": _darknet(struct.pack("<3iq", 0, 2**31 - 1, 5, 0)),
    "an old version of another length": _darknet(struct.pack("<3iq", 0, 1, 0, 0)),
    "a byte less": _darknet(HEAD, -1),
    "a byte more": _darknet(HEAD, 1),
    "a value less": _darknet(HEAD, -4),
    "a value more": _darknet(HEAD, 4),
    "100 GB": _darknet(HEAD, 10**11),
    "not a number": _darknet(HEAD + struct.pack("<f", float("nan"))),
    "infinity": _darknet(HEAD + struct.pack("<f", float("inf"))),
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_safetensors_that_are_none(house: Path, data: bytes) -> None:
    (house / "weights" / "a.safetensors").write_bytes(data)
    refused(["inspect", ask(house, A), "--weights"], house, house / "weights" / "a.safetensors", "weights (a)")


@pytest.mark.parametrize("make", one_in(3, PICKLES.values()), ids=PICKLES)
def test_pickles_that_are_no_weights(house: Path, make: Make) -> None:
    make(house / "weights" / "b.pt")
    refused(["inspect", ask(house, B), "--weights"], house, house / "weights" / "b.pt", "weights (b)")
    assert not Path("/tmp/was-run").exists()


@pytest.mark.parametrize("make", DARKNETS.values(), ids=DARKNETS)
def test_darknet_files_that_are_none(house: Path, make: Make) -> None:
    make(house / "yolo.weights")
    refused(["inspect", ask(house, Y), "--weights"], house, house / "yolo.weights", "weights (y)")


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind not in ("missing", "endless")])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".weights"])
def test_what_is_no_file_is_not_read(house: Path, kind: str, suffix: str) -> None:
    query = Y if suffix == ".weights" else A
    path = house / f"special{suffix}"
    make_special(path, kind)
    refused(["inspect", ask(house, query, weights=path.name), "--weights"], house, f"weights ({query['id']})")


@pytest.mark.parametrize("name", ["a.onnx", "a", "a.safetensors.bak", "a.PT", ".pt"])
def test_files_of_other_kinds(house: Path, name: str) -> None:
    (house / name).write_bytes(b"x")
    refused(["inspect", ask(house, A, weights=name), "--weights"], house, house / name, "files are not read")


@pytest.mark.parametrize("key", ["weights", "init"])
@pytest.mark.parametrize("command", [["merge", "-o", "new.safetensors"], ["train", "--query", "b"]])
def test_training_and_merging_refuse_them_too(house: Path, command: list[str], key: str) -> None:
    if (command[0], key) in {("merge", "init"), ("train", "weights")}:
        return  # what is not read
    (house / "bad.pt").write_bytes(b"bad")
    asked = {"weights": "new.safetensors", key: "bad.pt"}
    seen = tried([command[0], ask(house, {**B, **asked}), *command[1:]], house).held()
    *told, line = seen.err.splitlines()
    assert seen.code == 2 and not seen.changed and str(house / "bad.pt") in line
    assert all(re.match(r"\[ +[0-9.]+ s\]", one) for one in told)  # how far it had come


def test_a_name_whose_bytes_are_no_text_is_read(house: Path) -> None:
    for name in ("a.safetensors", "b.pt"):
        other = os.fsdecode(os.fsencode(house) + b"/\xff" + name.encode())
        os.rename(house / "weights" / name, other)
        assert len(read_state(other)) > 20


@pytest.mark.parametrize("old", [False, True])
def test_sound_weights_of_every_wrapping_are_read(house: Path, old: bool) -> None:
    path = house / "weights" / "b.pt"
    query = load_workload(house / ask(house, B)).queries[0]
    state = torch.load(path, weights_only=True)
    wrappings: list[Any] = [
        OrderedDict(state),
        {"state_dict": state, "epoch": 3, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}},
        {f"module.{name}": tensor for name, tensor in state.items()},
        {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in state.items()},
        {name: nn.Parameter(tensor) if tensor.is_floating_point() else tensor for name, tensor in state.items()},
    ]
    for wrapping in wrappings:
        torch.save(wrapping, path, _use_new_zipfile_serialization=not old)
        loaded = load_weights(query, build_query(query)).state_dict()
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in state.items())


def test_what_was_refused_leaves_the_module_as_it_was(house: Path) -> None:
    query = load_workload(house / ask(house, B)).queries[0]
    PICKLES["infinity"](house / "weights" / "b.pt")
    module = build_query(query)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(InputError):
        load_weights(query, module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
