"""Jobs for workers that have a hard time: they fail, are killed, or say where they ran."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from merger.bench.workbench import Workbench
from merger.journal.steps import Journal
from merger.methods.rate import trial
from models.errors import InputError


def squared(bench: Workbench, journal: Journal, number: int) -> dict[str, Any]:
    """The number's square and the process that found it; takes `number` passes of work."""
    bench.work.add(bench.queries["q0"], number)
    bench.progress("squared", number=number)
    return {"square": number * number, "process": os.getpid()}


def dying(bench: Workbench, journal: Journal, number: int, marks: str, deaths: int, main: int) -> dict[str, Any]:
    """As `squared`, but so many workers are killed at it; each leaves a mark."""
    left = Path(marks)
    if os.getpid() != main and len(list(left.iterdir())) < deaths:
        (left / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return squared(bench, journal, number)


def failing(bench: Workbench, journal: Journal, number: int, main: int) -> dict[str, Any]:
    """As `squared`, but no worker has the memory for it."""
    if os.getpid() != main:
        raise MemoryError("no room")
    return squared(bench, journal, number)


def refusing(bench: Workbench, journal: Journal, number: int) -> dict[str, Any]:
    """Bad input."""
    raise InputError("frame.png", "does not decode", "replace it", f"number {number}")


def killed_on_the_way(bench: Workbench, journal: Journal, marks: str) -> list[int]:
    """Ten steps that a journal remembers; the worker is killed after the sixth, once. The process of each step."""
    processes = []
    for step in range(10):
        processes.append(journal.step(f"step {step}", lambda: _counted(bench)))
        if step == 5 and not Path(marks).exists():
            Path(marks).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return processes


def _counted(bench: Workbench) -> int:
    bench.work.add(bench.queries["q0"], 1)
    return os.getpid()


def trial_killed_once(bench: Workbench, journal: Journal, start: dict, recipe: dict) -> float | None:
    """A trial of a rate (merger.methods.rate); the first worker that is half-way through one is killed."""
    mark, steps = bench.workload.path.parent / "killed", 0
    tick = journal.tick

    def counted() -> None:
        nonlocal steps
        steps += 1
        if steps == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        tick()

    journal.tick = counted
    return trial(bench, journal, start, recipe)
