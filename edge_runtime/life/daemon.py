"""The edge daemon: from a config to a box that serves, and `gemel run --check`."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gemel.edge_runtime.arrivals.sent_models import join_arrived
from gemel.edge_runtime.backoff import BackOff
from gemel.edge_runtime.capture.sources import ProbeResult, call_all, probe_cameras
from gemel.edge_runtime.http.auth import is_loopback
from gemel.edge_runtime.life.box import (
    CostedBox,
    LoadedBox,
    ReadyBox,
    cost_box,
    frame_requests,
    load_box,
    prepare_engines,
)
from gemel.edge_runtime.life.config import FOLDER_MODE, BoxConfig, load_config
from gemel.edge_runtime.life.reload import BuildBox, check_change, restore_canary, run_canary
from gemel.edge_runtime.life.runtime import ActiveConfig
from gemel.edge_runtime.life.service import LEDGER_FILE, Notifier, catch_signals, extend_start, serve
from gemel.edge_runtime.life.summary import empty_summary
from gemel.edge_runtime.simulation.profile_io import profile_path
from gemel.edge_runtime.updates.updater import recover_update
from gemel.models.bundle.format import is_open_as
from gemel.models.errors import BundleError, InputError, size_text
from gemel.models.files.io import check_apart, check_output, describe_problem, is_readable_by_others, locked_folder
from gemel.models.labels.data_notes import note_clipped_roi
from gemel.models.process import freeze_garbage_collector

DISK_BACK_OFF = BackOff(1.0, 30.0)
"""Pauses of a box that waits for a disk."""
START_S = 300.0
"""What a start may take by the systemd unit (TimeoutStartSec)."""

log = logging.getLogger("gemel.run")


def run(
    config_path: str | Path, check: bool = False, stop: threading.Event | None = None, seconds: float = math.inf
) -> dict[str, Any]:
    """Run the box until its cameras have ended, `seconds` are over, `stop` is set, or SIGINT or SIGTERM comes.

    Returns the summary (`edge_runtime.life.service.serve`), which is also logged and written to `SPOOL/ledger.json`.
    With `check` config, bundle and budget are checked, cameras and sinks are probed, and nothing runs (`check_box`).
    Raises InputError (one line: file, key, problem, hint) before anything is allocated when the config or the bundle is
    wrong or a query does not fit the budget, and where another box uses the spool. A camera that does not answer is no
    error: it is retried.
    """
    if check:
        return check_box(_cost(_load_config(config_path)))
    with catch_signals(stop or threading.Event()) as signals, contextlib.ExitStack() as afterwards:
        afterwards.callback(gc.unfreeze)  # a caller may go on without the box
        afterwards.callback(_use_one_thread_of_opencv())
        try:
            freeze_garbage_collector()  # every file and every session that is opened collects garbage
            box, build = _prepare_when_there(config_path, signals.stopping)
        except KeyboardInterrupt:
            if not signals.reasons:
                raise
            return empty_summary(signals.reasons[0])
        spool = box.config.spool
        with contextlib.nullcontext() if spool is None else locked_folder(spool.path):
            signals.is_serving = True
            summary = serve(box, signals, build, seconds)
    log.info("ledger: %s", json.dumps(summary))
    return summary


def _use_one_thread_of_opencv() -> Callable[[], object]:
    """Let OpenCV resize in the thread that calls it; returns what undoes this. Its own threads spin between frames."""
    import cv2

    before = cv2.getNumThreads()
    cv2.setNumThreads(1)
    return partial(cv2.setNumThreads, before)


def _prepare_when_there(config_path: str | Path, stopping: threading.Event) -> tuple[ReadyBox, BuildBox]:
    """`prepare`, tried again while what it needs is on a disk that is not there yet, as after a power cut."""
    failures, notifier = 0, Notifier()
    while True:
        try:
            with extend_start(notifier):
                return prepare(config_path)
        except InputError as error:
            if _revert_update(config_path, str(error)):
                continue
            late = None if stopping.is_set() else find_late_path(error, config_path)
            if late is None:
                raise
            failures += 1
            if failures == 1:
                log.warning("waiting for a disk at %s, which is empty: %s", late, error)
        pause_s = DISK_BACK_OFF.wait_s(failures, random.random())
        notifier.send(f"STATUS=waiting for {late}", f"EXTEND_TIMEOUT_USEC={round((pause_s + START_S) * 1e6)}")
        stopping.wait(pause_s)


def _revert_update(config_path: str | Path, problem: str) -> bool:
    """Take back an update on trial with which the box cannot start; whether there was one."""
    with contextlib.suppress(InputError):
        config = load_config(config_path)
        if config.updates is not None and config.spool is not None:
            return recover_update(config.spool.path, config.bundle, problem)
    return False


def find_late_path(error: InputError, config_path: str | Path) -> Path | None:
    """The empty folder that a missing file would be in: a disk that may not be mounted yet.

    That of the config itself is none: the systemd unit names its disk.
    """
    for text in (error.where, error.problem.partition(": ")[0]):
        path = Path(text)
        if not path.is_absolute() or os.path.lexists(path) or path == Path(config_path).absolute():
            continue
        folder = next(parent for parent in path.parents if parent.exists())
        with contextlib.suppress(OSError):
            if not any(folder.iterdir()):
                return folder
    return None


def prepare(config_path: str | Path) -> tuple[ReadyBox, BuildBox]:
    """A box that can serve, its spool's folder made, and the function that rebuilds it; raises as `run` does."""
    config = _load_config(config_path)
    if config.updates is not None and config.spool is not None:
        recover_update(config.spool.path, config.bundle)
    box = prepare_engines(_cost(config))
    for warning in (
        *_unused_cameras(box.costed.loaded),
        *_readable_secrets(box.config),
        *find_open_access(box.config),
    ):
        log.warning("%s", warning)
    if box.config.spool is not None:
        with describe_problem(box.config.spool.path):
            box.config.spool.path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    return box, partial(_rebuild, config_path)


