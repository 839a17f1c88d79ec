"""Pictures in memory of their own, apart from the heap."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from typing import Any

import numpy as np

from edge_runtime.capture.sources.base import Shot, picture_of

SPARE = 1
"""Pieces of memory that a camera keeps for its next frames: where none wait, one is shown while the next is made."""
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class OwnMemory:
    """Memory for the frames of one camera: a piece for each, taken from the system and used again.

    Frames are the largest things that a box holds for longer than a call, some tens of megabytes for a moment when they
    wait. In the heap small things that stay come to lie between them, so that what they leave never goes back whole,
    and the process grows with every such moment (docs/figures.md, "A box at work"). Here a piece is free again once the
    last array, view or tensor over it is gone, in whatever thread that is; `SPARE` of them are kept, the others go back
    to the system at once. Pictures, uint8, are taken by one thread.
    """

    def __init__(self) -> None:
        self._fit(0)

    def _fit(self, nbytes: int) -> None:
        """Take frames of another size; memory that is still in use for one of the former size is not kept."""
        self._nbytes, self._pixels = nbytes, ctypes.c_ubyte * nbytes
        self._spare: deque[mmap.mmap] = deque(maxlen=SPARE)

    def picture_of(self, shot: Shot) -> np.ndarray | None:
        """The picture of a decoded frame; None where it does not decode, or there is no memory for it."""
        made = picture_of(shot)
        try:
            return None if made is None else self._copy(made)
        except (OSError, ValueError):
            return None

    def _copy(self, picture: np.ndarray) -> np.ndarray:
        if picture.nbytes != self._nbytes:
            self._fit(picture.nbytes)
        piece = self._spare.pop() if self._spare else mmap.mmap(-1, self._nbytes, **PRIVATE)
        # Whatever shares the bytes keeps this object: it is made anew for each picture, and its end is the picture's.
        pixels: Any = self._pixels.from_buffer(piece)
        weakref.finalize(pixels, self._spare.append, piece).atexit = False
        copy = np.frombuffer(pixels, np.uint8).reshape(picture.shape)
        copy[...] = picture
        return copy
