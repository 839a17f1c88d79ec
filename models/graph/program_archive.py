"""Reads the archive of a .pt2 file, and writes another that holds nothing but what was built anew.

The files that are read are those that a list names here; whatever else an archive holds (samples, traces, code) is
never opened. Weights are bytes, described by a list of their own.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemel.models.errors import one_line, size_text
from gemel.models.files.documents import ParseError, parse_json
from gemel.models.graph.program_fields import (
    ProgramFault,
    check_integer,
    get_list,
    get_mapping,
    get_text,
    get_variant,
)
from gemel.models.graph.program_schema import (
    CONSTANTS,
    CPU,
    STRIDED,
    WEIGHTS,
    ProgramDocument,
    ProgramWeight,
)

MODEL = "models/model.json"
MAX_DIRECTORY_BYTES = 2**24
MAX_JSON_BYTES = 2**28
MAX_WEIGHT_BYTES = 2**31 - 2**26
"""What an ONNX model holds, which a program becomes."""
ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 2, 7: 4, 8: 8, 12: 1, 13: 2}
"""Of each dtype that is read (program_schema.DTYPES)."""
LISTS = {
    WEIGHTS: "data/weights/model_weights_config.json",
    CONSTANTS: "data/constants/model_constants_config.json",
}
FOLDERS = {WEIGHTS: "data/weights/weight_", CONSTANTS: "data/constants/tensor_"}
MEMBERS = {
    WEIGHTS: re.compile(r"weight_\d{1,9}", re.ASCII),
    CONSTANTS: re.compile(r"tensor_\d{1,9}", re.ASCII),
}
SAMPLES = "data/sample_inputs/model.pt"
END_BYTES, END_MARK = 65_557, b"PK\5\6"
"""The last record of a zip, with the longest comment."""


@dataclass(frozen=True)
class WeightPayload:
    """Where a weight's values are in an archive: the member, and how it is laid out there."""

    member: str
    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the weight's values, each counted."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class ProgramArchive:
    """The members of a .pt2 file that are read."""

    def __init__(self, archive: zipfile.ZipFile, file_bytes: int) -> None:
        self.archive = archive
        infos = archive.infolist()
        names = [info.filename for info in infos]
        if len(set(names)) < len(names):
            raise ProgramFault("holds two parts of one name")
        # A few bytes could unpack to gigabytes.
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
            raise ProgramFault("is compressed")
        if sum(info.file_size for info in infos) > file_bytes:
            raise ProgramFault("is damaged: its parts are larger than the file")
        models = [name for name in names if re.fullmatch(r"[^/]+/models/[^/]*", name)]
        model = next((name for name in models if name.endswith(f"/{MODEL}")), None)
        if model is None:
            raise ProgramFault(f"has no {MODEL}: is no program of torch.export")
        # Which one runs would be torch's choice.
        if len(models) > 1:
            raise ProgramFault("holds a second program")
        self.root = model.removesuffix(MODEL)
        self.sizes = {info.filename: info.file_size for info in infos}

    def read_json(self, name: str) -> dict[str, Any]:
        """A member that is a JSON object."""
        size = self.sizes.get(self.root + name)
        if size is None:
            hint = (
                "" if name == MODEL else "save it with a newer torch, which keeps weights as bytes"
            )
            raise ProgramFault(
                f"has no {name}: what stands for it would have to be unpickled", hint
            )
        if size > MAX_JSON_BYTES:
            raise ProgramFault(
                f"its {name} has {size_text(size)}, and {size_text(MAX_JSON_BYTES)} are read"
            )
        try:
            document = parse_json(self.read(name), foreign=True)
        except ParseError as error:
            raise ProgramFault(f"its {name} is no JSON: {error}") from error
        if not isinstance(document, dict):
            raise ProgramFault(f"its {name} is no object")
        return document

    def read(self, name: str) -> bytes:
        """The bytes of a member."""
        return self.archive.read(self.root + name)

    def find_weights(self, weights: tuple[ProgramWeight, ...]) -> dict[str, WeightPayload]:
        """Where the values of each weight are, by our names; ProgramFault where they are not plain bytes."""
        lists = {
            group: get_mapping(self.read_json(name), "config") for group, name in LISTS.items()
        }
        payloads = {
            weight.name: self._find(weight, lists[weight.group].get(weight.key))
            for weight in weights
        }
        total = sum(payload.nbytes for payload in payloads.values())
        if total > MAX_WEIGHT_BYTES:
            raise ProgramFault(
                f"has weights of {size_text(total)}, and {size_text(MAX_WEIGHT_BYTES)} are read"
            )
        return payloads

    def _find(self, weight: ProgramWeight, described: Any) -> WeightPayload:
        shown = f"its weight '{one_line(weight.key[:200])}'"
        if described is None:
            raise ProgramFault(f"{shown} has no values")
        if not isinstance(described, dict) or described.get("use_pickle") is not False:
            raise ProgramFault(f"{shown} would have to be unpickled")
        member = get_text(described, "path_name")
        name = f"{FOLDERS[weight.group].rpartition('/')[0]}/{member}"
        if not MEMBERS[weight.group].fullmatch(member) or self.root + name not in self.sizes:
            raise ProgramFault(f"{shown} is in '{one_line(member[:200])}'")
        meta = get_mapping(described, "tensor_meta")
        shape, strides = (
            tuple(_take_size(size) for size in get_list(meta, key)) for key in ("sizes", "strides")
        )
        dtype = meta.get("dtype")
        if type(dtype) is not int or dtype not in ITEM_BYTES or len(shape) != len(strides):
            raise ProgramFault(
                f"{shown} is no tensor of integers or floats", "export it in float32"
            )
        payload = WeightPayload(name, dtype, shape, strides, _take_size(meta.get("storage_offset")))
        self._check_payload(payload, shown)
        return payload

    def _check_payload(self, payload: WeightPayload, shown: str) -> None:
        size = self.sizes[self.root + payload.member]
        item = ITEM_BYTES[payload.dtype]
        steps = zip(payload.shape, payload.strides, strict=True)
        last = payload.offset + sum((length - 1) * stride for length, stride in steps)
        if size % item or payload.nbytes > size or (payload.nbytes and (last + 1) * item > size):
            raise ProgramFault(f"{shown} is not of its part of the file")


