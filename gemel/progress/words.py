"""Values of an event as words: bytes, shares and times in their own units, counts with their noun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemel.text import duration, percent, size

NAMED = 3


def told(name: str, value: Any) -> str:
    """One field of an event that nothing is known about: its name and value."""
    said = name.replace("_", " ")
    if isinstance(value, Mapping):
        return f"{said} " + ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if name.endswith("bytes"):
            return f"{name.removesuffix('bytes').rstrip('_').replace('_', ' ')} {size(value)}".strip()
        if name.endswith("fraction"):
            return f"{name.removesuffix('fraction').rstrip('_').replace('_', ' ')} {percent(value)}".strip()
        if name == "seconds":
            return duration(value)
    return f"{said} {plain(value)}"


def plain(value: Any) -> str:
    """A value as a person writes it."""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) >= 0.01 or not value else f"{value:.2g}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(plain(item) for item in value)
    return str(value)


def listed(names: Sequence[str]) -> str:
    """Names with commas, the first few of them."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def about(count: int, one: str, many: str | None = None) -> str:
    """A count and its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def worst(ratios: Mapping[str, float]) -> tuple[str, float]:
    """The query that keeps least, and what it keeps."""
    return min(ratios.items(), key=lambda item: item[1])


def metric(name: str) -> str:
    """A metric's name in words."""
    return {"f1": "F1"}.get(name, name.replace("_", " "))
