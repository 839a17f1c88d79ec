"""What a box remembers of its updates, in two files of its spool.

The history (`history.json`) is what the box has seen itself: no word of a server enters it. Where it is damaged nothing
is installed until a person has looked at it. What servers said (`server.json`) is worth nothing, and begun anew.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from gemel.edge_runtime.updates.update_health import HealthLimits
from gemel.models.bundle.signing import MAX_SEQUENCE
from gemel.models.errors import InputError, one_line
from gemel.models.files.documents import ParseError, parse_json
from gemel.models.files.io import Exact, open_atomic, read_json, validate

MAX_FILE_BYTES, MAX_REFUSED, MAX_REASON = 1 << 20, 1000, 400
MAX_FAILURES = 1000
ASK_A_PERSON = "no update is installed before somebody has looked at this file and removed it"

log = logging.getLogger("gemel.run")
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Reason = Annotated[str, Field(max_length=MAX_REASON)]
Sequence = Annotated[int, Field(ge=0, le=MAX_SEQUENCE)]
Count = Annotated[int, Field(ge=0)]


class UpdateTrial(Exact):
    """A bundle that serves and has to prove itself.

    `previous` is the digest of the bundle before it, `limits` what was measured with that one, `starts` those of the
    process since. With a `verdict` it is being taken back.
    """

    digest: Digest
    previous: Digest
    sequence: Sequence = 0
    starts: Count = 0
    limits: HealthLimits = HealthLimits()
    verdict: Reason | None = None


class UpdateHistory(Exact):
    """`highest` is the largest number of a bundle that has served, `refused` the bundles that were taken back.

    One that was merely late may come again at its time in `again_at` (seconds since 1970).
    """

    highest: Sequence = 0
    refused: dict[Digest, Reason] = Field(default_factory=dict)
    again_at: dict[Digest, float] = Field(default_factory=dict)
    trial: UpdateTrial | None = None

    def begin_trial(self, trial: UpdateTrial) -> UpdateHistory:
        """The history with a bundle on trial."""
        return self.model_copy(update={"trial": trial})

    def condemn(self, trial: UpdateTrial, reason: str, again_at: float | None = None) -> UpdateHistory:
        """The history with a bundle that is to be taken back; without `again_at` no offer of it is taken."""
        verdict = one_line(reason)[:MAX_REASON]
        refused = {**self.refused, trial.digest: verdict}
        newest = dict(list(refused.items())[-MAX_REFUSED:])
        times = {digest: moment for digest, moment in self.again_at.items() if digest in newest}
        if again_at is not None:
            times[trial.digest] = again_at
        condemned = trial.model_copy(update={"verdict": verdict})
        return self.model_copy(update={"refused": newest, "again_at": times, "trial": condemned})

    def end_trial(self, has_served: bool = True) -> UpdateHistory:
        """The history without the trial; the number of one that has served counts, unless it may come again."""
        served = 0
        if has_served and self.trial is not None and self.trial.digest not in self.again_at:
            served = self.trial.sequence
        return self.model_copy(update={"highest": max(self.highest, served), "trial": None})

    def forgive(self, now: float) -> UpdateHistory:
        """The history without bundles that may come again by now; itself where there are none."""
        due = {digest for digest, moment in self.again_at.items() if moment <= now}
        return self.pardon(due) if due else self

    def pardon(self, digests: Set[str]) -> UpdateHistory:
        """The history in which these bundles are refused no more."""
        refused = {digest: why for digest, why in self.refused.items() if digest not in digests}
        times = {digest: moment for digest, moment in self.again_at.items() if digest not in digests}
        return self.model_copy(update={"refused": refused, "again_at": times})


class ServerMemory(Exact):
    """`done` is the tag of the offer that needs no look any more, `failed` that of the one that failed so often.

    Tags are digests of what the server said. `refusal` says why the newest offer was refused or taken back, at
    `refused_at` (Unix seconds); `offered` is its digest, where known.
    """

    done: Digest | None = None
    failed: Digest | None = None
    failures: Annotated[int, Field(ge=0, le=MAX_FAILURES)] = 0
    refusal: Reason | None = None
    refused_at: float | None = None
    offered: Digest | None = None


def read_history(path: Path) -> UpdateHistory:
    """The history; a new one where there is no file. InputError where the file is damaged or cannot be read."""
    try:
        path.lstat()
    except FileNotFoundError:
        return UpdateHistory()
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}", ASK_A_PERSON) from error
    document = read_json(path, ASK_A_PERSON, MAX_FILE_BYTES)
    return validate(path, document, UpdateHistory, hint=ASK_A_PERSON)


def write_history(path: Path, history: UpdateHistory) -> None:
    """Write a history; it is on the disk afterwards. InputError where it cannot be written or not be read again."""
    _write(path, history)


def read_memory(path: Path) -> ServerMemory:
    """What servers said; nothing where that is damaged."""
    try:
        return validate(path, read_json(path, "", MAX_FILE_BYTES), ServerMemory) if path.exists() else ServerMemory()
    except (InputError, OSError) as error:
        log.warning("updates: %s; begun anew", error)
        return ServerMemory()


def write_memory(path: Path, memory: ServerMemory) -> None:
    """Write what servers said; as `write_history`."""
    _write(path, memory)


def _write(path: Path, value: UpdateHistory | ServerMemory) -> None:
    """Nothing is written that could not be read again."""
    data = value.model_dump_json().encode()
    try:
        type(value).model_validate(parse_json(data))
        if len(data) > MAX_FILE_BYTES:
            raise ParseError(f"it would have {len(data)} bytes")
    except (ParseError, ValidationError) as error:
        raise InputError(path, f"could not be read again: {one_line(error)}", "report this") from error
    with open_atomic(path, overwrite=True) as file:
        file.write(data)
