"""Updates that a box pulls: offers of a server, checked, tried for a while, and taken back where the box gets worse.

At any moment, also after a power cut, the bundle of the config is the old or the new one, whole: it is replaced by
rename alone, and the old one is kept in the spool until the new one has proved itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from edge_runtime.config import FOLDER_MODE, UpdateConfig
from edge_runtime.load_monitor import OVERLOAD_REASONS
from edge_runtime.reload import STOPPING, ReloadResult
from edge_runtime.update_sources import Offer, UpdateSource, make_source
from models.bundle import open_bundle
from models.bundle.signing import check_signature
from models.bundle.verify import verify_bundle
from models.errors import GemelError, InputError, message_of
from models.io import Exact, Name, describe_problem, open_atomic, read_json, validate

FOLDER, STATE_FILE = "updates", "state.json"
OFFER_FILE, PREVIOUS_FILE = "offer.safetensors", "previous.safetensors"
TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
MAX_STATE_BYTES, MAX_DIGESTS = 1 << 20, 1000
COPY_BYTES = 1 << 20
TICK_S, WINDOW_S = 5.0, 60.0
"""Interval at which the ledger is sampled, and how far back the time before an update is compared."""
MAX_STARTS = 3
"""Starts of the process during a trial: a bundle that makes the box end is taken back at the next."""
MIN_FRAMES = 20
"""A query with fewer frames says nothing."""
MAX_FEWER_IN_TIME, MAX_MORE_FAILED = 0.1, 0.05
"""Shares of a query's frames by which it may get worse."""
RELOAD_TIMEOUT_S = 600.0

log = logging.getLogger("gemel.run")
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class QueryHealth(Exact):
    """Frames of a query over some time: all, those answered in time, those failed."""

    received: int = 0
    in_time: int = 0
    failed: int = 0

    def is_worse(self, before: QueryHealth) -> str | None:
        """Why this is worse than the time before; None where it is not, or where there are too few frames."""
        if min(self.received, before.received) < MIN_FRAMES:
            failed = self.received >= MIN_FRAMES and self.failed / self.received > 0.5
            return f"{self.failed} of {self.received} frames failed" if failed else None
        if self.failed / self.received > before.failed / before.received + MAX_MORE_FAILED:
            return f"{self.failed / self.received:.0%} of its frames fail, {before.failed / before.received:.0%} before"
        now, then = self.in_time / self.received, before.in_time / before.received
        return f"{now:.0%} of its frames are in time, {then:.0%} before" if now < then - MAX_FEWER_IN_TIME else None


class UpdateTrial(Exact):
    """A bundle that serves and has to prove itself: `before` is the health of the queries before it."""

    digest: Digest
    previous: Digest
    offer: Annotated[str, Field(max_length=1000)]
    starts: int = 0
    before: dict[Name, QueryHealth] = Field(default_factory=dict)


class UpdateState(Exact):
    """What the updater knows over restarts. `refused` and `past` are digests that are never taken (again)."""

    model_config = ConfigDict(frozen=False)

    tag: Annotated[str, Field(max_length=1000)] | None = None
    refused: dict[Digest, str] = Field(default_factory=dict)
    past: list[Digest] = Field(default_factory=list)
    trial: UpdateTrial | None = None


class UpdateFolder:
    """The updater's files in the spool, and the bundle of the config."""

    def __init__(self, spool: Path, bundle: Path) -> None:
        self.folder, self.bundle = spool / FOLDER, bundle

    @property
    def offer(self) -> Path:
        """Where an offer is downloaded."""
        return self.folder / OFFER_FILE

    @property
    def previous(self) -> Path:
        """The bundle before the one on trial."""
        return self.folder / PREVIOUS_FILE

    def prepare(self) -> None:
        """Make the folder, and remove what a power cut has left half written."""
        with describe_problem(self.folder):
            self.folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            for path in (*self.folder.iterdir(), *self.bundle.parent.iterdir()):
                if TEMPORARY.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def read_state(self) -> UpdateState:
        """The state; a new one where there is none, or it is damaged."""
        path = self.folder / STATE_FILE
        if not path.exists():
            return UpdateState()
        try:
            return validate(path, read_json(path, "remove it", MAX_STATE_BYTES), UpdateState, hint="remove it")
        except InputError as error:
            log.error("updates: %s; begun anew", error)
            return UpdateState()

    def write_state(self, state: UpdateState) -> None:
        """Write the state; it is on the disk afterwards."""
        state.past = state.past[-MAX_DIGESTS:]
        state.refused = dict(list(state.refused.items())[-MAX_DIGESTS:])
        with open_atomic(self.folder / STATE_FILE, overwrite=True) as file:
            file.write(state.model_dump_json().encode())

    def copy(self, source: Path, target: Path) -> None:
        """Replace a file by a copy of another, whole or not at all."""
        with open(source, "rb") as data, open_atomic(target, overwrite=True) as file:
            while piece := data.read(COPY_BYTES):
                file.write(piece)


