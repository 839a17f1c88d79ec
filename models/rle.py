"""COCO's run-length encoded masks: runs of 0 and 1 in turn, column by column, plain or packed into text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.predictions import Box

MAX_RUNS = 2**22


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


def find_mask_box(counts: str | Sequence[int], size: tuple[int, int]) -> Box:
    """x, y, width, height of a mask of `size` (height, width); ValueError for runs of another size or without a 1."""
    height, width = size
    runs = np.asarray(unpack_counts(counts) if isinstance(counts, str) else counts, np.int64)
    if not 0 < len(runs) <= MAX_RUNS or runs.min() < 0 or runs.sum() != height * width:
        raise ValueError("the runs do not fill the mask")
    ends = np.cumsum(runs)
    starts, ends = (ends - runs)[1::2], ends[1::2]
    starts, ends = starts[ends > starts], ends[ends > starts]
    if not len(starts):
        raise ValueError("the mask is empty")
    columns, rows, last_rows = starts // height, starts % height, (ends - 1) % height
    wraps = (ends - 1) // height > columns  # over the end of a column: it covers rows from top to bottom
    x0, x1 = int(columns[0]), int((ends[-1] - 1) // height) + 1
    y0 = 0 if wraps.any() else int(rows.min())
    y1 = height if wraps.any() else int(last_rows.max()) + 1
    return float(x0), float(y0), float(x1 - x0), float(y1 - y0)