def _take_size(size: Any) -> int:
    kind, value = get_variant(size)
    if kind != "as_int":
        raise ProgramFault("its program has a weight without a size")
    return check_integer(value, 0)


@contextmanager
def open_archive(path: Path) -> Iterator[ProgramArchive]:
    """The archive of a .pt2 file; ProgramFault for one that is no such file, or damaged."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, io.SEEK_END)
            _check_directory(file, file_bytes)
            with zipfile.ZipFile(file) as archive:
                yield ProgramArchive(archive, file_bytes)
    except (
        zipfile.BadZipFile,
        OSError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        UnicodeError,
    ) as error:
        raise ProgramFault(f"is damaged or is no .pt2 file: {one_line(error)}") from error


def _check_directory(file: io.BufferedReader, file_bytes: int) -> None:
    """Refuse a list of members that is too long, before it is read."""
    file.seek(max(0, file_bytes - END_BYTES))
    tail = file.read(END_BYTES)
    place = tail.rfind(END_MARK)
    record = tail[place:] if place >= 0 else b""
    if len(record) < 22:
        raise zipfile.BadZipFile("no list of its parts")
    directory = int.from_bytes(record[12:16], "little")
    position = int.from_bytes(record[16:20], "little")
    # Zip64: the list ends where its own records begin.
    if position == 2**32 - 1 or directory == 2**32 - 1:
        located = tail.rfind(b"PK\6\6", 0, place)
        directory = (
            int.from_bytes(tail[located + 40 : located + 48], "little")
            if located >= 0
            else directory
        )
    if directory > MAX_DIRECTORY_BYTES:
        raise ProgramFault(f"its list of parts has {size_text(directory)}")


def write_archive(
    document: ProgramDocument, payloads: dict[str, WeightPayload], archive: ProgramArchive
) -> io.BytesIO:
    """A .pt2 file of a document that was built anew, and of the bytes of its weights."""
    copy = io.BytesIO()
    numbers: dict[str, int] = {}
    with zipfile.ZipFile(copy, "w") as target:
        lists: dict[str, dict[str, Any]] = {WEIGHTS: {}, CONSTANTS: {}}
        for weight in document.weights:
            payload = payloads[weight.name]
            number = numbers.get(payload.member)
            # Weights that share a part of the file share it in the copy.
            if number is None:
                number = numbers[payload.member] = len(numbers)
                _write(target, f"{FOLDERS[weight.group]}{number}", archive.read(payload.member))
            lists[weight.group][weight.name] = _describe_payload(weight, payload, number)
        for group, name in LISTS.items():
            _write(target, name, json.dumps({"config": lists[group]}).encode())
        _write(target, MODEL, json.dumps(document.tree).encode())
        _write(target, SAMPLES, b"")  # torch takes it for none, and unpickles nothing
        _write(target, "archive_format", b"pt2")
        _write(target, "archive_version", b"0")
        _write(target, "byteorder", b"little")
        _write(target, ".data/version", b"6\n")
    copy.seek(0)
    copy.name = "model.pt2"
    return copy


def _write(target: zipfile.ZipFile, name: str, data: bytes) -> None:
    target.writestr(zipfile.ZipInfo(f"model/{name}"), data)


def _describe_payload(weight: ProgramWeight, payload: WeightPayload, number: int) -> dict[str, Any]:
    folder = FOLDERS[weight.group].rpartition("/")[2]
    return {
        "path_name": f"{folder}{number}",
        "is_param": weight.is_trained,
        "use_pickle": False,
        "tensor_meta": {
            "dtype": payload.dtype,
            "sizes": [{"as_int": size} for size in payload.shape],
            "requires_grad": False,
            "device": CPU,
            "strides": [{"as_int": stride} for stride in payload.strides],
            "storage_offset": {"as_int": payload.offset},
            "layout": STRIDED,
        },
    }
