"""Bundles that mean harm: whatever reads one tells it in one line, and quickly; `verify` tells all that is wrong."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.bundle.container import DIGEST_KEY, MAX_HEADER_BYTES, encode_header, parse_header, place, tensor_name
from tests.hostile.harness import refused, refused_apart, tried
from tests.hostile.reading.test_json import make_special
from tests.hostile.samples import BUNDLE, OLD

VERIFY = ("bundle", "verify", BUNDLE)
OPENED_BY = {
    "show": ("bundle", "show", BUNDLE),
    "export": ("bundle", "export", BUNDLE, "--query", "a", "-o", "new.onnx"),
    "diff from": ("bundle", "diff", BUNDLE, OLD, "-o", "new.update"),
    "diff to": ("bundle", "diff", OLD, BUNDLE),
    "sign": ("bundle", "sign", BUNDLE, "--key", "box-key"),
    "plan": ("plan", BUNDLE, "--device", "orin-nano-8gb"),
    "simulate": ("simulate", BUNDLE, "--device", "orin-nano-8gb", "--duration", 1),
    "profile": ("profile", BUNDLE, "--device", "cpu"),
    "eval": ("eval", BUNDLE, "workload.yaml", "--out", "new"),
    "run": ("run", "box.yaml", "--check"),
}
ONCE = "plan"
"""Stands for all that open a bundle where there are many cases."""


def sealed(text: bytes, data: bytes, padded: bool = True) -> bytes:
    """A file with this header, whose `gemel.digest` is zeros, and these bytes."""
    text += b" " * (-(8 + len(text)) % 512 if padded else 0)
    blank = len(text).to_bytes(8, "little") + text
    return blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1) + data


def header_text(manifest: str, tensors: dict[str, Any]) -> bytes:
    metadata = {DIGEST_KEY: "0" * 64, "gemel.manifest": manifest}
    return json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()


class Opened:
    """A bundle taken apart: its manifest, its tensors' entries as in the header, its data."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        self.path, self.data = path, content[8 + length :]
        self.tensors: dict[str, Any] = json.loads(content[8 : 8 + length])
        self.manifest: dict[str, Any] = json.loads(self.tensors.pop("__metadata__")["gemel.manifest"])

    def write(self, manifest: str | None = None, text: bytes | None = None) -> None:
        """Put together again, and sealed."""
        said = json.dumps(self.manifest, separators=(",", ":")) if manifest is None else manifest
        self.path.write_bytes(sealed(header_text(said, self.tensors) if text is None else text, self.data))


def told(house: Path, *reasons: str) -> None:
    """`verify` falls short of the bundle, and every line names it."""
    seen = tried(VERIFY, house).held()
    lines = seen.out.splitlines()
    assert (seen.code, seen.err, seen.changed) == (1, "", ()) and lines, seen
    assert all(line.startswith(f"{BUNDLE}: ") and line.isprintable() for line in lines), lines
    for reason in reasons:
        assert any(reason in line for line in lines), (reason, lines)


# What is no file of bytes.


@pytest.mark.parametrize("kind", ["directory", "fifo", "/dev/zero", "endless", "missing", "empty"])
@pytest.mark.parametrize("command", ["verify", *OPENED_BY])
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


# A manifest that lies.


