"""Kills within the process, after a number of checkpoint writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

import gemel.merger.checkpoint as checkpoint_module
from gemel.merger.checkpoint import Checkpoint, CheckpointConfig

T = TypeVar("T")
MAX_KILLS = 150


class Killed(BaseException):
    """Stands for a kill within the process: nothing catches it."""


def kill_after(monkeypatch: pytest.MonkeyPatch, writes: int, again: bool = False) -> list[int]:
    """Raise Killed after this many writes, with `again` after each as many more; the list counts the writes."""
    save, done = Checkpoint.save, [0]

    def save_and_kill(self: Checkpoint) -> None:
        save(self)
        done[0] += 1
        if done[0] == writes or (again and done[0] % writes == 0):
            raise Killed

    monkeypatch.setattr(Checkpoint, "save", save_and_kill)
    return done


def store_at_every_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the checkpoint whenever it may be."""
    monkeypatch.setattr(checkpoint_module, "CONFIG", CheckpointConfig(0.0, float("inf")))


def to_the_end(run: Callable[[bool], T]) -> tuple[T, int]:
    """The result in the end, and the number of kills before; `run` is called with whether to resume."""
    for kills in range(MAX_KILLS):
        try:
            return run(bool(kills)), kills
        except Killed:
            pass
    raise AssertionError(f"killed {MAX_KILLS} times without an end")
