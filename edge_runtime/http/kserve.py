"""Requests and responses of KServe's v2 protocol with Triton's extension for binary tensors, without a server.

https://github.com/kserve/open-inference-protocol, and protocol/extension_binary_data.md of triton-inference-server.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemel.edge_runtime.http.status import LedgerStatus
from gemel.models.bundle import BundleQuery
from gemel.models.files.documents import ParseError, parse_json
from gemel.models.files.pictures import MAX_PIXELS, PUSHED_FORMATS, decode_picture
from gemel.models.predictions import unpack_float16

MAX_JSON_BYTES = 4 * 2**20
"""Of a request beside its binary tensors: the interpreter is busy while it is parsed."""
INPUT = "image"
BYTES, UINT8, FP32, INT64 = "BYTES", "UINT8", "FP32", "INT64"
DTYPES = {FP32: np.dtype("<f4"), INT64: np.dtype("<i8")}
CONFIG_TYPES = {BYTES: "TYPE_STRING", FP32: "TYPE_FP32", INT64: "TYPE_INT64"}
COLORS = 3
PIXELS = {"datatype": UINT8, "shape": [-1, -1, COLORS]}
"""The other form of the input: RGB pixels in place of an encoded picture."""
EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics", "model_repository")
RESULT = "result"
"""The output that holds the whole result record as JSON."""
OUTPUTS: Mapping[str, Mapping[str, tuple[str, list[int]]]] = {
    "classification": {"labels": (BYTES, [-1]), "scores": (FP32, [-1])},
    "detection": {"labels": (BYTES, [-1]), "scores": (FP32, [-1]), "boxes": (FP32, [-1, 4])},
    "keypoints": {
        "labels": (BYTES, [-1]), "scores": (FP32, [-1]), "boxes": (FP32, [-1, 4]), "points": (FP32, [-1, -1, 3])
    },
    "segmentation": {"labels": (BYTES, [-1]), "areas": (INT64, [-1])},
    "embedding": {"embedding": (FP32, [-1])},
    "tensor": {},
}  # fmt: skip
"""Task -> output -> data type and shape, beside RESULT."""


class _Keys(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Parameters(_Keys):
    binary_data_size: Annotated[int, Field(ge=0)] | None = None
    binary_data: bool | None = None
    binary_data_output: bool = False


class _Input(_Keys):
    name: str
    datatype: str
    shape: Annotated[list[Annotated[int, Field(ge=1, le=MAX_PIXELS)]], Field(min_length=1, max_length=4)]
    parameters: _Parameters = _Parameters()
    data: list[Any] | None = None


class _OutputParameters(_Parameters):
    classification: int = 0


class _Output(_Keys):
    name: str
    parameters: _OutputParameters = _OutputParameters()


class _Request(_Keys):
    id: Annotated[str, Field(max_length=256)] | None = None
    inputs: Annotated[list[_Input], Field(min_length=1, max_length=1)]
    outputs: Annotated[list[_Output], Field(max_length=64)] = []
    parameters: _Parameters = _Parameters()


@dataclass(frozen=True)
class InferRequest:
    """One frame, as an encoded picture or as pixels, and the outputs to give, each binary or not; all if None."""

    LENGTH_HEADER: ClassVar[str] = "Inference-Header-Content-Length"

    id: str | None
    picture: bytes | None
    pixels: np.ndarray | None
    outputs: Mapping[str, bool] | None
    binary: bool

    def decode(self) -> np.ndarray:
        """RGB uint8 (H, W, 3); InputError where the picture does not decode."""
        return (
            self.pixels
            if self.pixels is not None
            else decode_picture(self.picture or b"", Path(), formats=PUSHED_FORMATS)
        )


def parse_infer(body: bytes, header_length: str | None) -> InferRequest:
    """A request; ValueError, in one line, where it is none. `header_length` is that of its JSON before tensors."""
    length = _header_length(body, header_length)
    if length > MAX_JSON_BYTES:
        raise ValueError(f"its JSON has more than {MAX_JSON_BYTES // 2**20} MiB: send the tensor as binary data")
    try:
        request = _Request.model_validate(parse_json(body[:length], foreign=True))
    except ParseError as error:
        raise ValueError(f"its JSON is damaged: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the request'}: {first['msg']}") from error
    given = request.inputs[0]
    if given.name != INPUT:
        raise ValueError(f"the input '{given.name[:40]}' is unknown: name it '{INPUT}'")
    if given.datatype == BYTES:
        picture, pixels = _picture(given, body[length:]), None
    elif given.datatype == UINT8:
        picture, pixels = None, _pixels(given, body[length:])
    else:
        raise ValueError(f"the data type '{given.datatype[:40]}' is no frame: send BYTES (a picture) or UINT8")
    if any(one.parameters.classification for one in request.outputs):
        raise ValueError("`classification` of outputs is not supported: ask for labels and scores")
    binary = request.parameters.binary_data_output
    outputs = {
        one.name: binary if one.parameters.binary_data is None else one.parameters.binary_data
        for one in request.outputs
    }
    return InferRequest(request.id, picture, pixels, outputs or None, binary)


def _header_length(body: bytes, header_length: str | None) -> int:
    if header_length is None:
        return len(body)
    if not header_length.isascii() or not header_length.isdigit() or int(header_length[:12]) > len(body):
        raise ValueError(f"{InferRequest.LENGTH_HEADER} is not the length of the JSON in the body")
    return int(header_length)


def _binary(given: _Input, rest: bytes) -> bytes | None:
    size = given.parameters.binary_data_size
    if size is None:
        return None
    if size != len(rest):
        raise ValueError(f"binary_data_size is {size}, {len(rest)} bytes follow the JSON")
    return rest


def _picture(given: _Input, rest: bytes) -> bytes:
    """The encoded picture: binary with its length before it, or base64 in JSON."""
    if math.prod(given.shape) != 1:
        raise ValueError(f"the shape {given.shape} is not that of one picture: use [1]")
    data = _binary(given, rest)
    if data is not None:
        if len(data) < 4 or struct.unpack("<I", data[:4])[0] != len(data) - 4:
            raise ValueError("the binary tensor is not one string with its length (4 bytes, little-endian) before it")
        return data[4:]
    values = given.data
    while isinstance(values, list) and len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    if not isinstance(values, list) or len(values) != 1 or not isinstance(values[0], str):
        raise ValueError("`data` is to hold one picture as base64")
    try:
        return base64.b64decode(values[0], validate=True)
    except ValueError as error:
        raise ValueError("`data` is no base64") from error


def _pixels(given: _Input, rest: bytes) -> np.ndarray:
    """Pixels (H, W, 3), or (1, H, W, 3)."""
    shape = given.shape[1:] if len(given.shape) == 4 and given.shape[0] == 1 else given.shape
    if len(shape) != 3 or shape[2] != COLORS:
        raise ValueError(f"the shape {given.shape} is not that of a frame: use [H, W, 3] or [1, H, W, 3]")
    if math.prod(shape[:2]) > MAX_PIXELS:
        raise ValueError(f"the frame has more than {MAX_PIXELS:,} pixels")
    data = _binary(given, rest)
    if data is not None:
        values = np.frombuffer(data, np.uint8)
    else:
        try:
            numbers = np.array(given.data)
        except ValueError as error:  # lists of different lengths
            raise ValueError("`data` is to hold whole numbers from 0 to 255") from error
        if numbers.dtype.kind != "i" or numbers.size == 0 or numbers.min() < 0 or numbers.max() > 255:
            raise ValueError("`data` is to hold whole numbers from 0 to 255")
        values = numbers.astype(np.uint8).ravel()
    if values.size != math.prod(shape):
        raise ValueError(f"the tensor has {values.size} values, its shape {given.shape} takes {math.prod(shape)}")
    return values.reshape(shape)


def describe_model(query: BundleQuery, bundle: str) -> dict[str, Any]:
    """The metadata of a query as a model; its version is that of the bundle."""
    outputs = {**OUTPUTS.get(query.task, {}), RESULT: (BYTES, [1])}
    return {
        "name": query.id, "versions": [bundle], "platform": "gemel",
        "inputs": [{"name": INPUT, "datatype": BYTES, "shape": [1], "parameters": {"also": PIXELS}}],
        "outputs": [{"name": name, "datatype": kind, "shape": shape} for name, (kind, shape) in outputs.items()],
    }  # fmt: skip


def describe_config(query: BundleQuery) -> dict[str, Any]:
    """The configuration of a query as a model, with Triton's names."""
    outputs = {**OUTPUTS.get(query.task, {}), RESULT: (BYTES, [1])}
    return {
        "name": query.id, "platform": "gemel", "backend": "gemel", "max_batch_size": 0,
        "input": [{"name": INPUT, "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [
            {"name": name, "data_type": CONFIG_TYPES[kind], "dims": shape} for name, (kind, shape) in outputs.items()
        ],
        "parameters": {f"also_{key}": {"string_value": str(value)} for key, value in PIXELS.items()},
    }  # fmt: skip


def describe_statistics(query: BundleQuery, bundle: str, ledger: LedgerStatus) -> dict[str, Any]:
    """How many frames of a query were answered and how many failed, with Triton's names."""
    return {
        "name": query.id, "version": bundle, "inference_count": ledger.processed, "execution_count": ledger.processed,
        "inference_stats": {"success": {"count": ledger.processed}, "fail": {"count": ledger.failed}},
    }  # fmt: skip


def infer_response(
    request: InferRequest, query: BundleQuery, bundle: str, record: Mapping[str, Any]
) -> tuple[bytes, dict[str, str]]:
    """Body and headers of the answer; ValueError for an output that the query does not have."""
    tensors = _tensors(query, record)
    asked = request.outputs or dict.fromkeys(tensors, request.binary)
    head: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for name, is_binary in asked.items():
        if name not in tensors:
            raise ValueError(f"query '{query.id}' has no output '{name[:40]}', but {', '.join(tensors)}")
        kind, values = tensors[name]
        row: dict[str, Any] = {"name": name, "datatype": kind, "shape": list(np.shape(values))}
        if is_binary:
            blobs.append(_to_binary(kind, values))
            row["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            row["data"] = np.ravel(values).tolist() if kind != BYTES else list(values)
        head.append(row)
    document = {"model_name": query.id, "model_version": bundle, "outputs": head}
    text = json.dumps(document if request.id is None else {**document, "id": request.id}).encode()
    if not blobs:
        return text, {"Content-Type": "application/json"}
    return b"".join((text, *blobs)), {
        "Content-Type": "application/octet-stream", InferRequest.LENGTH_HEADER: str(len(text))
    }  # fmt: skip


def _tensors(query: BundleQuery, record: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The outputs of a result by name: data type and values."""
    rows = record.get("detections") or record.get("labels") or record.get("segments") or ()
    if "label" in record:
        rows = [{"class": record["label"], "score": record["score"]}]
    found: dict[str, tuple[str, Any]] = {}
    if "embedding" in record:
        found["embedding"] = FP32, unpack_float16(record["embedding"], (-1,))
    for index, one in enumerate(record.get("outputs", ())):
        if "float16" in one:
            found[f"output_{index}"] = FP32, unpack_float16(one["float16"], one["shape"])
        elif "argmax" in one:
            found[f"output_{index}"] = INT64, np.array(one["argmax"], np.int64)
    columns = {
        "labels": lambda: [one["class"] for one in rows],
        "scores": lambda: np.array([one["score"] for one in rows], np.float32),
        "boxes": lambda: np.array([one["box"] for one in rows], np.float32).reshape(-1, 4),
        "points": lambda: np.array([one["points"] for one in rows], np.float32).reshape(len(rows), -1, 3),
        "areas": lambda: np.array([one["area"] for one in rows], np.int64),
    }
    for name, (kind, _) in OUTPUTS.get(query.task, {}).items():
        if name in columns:
            found[name] = kind, columns[name]()
    return {**found, RESULT: (BYTES, [json.dumps(record)])}


def _to_binary(kind: str, values: Any) -> bytes:
    if kind == BYTES:
        texts = [text.encode() for text in values]
        return b"".join(part for text in texts for part in (struct.pack("<I", len(text)), text))
    return np.ascontiguousarray(values, DTYPES[kind]).tobytes()
