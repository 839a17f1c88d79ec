"""Reads fields of a program's JSON by their type."""

from __future__ import annotations

from typing import Any

MAX_INTEGER = 2**63 - 1
SPECIAL_NUMBERS = ("Infinity", "-Infinity", "NaN")
"""Texts that torch.export writes where JSON has no number."""


class ProgramFault(ValueError):
    """What is wrong with a program, as the end of a sentence that begins with the file, and what to do, if known."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint


def get_mapping(parent: Any, key: str) -> dict[str, Any]:
    """The object at a key."""
    return _get(parent, key, dict, "object")


def get_list(parent: Any, key: str) -> list[Any]:
    """The list at a key."""
    return _get(parent, key, list, "list")


def get_text(parent: Any, key: str) -> str:
    """The text at a key."""
    return _get(parent, key, str, "text")


def _get(parent: Any, key: str, kind: type, word: str) -> Any:
    value = parent.get(key) if isinstance(parent, dict) else None
    if not isinstance(value, kind):
        raise ProgramFault(f"its program has no {word} '{key}' where one belongs")
    return value


def get_variant(value: Any) -> tuple[str, Any]:
    """The kind and the content of a union, which JSON holds as an object of one key."""
    if not isinstance(value, dict) or len(value) != 1:
        raise ProgramFault("its program has an object of several kinds where one belongs")
    return next(iter(value.items()))


def check_list(value: Any) -> list[Any]:
    """A value that is a list."""
    if not isinstance(value, list):
        raise ProgramFault("its program has a value that is no list where one belongs")
    return value


def check_integer(value: Any, least: int = -MAX_INTEGER - 1, greatest: int = MAX_INTEGER) -> int:
    """A value that is an integer from `least` to `greatest`."""
    if type(value) is not int or not least <= value <= greatest:
        raise ProgramFault(
            f"its program has no integer from {least} to {greatest} where one belongs"
        )
    return value


def check_number(value: Any) -> float | str:
    """A value that is a number, as torch.export writes it."""
    if isinstance(value, str) and value in SPECIAL_NUMBERS:
        return value
    if type(value) is int:
        value = float(check_integer(value))
    if not isinstance(value, float):
        raise ProgramFault("its program has a value that is no number where one belongs")
    return value


def check_truth(value: Any) -> bool:
    """A value that is true or false."""
    if not isinstance(value, bool):
        raise ProgramFault(
            "its program has a value that is neither true nor false where one belongs"
        )
    return value
