"""`gemel run --check`: what would run, which cameras answer, and which sinks take results; nothing is left behind.

The edge daemon: from a config to a box that serves, stage by stage, each handing a value on to the next.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from edge_runtime.box import CostedBox, ReadyBox, cost_box, frame_request, load_box, prepare_engines
from edge_runtime.canary import run_canary
from edge_runtime.capture.sources import ProbeResult, at_once, region_problem
from edge_runtime.config import FOLDER_MODE, BoxConfig, load_config
from edge_runtime.reload import BuildBox
from edge_runtime.runtime import ActiveConfig, check_change
from edge_runtime.service import LEDGER_FILE, catch_signals, serve
from edge_runtime.simulation.profile_io import profile_path
from edge_runtime.sinks.base import SinkConfig
from edge_runtime.summary import empty_summary
from models.bundle import Bundle
from models.bundle.format import is_open_as
from models.errors import BundleError, InputError
from models.io import check_apart, check_output, describe_problem, locked_folder

log = logging.getLogger("gemel.run")


def check_box(box: CostedBox) -> dict[str, Any]:
    """The answers of a box that was opened and fitted, whose cameras were asked; its sinks are, all at the same time.

    A camera or a sink that does not answer is a warning, since a box starts without it. `warnings` has a line for each
    of these, for regions outside of what a camera shows, and for cameras that no query uses; the log has them too.
    """
    opened = box.box
    config, answers = opened.config, opened.answers
    reached = at_once([(sink.reach, sink.reach_s) for sink in config.sinks], "it does not answer")
    sinks = [_sink(sink, fault) for sink, fault in zip(config.sinks, reached, strict=True)]
    warnings = [*_of_cameras(opened.bundle, answers), *_of_sinks(sinks)]
    for warning in warnings:
        log.warning("%s", warning)
    return {
        "ok": True, "cameras": [{"id": camera, **answer.to_json()} for camera, answer in answers.items()],
        "sinks": sinks, "http": _http(config), "signed": config.public_key is not None, **box.to_json(),
        "warnings": [*_unused(config, opened.bundle), *warnings],
    }  # fmt: skip


def _of_cameras(bundle: Bundle, answers: Mapping[str, ProbeResult]) -> Iterator[str]:
    """Cameras that do not answer, and queries that look outside of what one shows."""
    for camera, answer in answers.items():
        if answer.image is None:
            yield f"camera {camera} does not answer: {answer.fault}"
            continue
        height, width = answer.image.shape[:2]
        for query in bundle.queries:
            fault = region_problem(query.id, frame_request(query), width, height) if query.camera == camera else None
            if fault is not None:
                yield f"camera {camera}: {fault}"


def _of_sinks(sinks: list[dict[str, Any]]) -> Iterator[str]:
    for sink in sinks:
        if sink["error"] is not None:
            yield f"sink {sink['name']}: {sink['error']}"


def _unused(config: BoxConfig, bundle: Bundle) -> Iterator[str]:
    """What opening the box has logged already."""
    for camera in config.cameras.keys() - {query.camera for query in bundle.queries}:
        yield f"camera {camera} is not opened: no query of the bundle uses it"


def _sink(sink: SinkConfig, fault: str | None) -> dict[str, Any]:
    return {"kind": sink.kind, "name": sink.name, "answers": fault is None, "error": fault}


def _http(config: BoxConfig) -> dict[str, Any] | None:
    if config.http is None:
        return None
    return {"host": config.http.host, "port": config.http.port, "token": config.http.token is not None}


log = logging.getLogger("gemel.run")


def run(
    config_path: str | Path, check: bool = False, stop: threading.Event | None = None, seconds: float = math.inf
) -> dict[str, Any]:
    """Run the box until its cameras have ended, it has served for so many seconds, `stop` is set, or SIGINT or SIGTERM
    comes; returns the summary.

    The summary holds the ledger per query, the bytes moved and swaps while serving (those of the warm-up apart),
    the most bytes resident and used, and why the box stopped; it is also logged and written to `SPOOL/ledger.json`.
    What could not be written by then, as on a full disk, is in `unwritten`, a line each. With `check` everything is
    validated, the fit included, cameras and sinks are asked for an answer, nothing runs, and the summary says what
    would (`checking.checked`). Raises InputError (one line: file, key, fault, remedy) before anything is allocated when
    the config or the bundle is faulty or when a query does not fit the budget even alone, or with `overflow: true` not
    even with an overflow; and where another box is at work on its spool. A camera that does not answer is no fault: it
    is tried again.
    """
    if check:
        _, fitted = _fitted(config_path, check)
        return check_box(fitted)
    with catch_signals(stop or threading.Event()) as asked:
        try:
            equipped, refit = prepare(config_path)
        except KeyboardInterrupt:
            if not asked.reasons:
                raise
            return empty_summary(asked.reasons[0])
        spool = equipped.fitted.box.config.spool
        with contextlib.nullcontext() if spool is None else locked_folder(spool.path):
            asked.is_serving = True
            summary = serve(equipped, asked, refit, seconds)
    log.info("ledger: %s", json.dumps(summary))
    return summary


def prepare(config_path: str | Path) -> tuple[ReadyBox, BuildBox]:
    """A box that can serve, its spool's folder there, and what makes it anew for a reload; raises as `run` does."""
    config, fitted = _fitted(config_path)
    equipped = prepare_engines(fitted)
    if config.spool is not None:
        with describe_problem(config.spool.path):
            config.spool.path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    return equipped, partial(_refitted, config_path)


