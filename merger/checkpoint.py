"""Resume after a kill: named results, loop state and training state in one file that is replaced atomically.

A method starts from its beginning after an interruption and asks the cache on the way; finished steps return at once.
Batches, their order and random numbers are functions of the seed and the step number (`merger.training.data`), so a
resumed merge writes the same bundle, bit by bit, on the same CPU. At most `save_interval_s` of work are lost.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gemel.merger.distributed import ProcessGroup
from gemel.models.errors import InputError
from gemel.models.files.io import open_atomic

T = TypeVar("T")
State = dict[str, Tensor]
Row = Mapping[str, Any]
"""A row of the merge's log: plain values."""
WORK_SUFFIX = ".work"
"""Appended to the output's name: the folder of the checkpoint."""
STATE = "state.pt"
FORMAT = 31
_UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, pickle.UnpicklingError,
)  # fmt: skip


@dataclass(frozen=True)
class CheckpointConfig:
    """How often the file is written: every `save_interval_s`; writing takes at most `max_write_fraction`."""

    save_interval_s: float = 60.0
    max_write_fraction: float = 0.25


CONFIG = CheckpointConfig()


def storable(cls: type[T]) -> type[T]:
    """Allow a dataclass or enum in checkpoints, which are read with weights_only=True."""
    torch.serialization.add_safe_globals([cls])
    return cls


def snapshot(model: nn.Module) -> State:
    """A copy of a model's state on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def snapshots(models: Mapping[str, nn.Module]) -> dict[str, State]:
    """A copy of each model's state on the CPU."""
    return {query: snapshot(model) for query, model in models.items()}


class Step(str, Enum):
    """Names of steps and loop states; a query or a number may follow."""

    ACCEPTED = "accepted"
    ATTEMPT = "attempt"
    BEGUN = "begun"
    BEST = "best"
    BITS = "start of a step of bits"
    BITS_TIME = "time for a step of bits"
    CAMERA_PREFIXES = "camera prefixes"
    COMPUTED = "computed"
    EVALUATED = "evaluated"
    LAYERS = "layers"
    MEMORY = "memory"
    NETWORK = "network"
    NETWORK_TRIAL = "network trial"
    METHOD = "method"
    PREFIX = "prefix"
    PRIVATE = "private layers"
    PROGRESS = "progress"
    QUANTIZED = "quantized"
    QUANTIZED_ORIGINALS = "quantized originals"
    QUERY = "query"
    RECIPE = "recipe"
    ROUND = "round"
    ROUNDED = "codes of int4"
    RUNG_TIME = "time for a rung"
    SEARCH = "search"
    SCHEDULE = "schedule"
    STARTS = "starts"
    SENSITIVITY = "sensitivity"
    TEST = "test"
    TIED = "tied"
    TRAINED = "trained"
    TRAINING = "training"
    TRUNK = "trunk"
    TUNING = "tuning"
    WIDE = "float32"


@storable
@dataclass
class StepResult:
    """What a step returned, the FLOPs counted by its end, and the log rows that were added within it."""

    value: Any = None
    flops: float = 0.0
    rows: list[Row] = field(default_factory=list)
    done: bool = False


@storable
@dataclass
class CacheState:
    """What a step cache stores: finished steps, loop states, training states."""

    done: dict[str, StepResult] = field(default_factory=dict)
    loops: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainings: dict[str, Any] = field(default_factory=dict)
    flops: float | None = None


@storable
@dataclass
class CheckpointFile:
    """The content of the checkpoint file; `identity` is JSON text a key."""

    format: int
    identity: dict[str, str]
    seconds: float
    cache: CacheState


