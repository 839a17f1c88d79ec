"""YAML within bounds: what is deep, endless, doubled or no value of its kind is a fault with a line and a column.

PyYAML builds a document in two steps. Nodes are composed first, and each is counted here with all that its aliases
stand for; so a file of a few lines that means a billion values is refused before any value is made of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode
from yaml.reader import ReaderError

from models.files.bounded import Fault

MAX_DEPTH = 50
MAX_VALUES = 50_000
"""Of a whole document, those that aliases repeat counted each time."""
MAX_CHARACTERS = 100
"""Of a value that is no text: a number, a date, a truth."""
MAX_TOLD = 200
_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"


def parsed(data: bytes) -> Any:
    """The one document of a YAML file, as plain values; Fault where there is none within the bounds."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Fault(_at(data[: error.start].decode(), "this byte is no UTF-8")) from error
    try:
        return _within_bounds(text)
    except ReaderError as error:
        raise Fault(_at(text[: error.position], f"the character {error.character!r} may not stand here")) from error
    except yaml.YAMLError as error:
        raise Fault(_said(error)) from error


def _within_bounds(text: str) -> Any:
    loader = _Bounded(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


@dataclass(frozen=True)
class _Extent:
    """How many values a node stands for, itself counted, and how deep they lie."""

    values: int
    depth: int


class _Bounded(yaml.SafeLoader):
    """PyYAML's safe loader, which counts, and makes a fault of all that a constructor cannot do."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._extents: dict[Node, _Extent] = {}
        self._parts: list[list[_Extent]] = [[]]
        self._composed = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        mark = self.peek_event().start_mark
        self._parts.append([])
        if len(self._parts) - 1 > MAX_DEPTH + 1:
            raise ConstructorError(None, None, f"nested more than {MAX_DEPTH} deep", mark)
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            extent = self._extents.get(node)  # type: ignore[arg-type]
            if extent is None:
                raise ConstructorError(None, None, "an anchor stands within itself", mark)
        else:
            self._composed += 1
            if self._composed > MAX_VALUES:
                raise ConstructorError(None, None, f"more than {MAX_VALUES} values", mark)
            node = super().compose_node(parent, index)
            parts = self._parts[-1]
            values, depth = 1 + sum(part.values for part in parts), 1 + max((part.depth for part in parts), default=0)
            extent = _Extent(values, depth)
            self._extents[node] = extent  # type: ignore[index]
        self._parts.pop()
        if extent.values > MAX_VALUES:
            raise ConstructorError(None, None, f"more than {MAX_VALUES} values, with what aliases repeat", mark)
        if extent.depth + len(self._parts) - 1 > MAX_DEPTH + 1:
            raise ConstructorError(None, None, f"nested more than {MAX_DEPTH} deep, with what aliases repeat", mark)
        self._parts[-1].append(extent)
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise ConstructorError(None, None, "a key is no plain value", key.start_mark)
            name = key.value if key.tag == _MERGE else self.construct_object(key, deep=True)
            if not isinstance(name, Hashable) or name in seen:
                raise ConstructorError(None, None, f"the key '{_clipped(key.value)}' stands twice", key.start_mark)
            seen.add(name)
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, ScalarNode):
            if node.tag != _TEXT and len(node.value) > MAX_CHARACTERS:
                fault = f"is longer than {MAX_CHARACTERS} characters, too long for a value of the kind {kind}"
                raise ConstructorError(None, None, f"'{_clipped(node.value)}' {fault}", node.start_mark)
            if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in node.value):
                raise ConstructorError(None, None, "a text with a NUL or half a character in it", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            what = f"'{_clipped(node.value)}' is" if isinstance(node, ScalarNode) else "is"
            raise ConstructorError(None, None, f"{what} no value of the kind {kind}", node.start_mark) from error


def _at(before: str, what: str) -> str:
    """A fault after so much of the file."""
    return f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}: {what}"


def _said(error: yaml.YAMLError) -> str:
    """What is wrong and where in the file; PyYAML calls the file `<unicode string>`."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return _clipped(" ".join(str(error).split()), MAX_TOLD)
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    what = _clipped(", ".join(part for part in parts if part), MAX_TOLD)
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}"


def _clipped(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
