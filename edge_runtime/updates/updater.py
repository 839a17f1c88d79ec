"""Updates that a box pulls: offers of a server, checked, tried for a while, and taken back where the box gets worse.

A bundle is taken where its owner has signed it and its number is above that of every bundle that has served here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from typing import Any

from gemel.edge_runtime.backoff import BackOff
from gemel.edge_runtime.life.config import UpdateConfig
from gemel.edge_runtime.life.reload import STOPPING, ReloadResult
from gemel.edge_runtime.updates.update_files import UpdateFolder, file_digest
from gemel.edge_runtime.updates.update_health import (
    HealthWatch,
    QueryHealth,
    count_health,
    health_between,
    measure_limits,
)
from gemel.edge_runtime.updates.update_history import (
    MAX_FAILURES,
    MAX_REASON,
    ServerMemory,
    UpdateHistory,
    UpdateTrial,
    read_history,
    read_memory,
    write_history,
    write_memory,
)
from gemel.edge_runtime.updates.update_sources import CutDownload, FileServer, Offer, tag_digest
from gemel.models.bundle import open_bundle
from gemel.models.bundle.format import Stamp
from gemel.models.bundle.signing import Release, check_signature
from gemel.models.bundle.verify import verify_bundle
from gemel.models.errors import GemelError, InputError, message_of, one_line
from gemel.models.files.io import locked_folder

TICK_S, WINDOW_S = 5.0, 3600.0
"""Interval at which the ledger is sampled, and how far back the time before an update is compared."""
MAX_STARTS = 3
"""Starts of the process during a trial: a bundle that makes the box end is taken back at the next."""
RELOAD_TIMEOUT_S = 600.0
RETRY_S = 60.0
"""Until taking back is tried again, where the box did not reload."""
DAY_S = 86_400.0
MIN_SILENT_S, SILENT_POLLS = DAY_S, 3
"""A server that has not answered for so long, and for so many polls, is a trouble."""
NO_TAG = tag_digest("")
BY_HAND = "taken back by hand"
TRY_AGAIN = "sign it again with `gemel bundle sign`, or install it by hand"

log = logging.getLogger("gemel.run")


def recover_update(spool: Path, bundle: Path, problem: str | None = None) -> bool:
    """Called at a start, before the bundle is opened: a trial that makes the box end again and again is taken back.

    With a `problem` (the bundle cannot be served) it is taken back at once. Returns whether that was done. Where the
    history is damaged nothing is done. InputError where another box uses the spool.
    """
    files = UpdateFolder(spool, bundle)
    if not files.folder.exists():
        return False
    with locked_folder(spool):
        return _recover(files, problem)


def _recover(files: UpdateFolder, problem: str | None) -> bool:
    try:
        files.prepare()
        history = read_history(files.history)
    except InputError as error:
        log.error("updates: %s", one_line(error))
        return False
    trial = history.trial
    if trial is None:
        return False
    if problem is None:
        if not files.bundle.exists() or file_digest(files.bundle) != trial.digest:
            # It never came, it was taken back, or somebody put another bundle there.
            write_history(files.history, history.end_trial(has_served=trial.verdict is not None))
            return False
        if trial.verdict is None and trial.starts < MAX_STARTS:
            again = trial.model_copy(update={"starts": trial.starts + 1})
            write_history(files.history, history.begin_trial(again))
            return False
    _take_back_files(files, history, trial, trial.verdict or problem or f"the box ended {MAX_STARTS} times")
    return True


def _take_back_files(files: UpdateFolder, history: UpdateHistory, trial: UpdateTrial, reason: str) -> None:
    """Let the bundle before a trial serve from the next start on."""
    write_history(files.history, history.condemn(trial, reason))
    restore_previous(files, trial)
    write_history(files.history, history.condemn(trial, reason).end_trial())
    log.error("update %s is taken back: %s", trial.digest[:12], one_line(reason))


def roll_back_files(files: UpdateFolder) -> str:
    """Install the bundle before the last update again, of a box that does not run; returns its SHA-256.

    InputError where there is none.
    """
    trial = find_rollback(files, history := read_history(files.history))
    _take_back_files(files, history, trial, BY_HAND)
    return trial.previous


def find_rollback(files: UpdateFolder, history: UpdateHistory) -> UpdateTrial:
    """The last update, on trial or accepted, as one that can be taken back; InputError where none can."""
    trial, previous = history.trial, file_digest(files.previous) if files.previous.exists() else None
    hint = "install another bundle by hand, and `gemel reload`"
    if previous is None or (trial is not None and trial.previous != previous):
        raise InputError(files.bundle, "the bundle before it is not kept: no update has replaced one here", hint)
    if trial is not None:
        return trial
    current = file_digest(files.bundle)
    if current == previous:
        raise InputError(files.bundle, "is the bundle before the last update already", hint)
    return UpdateTrial(digest=current, previous=previous)


def restore_previous(files: UpdateFolder, trial: UpdateTrial) -> None:
    """Install the bundle before a trial again, unless it is there already.

    InputError where it is gone or damaged: then a person has to put one there.
    """
    if files.bundle.exists() and file_digest(files.bundle) == trial.previous:
        return
    if not files.previous.exists() or file_digest(files.previous) != trial.previous:
        raise InputError(files.previous, "is not the bundle before the update", f"put a good one at {files.bundle}")
    files.install(files.previous)


class UpdateState(str, Enum):
    """Where an update is; `why` and `since` say more of one that is refused, until the server offers another."""

    __str__ = str.__str__

    CURRENT = "current"
    DOWNLOADING = "downloading"
    ON_TRIAL = "on trial"
    REFUSED = "refused"


class Updater:
    """Polls a source in a thread. `reload` reloads the box, `ledger` gives its counts (`Ledger.to_json`), `problems`
    why a query of the present bundle drifts or cannot run. Models of `factories` may lie in `root`.

    `history` is None while it cannot be read: then the box neither polls nor installs.
    """

    def __init__(
        self,
        config: UpdateConfig,
        files: UpdateFolder,
        reload: Callable[[], Future[ReloadResult]],
        ledger: Callable[[], list[dict[str, Any]]],
        problems: Callable[[], Mapping[str, str]],
        factories: tuple[str, ...] = (),
        root: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.files = config, files
        self._reload, self._ledger, self._problems, self._clock = reload, ledger, problems, clock
        self._source, self._factories, self._root = FileServer(config), factories, root
        self._stopping = threading.Event()
        self._samples: deque[tuple[float, dict[str, QueryHealth]]] = deque()
        self._is_downloading = False
        self._rollbacks: queue.SimpleQueue[Future[str]] = queue.SimpleQueue()
        self._watch: HealthWatch | None = None
        self._watched: dict[str, QueryHealth] = {}
        self._accept_at = math.inf
        self._known_problems: frozenset[str] = frozenset()
        self._next_poll = self._next_try = self._next_take_back = 0.0
        self._answered_at = clock()
        self._bundle_stamp: Stamp | None = None
        self._present: str | None = None
        self._poll_trouble: str | None = None
        self.checked_at: float | None = None
        self.release = Release()
        self.history: UpdateHistory | None = None
        self.memory = ServerMemory()
        self._thread = threading.Thread(target=self._work, name="updates", daemon=True)

    def start(self) -> None:
        """Begin to poll. Never raises: the box serves whatever is wrong with its updates."""
        self.open()
        self._thread.start()

    def stop(self) -> None:
        """End; a download that hangs is not waited for."""
        self._stopping.set()
        self._answer_rollbacks()

    def roll_back(self) -> Future[str]:
        """Let the bundle before the last update serve again; the future gives its SHA-256, within TICK_S and a reload.

        InputError, in the future, where there is none.
        """
        asked: Future[str] = Future()
        self._rollbacks.put(asked)
        if self._is_downloading or self._stopping.is_set():
            self._answer_rollbacks()
        return asked

    def _answer_rollbacks(self) -> None:
        """Answer every request for a rollback; requests at the same time get one answer."""
        asked = list[Future[str]]()
        with contextlib.suppress(queue.Empty):
            while True:
                asked.append(self._rollbacks.get_nowait())
        if not asked:
            return
        try:
            digest = self._roll_back()
        except (GemelError, OSError) as error:
            for one in asked:
                one.set_exception(error)
        else:
            for one in asked:
                one.set_result(digest)

    def _roll_back(self) -> str:
        busy = "an update is loaded" if self._is_downloading else STOPPING if self._stopping.is_set() else None
        if busy is not None:
            raise InputError(self.files.bundle, busy, "try again when that is over")
        if self.history is None and not self.open():
            raise InputError(self.files.history, str(self._poll_trouble), "")
        assert self.history is not None
        trial = find_rollback(self.files, self.history)
        self._take_back(trial, BY_HAND)
        return trial.previous

    @property
    def trouble(self) -> str | None:
        """Why updates do not go as they should at present; None where they do."""
        return next(self._find_troubles(), None)

    def _find_troubles(self) -> Iterator[str]:
        if self._poll_trouble is not None:
            yield self._poll_trouble
        if self.release.is_over(time.time()):
            yield f"the bundle that serves was signed to serve until {self.release.end_text}, and nothing newer came"
        silent_s = self._clock() - self._answered_at
        if silent_s > self.config.watch_s + max(MIN_SILENT_S, SILENT_POLLS * self.config.every_s):
            yield f"the server has not answered for {silent_s / DAY_S:.1f} days"

    def to_json(self) -> dict[str, Any]:
        """When the server answered last, the signed number and end of the bundle, the one on trial, those refused."""
        history = self.history or UpdateHistory()
        return {
            "state": str(self._state(history)),
            "checked_at": self.checked_at, "trial": None if history.trial is None else history.trial.digest[:12],
            "refused": {digest[:12]: why for digest, why in history.refused.items()}, "trouble": self.trouble,
            "sequence": self.release.sequence, "valid_until": self.release.valid_until, "why": self.memory.refusal,
            "since": self.memory.refused_at, "offered": (self.memory.offered or "")[:12] or None,
        }  # fmt: skip

    def _state(self, history: UpdateHistory) -> UpdateState:
        if history.trial is not None:
            return UpdateState.ON_TRIAL
        if self._is_downloading:
            return UpdateState.DOWNLOADING
        if self.memory.refusal is not None:
            return UpdateState.REFUSED
        return UpdateState.CURRENT

    def open(self) -> bool:
        """Read what was remembered; whether it can be used. Tried again at each step until it can."""
        try:
            self.files.prepare()
            self.history = read_history(self.files.history)
        except (GemelError, OSError) as error:
            self._note_trouble(message_of(error))
            return False
        self.memory = read_memory(self.files.memory)
        self._next_try = self._clock() + (self._pause_s() if self.memory.failed is not None else 0.0)
        self._note_trouble(None)
        self._read_release()
        return True

    def _work(self) -> None:
        while not self._stopping.wait(TICK_S):
            try:
                self.step()
            except Exception as error:  # the box serves on whatever happens to an update
                self._note_trouble(message_of(error))

    def step(self) -> None:
        """Sample the box, judge a trial, and poll where that is due."""
        now = self._clock()
        self._samples.append((now, count_health(self._ledger())))
        while self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()
        self._answer_rollbacks()
        if self.history is None and not self.open():
            return
        assert self.history is not None
        trial = self.history.trial
        if trial is not None and trial.verdict is not None:
            if now >= self._next_take_back:
                self._take_back(trial, trial.verdict)
        elif trial is not None:
            self._judge(trial, now)
        elif now >= self._next_poll:
            self._next_poll = now + self.config.every_s * random.uniform(0.9, 1.1)
            self.poll()

    def poll(self) -> None:
        """Take what the server offers, if it is news."""
        if self.history is None and not self.open():
            return
        try:
            self._count_present()
            self._forgive()
            offer = self._source.find()
            self.checked_at, self._answered_at = time.time(), self._clock()
            if offer.tag is not None and offer.tag == self.memory.done:
                self._note_trouble(None)
            elif self._tag_of(offer) == self.memory.failed and self._clock() < self._next_try:
                self._note_trouble(self.memory.refusal)
            else:
                self._try_offer(offer)
                self._note_trouble(None)
        except (GemelError, OSError) as error:
            self._note_trouble(message_of(error))

    def _forgive(self) -> None:
        """Look again at what was taken back as late, after its time."""
        assert self.history is not None
        history = self.history.forgive(time.time())
        if history is not self.history:
            self._write_history(history)
            self._remember(done=None, failed=None, failures=0, refusal=None, refused_at=None)

    def _try_offer(self, offer: Offer) -> None:
        """Take an offer; where that fails, it is tried again later and later."""
        try:
            self.files.check_writable()
            limit, current = self.files.find_limit(), file_digest(self.files.bundle)
            self._is_downloading = True
            if self._tag_of(offer) != self.memory.failed:
                self._remember(refusal=None, refused_at=None, offered=None)
            self._source.download(offer, self.files.offer, self.files.bundle, current, limit)
            release = self._check_offer(current)
            self._remember(refusal=None, refused_at=None)
            if release is not None:
                self._install(release, current)
            self._remember(done=offer.tag, failed=None, failures=0)
        except (GemelError, OSError) as error:
            self._note_refusal(message_of(error))
            is_first = self._tag_of(offer) != self.memory.failed or isinstance(error, CutDownload)
            failures = 1 if is_first else self.memory.failures + 1
            self.memory = self.memory.model_copy(update={"failures": min(failures, MAX_FAILURES)})
            self._next_try = self._clock() + self._pause_s()
            self._remember(failed=self._tag_of(offer))
            raise
        finally:
            self._is_downloading = False
            self.files.remove_offer()

    def _check_offer(self, current: str) -> Release | None:
        """The release of the downloaded bundle, None where it serves already; InputError where it is not taken."""
        assert self.history is not None
        path, digest = self.files.offer, file_digest(self.files.offer)
        self._remember(offered=digest)
        if digest == current:
            return None
        try:
            release = check_signature(open_bundle(path, self._factories, self._root), self.config.public_key)
        except InputError as error:
            raise InputError(self.config.url, error.problem, error.hint) from error
        for problem, hint in self._find_refusals(digest, release):
            raise InputError(self.config.url, problem, hint)
        for problem in verify_bundle(path, self._factories, self._root):
            raise InputError(self.config.url, problem, "offer a whole bundle")
        return release

    def _find_refusals(self, digest: str, release: Release) -> Iterator[tuple[str, str]]:
        """Why a signed bundle is not taken: problem and hint."""
        assert self.history is not None
        if digest in self.history.refused:
            yield f"bundle {digest[:12]} was taken back before: {self.history.refused[digest]}", TRY_AGAIN
        highest = self.history.highest
        if release.sequence <= highest:
            problem = f"bundle {digest[:12]} has the number {release.sequence}, and {highest} has served here"
            yield problem, TRY_AGAIN
        if release.is_over(time.time()):
            problem = f"bundle {digest[:12]} was signed to serve until {release.end_text}"
            yield problem, "sign it again with `gemel bundle sign --valid-until`"

    def _install(self, release: Release, current: str) -> None:
        assert self.history is not None
        counts = [count for _, count in self._samples]
        limits = measure_limits([health_between(*pair) for pair in itertools.pairwise(counts)])
        earlier, digest = self.history, file_digest(self.files.offer)
        trial = UpdateTrial(digest=digest, previous=current, sequence=release.sequence, limits=limits)
        self.files.keep_previous()
        self._write_history(earlier.begin_trial(trial))
        try:
            self.files.install(self.files.offer)
        except BaseException:
            if file_digest(self.files.bundle) != digest:
                self._write_history(earlier)
            raise
        self._known_problems = frozenset(self._problems())
        log.info("update: bundle %s comes from the server", digest[:12])
        self._watch = None
        result = self._reload().result(RELOAD_TIMEOUT_S)
        if result.reason == STOPPING:  # the next start goes on with the trial
            return
        if result.reason is not None:
            self._take_back(trial, f"the box refuses it: {result.reason}", has_served=False)
        self._read_release()
        self._begin_watch(trial)

    def _begin_watch(self, trial: UpdateTrial) -> None:
        """Count from now: neither a slow reload nor the time in which the box was off proves a bundle."""
        self._watch, self._watched = HealthWatch(trial.limits), count_health(self._ledger())
        self._accept_at = self._clock() + self.config.watch_s

    def _judge(self, trial: UpdateTrial, now: float) -> None:
        """Take the trial back where a query got worse; accept it after its time."""
        assert self.history is not None
        if self._watch is None:  # the first look after a restart
            self._begin_watch(trial)
            if file_digest(self.files.bundle) != trial.digest:  # somebody put another bundle there
                self._write_history(self.history.end_trial(has_served=False))
                return
        problems = {query: why for query, why in self._problems().items() if query not in self._known_problems}
        for query, why in problems.items():
            self._take_back(trial, f"query {query}: {why}")
            return
        assert self._watch is not None
        counts = count_health(self._ledger())
        lapse = self._watch.add(health_between(self._watched, counts))
        self._watched = counts
        if lapse is not None:
            again_at = time.time() + DAY_S if lapse.is_late else None
            self._take_back(trial, f"query {lapse.query}: {lapse.reason}", again_at=again_at)
            return
        if now >= self._accept_at:
            log.info("update %s is accepted", trial.digest[:12])
            self._write_history(self.history.end_trial())

    def _take_back(
        self, trial: UpdateTrial, reason: str, has_served: bool = True, again_at: float | None = None
    ) -> None:
        """Let the bundle before the trial serve again, then remember that.

        `again_at` is when an offer of it is taken again, in seconds since 1970; None: not before it is signed again, or
        installed by hand. Where a step fails the verdict stays, and the next one goes on from there.
        """
        assert self.history is not None
        self._note_refusal(reason)
        self._next_take_back = self._clock() + RETRY_S
        condemned = self.history.condemn(trial, reason, again_at)
        self.history = condemned
        try:
            self._write_history(condemned)
        except (GemelError, OSError) as error:  # a full disk, say: what matters is the bundle
            self._note_trouble(message_of(error))
        if file_digest(self.files.bundle) == trial.digest:  # else somebody put another bundle there
            restore_previous(self.files, trial)
        if has_served:
            result = self._reload().result(RELOAD_TIMEOUT_S)
            if result.reason == STOPPING:  # the next start finishes
                return
            if result.reason is not None:
                raise InputError(self.files.bundle, f"the box does not reload: {result.reason}", "it is tried again")
        self._write_history(condemned.end_trial())
        log.error("update %s is taken back: %s", trial.digest[:12], one_line(reason))
        self._read_release()
        self._note_trouble(None)

    def _write_history(self, history: UpdateHistory) -> None:
        write_history(self.files.history, history)
        self.history = history

    def _note_refusal(self, reason: str) -> None:
        """Remember why the newest offer is refused, and since when."""
        reason = one_line(reason)[:MAX_REASON]
        if reason != self.memory.refusal:
            self._remember(refusal=reason, refused_at=time.time())

    def _remember(self, **changes: str | float | None) -> None:
        """Keep what concerns the server; it is worth no trouble where it cannot be written."""
        self.memory = self.memory.model_copy(update=changes)
        try:
            write_memory(self.files.memory, self.memory)
        except (GemelError, OSError) as error:
            log.warning("update: %s", one_line(error))

    def _read_release(self) -> None:
        """Read digest, number and end date of the bundle that serves, where its file has changed."""
        try:
            bundle = open_bundle(self.files.bundle, self._factories, self._root)
            if bundle.file.opened_as == self._bundle_stamp:
                return
            self._bundle_stamp, self._present = bundle.file.opened_as, file_digest(self.files.bundle)
            self.release = check_signature(bundle, self.config.public_key)
        except (GemelError, OSError):  # without a signature, or with another key's: it has no number
            self.release = Release()

    def _count_present(self) -> None:
        """Remember the number of the bundle that serves; one that a person put there is refused no more."""
        assert self.history is not None
        self._read_release()
        if self.history.trial is not None:
            return
        if self.release.sequence > self.history.highest:
            self._write_history(self.history.model_copy(update={"highest": self.release.sequence}))
        if self._present in self.history.refused:
            self._write_history(self.history.pardon({self._present}))
            if self.memory.offered == self._present:
                self._remember(refusal=None, refused_at=None)

    def _tag_of(self, offer: Offer) -> str:
        return offer.tag or NO_TAG

    def _pause_s(self) -> float:
        """Until an offer that failed is tried again."""
        pauses = BackOff(2 * self.config.every_s, max(DAY_S, 2 * self.config.every_s), spread=0.2)
        return pauses.wait_s(self.memory.failures, random.random())

    def _note_trouble(self, text: str | None) -> None:
        if text is not None and text != self._poll_trouble:
            log.warning("update: %s", one_line(text))
        self._poll_trouble = text