def _in_manifest(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def changed(manifest: dict[str, Any]) -> None:
        *owners, last = path
        owner: Any = manifest
        for step in owners:
            owner = owner[step]
        owner[last] = value

    return changed


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "format true": _in_manifest("format", value=True),
    "format 1.0": _in_manifest("format", value=1.0),
    "format 2.0": _in_manifest("format", value=2.0),
    "format in words": _in_manifest("format", value="1"),
    "format 3": _in_manifest("format", value=3),
    "format null": _in_manifest("format", value=None),
    "a format that it does not have": _in_manifest("format", value=2),
    "bytes that are more": _in_manifest("bytes", "before", value=1 << 49),
    "bytes of floats": _in_manifest("bytes", "after", value=1.0),
    "bytes of truth": _in_manifest("bytes", "ceiling", value=True),
    "no queries": _in_manifest("queries", value=[]),
    "queries of numbers": _in_manifest("queries", value=[1, 2]),
    "a name of controls": _in_manifest("workload", value="x\n/path: sound"),
    "an id of controls": _in_manifest("queries", 0, "id", value="x\x1b[2J"),
    "an id that is a path": _in_manifest("queries", 0, "id", value="../../x"),
    "an id twice": _in_manifest("queries", 0, "id", value="b"),
    "a class twice": _in_manifest("queries", 0, "classes", value=["x", "x"]),
    "a class of nothing": _in_manifest("queries", 0, "classes", value=["", "x"]),
    "no classes": _in_manifest("queries", 0, "classes", value=[]),
    "a task that is none": _in_manifest("queries", 0, "task", value="x"),
    "another model": _in_manifest("queries", 0, "model", value="resnet18"),
    "a model of another task": _in_manifest("queries", 0, "model", value="fastestdet"),
    "a model that is none": _in_manifest("queries", 0, "model", value="nothing"),
    "a model's path": _in_manifest("queries", 0, "model", value="../x.py"),
    "arguments that nobody takes": _in_manifest("queries", 0, "model_args", value={"x": 1}),
    "arguments of mappings": _in_manifest("queries", 0, "model_args", value={"x": {"y": 1}}),
    "deep arguments": _in_manifest("queries", 0, "model_args", value={"x": _deep(500)}),
    "ranks of nothing": _in_manifest("queries", 0, "model_args", value={"low_rank": {"x": 1}}),
    "ranks of truth": _in_manifest("queries", 0, "model_args", value={"low_rank": {"fc": True}}),
    "an input of nothing": _in_manifest("queries", 0, "input_size", value=0),
    "an input of a mile": _in_manifest("queries", 0, "input_size", value=1 << 40),
    "another preparation": _in_manifest("queries", 0, "preprocess", "input_size", value=33),
    "no deviation": _in_manifest("queries", 0, "preprocess", "std", value=[0, 0, 0]),
    "no rate": _in_manifest("queries", 0, "fps", value=0),
    "an endless rate": _in_manifest("queries", 0, "fps", value=1e6),
    "a rate of truth": _in_manifest("queries", 0, "fps", value=True),
    "no time": _in_manifest("queries", 0, "sla_ms", value=1e-9),
    "a time of ages": _in_manifest("queries", 0, "sla_ms", value=1e300),
    "a target above all": _in_manifest("queries", 0, "accuracy_target", value=1.5),
    "a region of nothing": _in_manifest("queries", 0, "roi", value=[5, 5, 5, 5]),
    "a region without end": _in_manifest("queries", 0, "roi", value=[0, 0, 1e300, 1e300]),
    "a priority of a fraction": _in_manifest("queries", 0, "priority", value=1.5),
    "a threshold above all": _in_manifest("queries", 0, "threshold", value=2),
    "no tensors": _in_manifest("queries", 0, "tensors", value={}),
    "a tensor that is not there": _in_manifest("queries", 0, "tensors", "fc.bias", value="f" * 64),
    "a tensor that is a path": _in_manifest("queries", 0, "tensors", "fc.bias", value="/etc/passwd"),
    "a residual beside nothing": _in_manifest(
        "queries", 0, "residuals", value={"x": {"rank": 1, "a": "f" * 64, "b": "f" * 64}}
    ),
    "a residual of rank zero": _in_manifest(
        "queries", 0, "residuals", value={"fc": {"rank": 0, "a": "f" * 64, "b": "f" * 64}}
    ),
    "packed and not there": _in_manifest("queries", 0, "stored", value={"x": {"dtype": "int8", "scale": "f" * 64}}),
    "packed as nothing known": _in_manifest("queries", 0, "stored", value={"fc.weight": {"dtype": "int4"}}),
    "evidence of text": _in_manifest("queries", 0, "evidence", value="fine"),
    "evidence without a metric": _in_manifest("queries", 0, "evidence", value={"x": 1}),
    "shared by nobody": _in_manifest("shared", value=[]),
    "shared by strangers": _in_manifest("shared", value=[{"tensor": "f" * 64, "members": [["x", "y"]]}]),
    "text": lambda manifest: manifest.clear(),
}  # fmt: skip
UNOPENED = ("a model that is none", "another model", "a model of another task", "arguments that nobody takes",
            "ranks of nothing")  # fmt: skip