class StepCache:
    """Results of steps, loop states and trainings of a search, in memory; `Checkpoint` stores them too.

    Names are relative to the step at work; what was kept within a step is dropped when it finishes. Values are plain
    values, tensors and `storable` dataclasses, and are not changed afterwards. `meter` (merger.training.recipe.Flops),
    where given, shows after a restored step what it showed when that step finished. `log` has the rows of the merge.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group or ProcessGroup()
        self.meter: Any = None
        self.log: list[Row] = []
        self._state = CacheState()
        self._counted = set[str]()  # steps whose FLOPs the meter shows already
        self._trainings: dict[str, Any] = {}
        self._scope: list[str] = []

    @contextmanager
    def open_step(self, name: str, *parts: str) -> Iterator[StepResult]:
        """A step: unless the result is `done`, give it a `value` within; of several processes that of rank 0 counts."""
        path = self._path(name, *parts)
        if path in self._state.done:
            found = self._state.done[path]
            if path not in self._counted:
                self._set_meter(found.flops)
            self._counted.add(path)
            self.log += found.rows
            yield found
            return
        result, rows = StepResult(), len(self.log)
        self._scope.append(" ".join([name, *parts]))
        try:
            yield result
        finally:
            self._scope.pop()
        result.value, result.flops = self.group.broadcast(result.value), self._meter_total()
        result.rows, result.done = self.log[rows:], True
        self._drop(path)
        self._state.done[path] = result
        self._counted.add(path)
        self.maybe_save()

    def step(self, name: str, compute: Callable[[], T], *parts: str) -> T:
        """The result of a step, computed unless it is done."""
        with self.open_step(name, *parts) as result:
            if not result.done:
                result.value = compute()
        return result.value

    def state(self, name: str) -> dict[str, Any]:
        """The mutable state of a loop, as last stored, or empty.

        Change it only between two calls that may save (a training step, a finished step, `maybe_save`), together with
        what it describes.
        """
        path = self._path(name)
        if path in self._state.loops:
            self._set_meter(self._state.flops)
        return self._state.loops.setdefault(path, {})

    def training(self, training: Any, *parts: str) -> None:
        """Restore this merger.training.loop.Training if it was begun before; from now on its state is stored."""
        path = self._path(Step.TRAINING, *parts)
        if path in self._state.trainings:
            training.load_state_dict(self._state.trainings.pop(path))
            self._set_meter(self._state.flops)
        self._trainings[path] = training
        training.after_step = self.maybe_save

    def discard(self, name: str, *parts: str) -> None:
        """Drop a result that is no longer needed, and all that was kept within it."""
        path = self._path(name, *parts)
        self._state.done.pop(path, None)
        self._drop(path)

    def add_row(self, row: Row) -> None:
        """Append a row to the log; rows that were added outside a finished step are added again on resume."""
        self.log.append(dict(row))

    def maybe_save(self) -> None:
        """Store everything if it is time to; nothing to do in memory."""

    def _path(self, name: str, *parts: str) -> str:
        return "/".join([*self._scope, " ".join([name, *parts])])

    def _drop(self, path: str) -> None:
        for kept in (self._state.done, self._state.loops, self._state.trainings, self._trainings):
            for inner in [inner for inner in kept if inner == path or inner.startswith(f"{path}/")]:
                del kept[inner]

    def _meter_total(self) -> float:
        return self.meter.total if self.meter is not None else 0.0

    def _set_meter(self, total: float | None) -> None:
        if self.meter is not None and total is not None:
            self.meter.total = total


class Checkpoint(StepCache):
    """A step cache in a folder beside the output; rank 0 reads and writes it, for any number of processes.

    `identity` (JSON values) names the workload, method, seed and options, `what` the kind of work. Raises InputError
    for a stored state without `resume`, one that cannot be read, and one of another identity. `seconds` is the time
    spent before this start.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        resume: bool,
        group: ProcessGroup | None = None,
        what: str = "merge",
    ) -> None:
        super().__init__(group)
        self.folder, self._what = folder, what
        self._identity = {key: json.dumps(value, sort_keys=True) for key, value in identity.items()}
        found = self.group.run_on_rank0(lambda: self._read(resume))
        self.seconds = found.seconds if found else 0.0
        if found:
            self._state = found.cache
        self._opened = self._saved = time.monotonic()
        self._write_s = 0.0

    @property
    def digest(self) -> str:
        """The identity, as a SHA-256."""
        return hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()

    @property
    def elapsed_s(self) -> float:
        """Seconds of work, of all starts."""
        return self.seconds + time.monotonic() - self._opened

    def maybe_save(self) -> None:
        """Store everything if `save_interval_s` have passed since the last time."""
        if self.group.is_local:
            return
        wait = max(CONFIG.save_interval_s, self._write_s / CONFIG.max_write_fraction)
        if self.group.broadcast(time.monotonic() - self._saved >= wait):
            self.save()

    def save(self) -> None:
        """Store everything now; InputError when that fails, and then the file before is unchanged."""
        started = time.monotonic()
        running = {path: training.state_dict() for path, training in self._trainings.items()}
        trainings = {**self._state.trainings, **running}
        cache = CacheState(self._state.done, self._state.loops, trainings, self._meter_total())
        seconds = self.elapsed_s
        if self.group.rank == 0:
            self._write(CheckpointFile(FORMAT, self._identity, seconds, cache))
        self._saved = time.monotonic()
        self._write_s = self._saved - started

    def remove(self) -> None:
        """Delete the checkpoint, and its folder unless something else is in it."""
        self._remove_partial()
        with suppress(OSError):
            (self.folder / STATE).unlink(missing_ok=True)
            self.folder.rmdir()

    def _write(self, content: CheckpointFile) -> None:
        path = self.folder / STATE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open_atomic(path, overwrite=True) as file:
                torch.save(content, file)
        except (InputError, OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = error.problem if isinstance(error, InputError) else f"cannot be written: {reason}"
            hint = "free some space on this disk" + (" and go on with --resume" if path.exists() else "")
            raise InputError(path, problem, hint) from error

    def _read(self, resume: bool) -> CheckpointFile | None:
        path = self.folder / STATE
        if not os.path.lexists(path):
            return None
        if not resume:
            problem = f"holds an interrupted {self._what}"
            raise InputError(self.folder, problem, "give --resume to go on, or remove the folder")
        self._remove_partial()
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(content, CheckpointFile) or content.format != FORMAT:
                raise ValueError("it was written by another version")
        except _UNREADABLE as error:
            reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())[:120]
            raise InputError(path, f"is no checkpoint: {reason}", "remove the folder and start again") from error
        if content.identity != self._identity:
            changed = [key for key, value in self._identity.items() if content.identity.get(key) != value]
            problem = f"belongs to another {self._what} ({', '.join(changed)} differ)"
            raise InputError(path, problem, "remove the folder, or repeat the command as before")
        return content

    def _remove_partial(self) -> None:
        """Remove what a kill in the middle of a write has left (models.files.io.open_atomic)."""
        for partial in self.folder.glob(".*.tmp"):
            with suppress(OSError):
                partial.unlink()
