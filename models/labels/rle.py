"""COCO's run-length encoded masks: runs of 0 and 1 in turn, column by column, plain or packed into text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_RUNS = 2**22
PackedBox = tuple[float, float, float, float]


def unpack_counts(packed: str) -> list[int]:
    """The runs of a packed mask, as pycocotools' rleFrString: 5 bits a character, differences from the run before last.

    Raises ValueError for text that is none.
    """
    counts: list[int] = []
    value = shift = 0
    for char in packed:
        bits = ord(char) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("no packed mask")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    if shift:
        raise ValueError("no packed mask")
    return counts


def _read_runs(counts: str | Sequence[int], pixels: int) -> np.ndarray:
    """The runs of a mask of so many pixels; ValueError where they do not fill it."""
    runs = np.asarray(unpack_counts(counts) if isinstance(counts, str) else counts, np.int64)
    if not 0 < len(runs) <= MAX_RUNS or runs.min() < 0 or runs.sum() != pixels:
        raise ValueError("the runs do not fill the mask")
    return runs


def find_mask_box(counts: str | Sequence[int], size: tuple[int, int]) -> PackedBox:
    """x, y, width, height of a mask of `size` (height, width); ValueError for runs of another size or without a 1."""
    height, width = size
    runs = _read_runs(counts, height * width)
    ends = np.cumsum(runs)
    starts = (ends - runs)[1::2]
    ends = ends[1::2]
    starts, ends = starts[ends > starts], ends[ends > starts]
    if not len(starts):
        raise ValueError("the mask is empty")
    columns = starts // height
    rows = starts % height
    last_rows = (ends - 1) % height
    # Over the end of a column: it covers rows from top to bottom.
    wraps = (ends - 1) // height > columns
    x0 = int(columns[0])
    x1 = int((ends[-1] - 1) // height) + 1
    y0 = 0 if wraps.any() else int(rows.min())
    y1 = height if wraps.any() else int(last_rows.max()) + 1
    return float(x0), float(y0), float(x1 - x0), float(y1 - y0)


def encode_rle(mask: np.ndarray) -> str:
    """The packed runs of a boolean mask (H, W), as `pycocotools.mask.encode`."""
    flat = mask.T.ravel()
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(np.concatenate([[0], edges, [flat.size]])).tolist()
    if flat.size and flat[0]:
        counts.insert(0, 0)  # the first run is of zeros
    text = bytearray()
    for place, count in enumerate(counts):
        value = count - counts[place - 2] if place > 2 else count
        more = True
        while more:
            bits = value & 31
            value >>= 5
            more = value != (-1 if bits & 16 else 0)
            text.append((bits | 32 if more else bits) + 48)
    return text.decode()


def decode_rle(counts: str | Sequence[int], size: tuple[int, int]) -> np.ndarray:
    """The boolean mask of such runs, of `size` (height, width); ValueError for runs of another size."""
    height, width = size
    runs = _read_runs(counts, height * width)
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T
