"""Kinds of content: how a valid file becomes a tree of values that can be damaged, and that tree a file again."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import os
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import onnx
import torch
from google.protobuf import json_format

from gemel.models.bundle.format import ALIGNMENT_BYTES, DIGEST_KEY
from tests.hostile.mutations import VALUES, damage_bytes, damage_tree


@dataclass(frozen=True)
class Codec:
    """`load` makes a tree of a file's bytes, `dump` the bytes of any tree; `values` may occur anywhere in it."""

    load: Callable[[bytes], Any]
    dump: Callable[[Any], bytes]
    values: Sequence[Any] = VALUES

    def damage(self, data: bytes, random: Random) -> bytes:
        """A damaged file: three in four by its values, the others by its bytes."""
        if random.random() < 0.25:
            return damage_bytes(data, random)
        return self.dump(damage_tree(self.load(data), random, self.values))


def _dump_json(tree: Any) -> bytes:
    return json.dumps(tree, default=str).encode()


def _load_lines(data: bytes) -> Any:
    return [json.loads(line) for line in data.splitlines()]


def _dump_lines(tree: Any) -> bytes:
    return b"".join(_dump_json(line) + b"\n" for line in tree) if isinstance(tree, list) else _dump_json(tree)


def _load_container(data: bytes) -> Any:
    """The header's JSON, that in its metadata too, and the data section as it is."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    metadata.pop(DIGEST_KEY, None)
    metadata.update({key: json.loads(text) for key, text in metadata.items() if text.startswith("{")})
    return {"header": header, "data": data[8 + length :]}


def _dump_container(tree: Any) -> bytes:
    text = _dump_json(tree.get("header"))
    return len(text).to_bytes(8, "little") + text + _data_of(tree)


def _dump_bundle(tree: Any) -> bytes:
    """Sealed again, so that the checks behind the seal are reached."""
    header = tree.get("header")
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        return _dump_container(tree)
    metadata = {
        key: json.dumps(value) if isinstance(value, dict) else value for key, value in header["__metadata__"].items()
    }
    rest = {key: value for key, value in header.items() if key != "__metadata__"}
    whole = {"__metadata__": {DIGEST_KEY: "0" * 64, **metadata}, **rest}
    text = json.dumps(whole, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    blank = len(text).to_bytes(8, "little") + text
    return blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1) + _data_of(tree)


def _data_of(tree: Any) -> bytes:
    return tree["data"] if isinstance(tree.get("data"), bytes) else b""


class Bomb:
    """Unpickling it would make a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)

    def __deepcopy__(self, memo: object) -> Bomb:
        return self


TORCH_VALUES: tuple[Any, ...] = (
    torch.zeros(0), torch.zeros(3), torch.zeros(1).expand(50_000, 50_000), torch.full((3, 3), torch.nan),
    torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.bool),
    torch.zeros(3).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(10**12, device="meta"),
    torch.zeros(2, 2, requires_grad=True), torch.zeros((1,) * 30), torch.nn.Parameter(torch.zeros(2)), Bomb(),
    os.getcwd, pathlib.PurePosixPath("x"), datetime.date(2026, 1, 1), {1, 2}, b"x", 1j, (1,), {1: 2},
)  # fmt: skip
"""Unusual tensors, and values that no checkpoint holds."""


def _load_torch(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _dump_torch(tree: Any) -> bytes:
    out = io.BytesIO()
    torch.save(tree, out)
    return out.getvalue()


JSON = Codec(json.loads, _dump_json)
LINES = Codec(_load_lines, _dump_lines)
SAFETENSORS = Codec(_load_container, _dump_container)
BUNDLE = Codec(_load_container, _dump_bundle)
TORCH = Codec(_load_torch, _dump_torch, (*VALUES, *TORCH_VALUES))


def _load_onnx(data: bytes) -> Any:
    return json_format.MessageToDict(onnx.load_model_from_string(data))


def _dump_onnx(tree: Any) -> bytes:
    """What protobuf can hold of a tree; else its JSON, which is no ONNX file."""
    try:
        return json_format.ParseDict(tree, onnx.ModelProto(), ignore_unknown_fields=True).SerializeToString()
    except (json_format.ParseError, TypeError, ValueError, AttributeError, RecursionError, SystemError):
        return _dump_json(tree)


GRAPH_VALUES: tuple[Any, ...] = (
    0, 1, -1, 3, 7, 2**31, 2**62, -(2**63), "", "x", "..", "/etc/passwd", "Conv", "NonMaxSuppression", "TopK", "Loop",
    "If", "Expand", "Gather", "ConstantOfShape", [], {}, "ai.acme", "EXTERNAL", "FLOAT16", "INT64",
)  # fmt: skip
ONNX = Codec(_load_onnx, _dump_onnx, GRAPH_VALUES)


def damage_program(data: bytes, random: Random) -> bytes:
    """A .pt2 file with its bytes damaged, or its program or the list of its weights, or with a bomb as its sample."""
    if random.random() < 0.25:
        return damage_bytes(data, random)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        chosen = random.choice([name for name in source.namelist() if name.endswith((".json", ".pt"))])
        for name in source.namelist():
            content = source.read(name)
            if name == chosen:
                content = JSON.damage(content, random) if name.endswith(".json") else TORCH.dump(((Bomb(),), {}))
            target.writestr(name, content)
    return out.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG with its length and checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def damage_png(data: bytes, random: Random) -> bytes:
    """Its bytes, or its sides, depth and colours, with a right checksum."""
    if random.random() < 0.5:
        return damage_bytes(data, random)
    sides = (0, 1, 48, 30_000, 65_536, 2**31 - 1, 2**32 - 1)
    head = struct.pack(
        ">IIBBBBB", random.choice(sides), random.choice(sides), random.choice((1, 8, 16, 77)),
        random.choice((0, 2, 3, 6, 9)), 0, 0, random.choice((0, 1)),
    )  # fmt: skip
    return data[:8] + png_chunk(b"IHDR", head) + data[33:]


def damage_sample(data: bytes, random: Random) -> bytes:
    """A picture's bytes, or its description, with a right checksum."""
    if random.random() < 0.3:
        return damage_png(data, random)
    length = struct.unpack(">I", data[33:37])[0]
    description = JSON.damage(data[47 : 41 + length], random)
    return data[:33] + png_chunk(b"tEXt", b"gemel\0" + description) + data[45 + length :]
