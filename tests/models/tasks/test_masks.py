"""Masks: COCO's run lengths as pycocotools writes them, and nearest values on another grid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pycocotools import mask as coco

from gemel.models.labels.rle import decode_rle, encode_rle
from gemel.models.objects.masks import IGNORED, resample

MASKS = st.tuples(st.integers(1, 40), st.integers(1, 40)).flatmap(lambda shape: arrays(bool, shape))


@given(MASKS)
def test_rle_equals_that_of_pycocotools(mask):
    assert encode_rle(mask) == coco.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()  # type: ignore[attr-defined]
    assert np.array_equal(decode_rle(encode_rle(mask), mask.shape), mask)


@pytest.mark.parametrize("counts", ["", "a", "oooooooooo", "0" * 5, "\x7f\x7f", "11111"])
def test_rle_that_does_not_fill_its_mask_is_refused(counts):
    with pytest.raises(ValueError, match=r"fill|packed"):
        decode_rle(counts, (3, 3))


def test_resample_of_an_enlarged_mask_gives_it_back():
    mask = np.arange(6, dtype=np.uint8).reshape(2, 3)
    large = resample(mask, (0, 0, 3, 2), (20, 30), (0, 0, 3, 2))
    assert large.shape == (20, 30) and np.array_equal(resample(large, (0, 0, 3, 2), (2, 3), (0, 0, 3, 2)), mask)


def test_resample_outside_the_mask_is_ignored():
    found = resample(np.ones((4, 4), np.uint8), (2, 2, 6, 6), (8, 8), (0, 0, 8, 8))
    assert (found[2:6, 2:6] == 1).all() and np.count_nonzero(found == IGNORED) == 64 - 16
