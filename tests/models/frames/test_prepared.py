"""Frames kept for training: decoded several at a time, as bytes, on the device that is trained on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

import models.data as prepared_module
from models.data import Frames, PreparedFrames, Split
from models.errors import InputError
from models.workload import Query
from tests.models.frames.test_data import _query


def _split(loaders: list[Callable[[], np.ndarray]]) -> Split:
    return Split("train", Frames(loaders), None, ("u",) * len(loaders), tuple(map(float, range(len(loaders)))))


def _frame(value: int) -> np.ndarray:
    return np.full((20, 30, 3), value, np.uint8)


@pytest.fixture
def query(tmp_path) -> Query:
    return _query(tmp_path)


@pytest.mark.parametrize("kept", [True, False])
def test_frames_are_decoded_several_at_a_time(query: Query, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    if not kept:
        monkeypatch.setattr(prepared_module, "MAX_CACHED_BYTES", 0)
    two = threading.Barrier(2, timeout=60)  # no thread passes alone

    def meeting(value: int) -> np.ndarray:
        two.wait()
        return _frame(value)

    found = PreparedFrames(query, _split([lambda value=value: meeting(value) for value in range(4)]))
    told: list[float] = []
    if kept:
        found.load(told.append)
        assert told == [0.25, 0.5, 0.75, 1.0]
    assert found.batch([2, 0])[:, 0, 0, 0].tolist() == [2, 0] and found.sizes([2]) == [(30, 20)]


def test_the_first_frame_that_does_not_decode_is_told_of(query: Query) -> None:
    def fail(name: str) -> np.ndarray:
        raise InputError(name, "is no image")

    loaders: list[Callable[[], np.ndarray]] = [lambda: _frame(1) for _ in range(6)]
    loaders[2:4] = [lambda: fail("a.png"), lambda: fail("b.png")]
    with pytest.raises(InputError, match=r"a\.png"):
        PreparedFrames(query, _split(loaders)).load()
