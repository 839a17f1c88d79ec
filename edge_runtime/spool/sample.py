"""A sample: the picture that a query's model was shown, with what it answered, in one PNG file.

The picture is the part of the decoded frame that the query looks at, resized to its input size: pixel by pixel what the
model was fed, before it was normalised. PNG loses nothing of that. What was answered stands in a text chunk `gemel`
(PNG specification, 11.3.3), as JSON, right behind the picture's head.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field

from models.bundle import BundleQuery
from models.errors import InputError
from models.io import ClassName, Exact, Name, ParseError, parse_json, read_bounded, validate
from models.pictures import MAX_PICTURE_BYTES, decode_picture
from models.preprocess import FURTHEST_PIXEL, crop

if TYPE_CHECKING:
    import numpy as np

FORMAT = 1
MIN_EXPECTED = 0.01
SUFFIX = ".png"
REMEDY = "remove it"
MAX_HEAD_BYTES = 1 << 20
MAX_FOUND = 1000
"""Detections of one answer; a detector gives 100 at most."""
_SIGNATURE, _KEYWORD = b"\x89PNG\r\n\x1a\n", b"gemel\0"
_FIRST_CHUNKS = len(_SIGNATURE) + 25  # the signature and the chunk IHDR

Fraction = Annotated[float, Field(ge=0, le=1)]
Pixel = Annotated[float, Field(ge=-FURTHEST_PIXEL, le=FURTHEST_PIXEL)]
Box = Annotated[list[Pixel], Field(min_length=4, max_length=4)]
Digits = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]


class Found(Exact):
    """One detection; its box is in pixels of the whole frame."""

    model_config = ConfigDict(populate_by_name=True)

    name: ClassName = Field(alias="class")
    score: Fraction
    box: Box


class Head(Exact):
    """What a sample says of its picture: when and of what it was taken, and what was answered.

    `size` is (width, height) of the part of the frame that the query looks at, `roi` that part, `threshold` the score
    from which detections count, `expected` the agreement with its original of a model that is right as often (on the
    test split of the merge; 1 where nobody knows), `bundle` the first digits of the SHA-256 of what was served. A
    classification has `label` and `score`, a detection `detections`.
    """

    format: Literal[1]
    run: Annotated[str, Field(max_length=100)]
    query: Name
    camera: Name
    frame: Annotated[int, Field(ge=0, le=1 << 62)]
    captured_at: Annotated[float, Field(ge=0, le=1e11)]
    bundle: Digits
    size: Annotated[list[Annotated[int, Field(ge=1, le=1_000_000)]], Field(min_length=2, max_length=2)]
    roi: Box | None
    threshold: Fraction
    expected: Annotated[float, Field(ge=MIN_EXPECTED, le=1)]
    label: ClassName | None = None
    score: Fraction | None = None
    detections: Annotated[list[Found], Field(max_length=MAX_FOUND)] | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """A picture, RGB uint8 (S, S, 3), and its head."""

    head: Head
    picture: np.ndarray


def sample_bytes(record: Mapping[str, Any], image: np.ndarray, query: BundleQuery) -> bytes:
    """The file of a sample: a result (`edge_runtime.frames.results.record_of`) of a frame, RGB uint8 (H, W, 3)."""
    import cv2

    part = crop(image, query.roi)
    picture = query.preprocess.resize(part).permute(1, 2, 0).contiguous().numpy()
    head = {
        "format": FORMAT, **{key: record[key] for key in ("run", "query", "camera", "frame", "captured_at", "bundle")},
        "size": [part.shape[1], part.shape[0]], "roi": None if query.roi is None else list(query.roi),
        "threshold": max(query.min_score, query.threshold or 0.0), "expected": expected_agreement(query),
        **{key: record[key] for key in ("label", "score", "detections") if key in record},
    }  # fmt: skip
    text = json.dumps(head, allow_nan=False, separators=(",", ":")).encode()
    encoded, data = cv2.imencode(SUFFIX, cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
    if not encoded:
        raise ValueError(f"a picture of {picture.shape} cannot be written as PNG")
    png = data.tobytes()
    return png[:_FIRST_CHUNKS] + _chunk(_KEYWORD + text) + png[_FIRST_CHUNKS:]


def expected_agreement(query: BundleQuery) -> float:
    """The agreement with its original of a model that is right as often: by labels two that are equally good differ.

    What it was on the test split of the merge, over the ratio there: 1 where the original's answers were the reference.
    """
    evidence: Mapping[str, Any] = query.evidence or {}
    ratio, agreement = evidence.get("ratio"), evidence.get("agreement")
    if not isinstance(agreement, float) or not ratio:
        return 1.0
    return min(1.0, max(MIN_EXPECTED, agreement / ratio))


def sample_name(record: Mapping[str, Any]) -> str:
    """The name of a result's sample; names are in the order of time."""
    return f"{round(1000 * record['captured_at']):015d}-{record['query']}-{record['frame']}{SUFFIX}"


def read_head(path: Path) -> Head:
    """What a sample says of itself; its picture is not decoded. InputError where it is none."""
    return _head(path, read_bounded(path, MAX_PICTURE_BYTES, REMEDY))


def read_sample(path: Path) -> Sample:
    """A sample, whoever wrote it; InputError where it is none, or damaged."""
    data = read_bounded(path, MAX_PICTURE_BYTES, REMEDY)
    return Sample(_head(path, data), decode_picture(data, path))


def _head(path: Path, data: bytes) -> Head:
    try:
        said = parse_json(_text(data))
    except ParseError as fault:
        raise InputError(path, f"is no sample: {fault}", REMEDY) from fault
    head = validate(path, said, Head, hint=REMEDY)
    if (head.label is None) == (head.detections is None) or (head.label is None) != (head.score is None):
        raise InputError(path, "has no answer: a label with its score, or detections", REMEDY)
    return head


def _text(data: bytes) -> bytes:
    """The JSON that stands in the text chunk of a PNG file."""
    start = _FIRST_CHUNKS
    if data[: len(_SIGNATURE)] != _SIGNATURE or data[start + 4 : start + 8] != b"tEXt":
        raise ParseError("there is no text chunk at its beginning")
    length = int.from_bytes(data[start : start + 4], "big")
    body = data[start + 8 : start + 8 + length]
    if length > MAX_HEAD_BYTES or data[start : start + 12 + length] != _chunk(body):
        raise ParseError("its text chunk is damaged or too long")
    if not body.startswith(_KEYWORD):
        raise ParseError("its text chunk is of something else")
    return body.removeprefix(_KEYWORD)


def _chunk(body: bytes) -> bytes:
    """A text chunk of a PNG file: length, kind, body, checksum."""
    kind = b"tEXt"
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