def _loaded(config_path: str | Path) -> BoxConfig:
    config = load_config(config_path)
    _check_outputs(config)
    for sink in config.sinks:
        sink.check()
    return config


def _refitted(config_path: str | Path, work: ActiveConfig) -> ReadyBox | None:
    """The box as config and bundle are now, ready to serve; None where they are what is at work.

    Raises InputError where anything is wrong: what a box that starts can do without, a running one need not go over to.
    """
    before, config = work.box.fitted.box, _loaded(config_path)
    check_change(before.config, config)
    if config == before.config and work.bundle_problem is None and is_open_as(before.bundle.file):
        return None
    opened = load_box(config)
    for query, reason in opened.damaged.items():
        raise BundleError(config.bundle, f"query '{query}': {reason}", "copy or build the bundle again")
    if config.canary and config.spool is not None and work.bundle_problem is None:
        opened = run_canary(before, opened, config.spool)
    return prepare_engines(cost_box(opened))


def _fitted(config_path: str | Path, check: bool = False) -> tuple[BoxConfig, CostedBox]:
    config = _loaded(config_path)
    if config.http is not None:
        from edge_runtime.http.app import check_address

        check_address(config.http, config.path)
    fitted = cost_box(load_box(config, check))
    for query, reason in fitted.box.damaged.items():
        log.error("query %s is out: %s; copy the bundle again", query, reason)
    return config, fitted


def _check_outputs(config: BoxConfig) -> None:
    """Refuse a trace, a sink's file or a ledger that is what the box reads, or that cannot be written."""
    sinks = [(f"sinks[{index}].path", path) for index, sink in enumerate(config.sinks) for path in sink.paths]
    spool = None if config.spool is None else config.spool.path
    ledger = spool / LEDGER_FILE if spool is not None and spool.is_dir() else spool
    cameras = [(f"the source of camera {name}", one.source) for name, one in config.cameras.items()]
    read = [
        ("the config", config.path),
        ("the bundle", config.bundle),
        ("its profile", profile_path(config.bundle)),
        ("the public key", config.public_key),
        ("the token", config.token_file),
    ]
    written = [("trace", config.trace), *sinks, ("spool", ledger)]
    check_apart(written, [*read, *cameras], config.path)
    for key, output in written:
        if output is not None:
            try:
                check_output(output, overwrite=True)
            except InputError as error:
                raise InputError(config.path, f"{output}: {error.problem}", error.hint, key) from error
