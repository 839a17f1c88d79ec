"""States of models, as a merge and a training keep them.

A file of plain values and tensors with a seal at its end: what is read is, byte for byte, what was written here.

So nothing in it has to be checked again, however deep it lies. The seal is no secret: it tells damage, and files of
others, from our own.

What a long search has found out so far, by name, so that it can go on from there.

A method runs from its beginning again after an interruption, and asks the journal on the way:
- `step(name, compute)` returns the result of a finished piece of work, or does it and notes its result;
- `training(name, training)` puts a training back to where it stood;
- `part(name)` is a dict in which a loop keeps what it must not forget (what it validated, its best state).
Names are relative to the step at work, and what was kept within a step is dropped when the step is finished.
A loop over a training is right when its parts change only between two calls that may store (a training step, a
finished `step`, `tick`), together with what they describe. Results and parts are plain values and tensors, which
nobody changes afterwards. This class keeps them in memory; a `Checkpoint` also stores them.

The state of a merge on the disk, so that a merge that was killed at any moment goes on and ends the same; so is
that of an original's training.

One file beside what is made holds everything: what was accepted after the last finished round, and the journal of
what has been done since (`merger.checkpoint`): results, the state of the training at work, the best so far. It is
replaced whole in one step, every INTERVAL_S seconds of work, so that less than 30 s are lost; where writing takes
long it is done less often, so that it takes at most a quarter of the time. What it holds besides decides nothing:
batches, their order and all random numbers are functions of the seed and the number of the step
(`merger.training.data`), so a resumed merge gives the same bundle, bit by bit, on the same processor.
Of several processes (`merger.crew`) the first reads and writes it, and it does not depend on how many they are.
A seal (`merger.checkpoint`) tells what was damaged. When there is no room for a new file, the merge ends with one
line, and the last good file stays for `--resume`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import torch
from torch import Tensor, nn

from merger.distributed import ProcessGroup
from models.errors import InputError
from models.io import open_atomic, read_bounded

State = dict[str, Tensor]


def snapshot(model: nn.Module) -> State:
    """A copy of a model's state, in the processor's memory: a merge keeps several, and a card has room for none."""
    return {name: _kept(tensor) for name, tensor in model.state_dict().items()}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def snapshots(models: Mapping[str, nn.Module]) -> dict[str, State]:
    """A copy of each model's state, as `snapshot` makes it."""
    return {query: snapshot(model) for query, model in models.items()}


SEAL = b"\ngemel seal sha256 "
LENGTH = len(SEAL) + 64
CHUNK_BYTES = 2**20
FAULTS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
)
"""What reading a file that is none, or a damaged one, comes to."""


