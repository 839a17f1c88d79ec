"""Kills within the process, once so much was stored."""

from __future__ import annotations

import pytest

from merger.journal.checkpoint import Checkpoint


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
