"""Run-length encoded masks against pycocotools."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.models.labels.rle import find_mask_box, unpack_counts


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_mask_has_the_box_and_runs_of_pycocotools(height: int, width: int, seed: int, share: float) -> None:
    masks = pytest.importorskip("pycocotools.mask")
    drawn = np.asfortranarray(np.random.default_rng(seed).random((height, width)) < share).astype(np.uint8)
    packed = masks.encode(np.asfortranarray(drawn))
    counts = unpack_counts(packed["counts"].decode())
    assert masks.frPyObjects({"size": [height, width], "counts": counts}, height, width)["counts"] == packed["counts"]
    if drawn.any():
        assert find_mask_box(counts, (height, width)) == tuple(masks.toBbox(packed))
    else:
        with pytest.raises(ValueError, match="the mask is empty"):
            find_mask_box(counts, (height, width))


@pytest.mark.parametrize("counts", ["", "é", "o", "oooooooooooooooooooo1", [1, -1, 2], [], [3]])
def test_find_mask_box_refuses_runs_that_are_none(counts) -> None:
    with pytest.raises(ValueError):
        find_mask_box(counts, (1, 2))
