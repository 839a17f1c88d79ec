"""Jobs that have a hard time where they run, and a stand-in for Ray whose actors are objects of this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from merger.checkpoint import StepCache
from merger.events import Progress, silent
from merger.jobs import Done, Job, Order, Threads
from merger.methods.rate import trial
from merger.training.step_config import MemoryPlan
from models.errors import InputError


class Lost(Exception):
    """What the stand-in's actors die of."""


class Meter:
    """What counts work."""

    total = 0.0


class Bench:
    """As much of a workbench as jobs of numbers need; `where` says whose it is."""

    def __init__(self, where: str = "main", progress: Progress = silent) -> None:
        self.where, self.progress = where, progress
        self.flops = Meter()
        self.workers: Any = None
        self.threads = Threads(1, 1)
        self.fitting = MemoryPlan()

    def settled(self, queries: Any) -> Mapping[str, str]:
        """Nothing is trained in a precision."""
        return dict.fromkeys(queries, "fp32")


class Desk:
    """A desk of an actor, numbered."""

    made = 0

    def __init__(self, progress: Progress) -> None:
        Desk.made += 1
        self._ctx = Bench(f"desk {Desk.made}", progress)

    def do(self, job: Job, order: Order) -> Done:
        """The result and the work of a job."""
        self._ctx.flops.total = 0.0
        return Done(job.do(self._ctx, StepCache(), **job.given), self._ctx.flops.total)


def squared(ctx: Bench, journal: StepCache, number: int) -> dict[str, Any]:
    """The number's square and who found it; takes `number` of work."""
    ctx.flops.total += number
    ctx.progress("squared", number=number)
    return {"square": number * number, "where": ctx.where}


def dying(ctx: Bench, journal: StepCache, number: int, deaths: list[str], most: int) -> dict[str, Any]:
    """As `squared`, but so many actors die of it."""
    if ctx.where != "main" and len(deaths) < most:
        deaths.append(ctx.where)
        raise Lost
    return squared(ctx, journal, number)


def failing(ctx: Bench, journal: StepCache, number: int) -> dict[str, Any]:
    """As `squared`, but no actor has the memory for it."""
    if ctx.where != "main":
        raise MemoryError("no room")
    return squared(ctx, journal, number)


def refusing(ctx: Bench, journal: StepCache, number: int) -> dict[str, Any]:
    """Bad input."""
    raise InputError("frame.png", "does not decode", "replace it", f"number {number}")


class Ray:
    """The part of Ray's module that merger.workers.cluster uses; of several jobs the last one is done first."""

    def __init__(self, *processors: int) -> None:
        self._nodes = [{"Alive": True, "Resources": {"CPU": float(count)}} for count in processors]
        self.alive: list[Any] = []

        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            def __init__(self, cause: Exception) -> None:
                self.cause = cause

        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def nodes(self) -> list[dict[str, Any]]:
        """The machines."""
        return self._nodes

    def remote(self, **needs: int) -> Callable[[type], Any]:
        """What makes actors of a class."""

        def of(kind: type) -> Any:
            return SimpleNamespace(remote=lambda *given: self._hired(kind(*given)))

        return of

    def wait(self, answers: Sequence[_Answer], timeout: float) -> tuple[list[_Answer], list[_Answer]]:
        """The last of these, done."""
        with suppress(Exception):  # whoever asks for it hears of that
            answers[-1].do()
        return [answers[-1]], list(answers[:-1])

    def get(self, answer: _Answer, timeout: float | None = None) -> Any:
        """What came of it."""
        try:
            return answer.do()
        except Lost as error:
            raise self.exceptions.RayError from error
        except Exception as error:
            raise self.exceptions.RayTaskError(error) from error

    def kill(self, handle: Any) -> None:
        """End an actor."""
        self.alive.remove(handle)

    def _hired(self, actor: Any) -> Any:
        def method(name: str) -> Any:
            return SimpleNamespace(remote=lambda *given: _Answer(lambda: getattr(actor, name)(*given)))

        self.alive.append(SimpleNamespace(do=method("do"), told=method("told")))
        return self.alive[-1]


class _Answer:
    """A call that is made once, when somebody wants to know."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._found, self._error = call, None, None

    def do(self) -> Any:
        """What the call returns or raises."""
        if self._call is not None:
            call, self._call = self._call, None
            try:
                self._found = call()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._found


def trial_killed_once(ctx: Any, journal: StepCache, start: dict, recipe: dict) -> float | None:
    """A trial of a rate (merger.methods.rate); the first worker that is half-way through one is killed."""
    mark, steps = ctx.workload.path.parent / "killed", 0
    tick = journal.maybe_save

    def counted() -> None:
        nonlocal steps
        steps += 1
        if steps == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        tick()

    journal.maybe_save = counted
    return trial(ctx, journal, start, recipe)
