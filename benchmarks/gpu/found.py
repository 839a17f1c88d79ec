"""What a stage is given, and what it found: figures, and the bounds that they had to hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gemel.edge_runtime.memory.transfer import on_compute_stream


@dataclass(frozen=True)
class Setting:
    """The device ("cpu" or "cuda"), whether it is a rehearsal (few rounds, small models), and a folder to write in."""

    device: torch.device
    small: bool
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """Whether there is anything that runs beside the processor."""
        return self.device.type == "cuda"

    def many(self, whole: int, few: int) -> int:
        """A number of rounds."""
        return few if self.small else whole

    def on_compute_stream(self) -> AbstractContextManager[None]:
        """As a box computes: on the stream of its own."""
        return on_compute_stream(self.device)

    def synchronise(self) -> None:
        """Return when the device has done all that it was given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def busy(self, seconds: float) -> None:
        """Queue a kernel that only takes time; nothing on the processor."""
        if self.on_gpu:
            torch.cuda._sleep(int(seconds * 1e9))  # cycles, of which a GPU makes one to two billion in a second

    def times(self, rounds: int, *actions: Callable[[], object]) -> list[float]:
        """The median seconds of each of these, done in turns, after one round that does not count."""
        taken: list[list[float]] = [[] for _ in actions]
        for index in range(rounds + 1):
            for own, action in zip(taken, actions):
                self.synchronise()
                start = time.perf_counter()
                action()
                self.synchronise()
                if index:
                    own.append(time.perf_counter() - start)
        return [median(own) for own in taken]


@dataclass
class Found:
    """Figures by name, what did not hold, and what was left out and why.

    Times say something of a GPU alone: on the processor they are noted and not judged (`timed`). `tell` hears of each
    figure as it is found.
    """

    timed: bool
    tell: Callable[[str, Any], object] = lambda *_: None
    figures: dict[str, Any] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, value: Any) -> None:
        """A figure without a limit."""
        self.figures[name] = round(value, 6) if isinstance(value, float) else value
        self.tell(name, self.figures[name])

    def holds(self, name: str, value: bool) -> None:
        """Something that has to be so."""
        self.note(name, bool(value))
        if not value:
            self.missed.append(name)

    def at_most(self, name: str, value: float, bound: float) -> None:
        """A figure that may not be more; not a number is more than anything."""
        self.note(name, value)
        if not value <= bound:
            self.missed.append(f"{name} is {value:.4g}, at most {bound:g} is asked")

    def takes_at_most(self, name: str, value: float, bound: float) -> None:
        """The same of a time, or a ratio of two."""
        if self.timed:
            self.at_most(name, value, bound)
        else:
            self.note(name, value)
