"""JSON within bounds: what is deep, endless, doubled, no number or no text is a fault before or while it is parsed.

Bytes are bounded by whoever reads them. Values and depth are counted in the bytes, before any value is made of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

from models.files.bounded import Fault

MAX_DEPTH = 50
MAX_VALUES = 1_000_000
MAX_DIGITS = 20
"""Of an integer, the sign counted: more than any of 64 bits has is no count of anything."""
MAX_TOLD = 40
PART_BYTES = 2**20
_OPENING, _BRACKETS = b"[{", b"[]{}"
_REST = bytes(set(range(256)) - set(_BRACKETS))


def parsed(data: bytes, most_values: int = MAX_VALUES) -> Any:
    """The document as plain values: numbers are finite, keys stand once, texts are whole; Fault where it is none."""
    _check_bounds(data, most_values)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Fault(_at(data[: error.start].decode(), "this byte is no UTF-8")) from error
    try:
        document = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Fault(_at(text[: error.pos], error.msg)) from error
    if "\\u" in text and not all(map(_is_whole, _texts(document))):
        raise Fault("a text with a NUL or half a character in it")
    return document


def _check_bounds(data: bytes, most_values: int) -> None:
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * most_values:  # a key and a value for each, and both ends of them
        raise Fault(f"more than {most_values} values")
    outside = _outside_texts(bare)
    if outside.count(b",") + sum(outside.count(one) for one in (b"[", b"{")) >= most_values:
        raise Fault(f"more than {most_values} values")
    depth = 0
    for bracket in outside.translate(None, _REST):
        depth += 1 if bracket in _OPENING else -1
        if depth > MAX_DEPTH:
            raise Fault(f"nested more than {MAX_DEPTH} deep")


def _outside_texts(bare: bytes) -> bytes:
    """What stands outside quotes, taken part by part, so that the pieces between them are never many at once."""
    found, inside = [], 0
    for start in range(0, len(bare), PART_BYTES):
        pieces = bare[start : start + PART_BYTES].split(b'"')
        found.append(b"".join(pieces[inside::2]))
        inside ^= (len(pieces) - 1) & 1
    return b"".join(found)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise Fault(f"the key '{_clipped(twice)}' stands twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise Fault(f"{_clipped(digits)} is longer than {MAX_DIGITS} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise Fault(f"{_clipped(digits)} is too large for a number")
    return value


def _constant(name: str) -> NoReturn:
    raise Fault(f"{name} is no number")


def _texts(value: Any) -> Iterator[str]:
    """Every text of a document, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from _texts(one)


def _is_whole(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def _at(before: str, what: str) -> str:
    """A fault after so much of the file."""
    return f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}: {what}"


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_TOLD else f"{text[:MAX_TOLD]}..."


_DECODER = json.JSONDecoder(
    object_pairs_hook=_mapping, parse_int=_integer, parse_float=_finite, parse_constant=_constant
)
