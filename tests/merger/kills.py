"""Kills within the process, once so much was stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

import merger.checkpoint as checkpoint_module
from merger.checkpoint import Checkpoint

T = TypeVar("T")
MOST = 150
"""Kills that nothing here needs: what begins anew each time would be killed for ever."""


class Killed(BaseException):
    """What stands for a kill within the process: nothing catches it."""


def kill_after(monkeypatch: pytest.MonkeyPatch, writes: int, again: bool = False) -> list[int]:
    """Raise Killed after so many writes, and `again` after as many more; the list counts the writes."""
    write, done = Checkpoint.write, [0]

    def counted(self: Checkpoint) -> None:
        write(self)
        done[0] += 1
        if done[0] == writes or (again and done[0] % writes == 0):
            raise Killed

    monkeypatch.setattr(Checkpoint, "write", counted)
    return done


def store_at_every_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the state whenever it may be."""
    monkeypatch.setattr(checkpoint_module, "INTERVAL_S", 0.0)
    monkeypatch.setattr(checkpoint_module, "WRITING_SHARE", float("inf"))


def to_the_end(run: Callable[[bool], T]) -> tuple[T, int]:
    """What comes of it in the end, and how often it was killed before; it is told whether to go on from there."""
    for kills in range(MOST):
        try:
            return run(bool(kills)), kills
        except Killed:
            pass
    raise AssertionError(f"killed {MOST} times, and no end")
