"""JSON and YAML as plain values, in time and memory that grow with a document's length, whatever it says.

JSON is strict unless another program wrote it. YAML is the core schema of YAML 1.2: no merge keys, no dates, no numbers
to the base of 60, no tags that make objects.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NoReturn

import yaml

MAX_JSON_SEPARATORS = 8_000_000
"""Separators are commas and opening brackets, of which a document has about as many as values."""
MAX_YAML_VALUES, MAX_YAML_CHARACTERS = 100_000, 2**22
"""Values of a document, keys among them, and characters of its texts; what aliases repeat is counted each time."""
MAX_DEPTH = 50
MAX_INTEGER = 2**64 - 1
"""The largest integer, and with a minus the smallest."""
MAX_INTEGER_DIGITS = 40
"""With leading zeros; more are not even converted."""


class ParseError(Exception):
    """Why bytes are no valid document; the reader adds which file."""


# JSON


def parse_json(data: bytes, foreign: bool = False) -> Any:
    """A JSON document as plain values: finite numbers, unique keys, text without NUL; raises ParseError.

    A `foreign` one, of another program, may be in any Unicode encoding and hold NaN and infinities.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_JSON_SEPARATORS:
        raise ParseError(f"more than {MAX_JSON_SEPARATORS} commas and brackets")
    try:
        text = data.decode(json.detect_encoding(data) if foreign else "utf-8")
        document = _choose_decoder(text, foreign).decode(text)
    except json.JSONDecodeError as error:
        raise ParseError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, endless nesting
        raise ParseError(str(error)) from error
    _check_document(document, MAX_JSON_SEPARATORS)
    return document


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen = set[str]()
        for key, _ in pairs:
            if key in seen:
                raise ParseError(f"the key '{key}' occurs twice")
            seen.add(key)
    return mapping


def _parse_number(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse_number(digits)


def _refuse_number(text: str) -> NoReturn:
    raise ParseError(f"{text} is no finite number")


def _parse_integer(digits: str, base: int = 10) -> int:
    value = int(digits, base) if len(digits) <= MAX_INTEGER_DIGITS else MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise ParseError(f"an integer of {len(digits)} digits, more than 64 bits hold")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_float=_parse_number, parse_constant=_refuse_number
)
_FOREIGN_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)
_CAREFUL_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_float=_parse_number,
    parse_constant=_refuse_number,
    parse_int=_parse_integer,
)
_CAREFUL_FOREIGN_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_int=_parse_integer
)
_LONG_NUMBER = re.compile("[0-9]{20}")


def _choose_decoder(text: str, foreign: bool) -> json.JSONDecoder:
    """The decoder that checks each integer only for a text that may hold a long one, since that takes a call each."""
    # Converting an integer of many digits takes the square of their number.
    if _LONG_NUMBER.search(text):
        return _CAREFUL_FOREIGN_DECODER if foreign else _CAREFUL_DECODER
    return _FOREIGN_DECODER if foreign else _DECODER


def _check_document(document: Any, max_values: int) -> None:
    """Raise ParseError for a document that is too deep or too large, or holds a NUL or half a character."""
    level = [document]
    for _ in range(MAX_DEPTH + 1):
        if not all(_is_plain_text(text) for text in level if isinstance(text, str)):
            raise ParseError("a text with a NUL or half a character in it")
        parts = (
            [*value, *value.values()] if isinstance(value, dict) else value
            for value in level
            if isinstance(value, dict | list)
        )
        level = list(islice(chain.from_iterable(parts), max_values + 1))
        if not level:
            return
        if len(level) > max_values:
            raise ParseError(f"more than {max_values} values")
    raise ParseError(f"nested more than {MAX_DEPTH} deep")


def _is_plain_text(text: str) -> bool:
    """Whether a text holds no NUL and no half of a surrogate pair."""
    if "\0" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# YAML

_CORE_TAG = "tag:yaml.org,2002:"
_MERGE_KEY = "<<"
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_BASES = {"0o": 8, "0x": 16}
_TYPES = {
    "str": str, "int": int, "float": float, "bool": bool, "null": type(None), "seq": list, "map": dict,
}  # fmt: skip