"""Faults that opening does not see: who needs the architecture tells them."""


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_lies(house: Path, name: str) -> None:
    bundle = Opened(house / BUNDLE)
    MANIFESTS[name](bundle.manifest)
    bundle.write()
    told(house)
    refused(OPENED_BY["plan"], house, BUNDLE)
    if name not in UNOPENED:
        refused(OPENED_BY["show"], house, BUNDLE)


@pytest.mark.parametrize("name", ["format true", "an endless rate", "shared by nobody", "another model"])
@pytest.mark.parametrize("command", OPENED_BY)
def test_a_manifest_that_lies_to_each_command(house: Path, command: str, name: str) -> None:
    bundle = Opened(house / BUNDLE)
    MANIFESTS[name](bundle.manifest)
    bundle.write()
    seen = tried(OPENED_BY[command], house).held()
    if seen.code:  # some need no architecture
        seen.refused(BUNDLE)
    else:
        assert name in UNOPENED and command in ("show", "diff from", "diff to", "sign")


TEXTS = {
    "deep": "[" * 100_000,
    "deep arguments": '{"format":1,"queries":[{"model_args":' + '{"x":' * 100_000 + "1" + "}" * 100_000 + "}]}",
    "a key twice": '{"format":1,"format":1}',
    "NaN": '{"format":NaN}',
    "an endless number": '{"format":' + "1" * 10_000 + "}",
    "empty": "",
    "a list": "[]",
    "a number": "1",
    "cut off": '{"format":1,',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_manifest_that_is_none(house: Path, text: str) -> None:
    Opened(house / BUNDLE).write(manifest=text)
    told(house)
    for command in ("show", ONCE):
        refused(OPENED_BY[command], house, BUNDLE)


@pytest.mark.parametrize("keys", ["classes", "args", "queries"])
def test_a_manifest_of_millions_takes_no_more_than_its_share(house: Path, keys: str) -> None:
    bundle = Opened(house / BUNDLE)
    first = bundle.manifest["queries"][0]
    if keys == "classes":
        first["classes"] = [f"c{index}" for index in range(1_000_000)]
    elif keys == "args":
        first["model_args"] = {f"x{index}": index for index in range(500_000)}
    else:
        bundle.manifest["queries"] += [{**first, "id": f"x{index}"} for index in range(3000)]
    bundle.write()
    told(house)
    refused(OPENED_BY[ONCE], house, BUNDLE)
    tried(OPENED_BY["show"], house).held()


# Tensors that cannot be.


def _with_values(path: Path, dtype: str, change: Callable[[np.ndarray], Any]) -> str:
    """Change the values of a bundle's first large tensor of a dtype, and everything that is said of it."""
    bundle, content = Opened(path), path.read_bytes()
    header = parse_header(content)
    kept = {name: entry for name, entry in header.entries.items() if not entry.is_pad}
    data = {
        name: content[header.data_start + entry.begin : header.data_start + entry.end] for name, entry in kept.items()
    }
    old = next(name for name, entry in kept.items() if entry.dtype == dtype and entry.nbytes > 100)
    values = np.frombuffer(data[old], {"F32": "<f4", "I8": "i1", "F16": "<f2"}[dtype]).copy()
    change(values)
    new = tensor_name(dtype, kept[old].shape, values.tobytes())
    order = [new if name == old else name for name in kept]
    data[new], kept[new] = values.tobytes(), kept[old]
    entries = place((name, kept[name].dtype, kept[name].shape, len(data[name])) for name in order)
    manifest = json.dumps(bundle.manifest, separators=(",", ":")).replace(old, new)
    body = b"".join(data.get(entry.name, bytes(entry.nbytes)) for entry in entries)
    path.write_bytes(encode_header(entries, {"gemel.manifest": manifest}) + body)
    return new


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_told(house: Path, value: float) -> None:
    name = _with_values(house / BUNDLE, "F32", lambda values: values.put(7, value))
    told(house, f"tensor {name} holds NaN or infinite values")


def test_the_largest_numbers_are_no_fault(house: Path) -> None:
    _with_values(house / BUNDLE, "F32", lambda values: values.put([0, 1, 2], [3.4e38, -3.4e38, 1e-45]))
    assert tried(VERIFY, house).held().code == 0


def test_a_pipe_that_is_written_to_is_not_read_either(house: Path) -> None:
    (house / BUNDLE).unlink()
    os.mkfifo(house / BUNDLE)
    refused_apart(OPENED_BY["show"], house, BUNDLE)
