"""Damaged documents: a valid one with one value after the other missing, of another kind, or out of all bounds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**9, 10**19, -0.5, 1e308, "", "x", "1", "x" * 1000, [], [[]], [None], {}, {"x": 1}, [[["x"]]],
)  # fmt: skip


def damages(document: Any) -> Iterator[tuple[str, Any]]:
    """(what was done where, the document so damaged), for every place in it."""
    for place in _places(document):
        where = ".".join(map(str, place))
        if isinstance(_at(document, place), dict):
            yield f"{where}: unknown key", _with(document, place, lambda value: {**value, "unknown": 1})
        if place:
            yield f"{where}: missing", _without(document, place)
        for value in VALUES:
            yield f"{where}: {str(value)[:20]!r}", _with(document, place, lambda _, value=value: value)


def _places(document: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield here
    steps = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for step, value in steps:
        yield from _places(value, (*here, step))


def _at(document: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        document = document[step]
    return document


def _with(document: Any, place: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    changed = {"": copy.deepcopy(document)}
    owner, step = changed, ""
    for following in place:
        owner, step = owner[step], following
    owner[step] = change(owner[step])
    return changed[""]


def _without(document: Any, place: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(document)
    del _at(changed, place[:-1])[place[-1]]
    return changed
