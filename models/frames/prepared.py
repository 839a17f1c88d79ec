"""Frames of a split resized once for one query, so that every epoch does not decode them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.frames.data import Split
from models.workload import Query
from models.zoo import preprocess_of

MAX_CACHED_BYTES = 2 << 30


class Prepared:
    """A split as uint8 batches (N, 3, S, S); kept in memory up to 2 GiB, decoded anew each time above that."""

    def __init__(self, query: Query, split: Split) -> None:
        self.split = split
        self._preprocess = preprocess_of(query.model, query.input_size)
        size = query.input_size
        cached = len(split) * 3 * size * size <= MAX_CACHED_BYTES
        self._images = torch.empty((len(split), 3, size, size), dtype=torch.uint8) if cached else None
        self._sizes: list[tuple[int, int] | None] = [None] * len(split)

    def __len__(self) -> int:
        return len(self.split)

    @property
    def nbytes(self) -> int:
        """Memory its frames take."""
        return 0 if self._images is None else self._images.nbytes

    def load(self, told: Callable[[float], None] = lambda done: None) -> Prepared:
        """Decode every frame now, so that a frame that does not decode is found before any training.

        `told` hears which part of them is decoded, frame by frame.
        """
        for index in range(len(self)):
            self._image(index)
            told((index + 1) / len(self))
        return self

    def batch(self, indices: Sequence[int]) -> Tensor:
        """uint8 (N, 3, S, S) of these frames."""
        return torch.stack([self._image(index) for index in indices])

    def sizes(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """(width, height) of these frames before resizing."""
        for index in indices:
            if self._sizes[index] is None:
                self._image(index)
        return [size for index in indices if (size := self._sizes[index]) is not None]

    def _image(self, index: int) -> Tensor:
        if self._images is not None and self._sizes[index] is not None:
            return self._images[index]
        frame = self.split.frames[index]
        self._sizes[index] = (frame.shape[1], frame.shape[0])
        image = self._preprocess.resize(frame)
        if self._images is not None:
            self._images[index] = image
        return image
