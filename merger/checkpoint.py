"""Resume after a kill: named results, loop state and training state in one file that is replaced atomically.

A method starts from its beginning after an interruption and asks the cache on the way; finished steps return at once.
Batches, their order and random numbers are functions of the seed and the step number (`merger.training.data`), so a
resumed merge writes the same bundle, bit by bit, on the same CPU. At most `save_interval_s` of work are lost.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from merger.distributed import ProcessGroup
from models.errors import InputError
from models.io import open_atomic, read_bounded

T = TypeVar("T")
State = dict[str, Tensor]
WORK_SUFFIX = ".work"
"""Appended to the output's name: the folder of the checkpoint."""
STATE = "state.pt"
MARK = "gemel-work"
MARK_TEXT = b"gemel: interrupted work; the same command with --resume goes on with it\n"
FORMAT = 19
_UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, pickle.UnpicklingError,
)  # fmt: skip


@dataclass(frozen=True)
class CheckpointConfig:
    """How often the file is written: every `save_interval_s`; writing takes at most `max_write_fraction`."""

    save_interval_s: float = 20.0
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


class FlopMeter(Protocol):
    """Counts FLOPs; `merger.training.recipe.Flops` is one."""

    total: float


class Stateful(Protocol):
    """Has a state that can be restored; `merger.training.loop.Training` is one."""

    after_step: Callable[[], None]

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later step depends on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Inverse of `state_dict`."""
        ...


@storable
@dataclass
class CacheState:
    """What a step cache stores: finished results with the FLOPs counted by then, loop state, training states."""

    done: dict[str, tuple[Any, float]] = field(default_factory=dict)
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
    """Named results, loop state and trainings of a search, in memory; `Checkpoint` stores them too.

    Names (str or str enums) are relative to the step at work; what was kept within a step is dropped when it finishes.
    Values are plain values, tensors and `storable` dataclasses, and are not changed afterwards. `meter`, where given,
    shows after a restored step what it showed when that step finished.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group or ProcessGroup()
        self.meter: FlopMeter | None = None
        self.log: list[dict[str, Any]] = []
        self._state = CacheState()
        self._trainings: dict[str, Stateful] = {}
        self._scope: list[str] = []

    def step(self, name: str, compute: Callable[[], T]) -> T:
        """The result of this step, computed unless it finished before; of several processes that of rank 0."""
        path = self._path(name)
        if path in self._state.done:
            value, total = self._state.done[path]
            self._set_meter(total)
            return value
        self._scope.append(name)
        try:
            value = compute()
        finally:
            self._scope.pop()
        value = self.group.broadcast(value)
        self._drop(path)
        self._state.done[path] = (value, self._meter_total())
        self.maybe_save()
        return value

    def has_done(self, name: str) -> bool:
        """Whether this step is finished."""
        return self._path(name) in self._state.done

    def state(self, name: str) -> dict[str, Any]:
        """The mutable state of a loop, as last stored, or empty.

        Change it only between two calls that may save (a training step, a finished step, `maybe_save`), together with
        what it describes.
        """
        path = self._path(name)
        if path in self._state.loops:
            self._set_meter(self._state.flops)
        return self._state.loops.setdefault(path, {})

    def training(self, name: str, training: Stateful) -> None:
        """Restore this training if it was begun before; from now on its state is stored."""
        path = self._path(name)
        if path in self._state.trainings:
            training.load_state_dict(self._state.trainings.pop(path))
            self._set_meter(self._state.flops)
        self._trainings[path] = training
        training.after_step = self.maybe_save

    def discard(self, name: str) -> None:
        """Drop a result that is no longer needed, and all that was kept within it."""
        path = self._path(name)
        self._state.done.pop(path, None)
        self._drop(path)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Append a row to the log; the log is not stored: a resumed method appends its rows again."""
        self.log.append(dict(row))

    def maybe_save(self) -> None:
        """Store everything if it is time to; nothing to do in memory."""

    def _cache_state(self) -> CacheState:
        running = {path: training.state_dict() for path, training in self._trainings.items()}
        return CacheState(
            self._state.done, self._state.loops, {**self._state.trainings, **running}, self._meter_total()
        )

    def _restore(self, state: CacheState) -> None:
        self._state = state

    def _path(self, name: str) -> str:
        return "/".join([*self._scope, name.value if hasattr(name, "value") else name])  # type: ignore[attr-defined]

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
    for a folder that Gemel did not make, for a stored state without `resume`, and for a state of another identity.
    `seconds` is the time spent before this start.
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
            self._restore(found.cache)
        self._opened = self._saved = time.monotonic()
        self._write_s = 0.0

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
        seconds = self.seconds + started - self._opened
        content = CheckpointFile(FORMAT, self._identity, seconds, self._cache_state())
        if self.group.rank == 0:
            self._write(content)
        self._saved = time.monotonic()
        self._write_s = self._saved - started

    def remove(self) -> None:
        """Delete the checkpoint, and its folder unless something else is in it."""
        with suppress(InputError):
            _check_own(self.folder)
            self._remove_partial()
            for name in (STATE, MARK):
                (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()

    def _write(self, content: CheckpointFile) -> None:
        path = self.folder / STATE
        if not os.path.lexists(self.folder):
            _make_folder(self.folder)
        _check_own(self.folder)
        try:
            with open_atomic(path, overwrite=True) as file:
                torch.save(content, file)
        except (InputError, OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = error.problem if isinstance(error, InputError) else f"cannot be written: {reason}"
            hint = "free some space on this disk" + (" and go on with --resume" if path.exists() else "")
            raise InputError(path, problem, hint) from error

    def _read(self, resume: bool) -> CheckpointFile | None:
        path = self.folder / STATE
        if os.path.lexists(self.folder):
            _check_own(self.folder)
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
        for partial in self.folder.glob(".*.tmp"):  # of a write that a kill cut short
            with suppress(OSError):
                partial.unlink()


def _check_own(folder: Path) -> None:
    """Refuse a folder without Gemel's mark."""
    problem = InputError(folder, "was not made by gemel", "move it away, or choose another path")
    if folder.is_symlink() or (folder / MARK).is_symlink():
        raise problem
    try:
        text = read_bounded(folder / MARK, len(MARK_TEXT), "")
    except InputError as error:
        raise problem from error
    if text != MARK_TEXT:
        raise problem


def _make_folder(folder: Path) -> None:
    """Make the folder with its mark in one rename, so that a kill leaves no folder without a mark."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp")
    partial.mkdir()
    (partial / MARK).write_bytes(MARK_TEXT)
    partial.rename(folder)
