"""Reloads: a thread builds and checks another box beside the active one, which it replaces between two frames.

The canary tries new weights on the newest samples before they serve.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import Field

from gemel.edge_runtime.engines.base import AUTO, ENGINES, FALLBACK, ONNX, EngineError, FrameEngine
from gemel.edge_runtime.engines.mapped import open_sessions
from gemel.edge_runtime.frames.results import BUNDLE_DIGITS
from gemel.edge_runtime.frames.samples import (
    SUFFIX,
    Predict,
    compare_samples,
    expected_agreement,
    read_drift,
    read_head,
)
from gemel.edge_runtime.life.box import LoadedBox, ReadyBox, load_box
from gemel.edge_runtime.life.config import BoxConfig, SpoolConfig
from gemel.edge_runtime.life.runtime import ActiveConfig, PendingConfig, Runtime
from gemel.models.bundle import Bundle, BundleQuery, write_substituted
from gemel.models.errors import InputError, message_of
from gemel.models.files.extras import is_installed
from gemel.models.files.io import MAX_QUERIES, Exact, Name, open_atomic, read_json, validate
from gemel.models.measures.agreement import BELOW, ONE_ANSWER, TOO_FEW, compare_agreement, is_surely_below
from gemel.models.predictions import Prediction
from gemel.models.tasks import task_of

STOPPING = "the box stops"
SWITCH_INTERVAL_S = 0.0005
"""Thread switch interval of the interpreter during a check. A run of a network takes and releases the interpreter lock
hundreds of times; with the usual 5 ms a run of 20 ms took 755 ms during a check, with this 100 ms.
"""
SINK_TIMEOUT_S = 5.0
"""How long removed sinks may deliver what waits for them."""
CANARY_FRAMES = 64
"""Most samples of a query on which its new weights are tried."""
CANARY_ERROR = 0.01
"""Likelihood that a reload holds back any query whose new weights agree as they should."""
CanaryFile = Literal["canary-1.safetensors", "canary-2.safetensors"]
CANARY_FILES: tuple[CanaryFile, ...] = get_args(CanaryFile)
"""Bundles with held back queries, beside the samples: one is written while the other serves."""
HELD_BACK_FILE, MAX_RECORD_BYTES = "held_back.json", 1 << 20
"""In the spool: what the canary held back, for the next start."""
QUESTION_KEYS = (
    "camera",
    "roi",
    "frame_size",
    "task",
    "classes",
    "input_size",
    "preprocess",
    "agreement",
    "multi_label",
)
"""A query asks the same as before where these are equal."""
log = logging.getLogger("gemel.run")

BuildBox = Callable[[ActiveConfig], ReadyBox | None]
"""Builds the box from config and bundle as they are now; None where nothing has changed. Raises InputError."""


class HeldBack(Exact):
    """What a reload of a `bundle` (its SHA-256) held back: `file` beside the samples serves, with its own `digest`."""

    bundle: Annotated[str, Field(max_length=64)]
    file: CanaryFile
    digest: Annotated[str, Field(max_length=64)]
    reasons: Annotated[dict[Name, str], Field(max_length=MAX_QUERIES)]


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """Why a reload was refused, None where it was applied; queries that keep their old weights all the same."""

    reason: str | None = None
    held_back: tuple[str, ...] = ()


class ReloadManager:
    """Runs requested reloads one after the other, and counts them by outcome.

    `refused` says why the last one was refused; None where it was applied.
    `notify` is called with whether a reload is under way, `on_applied` with the box that serves from now on.
    """

    def __init__(
        self,
        runtime: Runtime,
        build: BuildBox,
        notify: Callable[[bool], object] = lambda _: None,
        on_applied: Callable[[ReadyBox], object] = lambda _: None,
    ) -> None:
        self.counts: dict[Literal["applied", "partly", "refused"], int] = {"applied": 0, "partly": 0, "refused": 0}
        self.refused: str | None = None
        self._runtime, self._build, self._notify, self._on_applied = runtime, build, notify, on_applied
        self._changed = threading.Condition()
        self._open: list[Future[ReloadResult]] = []
        self._pending: PendingConfig | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="reload", daemon=True)

    def start(self) -> None:
        """Take requests from now on."""
        self._thread.start()

    def request(self) -> Future[ReloadResult]:
        """Request a reload, from any thread."""
        future: Future[ReloadResult] = Future()
        with self._changed:
            if self._stopping:
                future.set_result(ReloadResult(STOPPING))
            else:
                self._open.append(future)
                self._changed.notify_all()
        return future

    def apply_pending(self) -> None:
        """Activate what is ready, if anything; called between two frames by the thread that runs queries."""
        if self._pending is None:
            return
        with self._changed:
            pending, self._pending = self._pending, None
            if pending is None:  # the box stops
                return
            start = time.monotonic()
            self._runtime.activate(pending)
            log.info(
                "reloaded: bundle %s, %d queries; frames waited %.0f ms",
                pending.config.identity.bundle[:BUNDLE_DIGITS],
                len(pending.config.queries),
                1000 * (time.monotonic() - start),
            )
            self._changed.notify_all()

    def stop(self) -> None:
        """End; open requests are answered."""
        with self._changed:
            self._stopping = True
            if self._pending is not None:
                self._runtime.discard(self._pending)
                self._pending = None
            for future in self._open:
                future.set_result(ReloadResult(STOPPING))
            self._open = []
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._stopping)
                if self._stopping:
                    return
            self._notify(True)
            pending, reason = self._check()
            if pending is None or self._transfer_control(pending):
                self._finish(reason)
            if pending is not None and self._runtime.active is pending.config:
                self._settle(pending)
            self._notify(False)

    def _check(self) -> tuple[PendingConfig | None, str | None]:
        """What is to be activated, if anything has changed, or why the reload is refused."""
        try:
            with _short_switch_interval():
                box = self._build(self._runtime.active)
                if box is not None:
                    return self._runtime.prepare(box), None
        except (Exception, SystemExit) as error:  # code named by a bundle is imported, and may raise anything
            reason = message_of(error)
            log.error("not reloaded, the box serves on unchanged: %s", reason)
            return None, reason
        log.info("reloaded: nothing has changed")
        return None, None

    def _transfer_control(self, pending: PendingConfig) -> bool:
        """Wait until the inference thread has activated it; False where the box stops before."""
        with self._changed:
            if self._stopping:
                self._runtime.discard(pending)
                return False
            self._pending = pending
            self._runtime.mailboxes.wake()
            self._changed.wait_for(lambda: self._pending is None)
            return self._runtime.active is pending.config

    def _finish(self, reason: str | None) -> None:
        held_back = tuple(self._runtime.active.box.costed.loaded.held_back) if reason is None else ()
        with self._changed:
            self.counts["partly" if held_back else "applied" if reason is None else "refused"] += 1
            self.refused = reason
            if self._open:  # none where the box stops
                self._open.pop(0).set_result(ReloadResult(reason, held_back))

    def _settle(self, pending: PendingConfig) -> None:
        """Do what need not happen between two frames."""
        self._on_applied(pending.config.box)
        hanging = self._runtime.sinks.settle(SINK_TIMEOUT_S)
        if hanging:
            log.warning("not waited for: %s", ", ".join(hanging))


@contextlib.contextmanager
def _short_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def check_change(before: BoxConfig, after: BoxConfig) -> None:
    """Raise InputError where a running box cannot take the other config."""
    addresses = [None if config.http is None else (config.http.host, config.http.port) for config in (before, after)]
    fixed = {
        "device": before.device == after.device,
        "spool": before.spool == after.spool,
        "clips": before.clips == after.clips,
        "updates": before.updates == after.updates,
        "http.bind": addresses[0] == addresses[1],
        "zmq": before.detector_port == after.detector_port,
    }
    for key, is_same in fixed.items():
        if not is_same:
            raise InputError(after.path, "cannot be changed while the box runs", "start the box again", key)
    if before.trace is not None or after.trace is not None:
        problem = "a trace describes one box, so a box that writes one cannot be reloaded"
        raise InputError(after.path, problem, "leave `trace` out and start the box again", "trace")


def run_canary(before: LoadedBox, after: LoadedBox, spool: SpoolConfig) -> LoadedBox:
    """The box that is to serve; each query whose new weights fail on the newest samples keeps its old ones.

    A query fails when a test of `CANARY_ERROR`, which all queries share, finds its agreement with the answers that were
    given below its accuracy target. The next reload tries it again, on newer samples. `held_back` of the box has the
    reasons. Raises InputError where the mixed bundle cannot be written.
    """
    old, new = before.bundle, after.bundle
    recalled = _recall(spool, new.digest)
    reasons: dict[str, str] = {}
    tried = canary_queries(old, new, _drifted_queries(spool, old.digest[:BUNDLE_DIGITS]))
    for query in tried:
        paths = _newest_samples(spool.samples, query.id, old.digest[:BUNDLE_DIGITS])
        with open_predictor(new, query.id, after.config.engine) as predict:
            compared = compare_samples(query, paths, predict)
        compared = replace(compared, expected=compared.expected * expected_agreement(query))
        is_below = is_surely_below(compared, task_of(query), query.accuracy_target, CANARY_ERROR / len(tried))
        found = compare_agreement(compared, task_of(query), query.accuracy_target, is_below)
        if found.verdict in (TOO_FEW, ONE_ANSWER) and recalled is not None and query.id in recalled.reasons:
            reasons[query.id] = recalled.reasons[query.id]
            log.warning("query %s keeps its old weights, as before: %s", query.id, reasons[query.id])
        elif found.verdict == TOO_FEW:
            log.info("query %s: %d samples are too few to try its new weights", query.id, len(paths))
        elif found.verdict == ONE_ANSWER:
            log.info("query %s: all samples have one answer, which does not prove its new weights", query.id)
        elif found.verdict == BELOW and found.ratio is not None:
            reasons[query.id] = (
                f"on the last {found.frames} frames the new ones agree with its answers by {found.ratio:.2f}, "
                f"its target is {query.accuracy_target:g}"
            )
            log.warning("query %s keeps its old weights: %s", query.id, reasons[query.id])
    if not reasons:
        (spool.path / HELD_BACK_FILE).unlink(missing_ok=True)
        return after
    canary = CANARY_FILES[1] if old.path.name == CANARY_FILES[0] else CANARY_FILES[0]
    path = spool.samples / canary
    write_substituted(path, new, dict.fromkeys(reasons, old), overwrite=True)
    mixed = load_box(replace(after.config, bundle=path, public_key=None))  # the signature of its parts was checked
    record = HeldBack(bundle=new.digest, file=canary, digest=mixed.bundle.digest, reasons=reasons)
    with open_atomic(spool.path / HELD_BACK_FILE, overwrite=True) as file:
        file.write(record.model_dump_json().encode())
    return replace(mixed, held_back=reasons)


def restore_canary(loaded: LoadedBox) -> LoadedBox:
    """The box that serves after a restart: queries that the last reload of this bundle held back stay so."""
    spool = loaded.config.spool
    record = None if spool is None or not loaded.config.canary else _recall(spool, loaded.bundle.digest)
    if spool is None or record is None:
        return loaded
    path = spool.samples / record.file
    try:
        mixed = load_box(replace(loaded.config, bundle=path, public_key=None))
        if mixed.bundle.digest != record.digest or mixed.damaged:
            raise InputError(path, "is not what the reload wrote", "reload again")
    except InputError as error:
        log.error("queries %s cannot keep their old weights: %s", ", ".join(record.reasons), error)
        return loaded
    for query, reason in record.reasons.items():
        log.warning("query %s keeps its old weights since a reload: %s", query, reason)
    return replace(mixed, held_back=record.reasons)


def _recall(spool: SpoolConfig, bundle: str) -> HeldBack | None:
    """What the last reload held back, if it was of this bundle."""
    path = spool.path / HELD_BACK_FILE
    if not path.exists():
        return None
    try:
        record = validate(path, read_json(path, "remove it", MAX_RECORD_BYTES), HeldBack, hint="remove it")
    except InputError as error:
        log.error("%s", error)
        return None
    return record if record.bundle == bundle else None


def canary_queries(old: Bundle, new: Bundle, drifted: Collection[str]) -> list[BundleQuery]:
    """Queries that ask the same as before with other weights.

    Those that have `drifted`, by the last drift check, are left out: there the old answers are wrong.
    """
    before = {query.id: query for query in old.queries}
    return [
        query
        for query in new.queries
        if query.id in before.keys() - drifted
        and all(getattr(query, key) == getattr(before[query.id], key) for key in QUESTION_KEYS)
        and query.places() != before[query.id].places()
    ]


def _drifted_queries(spool: SpoolConfig, bundle: str) -> set[str]:
    """Queries that the last drift check of this bundle found below their target."""
    try:
        report = read_drift(spool.path)
    except InputError:  # there was none
        return set()
    return {query.id for query in report.queries if query.verdict == BELOW} if report.bundle == bundle else set()


def _newest_samples(folder: Path, query: str, bundle: str) -> list[Path]:
    """The newest samples of a query and a bundle, in the order of time."""
    found: list[Path] = []
    for path in sorted(folder.glob(f"*-{query}-*{SUFFIX}"), reverse=True):
        with contextlib.suppress(InputError):
            head = read_head(path)
            if (head.query, head.bundle) == (query, bundle):
                found.append(path)
        if len(found) == CANARY_FRAMES:
            break
    return found[::-1]


@contextlib.contextmanager
def open_predictor(bundle: Bundle, query: str, engine_name: str) -> Iterator[Predict]:
    """A query of a bundle on the CPU, over mapped weights unless a box names another engine or has no graph for it.

    Raises InputError where its network cannot be prepared, and torch is not installed.
    """
    engine: FrameEngine | None = None
    if engine_name in (AUTO, ONNX):
        try:
            engine = next(iter(open_sessions(bundle, [query])))[query]
        except EngineError as error:
            if not is_installed("torchvision"):
                raise InputError(bundle.path, f"query {query}: {error}", "build the bundle again") from error
            log.info("query %s is tried on torch: %s", query, error)
    if engine is None:
        engine = ENGINES[FALLBACK](bundle, query)
        engine.bind({name: bundle.read(name) for name in bundle.names_in_order(query)}.__getitem__)

    def predict(pictures: np.ndarray, sizes: Sequence[tuple[int, int]]) -> list[Prediction]:
        return engine.decode(engine.infer(pictures), sizes, 0.0)

    try:
        yield predict
    finally:
        engine.unbind()