def recover_update(spool: Path, bundle: Path, problem: str | None = None) -> bool:
    """Called at a start, before the bundle is opened: a trial that makes the box end again and again is taken back.

    With a `problem` (the bundle cannot be served) it is taken back at once. Returns whether that was done.
    """
    files = UpdateFolder(spool, bundle)
    if not (files.folder / STATE_FILE).exists():
        return False
    files.prepare()
    state = files.read_state()
    if state.trial is None:
        return False
    state.trial = state.trial.model_copy(update={"starts": state.trial.starts + 1})
    if problem is None and state.trial.starts <= MAX_STARTS:
        files.write_state(state)
        return False
    revert_trial(files, state, problem or f"the box ended {MAX_STARTS} times")
    return True


def revert_trial(files: UpdateFolder, state: UpdateState, reason: str) -> None:
    """The bundle before the trial, again; the other is never taken any more."""
    trial = state.trial
    assert trial is not None
    if files.previous.exists():
        files.copy(files.previous, files.bundle)
    state.refused[trial.digest] = reason[:400]
    state.trial = None
    files.write_state(state)
    log.error("update %s is taken back: %s", trial.digest[:12], reason)


class Updater:
    """Polls a source in a thread. `reload` reloads the box, `ledger` gives its counts (`Ledger.to_json`), `problems`
    why a query of the present bundle drifts or cannot run.
    """

    def __init__(
        self,
        config: UpdateConfig,
        files: UpdateFolder,
        reload: Callable[[], Future[ReloadResult]],
        ledger: Callable[[], list[dict[str, Any]]],
        problems: Callable[[], Mapping[str, str]],
        factories: tuple[str, ...] = (),
        source: UpdateSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.files = config, files
        self._reload, self._ledger, self._problems, self._clock = reload, ledger, problems, clock
        self._source, self._factories = source or make_source(config), factories
        self._stopping = threading.Event()
        self._samples: deque[tuple[float, dict[str, QueryHealth]]] = deque()
        self._begun: dict[str, QueryHealth] | None = None
        self._accept_at = math.inf
        self._known_problems: frozenset[str] = frozenset()
        self._next_poll = 0.0
        self.trouble: str | None = None
        """Why the last poll failed."""
        self.checked_at: float | None = None
        self.state = UpdateState()
        self._thread = threading.Thread(target=self._work, name="updates", daemon=True)

    def start(self) -> None:
        """Begin to poll."""
        self.files.prepare()
        self.state = self.files.read_state()
        self._thread.start()

    def stop(self) -> None:
        """End; a download that hangs is not waited for."""
        self._stopping.set()

    def to_json(self) -> dict[str, Any]:
        """When the server answered last, the bundle on trial, bundles refused, and the present trouble."""
        state = self.state
        return {
            "checked_at": self.checked_at, "trial": None if state.trial is None else state.trial.digest[:12],
            "refused": {digest[:12]: why for digest, why in state.refused.items()}, "trouble": self.trouble,
        }  # fmt: skip

    def _work(self) -> None:
        while not self._stopping.wait(TICK_S):
            try:
                self.step()
            except Exception as error:  # the box serves on whatever happens to an update
                self._note_trouble(message_of(error))

    def step(self) -> None:
        """Sample the box, judge a trial, and poll where that is due."""
        now = self._clock()
        self._samples.append((now, self._health()))
        while self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()
        if self.state.trial is not None:
            self._judge(self.state.trial, now)
        elif now >= self._next_poll:
            self._next_poll = now + self.config.every_s * random.uniform(0.9, 1.1)
            self.poll()

    def poll(self) -> None:
        """Take what the server offers, if it is news."""
        try:
            offer = self._source.find(self.state.tag)
            self.checked_at = time.time()
            if offer is not None:
                self._try_offer(offer)
            self._note_trouble(None)
        except (GemelError, OSError) as error:
            self._note_trouble(message_of(error))

    def _try_offer(self, offer: Offer) -> None:
        current = file_digest(self.files.bundle)
        self._source.download(
            offer, self.files.offer, self.files.bundle, current
        )  # where it fails, the next poll tries
        try:
            digest = self._check_offer(current)
        except InputError as error:
            self._source.report(offer, False, message_of(error))
            self._remember_tag(offer)
            raise
        if digest is None:
            self._remember_tag(offer)
            self._source.report(offer, True, "serves already")
            return
        self._install(offer, digest, current)

    def _check_offer(self, current: str) -> str | None:
        """The digest of the downloaded bundle, None where it serves already; InputError where it is not taken."""
        digest = file_digest(self.files.offer)
        if digest == current:
            return None
        check_signature(open_bundle(self.files.offer, self._factories, self.files.folder), self.config.public_key)
        for problem in verify_bundle(self.files.offer, self._factories, self.files.folder):
            raise InputError(self.files.offer, problem, "offer a whole bundle")
        if digest in self.state.refused:
            reason = self.state.refused[digest]
            raise InputError(self.files.offer, f"bundle {digest[:12]} was taken back before: {reason}", "offer another")
        if digest in self.state.past:
            raise InputError(self.files.offer, f"bundle {digest[:12]} is older: it served before", "offer a newer one")
        return digest

    def _install(self, offer: Offer, digest: str, current: str) -> None:
        before = _difference(self._samples[0][1], self._samples[-1][1]) if self._samples else {}
        self.files.copy(self.files.bundle, self.files.previous)
        self.state.trial = UpdateTrial(digest=digest, previous=current, offer=offer.name, before=before)
        self.files.write_state(self.state)
        self.files.copy(self.files.offer, self.files.bundle)
        self._known_problems = frozenset(self._problems())
        log.info("update: bundle %s comes from the server", digest[:12])
        result = self._reload().result(RELOAD_TIMEOUT_S)
        if result.reason == STOPPING:  # the next start goes on with the trial
            return
        self.files.offer.unlink(missing_ok=True)
        if result.reason is not None:
            self._revert(f"the box refuses it: {result.reason}")
        self._remember_tag(offer)
        self._begin_watch()

    def _begin_watch(self) -> None:
        """Count from now: neither a slow reload nor the time in which the box was off proves a bundle."""
        self._begun, self._accept_at = self._health(), self._clock() + self.config.watch_s

    def _judge(self, trial: UpdateTrial, now: float) -> None:
        """Take the trial back where a query got worse; accept it after its time."""
        if self._begun is None:  # the first look after a restart
            self._begin_watch()
            if file_digest(self.files.bundle) != trial.digest:
                self.state.trial = None  # a power cut came before it was installed, or another bundle was put there
                self.files.write_state(self.state)
                return
        reasons = [
            f"query {query}: {why}" for query, why in self._problems().items() if query not in self._known_problems
        ]
        for query, health in _difference(self._begun or {}, self._health()).items():
            if (why := health.is_worse(trial.before.get(query, QueryHealth()))) is not None:
                reasons.append(f"query {query}: {why}")
        if reasons:
            self._revert(reasons[0])
            self._reload().result(RELOAD_TIMEOUT_S)
        elif now >= self._accept_at:
            log.info("update %s is accepted", trial.digest[:12])
            self.state.past.append(trial.previous)
            self.state.trial = None
            self.files.write_state(self.state)
            self._source.report(Offer(trial.offer), True, "accepted")

    def _revert(self, reason: str) -> None:
        trial = self.state.trial
        assert trial is not None
        revert_trial(self.files, self.state, reason)
        with contextlib.suppress(GemelError, OSError):
            self._source.report(Offer(trial.offer), False, reason)

    def _remember_tag(self, offer: Offer) -> None:
        self.state.tag = offer.tag
        self.files.write_state(self.state)

    def _health(self) -> dict[str, QueryHealth]:
        """The counts of all queries so far."""
        return {
            row["query"]: QueryHealth(
                received=row["processed"] + row["failed"] + _lost_frames(row), in_time=row["processed"] - row["late"],
                failed=row["failed"],
            )
            for row in self._ledger()
        }  # fmt: skip

    def _note_trouble(self, text: str | None) -> None:
        if text is not None and text != self.trouble:
            log.warning("update: %s", text)
        self.trouble = text


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with describe_problem(path), open(path, "rb") as file:
        while piece := file.read(COPY_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _lost_frames(row: Mapping[str, Any]) -> int:
    return sum(row["dropped"].get(reason, 0) for reason in OVERLOAD_REASONS)


def _difference(first: Mapping[str, QueryHealth], last: Mapping[str, QueryHealth]) -> dict[str, QueryHealth]:
    zero = QueryHealth()
    return {
        query: QueryHealth(**{key: max(0, value - getattr(first.get(query, zero), key)) for key, value in health})
        for query, health in last.items()
    }
