"""What originals answer to frames that come as they are: computed at the first visit, and kept for all others.

Frames without labels are not augmented, so at every visit they are the same, and so is the answer: a frame's does not
depend on those beside it. Frames with labels are moved and lit anew at every visit, by draws that no two share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from merger.training.distillation import record_inputs, watched_layers
from merger.training.recipe import Recipe
from models.device import to_device
from models.workload import Query
from models.zoo import build_query

MAX_TEACHER_CACHE_BYTES = 1 << 30
"""Of the processor's memory, for what all originals of a training answered."""
FLOAT_BYTES = 4


class TeacherFrames(Protocol):
    """Frames that an original teaches; `merger.training.loop.TrainingSet` is one."""

    @property
    def unchanged(self) -> bool:
        """Whether its frames are the same at every visit."""
        ...

    def teacher_output_bytes(self, features: bool) -> int | None:
        """See `answer_bytes` below, of its original."""
        ...

    def __len__(self) -> int: ...


@torch.inference_mode(False)
@torch.no_grad()
def teacher_output_bytes(query: Query, features: bool) -> int | None:
    """The most bytes of an original's outputs for one frame, and with `features` of what goes into its heads.

    Found without computing. None where answers have no row for each frame: these can't be kept.
    """
    model = build_query(query, device="meta").eval()
    paths = watched_layers(query, model) if features else []
    frames = torch.empty(2, 3, query.input_size, query.input_size, device="meta")
    with record_inputs(model, paths) as seen:
        leaves = tree_leaves((model(frames), seen))
    if not all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 2 for leaf in leaves):
        return None
    return sum(leaf.numel() // 2 * FLOAT_BYTES for leaf in leaves)


def split_capacity(frames: Mapping[str, int], needs: Mapping[str, int], most: int) -> dict[str, int]:
    """For how many of each query's `frames` the answers can be kept in `most` bytes, when one frame's `needs` so many.

    All where there is memory for them; those that need much share evenly what others leave.
    """
    found, left = dict[str, int](), most
    for before, query in enumerate(sorted(needs, key=lambda query: (frames[query] * needs[query], query))):
        share = left // (len(needs) - before)
        found[query] = min(frames[query], share // max(1, needs[query]))
        left -= found[query] * needs[query]
    return found


def cache_capacities(sets: Mapping[str, TeacherFrames], recipe: Recipe) -> dict[str, int]:
    """For how many frames of each query that come unchanged answers are kept, when these train together."""
    features = recipe.features > 0
    unchanged = {query: data.answer_bytes(features) for query, data in sets.items() if data.unchanged}
    needs = {query: count for query, count in unchanged.items() if count is not None}
    found = split_capacity({query: len(sets[query]) for query in needs}, needs, MAX_TEACHER_CACHE_BYTES)
    return {query: room for query, room in found.items() if room}


def expected_teacher_passes(visits: int, frames: int, room: int) -> int:
    """About how many passes of an original so many visits take, to so many frames in turn, when `room` are kept."""
    first = min(visits, frames)
    return first + (visits - first) * (frames - room) // frames if frames else 0


class TeacherCache:
    """What one original answers to its frames: outputs and features, of the first `room` frames that are visited.

    `known` are the frames whose passes were counted and whose answers are kept. After an interruption answers are found
    again when they are asked for, which is not counted again.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.known: dict[int, None] = {}
        self._slots: dict[int, int] = {}
        self._rows: list[Tensor] = []
        self._form: Any = None

    def count(self, frames: Iterable[int]) -> int:
        """How many passes a visit to these frames takes; those for which there is room are known from now on."""
        new = dict.fromkeys(frame for frame in frames if frame not in self.known)
        for frame in new:
            if len(self.known) < self.room:
                self.known[frame] = None
        return len(new)

    def uncount(self, known: int) -> None:
        """Back to so many known frames: what came after them was for nothing."""
        while len(self.known) > known:
            self.known.popitem()

    def of(self, frames: Sequence[int], images: Tensor, compute: Callable[[Tensor], Any]) -> Any:
        """The answers to these frames, whose `images` (N, ...) are computed where they are not at hand."""
        places = {frame: place for place, frame in enumerate(frames) if frame not in self._slots}
        if len(places) == len(frames):
            found = compute(images)
            self._keep(list(places), found)
            return found
        new: list[Any] = []
        if places:
            found = compute(images[to_device(torch.tensor(list(places.values())), images.device)])
            self._keep(list(places), found)
            new, self._form = tree_flatten(found)
        kept = self._rows or new
        pairs = zip(kept, new or [None] * len(kept))
        rows = [_joined(frames, rows, self._slots, one, places, images.device) for rows, one in pairs]
        return tree_unflatten(rows, self._form)

    def _keep(self, frames: Sequence[int], found: Any) -> None:
        """Keep the rows of those of these frames that are known."""
        mine = [place for place, frame in enumerate(frames) if frame in self.known]
        if not mine:
            return
        leaves, self._form = tree_flatten(found)
        if not self._rows:
            self._rows = [_like(leaf, self.room, torch.device("cpu")) for leaf in leaves]
        slots = torch.arange(len(self._slots), len(self._slots) + len(mine))
        self._slots.update((frames[place], int(slot)) for place, slot in zip(mine, slots))
        for rows, leaf in zip(self._rows, leaves):
            rows[slots] = leaf.detach()[to_device(torch.tensor(mine), leaf.device)].cpu()


def _joined(
    frames: Sequence[int],
    rows: Tensor,
    slots: Mapping[int, int],
    new: Tensor | None,
    places: Mapping[int, int],
    device: torch.device,
) -> Tensor:
    """The rows of these frames in order, laid out in memory as they were computed: from those kept, or the `new`."""
    order = {frame: number for number, frame in enumerate(places)}
    old = [(place, slots[frame]) for place, frame in enumerate(frames) if frame not in places]
    just = [(place, order[frame]) for place, frame in enumerate(frames) if frame in places]
    found = _like(rows, len(frames), device)
    if old:
        there, here = (torch.tensor(one) for one in zip(*old))
        found[to_device(there, device)] = to_device(rows[here], device)
    if just and new is not None:
        there, here = (to_device(torch.tensor(one), device) for one in zip(*just))
        found[there] = new[here]
    return found


def _like(rows: Tensor, count: int, device: torch.device) -> Tensor:
    """So many rows of this kind, with nothing in them yet, each laid out in memory in the same way."""
    one = torch.empty_like(rows[:1])
    strides = (one.numel(), *one.stride()[1:])
    return torch.empty_strided((count, *one.shape[1:]), strides, dtype=one.dtype, device=device)
