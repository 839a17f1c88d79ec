"""Where an operator's function is registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Numbers = Any
"""A static input: a number or a list of numbers, or an integer tensor on the CPU where it depends on the batch."""


@dataclass(frozen=True)
class Operator:
    """How to compute an operator.

    `run(*inputs, **attributes)` returns a tensor, or a tuple of them. Inputs at the positions `static` are numbers,
    as shapes and axes are; `opset` and `count` (of outputs) are passed to those that ask.
    """

    run: Callable[..., Any]
    static: tuple[int, ...] = ()
    opset: bool = False
    count: bool = False


OPERATORS: dict[str, Operator] = {}


def operator(
    *names: str, static: tuple[int, ...] = (), opset: bool = False, count: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function for the operators of these names."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            OPERATORS[name] = Operator(run, static, opset, count)
        return run

    return register


def integers(values: Numbers) -> list[int]:
    """A static input as a list of integers."""
    values = values.tolist() if isinstance(values, Tensor) else values
    return [int(value) for value in (values if isinstance(values, (list, tuple)) else [values])]


def number(value: Numbers) -> Any:
    """A static input as one number."""
    value = value.tolist() if isinstance(value, Tensor) else value
    return value[0] if isinstance(value, (list, tuple)) else value


MAX_COUNT = 2**28
"""Values of what an operator makes from numbers alone."""


MAX_PLACES = 2**20
"""Of an axis whose places are written down, times what each of them reads."""
MAX_STEPS = 4096
"""Of a sequence."""


def check_places(count: int) -> None:
    """Refuse to write down more places of an axis than any picture has."""
    if not 0 <= count <= MAX_PLACES:
        raise ValueError(f"{count} places of an axis are more than {MAX_PLACES}")


def check_count(count: float) -> None:
    """Refuse to make tensors that would fill the memory."""
    if not abs(count) <= MAX_COUNT:
        raise ValueError(f"{count:g} values are more than {MAX_COUNT}")
