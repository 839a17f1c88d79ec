"""Frames kept for training: decoded several at a time, as bytes, on the device that is trained on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

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
    two = threading.Barrier(2, timeout=60)  # nobody passes alone

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
    def broken(name: str) -> np.ndarray:
        raise InputError(name, "is no image")

    loaders: list[Callable[[], np.ndarray]] = [lambda: _frame(1) for _ in range(6)]
    loaders[2:4] = [lambda: broken("a.png"), lambda: broken("b.png")]
    with pytest.raises(InputError, match=r"a\.png"):
        PreparedFrames(query, _split(loaders)).load()


def test_frames_stay_where_they_were_when_a_card_has_no_room(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    found = PreparedFrames(query, _split([lambda: _frame(7)]))

    def full(tensor: Tensor, *args, **named) -> Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", full)
        assert not found.keep_on(torch.device("meta"))
    assert found.batch([0]).device.type == "cpu" and int(found.batch([0]).max()) == 7
    monkeypatch.setattr(prepared_module, "MAX_CACHED_BYTES", 0)
    many = PreparedFrames(query, _split([lambda: _frame(7)]))
    assert many.keep_on(torch.device("meta")) and many.batch([0]).device.type == "cpu", "too many to keep anywhere"


@torch.inference_mode()
def test_frames_are_decoded_by_several_threads_in_inference_mode_too(query: Query, monkeypatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = PreparedFrames(query, _split([lambda value=value: _frame(value) for value in range(3)]))
    assert found.batch([2, 0])[:, 0, 0, 0].tolist() == [2, 0] and found.batch([1]).max() == 1
