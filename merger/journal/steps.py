"""What a long search has found out so far, by name, so that it can go on from there.

A method runs from its beginning again after an interruption, and asks the journal on the way:
- `step(name, compute)` returns the result of a finished piece of work, or does it and notes its result;
- `training(name, training)` puts a training back to where it stood;
- `part(name)` is a dict in which a loop keeps what it must not forget (what it validated, its best state).
Names are relative to the step at work, and what was kept within a step is dropped when the step is finished.
A loop over a training is right when its parts change only between two calls that may store (a training step, a
finished `step`, `tick`), together with what they describe. Results and parts are plain values and tensors, which
nobody changes afterwards. This class keeps them in memory; a `Checkpoint` also stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Meter(Protocol):
    """What counts the work; `merger.training.loop.Work` is one."""

    total: float


class Stateful(Protocol):
    """What can be put back to where it stood; `merger.training.loop.Training` is one."""

    after_step: Callable[[], None]

    def state_dict(self) -> dict[str, Any]:
        """All that the following steps depend on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Inverse of `state_dict`."""
        ...


class Journal:
    """Named results, parts and trainings. `meter`, where given, shows after a restored piece what it showed then."""

    def __init__(self) -> None:
        self.meter: Meter | None = None
        self._done: dict[str, tuple[Any, float]] = {}
        self._parts: dict[str, dict] = {}
        self._stopped: dict[str, Mapping[str, Any]] = {}  # states of trainings nobody has asked for again yet
        self._trainings: dict[str, Stateful] = {}
        self._meter_then: float | None = None  # what the meter showed when parts and trainings were stored
        self._scope: list[str] = []

    def step(self, name: str, compute: Callable[[], T]) -> T:
        """The result of this piece of work, done now unless it was finished before."""
        path = self._path(name)
        if path in self._done:
            value, total = self._done[path]
            self._show(total)
            return value
        self._scope.append(name)
        try:
            value = compute()
        finally:
            self._scope.pop()
        self._drop(path)
        self._done[path] = (value, self._shown())
        self.tick()
        return value

    def has_done(self, name: str) -> bool:
        """Whether this piece of work is finished."""
        return self._path(name) in self._done

    def part(self, name: str) -> dict:
        """The dict of this name, as it was last stored, or empty; change it in place."""
        path = self._path(name)
        if path in self._parts:
            self._show(self._meter_then)
        return self._parts.setdefault(path, {})

    def training(self, name: str, training: Stateful) -> None:
        """Put this training back to where it stood, if it was begun before; from now on its state is kept."""
        path = self._path(name)
        if path in self._stopped:
            training.load_state_dict(self._stopped.pop(path))
            self._show(self._meter_then)
        self._trainings[path] = training
        training.after_step = self.tick

    def forget(self, name: str) -> None:
        """Drop a result that is needed no longer, and all that was kept within it."""
        path = self._path(name)
        self._done.pop(path, None)
        self._drop(path)

    def tick(self) -> None:
        """The moment is right for storing; nothing to do in memory."""

    def state_dict(self) -> dict[str, Any]:
        """Everything noted, as plain values and tensors."""
        states = {**self._stopped, **{path: training.state_dict() for path, training in self._trainings.items()}}
        return {"done": self._done, "parts": self._parts, "trainings": states, "meter": self._shown()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._done = {path: (value, total) for path, (value, total) in state["done"].items()}
        self._parts = {path: dict(part) for path, part in state["parts"].items()}
        self._stopped, self._meter_then = dict(state["trainings"]), state["meter"]

    def _path(self, name: str) -> str:
        return "/".join([*self._scope, name])

    def _drop(self, path: str) -> None:
        kept_within = f"{path}/"
        for kept in (self._done, self._parts, self._stopped, self._trainings):
            for inner in [inner for inner in kept if inner.startswith(kept_within) or inner == path]:
                del kept[inner]

    def _shown(self) -> float:
        return self.meter.total if self.meter is not None else 0.0

    def _show(self, total: float | None) -> None:
        if self.meter is not None and total is not None:
            self.meter.total = total
