"""Outputs of the originals for frames without labels, computed at the first visit and kept.

Frames without labels are not augmented, so they and the original's outputs are the same at every visit. Frames with
labels are augmented anew at every visit and are not cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from merger.training.data import TrainingSet
from merger.training.recipe import Recipe
from models.device import to_device

MAX_CACHE_BYTES = 1 << 30
"""Host memory for the outputs of all originals of one training."""


def cache_capacities(sets: Mapping[str, TrainingSet], recipe: Recipe) -> dict[str, int]:
    """The number of frames of each query whose outputs are cached when these queries train together.

    All frames if they fit in MAX_CACHE_BYTES; queries that need much share evenly what the others leave.
    """
    sizes = {query: data.teacher_output_bytes(recipe.features > 0) for query, data in sets.items() if data.unchanged}
    needs = {query: size for query, size in sizes.items() if size is not None}
    found, left = dict[str, int](), MAX_CACHE_BYTES
    for index, query in enumerate(sorted(needs, key=lambda query: (len(sets[query]) * needs[query], query))):
        share = left // (len(needs) - index)
        found[query] = min(len(sets[query]), share // max(1, needs[query]))
        left -= found[query] * needs[query]
    return {query: capacity for query, capacity in found.items() if capacity}


def expected_teacher_passes(visits: int, frames: int, capacity: int) -> int:
    """About how many passes of an original this many visits to `frames` frames in turn take with a cache."""
    first = min(visits, frames)
    return first + (visits - first) * (frames - capacity) // frames if frames else 0


class TeacherCache:
    """Outputs and features of one original, for the first `capacity` frames that are visited, in host memory.

    After an interruption outputs are computed again when needed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: dict[int, int] = {}
        self._rows: list[Tensor] = []
        self._structure: Any = None

    def outputs(self, frames: Sequence[int], images: Tensor, compute: Callable[[Tensor], Any]) -> Any:
        """The outputs for these frames, from the cache if all are there, else computed from `images` (N, ...)."""
        if all(frame in self._slots for frame in frames):
            slots = torch.tensor([self._slots[frame] for frame in frames])
            rows = [to_device(_copy_format(row[slots], row), images.device) for row in self._rows]
            return tree_unflatten(rows, self._structure)
        found = compute(images)
        new = {frame: place for place, frame in enumerate(frames) if frame not in self._slots}
        room = self.capacity - len(self._slots)
        self._store(list(new)[:room], list(new.values())[:room], found)
        return found

    def _store(self, frames: Sequence[int], places: Sequence[int], found: Any) -> None:
        if not frames:
            return
        leaves, self._structure = tree_flatten(found)
        if not self._rows:
            self._rows = [_empty_rows(leaf, self.capacity) for leaf in leaves]
        slots = range(len(self._slots), len(self._slots) + len(frames))
        self._slots.update(zip(frames, slots))
        for rows, leaf in zip(self._rows, leaves):
            rows[torch.tensor(slots)] = leaf.detach().cpu()[torch.tensor(places)]


def _empty_rows(leaf: Tensor, count: int) -> Tensor:
    """Uninitialised host memory for `count` rows, each with the memory format of the leaf's."""
    one = torch.empty_like(leaf[:1], device="cpu")
    return torch.empty_strided((count, *one.shape[1:]), (one.numel(), *one.stride()[1:]), dtype=one.dtype)


def _copy_format(found: Tensor, rows: Tensor) -> Tensor:
    """The gathered rows in the memory format in which they were computed: results depend on it bit by bit."""
    out = _empty_rows(rows, len(found))
    return out.copy_(found)
