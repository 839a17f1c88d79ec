"""Frames of a split resized once for one query, so that every epoch does not decode them again.

Several are decoded at once: OpenCV and torch let other threads go on meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from models.frames.data import Split
from models.sent import sent
from models.workload import Query
from models.zoo import preprocess_of

MAX_CACHED_BYTES = 2 << 30
MAX_DECODERS = 8


class Prepared:
    """A split as uint8 batches (N, 3, S, S); kept in memory up to 2 GiB, decoded anew each time above that.

    Kept in the processor's memory, or on a device (`keep_on`): batches come from where the frames lie.
    """

    def __init__(self, query: Query, split: Split) -> None:
        self.split = split
        self._preprocess = preprocess_of(query.model, query.input_size)
        size = query.input_size
        cached = len(split) * 3 * size * size <= MAX_CACHED_BYTES
        with torch.inference_mode(False):  # the threads that fill it are in no such mode, whatever the caller is in
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
        for index, _ in enumerate(self._decoded(range(len(self)))):
            told((index + 1) / len(self))
        return self

    def keep_on(self, device: torch.device) -> bool:
        """Keep all frames that are kept on this device, decoded now; without room there they stay where they were.

        Returns whether there was room.
        """
        if self._images is None:
            return True
        try:
            self.load()
            self._images = self._images.to(device)
        except torch.OutOfMemoryError:
            return False
        return True

    def batch(self, indices: Sequence[int]) -> Tensor:
        """uint8 (N, 3, S, S) of these frames, where frames are kept."""
        if self._images is None:
            return torch.stack(list(self._decoded(indices)))
        for _ in self._decoded([index for index in indices if self._sizes[index] is None]):
            pass
        return self._images.index_select(0, sent(torch.tensor(indices), self._images.device))

    def _decoded(self, indices: Sequence[int]) -> Iterator[Tensor]:
        """These frames in order, several decoded at a time; the first that does not decode is what is told of."""
        threads = min(MAX_DECODERS, os.cpu_count() or 1, len(indices))
        if threads < 2:
            yield from map(self._image, indices)
            return
        with ThreadPoolExecutor(threads, "decode") as pool:
            yield from pool.map(self._image, indices)

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
        image = self._preprocess.resize(frame)
        if self._images is not None:
            self._images[index] = image
        self._sizes[index] = (frame.shape[1], frame.shape[0])  # last: another thread takes it for a frame that is there
        return image