def parse_yaml(data: bytes) -> Any:
    """A YAML document as plain values with unique keys; raises ParseError."""
    try:
        builder = _Builder()
        for event in yaml.parse(data.decode("utf-8"), Loader=yaml.SafeLoader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        raise ParseError(_where(error.problem_mark) + str(error.problem)) from error
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # characters that YAML forbids, no UTF-8
        raise ParseError(str(error)) from error
    document = builder.documents[0] if builder.documents else None
    _check_document(document, MAX_YAML_VALUES)
    return document


@dataclass(frozen=True)
class _Value:
    """A value, and the values and characters in it with all that aliases repeat."""

    value: Any
    values: int
    characters: int


@dataclass
class _Open:
    """A list or mapping that is being built; `key` is of a mapping whose next value is to come."""

    value: list[Any] | dict[Any, Any]
    anchor: str | None
    values: int = 1
    characters: int = 0
    has_key: bool = False
    key: Any = None
    names: set[str] = field(default_factory=set)

    def add(self, part: _Value, mark: yaml.Mark | None) -> None:
        """Take the next item, key or value."""
        self.values += part.values
        self.characters += part.characters
        if isinstance(self.value, list):
            self.value.append(part.value)
        elif self.has_key:
            self.value[self.key] = part.value
            self.has_key = False
        elif isinstance(part.value, list | dict):
            raise ParseError(f"{_where(mark)}a key that is a list or a mapping")
        else:
            name = str(part.value)
            if name in self.names:
                raise ParseError(f"{_where(mark)}the key '{name}' occurs twice")
            self.names.add(name)
            self.key = part.value
            self.has_key = True


class _Builder:
    """Builds the value that the events of a parser describe; what aliases repeat is counted before it is taken."""

    def __init__(self) -> None:
        self.documents: list[Any] = []
        self._open: list[_Open] = []
        self._anchors: dict[str, _Value] = {}
        self._values = self._characters = 0

    def take(self, event: Any) -> None:
        """Follow one event; raises ParseError where a limit is passed."""
        if isinstance(event, yaml.ScalarEvent):
            self._count(1, len(event.value))
            self._close(
                event,
                _Value(_resolve(event, self._awaits_key()), 1, len(event.value)),
                event.anchor,
            )
        elif isinstance(event, yaml.AliasEvent):
            value = self._anchors.get(event.anchor)
            if value is None:
                raise ParseError(
                    f"{_where(event.start_mark)}the alias '{event.anchor}' of nothing before it"
                )
            self._count(value.values, value.characters)
            self._close(event, value, None)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._count(1, 0)
            if len(self._open) >= MAX_DEPTH:
                raise ParseError(f"{_where(event.start_mark)}nested more than {MAX_DEPTH} deep")
            empty: list[Any] | dict[Any, Any] = (
                {} if isinstance(event, yaml.MappingStartEvent) else []
            )
            _check_tag(event, empty)
            self._open.append(_Open(empty, event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = self._open.pop()
            self._close(event, _Value(ended.value, ended.values, ended.characters), ended.anchor)
        elif isinstance(event, yaml.DocumentStartEvent) and self.documents:
            raise ParseError(f"{_where(event.start_mark)}a second document")

    def _awaits_key(self) -> bool:
        return (
            bool(self._open)
            and isinstance(self._open[-1].value, dict)
            and not self._open[-1].has_key
        )

    def _count(self, values: int, characters: int) -> None:
        self._values += values
        self._characters += characters
        if self._values > MAX_YAML_VALUES:
            raise ParseError(f"more than {MAX_YAML_VALUES} values")
        if self._characters > MAX_YAML_CHARACTERS:
            raise ParseError(f"more than {MAX_YAML_CHARACTERS} characters")

    def _close(self, event: Any, value: _Value, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = value
        if self._open:
            self._open[-1].add(value, event.start_mark)
        else:
            self.documents.append(value.value)


def _resolve(event: yaml.ScalarEvent, is_key: bool) -> Any:
    """A scalar as the core schema has it: null, a truth value, a number or text."""
    is_plain = event.implicit[0]
    # Other readers merge here: taking it for a key would mislead.
    if is_plain and is_key and event.value == _MERGE_KEY:
        raise ParseError(
            f"{_where(event.start_mark)}merge keys (<<) are not read: write the keys out"
        )
    if event.tag in ("!", f"{_CORE_TAG}str") or (event.tag is None and not is_plain):
        return event.value
    try:
        value = _plain_value(event.value)
    except ParseError as error:
        raise ParseError(f"{_where(event.start_mark)}{error}") from error
    _check_tag(event, value)
    return value


def _plain_value(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return _parse_integer(text, _BASES.get(text[:2], 10))
    return float(text) if _FLOAT.fullmatch(text) else text


def _check_tag(event: Any, value: Any) -> None:
    """Raise ParseError for a tag that is none of the core schema's, or of another kind of value."""
    kind = (
        None
        if event.tag in (None, "!")
        else _TYPES.get(str(event.tag).removeprefix(_CORE_TAG), object)
    )
    if kind is not None and type(value) is not kind:
        raise ParseError(
            f"{_where(event.start_mark)}the tag '{event.tag:.100}' is not read: remove it"
        )


def _where(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
