"""The names of a model's classes as files state them, beside weights or in metadata: one reader of all forms."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_METADATA = 2**20
"""Characters of one value that are parsed."""
MAX_CLASSES = 2**16
MAX_NAME = 200
"""Characters of one class's name in a list that is plain text."""
UNUSED = "unused "
"""Begins the name of a column that has no class."""
ALL_COLUMNS, ASKED = "gemel.names", "gemel.classes"
"""Of a file that this project exports: the name of every column, and the classes that its query asked for."""
KEYS = (
    ALL_COLUMNS, "names", ASKED, "class_names", "classes", "CLASSES", "labels", "id2label", "idx_to_class",
    "class_to_idx", "label2id", "idx2label", "label_map", "labelmap", "label_names", "class_list", "vocab",
)  # fmt: skip
"""Under which names are looked for, the most certain first."""
WORDS = ("names", "class_names")
"""Keys whose value is a name even where it is one word."""
NO_NAMES = ("", "n/a")
BACKGROUNDS = ("background", "bg")
"""Without marks, as `__background__`."""
PLACEHOLDER = "LABEL_"
"""Begins the names that Hugging Face gives to classes without any."""


@dataclass(frozen=True)
class StatedNames:
    """The key under which a file names its classes, and their names in the order of the columns.

    Names are empty where they cannot be read.
    """

    key: str
    names: tuple[str, ...]


def parse(text: str | None) -> Any:
    """A value of a file's metadata, JSON or a Python literal as Ultralytics writes them; None for anything else."""
    if not text or len(text) > MAX_METADATA:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return None


def find_names(values: Mapping[str, Any]) -> StatedNames | None:
    """The names that a file states under one of KEYS: the first that can be read, else the first that cannot."""
    unread: StatedNames | None = None
    for key in KEYS:
        value = values.get(key)
        if isinstance(value, str):
            value = _parse_text(value, key)
        if not isinstance(value, Mapping | list | tuple) or not value:
            continue
        names = read_names(value)
        # Names that a program made up say nothing; another key may hold the real ones.
        if names and not all(name.startswith(PLACEHOLDER) for name in names):
            return StatedNames(key, names)
        if not names:
            unread = unread or StatedNames(key, ())
    return unread


def find_other_names(values: Mapping[str, Any]) -> StatedNames | None:
    """Names under another key that differ from those of `find_names`; None where there are none."""
    stated = find_names(values)
    if stated is None:
        return None
    remaining = {key: value for key, value in values.items() if key not in (stated.key, ASKED)}
    other = find_names(remaining)
    return other if other and other.names and other.names != stated.names else None


def read_names(value: Mapping[Any, Any] | Sequence[Any]) -> tuple[str, ...]:
    """The names of a list, or of a mapping by index or to indices; a gap is an unused column. Empty for other values.

    Raises nothing.
    """
    items = _order_by_index(value) if isinstance(value, Mapping) else dict(enumerate(value))
    if not items or not all(isinstance(name, str) for name in items.values()):
        return ()
    if min(items) < 0 or max(items) >= MAX_CLASSES:
        return ()
    names = [items.get(index, "") for index in range(max(items) + 1)]
    return tuple(
        f"{UNUSED}{index}" if name.lower() in NO_NAMES else name for index, name in enumerate(names)
    )


def _order_by_index(value: Mapping[Any, Any]) -> dict[int, Any]:
    """A mapping as names by index; empty where neither its keys nor its values are indices, each once."""
    for pairs in (list(value.items()), [(index, name) for name, index in value.items()]):
        if all(_is_index(index) for index, _ in pairs):
            indexed = {int(index): name for index, name in pairs}
            return indexed if len(indexed) == len(pairs) else {}
    return {}


def _is_index(value: Any) -> bool:
    if isinstance(value, str):
        return value.isascii() and value.isdigit() and len(value) < 10
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_text(text: str, key: str) -> Any:
    """What a text of metadata holds: JSON, a literal, or names by line or comma."""
    value = parse(text)
    if value is not None and not isinstance(value, str | int | float):
        return value
    if text.strip().startswith(("[", "{", "(")) or len(text) > MAX_METADATA:
        return [None]  # names, in a form that nothing reads
    for separator in ("\n", ";", ","):
        names = [name.strip() for name in text.strip().strip(separator).split(separator)]
        if len(names) > 1:
            return names if all(len(name) <= MAX_NAME for name in names) else None
    return names if key in WORDS and names[0] else None


def find_displaced(names: Sequence[str], classes: Sequence[str]) -> str:
    """The first class that a file names at another place than a query does; empty where there is none.

    A background that the file counts first is none of the query's classes.
    """
    plain = [_plain(name) for name in names]
    # The background has a column of its own in many files.
    if len(plain) == len(classes) + 1 and plain[0] in BACKGROUNDS:
        plain = plain[1:]
    for place, name in enumerate(classes):
        if _plain(name) in plain and plain[place : place + 1] != [_plain(name)]:
            return name
    return ""


def _plain(name: str) -> str:
    return "".join(char for char in name.casefold() if char.isalnum())