def check_box(box: CostedBox) -> dict[str, Any]:
    """The result of `--check`: all cameras are probed at the same time, then all sinks.

    A camera or a sink that does not answer is a warning, since a box starts without it. `warnings` has a line for each
    of these, for regions outside of the picture, and for cameras that no query uses; they are logged too.
    """
    config, loaded, http = box.loaded.config, box.loaded, box.loaded.config.http
    if config.updates is not None:
        from gemel.edge_runtime.updates.update_sources import check_update_folder

        check_update_folder(config)
    if http is not None and http.tls is not None:
        from gemel.edge_runtime.http.tls import check_certificate

        check_certificate(http.tls)
    probes = probe_cameras([camera for camera in loaded.cameras if not camera.is_push])
    problems = call_all([(sink.check_reachable, sink.reach_timeout_s) for sink in config.sinks], "it does not answer")
    sinks = [
        {"kind": sink.kind, "name": sink.name, "answers": problem is None, "error": problem}
        for sink, problem in zip(config.sinks, problems, strict=True)
    ]
    warnings = [
        *_unused_cameras(loaded),
        *_readable_secrets(config),
        *find_open_access(config),
        *_camera_problems(loaded, probes),
        *(f"sink {sink['name']}: {sink['error']}" for sink in sinks if sink["error"] is not None),
        *_address_problems(config),
        *_lack_of_room(config),
    ]
    for warning in warnings:
        log.warning("%s", warning)
    return {
        "ok": True, "cameras": [{"id": camera, **probe.to_json()} for camera, probe in probes.items()], "sinks": sinks,
        "http": None if http is None else {"host": http.host, "port": http.port, "token": http.token is not None},
        "signed": config.public_key is not None, **box.to_json(), "warnings": warnings,
    }  # fmt: skip


def _readable_secrets(config: BoxConfig) -> Iterator[str]:
    """Files with secrets that every user of this machine can read."""
    tls = None if config.http is None else config.http.tls
    for path in (config.token_file, None if tls is None else tls.key, *(sink.secret_file for sink in config.sinks)):
        if path is not None and is_readable_by_others(path):
            yield f"{path} can be read by every user of this machine: chmod 600 {path.name}"


def find_open_access(config: BoxConfig) -> Iterator[str]:
    """A token that leaves this machine unencrypted, and a port that needs none."""
    updates = config.updates
    if updates is not None and updates.token is not None:
        url = urlsplit(updates.url)
        if url.scheme == "http" and not is_loopback(url.hostname or ""):
            yield "updates: `token` is sent unencrypted: use an https:// address"
    if config.detector_port is not None and not config.detector_port.is_local:
        yield "zmq: whoever reaches the port gets answers, since its clients have no token: let Frigate alone reach it"


def _address_problems(config: BoxConfig) -> Iterator[str]:
    """Why the address of HTTP is not available at present; a box that already serves has it."""
    if config.http is not None:
        from gemel.edge_runtime.http.app import address_problem

        if (problem := address_problem(config.http)) is not None:
            yield f"http: {problem[0]}"


