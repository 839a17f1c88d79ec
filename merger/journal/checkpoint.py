"""The state of a merge on the disk, so that a merge that was killed at any moment goes on and ends the same; so is
that of an original's training.

One file beside what is made holds everything: what was accepted after the last finished round, and the journal of
what has been done since (`merger.journal.steps`): results, the state of the training at work, the best so far. It is
replaced whole in one step, every INTERVAL_S seconds of work, so that less than 30 s are lost; where writing takes
long it is done less often, so that it takes at most a quarter of the time. What it holds besides decides nothing:
batches, their order and all random numbers are functions of the seed and the number of the step
(`merger.training.batches`), so a resumed merge gives the same bundle, bit by bit, on the same processor.
Of several processes (`merger.crew`) the first reads and writes it, and it does not depend on how many they are.
A seal (`merger.journal.sealed`) tells what was damaged. When there is no room for a new file, the merge ends with one
line, and the last good file stays for `--resume`.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from merger.crew.crew import Crew
from merger.journal.sealed import FAULTS, load_sealed, save_sealed
from merger.journal.steps import Journal
from models.errors import InputError
from models.io import open_atomic, read_bounded

WORK_SUFFIX = ".work"
"""Of the folder beside what is made: its name, and this."""
STATE = "state.pt"
MARK = "gemel-work"
"""The file that says that a folder is such a one: nobody else's is written to, or removed."""
SAID = b"gemel: interrupted work; the same command with --resume goes on with it\n"
FORMAT = 18
INTERVAL_S = 20.0
WRITING_SHARE = 0.25


class Checkpoint(Journal):
    """A folder beside what is made with the file described above, and a mark; InputError for a folder without one.

    `identity` tells one merge from another (workload, method, seed, options), or `what` else is done; a folder of
    another one is refused, and so is an existing one unless `resume`. `log` are the rows of the merge's log so far,
    `accepted` what was saved after the last finished round (plain values and tensors, None before), `work` what had
    been done then.
    With a `crew` all processes make one, and call `tick` at the same moments: what they know is the same.
    """

    def __init__(
        self, folder: Path, identity: dict[str, Any], resume: bool, crew: Crew | None = None, what: str = "merge"
    ) -> None:
        super().__init__()
        self._crew, self._what = crew or Crew(), what
        self.folder, self.identity = folder, json.loads(json.dumps(identity))
        self.rounds, self.seconds, self.work = 0, 0.0, 0.0
        self.rate: float | None = None
        self.log: list[dict[str, Any]] = []
        self.accepted: Any = None
        self._settled_rows = 0
        self._writing_s = 0.0
        found = self._crew.once(partial(self._find, resume))
        if found is not None and self._crew.rank:  # the first has taken it to see whether it is sound
            self._take(found)
        self._seconds_before, self._opened = self.seconds, time.monotonic()
        self._stored = time.monotonic()

    def save(
        self, accepted: Any, rounds: int, rows: list[dict[str, Any]], work: float, seconds: float, rate: float
    ) -> None:
        """Store the state after a finished round, in place of the one before."""
        self.rounds, self.work, self.rate, self.accepted = rounds, work, rate, accepted
        self._seconds_before, self._opened = seconds, time.monotonic()
        self.log += rows
        self._settled_rows = len(self.log)
        self.write()

    def note(self, row: dict[str, Any]) -> None:
        """Add a row to the log that running the method again would add again."""
        self.log.append(row)

    def tick(self) -> None:
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
            "work": self.work, "rate": self.rate, "log": self.log[: self._settled_rows],
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
            what = error.fault if isinstance(error, InputError) else f"cannot be written: {said}"
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
        self.rounds, self.seconds, self.work = content["rounds"], content["seconds"], content["work"]
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
    counts = (rounds, content["seconds"], content["work"], 0.0 if rate is None else rate)
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
