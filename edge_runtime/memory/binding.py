"""What an engine and the memory of its weights say to each other. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, Protocol

TensorOf = Callable[[str], Any]
"""Gives a resident tensor by its content name: a view of the arena."""
WaitFor = Callable[[Iterable[str]], None]
"""Returns when what is started next may read the tensors of these names."""


class Bindable(Protocol):
    """An engine that uses resident weights; `starts_early`: it can start before its last tensors have arrived."""

    starts_early: bool

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
        """Use the tensors that `tensor_of` gives by content name from now on.

        With `wait`, which only an engine that starts early is given, they are still arriving: a run calls it with the
        names of a layer's tensors before it starts the layer.
        """
        ...

    def unbind(self) -> None:
        """Drop all tensors, so that their memory can be freed; `bind` comes before the next run."""
        ...


class WeightFormat(IntEnum):
    """The format in which an engine takes convolution weights; the later one is faster to run, slower to load."""

    STORED = 0
    CHANNELS_LAST = 1
