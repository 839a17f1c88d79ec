"""Manifests and tensors that mean harm: `verify` tells all that is wrong, what opens a bundle tells it in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.bundle.format import encode_header, parse_header, place, tensor_name
from tests.exhaustive import every
from tests.hostile.bundles.opened import FEW, ONCE, OPENED_BY, VERIFY, Opened, told
from tests.hostile.harness import refused, tried
from tests.hostile.samples import BUNDLE

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
@pytest.mark.parametrize("command", every(OPENED_BY, FEW))
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


@pytest.mark.parametrize("keys", every(["classes", "args", "queries"], ["queries"]))
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
