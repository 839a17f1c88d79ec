"""Where some work stands: which stages there are, which is at work, how much of it is done.

Work that is part of other work announces stages of its own (`merger.events`): they lie within the stage that
was at work then, and end when the outer work begins its next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemel.text import duration, percent


@dataclass
class Level:
    """The stages of one piece of work; `at` is the place of the one at work, None before the first.

    Stages that were not `said_before` are those that began so far.
    """

    names: list[str]
    at: int | None = None
    said_before: bool = True

    @property
    def stage(self) -> str | None:
        """The name of the stage at work."""
        return None if self.at is None else self.names[self.at]


class Standing:
    """What the events `stages`, `stage` and `part` came to; `hear` each with the time it came (seconds)."""

    def __init__(self, now: float) -> None:
        self.levels: list[Level] = []
        self.began = now
        self.done: float | None = None
        self.ends: float | None = None

    def hear(self, event: str, fields: Mapping[str, Any], now: float) -> None:
        """Take note of an event; others than the three change nothing."""
        if event == "stages":
            self._announced([str(name) for name in fields["names"]])
        elif event == "stage":
            self._begun(str(fields["name"]))
            self.began, self.done, self.ends = now, None, None
        elif event == "part":
            left = fields.get("seconds_left")
            self.done, self.ends = fields["done"], None if left is None else now + left

    def _announced(self, names: list[str]) -> None:
        for place, level in enumerate(self.levels):
            if level.names == names or level.at is None:  # the same work once more, or what never began
                del self.levels[place:]
                break
        self.levels.append(Level(names))

    def _begun(self, name: str) -> None:
        for place in reversed(range(len(self.levels))):
            level = self.levels[place]
            if name in level.names:
                del self.levels[place + 1 :]
                level.at = level.names.index(name)
                return
        if not self.levels or self.levels[-1].said_before:
            self.levels.append(Level([], said_before=False))
        self.levels[-1].names.append(name)
        self.levels[-1].at = len(self.levels[-1].names) - 1

    def announced(self) -> str:
        """The stages announced last, as one sentence."""
        level, outer = self.levels[-1], self.levels[-2].stage if len(self.levels) > 1 else None
        count = len(level.names)
        what = f"{count} stages" if count != 1 else "one stage"
        return f"{outer or 'this'} takes {what}: {', '.join(level.names)}"

    def stage(self) -> str:
        """The stage at work as a sentence, within the outer ones."""
        parts = [
            f"{level.stage} ({level.at + 1} of {len(level.names)})" if level.said_before else f"{level.stage}"
            for level in self.levels
            if level.at is not None
        ]
        return ", ".join(parts)

    def still(self, now: float) -> str:
        """What is said when nothing else was for a while."""
        stage = next((level.stage for level in reversed(self.levels) if level.stage), None)
        if stage is None:
            return f"still at work, for {duration(now - self.began)} now"
        if self.done is None:
            return f"still at '{stage}', for {duration(now - self.began)} now"
        return f"still at '{stage}': {self.part(now)}"

    def part(self, now: float) -> str:
        """How much of the stage at work is done, and how long the rest takes; empty where nobody knows.

        Where that time is over and nothing more was told, how long it has taken.
        """
        if self.done is None:
            return ""
        done = f"{percent(self.done, 0)} done"
        if self.ends is None:
            return done
        if self.ends < now:
            return f"{done}, after {duration(now - self.began)}"
        return f"{done}, about {duration(max(1.0, self.ends - now))} left"


def marks(level: Level) -> Sequence[tuple[str, str]]:
    """(mark, name) of each stage of a level: done, at work, or to come."""
    at = -1 if level.at is None else level.at
    return [("✓" if i < at else "▸" if i == at else "·", name) for i, name in enumerate(level.names)]