def _lack_of_room(config: BoxConfig) -> Iterator[str]:
    """Samples that may take more than their disk has."""
    if config.spool is None:
        return
    folder = next(parent for parent in (config.spool.path, *config.spool.path.parents) if parent.exists())
    free = shutil.disk_usage(folder).free + sum(path.stat().st_size for path in config.spool.samples.glob("*"))
    if config.spool.max_bytes > free:
        yield (
            f"spool.max_bytes is {size_text(config.spool.max_bytes)}, its disk has {size_text(free)} free: "
            "samples give way to all else"
        )


def _unused_cameras(box: LoadedBox) -> list[str]:
    used = {camera.id for camera in box.cameras}
    return [f"camera {name} is not opened: no query of the bundle uses it" for name in box.config.cameras.keys() - used]


def _camera_problems(box: LoadedBox, probes: Mapping[str, ProbeResult]) -> Iterator[str]:
    """Cameras that do not answer, and queries with a region outside of the picture."""
    for camera, probe in probes.items():
        if probe.image is None:
            yield f"camera {camera} gives no frame: {probe.problem}"
            continue
        height, width = probe.image.shape[:2]
        for query, request in frame_requests(box.bundle, camera).items():
            problem = request.region_problem(query, width, height)
            if problem is not None:
                yield f"camera {camera}: {problem}"
            else:
                note_clipped_roi(query, request.region, (width, height))


def _rebuild(config_path: str | Path, active: ActiveConfig) -> ReadyBox | None:
    """The box from config and bundle as they are now; None where they are the active ones.

    Raises InputError for any problem, damaged queries included: the active box serves on.
    """
    before, config = active.box.costed.loaded, join_arrived(_load_config(config_path))
    check_change(before.config, config)
    is_unchanged = active.bundle_problem is None and is_open_as(before.bundle.file)
    if config == before.config and is_unchanged:
        return None
    loaded = load_box(config)
    for query, reason in loaded.damaged.items():
        raise BundleError(config.bundle, f"query '{query}': {reason}", "copy or build the bundle again")
    if config.canary and config.spool is not None and active.bundle_problem is None:
        loaded = run_canary(before, loaded, config.spool)
    return prepare_engines(cost_box(loaded))


def _cost(config: BoxConfig) -> CostedBox:
    config = join_arrived(config)
    if config.http is not None:
        from gemel.edge_runtime.http.app import check_address

        check_address(config.http, config.path)
    box = cost_box(restore_canary(load_box(config)))
    for query, reason in box.loaded.damaged.items():
        log.error("query %s is disabled: %s; copy the bundle again", query, reason)
    return box


def _load_config(config_path: str | Path) -> BoxConfig:
    config = load_config(config_path)
    _check_outputs(config)
    if config.http is not None and config.http.tls is not None:
        from gemel.edge_runtime.http.tls import Certificate

        Certificate(config.http.tls)
    if config.updates is not None:
        from gemel.edge_runtime.updates.update_sources import check_updates

        check_updates(config.updates)
    for sink in config.sinks:
        sink.check()
    return config


def _check_outputs(config: BoxConfig) -> None:
    """Refuse a trace, a sink's file or a ledger that the box also reads, or that cannot be written."""
    sinks = [(f"sinks[{index}].path", path) for index, sink in enumerate(config.sinks) for path in sink.paths]
    spool = None if config.spool is None else config.spool.path
    ledger = spool / LEDGER_FILE if spool is not None and spool.is_dir() else spool
    cameras = [(f"the source of camera {name}", camera.source) for name, camera in config.cameras.items()]
    tls = None if config.http is None else config.http.tls
    inputs = [
        ("the config", config.path),
        ("the bundle", config.bundle),
        ("its profile", profile_path(config.bundle)),
        ("the public key", config.public_key),
        ("the token", config.token_file),
        *(() if tls is None else (("the certificate", tls.cert), ("the key of the certificate", tls.key))),
    ]
    clips = None if config.clips is None else config.clips.path
    probe = clips / "probe" if clips is not None and clips.is_dir() else clips
    outputs = [("trace", config.trace), *sinks, ("spool", ledger), ("clips.path", probe)]
    check_apart(outputs, [*inputs, *cameras], config.path)
    for key, output in outputs:
        if output is not None:
            try:
                check_output(output, overwrite=True)
            except InputError as error:
                raise InputError(config.path, f"{output}: {error.problem}", error.hint, key) from error