class _Sealing:
    """A file as `torch.save` writes to it, which remembers a digest of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def save_sealed(content: Any, file: BinaryIO) -> None:
    """Write plain values and tensors, then the seal; torch alone can read it too."""
    sealing = _Sealing(file)
    torch.save(content, sealing)  # type: ignore[arg-type]
    file.write(SEAL + sealing.digest.hexdigest().encode())


def load_sealed(path: Path) -> Any:
    """What `save_sealed` wrote. Raises one of FAULTS for every other file, links and pipes among them.

    Nothing of it is unpacked before the seal was found and its digest was seen to be right.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        left = found.st_size - LENGTH
        file.seek(max(0, left))
        seal = file.read(LENGTH)
        if left < 0 or not seal.startswith(SEAL):
            raise ValueError("it was cut, changed, or written by another version")
        file.seek(0)
        digest = hashlib.sha256()
        while left > 0 and (chunk := file.read(min(left, CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
        if seal[len(SEAL) :] != digest.hexdigest().encode():
            raise ValueError("it was changed since it was written")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


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


class StepCache:
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
        self.maybe_save()
        return value

    def has_done(self, name: str) -> bool:
        """Whether this piece of work is finished."""
        return self._path(name) in self._done

    def state(self, name: str) -> dict:
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
        training.after_step = self.maybe_save

    def discard(self, name: str) -> None:
        """Drop a result that is needed no longer, and all that was kept within it."""
        path = self._path(name)
        self._done.pop(path, None)
        self._drop(path)

    def maybe_save(self) -> None:
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


WORK_SUFFIX = ".work"
"""Of the folder beside what is made: its name, and this."""
STATE = "state.pt"
MARK = "gemel-work"
"""The file that says that a folder is such a one: nobody else's is written to, or removed."""
SAID = b"gemel: interrupted work; the same command with --resume goes on with it\n"
FORMAT = 18
INTERVAL_S = 20.0
WRITING_SHARE = 0.25


class Checkpoint(StepCache):
    """A folder beside what is made with the file described above, and a mark; InputError for a folder without one.

    `identity` tells one merge from another (workload, method, seed, options), or `what` else is done; a folder of
    another one is refused, and so is an existing one unless `resume`. `log` are the rows of the merge's log so far,
    `accepted` what was saved after the last finished round (plain values and tensors, None before), `work` what had
    been done then.
    With a `crew` all processes make one, and call `tick` at the same moments: what they know is the same.
    """

    def __init__(
        self,
        folder: Path,
        identity: dict[str, Any],
        resume: bool,
        crew: ProcessGroup | None = None,
        what: str = "merge",
    ) -> None:
        super().__init__()
        self._crew, self._what = crew or ProcessGroup(), what
        self.folder, self.identity = folder, json.loads(json.dumps(identity))
        self.rounds, self.seconds, self.flops = 0, 0.0, 0.0
        self.rate: float | None = None
        self.log: list[dict[str, Any]] = []
        self.accepted: Any = None
        self._settled_rows = 0
        self._writing_s = 0.0
        found = self._crew.run_on_rank0(partial(self._find, resume))
        if found is not None and self._crew.rank:  # the first has taken it to see whether it is sound
            self._take(found)
        self._seconds_before, self._opened = self.seconds, time.monotonic()
        self._stored = time.monotonic()

    def save(
        self, accepted: Any, rounds: int, rows: list[dict[str, Any]], flops: float, seconds: float, rate: float
    ) -> None:
        """Store the state after a finished round, in place of the one before."""
        self.rounds, self.flops, self.rate, self.accepted = rounds, flops, rate, accepted
        self._seconds_before, self._opened = seconds, time.monotonic()
        self.log += rows
        self._settled_rows = len(self.log)
        self.write()

    def add_row(self, row: dict[str, Any]) -> None:
        """Add a row to the log that running the method again would add again."""
        self.log.append(row)

    def maybe_save(self) -> None:
        """Store everything if enough time has passed since it was stored last."""
        due = time.monotonic() - self._stored >= max(INTERVAL_S, self._writing_s / WRITING_SHARE)
        if self._crew.first(due):
            self.write()

    def write(self) -> None:
        """Store everything now; InputError when that cannot be done, and then the file before is as it was."""
        started = time.monotonic()
        self.seconds = self._seconds_before + started - self._opened
        content = {
            "format": FORMAT, "identity": self.identity, "rounds": self.rounds, "seconds": self.seconds,
            "flops": self.flops, "rate": self.rate, "log": self.log[: self._settled_rows],
            "accepted": self.accepted, "journal": self.state_dict(),
        }  # fmt: skip
        path = self.folder / STATE
        if self._crew.rank:
            return
        try:
            if not os.path.lexists(self.folder):
                _make(self.folder)
            _check_own(self.folder)
            with open_atomic(path, overwrite=True) as file:
                save_sealed(content, file)
        except _Foreign:
            raise
        except (InputError, OSError, RuntimeError) as error:
            said = getattr(error, "strerror", None) or error
            what = error.problem if isinstance(error, InputError) else f"cannot be written: {said}"
            remedy = "free some space on this disk and go on with --resume from the checkpoint before"
            raise InputError(path, what, remedy if path.exists() else "free some space on this disk") from error
        self._stored = time.monotonic()
        self._writing_s = self._stored - started

    def remove(self) -> None:
        """The merge is done: its files are needed no longer, nor is the folder if nobody put anything else there."""
        try:
            _check_own(self.folder)
        except _Foreign:  # nothing was stored, or somebody put another folder there meanwhile
            return
        self._remove_torn()
        for name in (STATE, MARK):
            with suppress(OSError):
                (self.folder / name).unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def _remove_torn(self) -> None:
        """What a kill left while the file was written."""
        for torn in self.folder.glob(f".{STATE}.*.tmp"):
            with suppress(OSError):
                torn.unlink()

    def _find(self, resume: bool) -> dict[str, Any] | None:
        """What was left by an interruption; None where there is nothing."""
        path = self.folder / STATE
        if os.path.lexists(self.folder):
            _check_own(self.folder)
        if not os.path.lexists(path):
            return None
        if not resume:
            fault = f"holds an interrupted {self._what}"
            raise InputError(self.folder, fault, "give --resume to go on, or remove the folder")
        self._remove_torn()
        return self._checked(path)

    def _take(self, content: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.rounds, self.seconds, self.flops = content["rounds"], content["seconds"], content["flops"]
        self.rate, self.log, self.accepted = content["rate"], list(content["log"]), content["accepted"]
        self.load_state_dict(content["journal"])
        self._settled_rows = len(self.log)

    def _checked(self, path: Path) -> dict[str, Any]:
        try:
            content = load_sealed(path)
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}")
            identity = json.loads(json.dumps(dict(content["identity"])))
            _check_head(content)
            self._take(content)
        except FAULTS as error:
            said = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())[:120]
            fault = f"is no checkpoint: {said}"
            raise InputError(path, fault, "remove the folder and start again") from error
        if identity != self.identity:
            changed = [key for key in self.identity if self.identity[key] != identity.get(key)]
            fault = f"belongs to another {self._what} ({', '.join(changed)} differ)"
            raise InputError(path, fault, f"remove the folder, or {self._what.removesuffix('ing')} as before")
        return content


def _check_head(content: Mapping[str, Any]) -> None:
    """Raise ValueError for what no merge counts."""
    rounds, rate = content["rounds"], content["rate"]
    counts = (rounds, content["seconds"], content["flops"], 0.0 if rate is None else rate)
    if not all(type(count) in (int, float) and 0 <= count < math.inf for count in counts):
        raise ValueError("its counts are none")
    if type(rounds) is not int or not all(isinstance(row, dict) for row in list(content["log"])):
        raise ValueError("its log is none")


class _Foreign(InputError):
    """A folder that somebody else made."""


def _check_own(folder: Path) -> None:
    """Refuse a folder that bears no mark."""
    fault = _Foreign(folder, "was not made by gemel", "move it away, or choose another path")
    if folder.is_symlink() or (folder / MARK).is_symlink():
        raise fault
    try:
        said = read_bounded(folder / MARK, len(SAID), "")
    except InputError as error:
        raise fault from error
    if said != SAID:
        raise fault


def _make(folder: Path) -> None:
    """Make the folder with its mark: it has its name once it is whole, whatever ends the merge meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp")
    making.mkdir()
    try:
        (making / MARK).write_bytes(SAID)
        making.rename(folder)
    except BaseException:
        (making / MARK).unlink(missing_ok=True)
        making.rmdir()
        raise
