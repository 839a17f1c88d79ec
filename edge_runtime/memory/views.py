"""Views: resident tensors as PyTorch sees them in the arena's memory, and the order they are put in on arrival."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from edge_runtime.memory.layout import Layouts
from edge_runtime.memory.movers.base import Mover
from edge_runtime.memory.placing import ALIGNMENT_BYTES, Placement

# In a cycle of swaps tensors return to a few places each; views of these are kept, since making them takes longer than
# all other bookkeeping of a swap.
VIEWS_PER_TENSOR = 4


class Views:
    """Views of the mover's memory by name and place; every tensor lies as `layouts` says once it is arranged.

    A mover that arranges them itself brings them so.
    """

    def __init__(self, layouts: Layouts, mover: Mover) -> None:
        self._mover = mover
        self.reset(layouts)

    def reset(self, layouts: Layouts) -> None:
        """Forget every view; from now on tensors lie as these layouts say."""
        self._layouts = layouts
        here = {} if self._mover.arranges else layouts
        self._to_arrange = frozenset(name for name, layout in here.items() if layout.arranged)
        self._views: dict[tuple[str, int], Tensor] = {}
        self._whole: dict[torch.dtype, Tensor] = {}
        # What is on its way and has to be arranged when it is there, and where that is: by then residency may have
        # planned to move it on.
        self._as_stored: dict[str, int] = {}

    def tensor(self, name: str, offset: int) -> Tensor:
        """A tensor that lies there; the same object as long as it lies, or returns, at its place."""
        place = name, offset
        view = self._views.get(place)
        if view is not None:
            return view
        layout = self._layouts[name]
        view = layout.view(self._seen_as(layout.dtype), offset)
        if len(self._views) >= VIEWS_PER_TENSOR * len(self._layouts):
            self._views.clear()
        self._views[place] = view
        return view

    def arriving(self, names: frozenset[str], placed: Mapping[str, Placement]) -> None:
        """Note where tensors are on their way to."""
        for name in self._to_arrange & names:
            self._as_stored[name] = placed[name].offset

    def arrived(self, names: Iterable[str]) -> None:
        """Put those of these tensors that have arrived as stored in the order they are wanted in."""
        for name in self._as_stored.keys() & frozenset(names):
            layout = self._layouts[name]
            layout.arrange(self._seen_as(layout.dtype), self._as_stored.pop(name))

    def lost(self, names: Iterable[str]) -> None:
        """Expect these tensors no longer."""
        for name in names:
            self._as_stored.pop(name, None)

    def _seen_as(self, dtype: torch.dtype) -> Tensor:
        """All of the memory as values of this dtype; one for all views, since a swap makes hundreds."""
        if dtype not in self._whole:
            memory = self._mover.memory
            self._whole[dtype] = memory[: memory.numel() // ALIGNMENT_BYTES * ALIGNMENT_BYTES].view(dtype)
        return self._whole[dtype]
