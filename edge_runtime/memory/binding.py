"""What the arena hands tensors to: anything that is bound to views of it before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

TensorOf = Callable[[str], Tensor]
"""Gives a resident tensor by its content name: a view of the arena."""
Wait = Callable[[Iterable[str]], None]
"""Returns when what is started next may read the tensors of these names."""


class Bindable(Protocol):
    """What uses tensors of the arena; `starts_early` says whether it may begin before its last ones have arrived."""

    starts_early: bool

    def bind(self, tensor_of: TensorOf, wait: Wait | None = None) -> None:
        """Use the tensors that `tensor_of` gives by content name from now on.

        With `wait`, which only one that starts early is given, they are still arriving: a run calls it with the
        names of a layer's tensors before it starts the layer. Without, all are there.
        """
        ...

    def unbind(self) -> None:
        """Let go of all tensors, so that their memory can be given back; `bind` comes before the next run."""
        ...
