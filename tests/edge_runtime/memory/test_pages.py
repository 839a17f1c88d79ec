"""Weights in a mapped file: what is read in, what is given back, and what stays for others."""

from __future__ import annotations

import mmap
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.memory.allocator import Extent
from gemel.edge_runtime.memory.pages import MappedWeights, page_ranges, range_bytes

PAGE = mmap.PAGESIZE
APART = 1024 * PAGE
"""Further than the system reads ahead."""
COMMON, LEFT, RIGHT = EXTENTS = Extent(0, 8 * PAGE), Extent(APART, 4 * PAGE), Extent(2 * APART, 2 * PAGE)
NBYTES = 2 * APART + 2 * PAGE
RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=8)


@pytest.fixture
def weights(tmp_path: Path):
    path = tmp_path / "weights.bin"
    values = np.arange(NBYTES, dtype=np.uint32).astype(np.uint8)
    with open(path, "wb") as file:
        file.write(values.tobytes())
        file.flush()
        os.fsync(file.fileno())  # dirty pages stay in memory whatever is advised
    mapped = MappedWeights(path)
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    yield mapped
    mapped.close()


def pages_of(ranges) -> set[int]:
    return {page for start, end in ranges for page in range(start // PAGE, end // PAGE)}


@given(RANGES)
def test_ranges_are_the_pages_of_the_extents(drawn):
    extents = [Extent(offset * 1000, nbytes * 1500) for offset, nbytes in drawn]
    ranges = page_ranges(extents)
    touched = {
        page for one in extents if one.nbytes
        for page in range(one.offset // PAGE, (one.offset + one.nbytes - 1) // PAGE + 1)
    }  # fmt: skip
    assert pages_of(ranges) == touched
    assert all(before[1] < after[0] for before, after in pairwise(ranges))
    assert range_bytes(ranges) == PAGE * len(touched)


def test_a_load_reads_what_is_needed_and_not_there(weights):
    assert weights.resident_bytes() == 0
    assert weights.load([COMMON, LEFT]) == 12 * PAGE
    assert weights.load([COMMON, RIGHT]) == 2 * PAGE
    assert weights.resident_bytes(EXTENTS) == weights.bytes_read == 14 * PAGE


def test_what_is_given_back_is_no_longer_in_memory(weights):
    weights.load(EXTENTS)
    assert weights.give_back([LEFT]) == 4 * PAGE
    assert weights.resident_bytes([LEFT]) == 0 and weights.resident_bytes([COMMON, RIGHT]) == 10 * PAGE


def test_a_file_that_was_cut_short_is_an_error_of_the_load(weights):
    os.truncate(weights.path, PAGE)
    with pytest.raises(OSError, match="was cut short"):
        weights.load([COMMON])


def test_values_are_the_same_after_they_were_given_back(weights):
    view = weights.view(LEFT, "uint8", (4 * PAGE,))
    before = view.copy()
    weights.load([LEFT])
    weights.give_back([LEFT])
    assert np.array_equal(view, before)
    assert not view.flags.writeable


def test_without_populate_pages_are_touched(weights, monkeypatch):
    from gemel.edge_runtime.memory import pages

    plain = pages._advise
    monkeypatch.setattr(pages, "MADV_POPULATE_READ", 999)  # what an older kernel knows as little
    assert weights.load([LEFT]) == 4 * PAGE
    assert weights.resident_bytes([LEFT]) == 4 * PAGE and pages._advise is plain


def test_other_mappings_of_the_file_are_given_back_too(weights):
    with open(weights.path, "rb") as file:
        other = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    weights.load([COMMON])
    assert sum(other[::PAGE]) >= 0
    weights.give_back([COMMON])
    assert weights.resident_bytes([COMMON]) == 0
    other.close()
