"""The edge daemon: from a config to a box that serves, stage by stage, each handing a value on to the next."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
from functools import partial
from pathlib import Path
from typing import Any

from edge_runtime.checking import checked
from edge_runtime.config import BoxConfig, load_config
from edge_runtime.equipping import EquippedBox, equip
from edge_runtime.fitting import FittedBox, fit
from edge_runtime.opening import open_box
from edge_runtime.reloading.canary import tried
from edge_runtime.reloading.differences import check_change
from edge_runtime.reloading.reloads import Refit
from edge_runtime.reloading.workplace import AtWork
from edge_runtime.serving.ledger_file import LEDGER_FILE
from edge_runtime.serving.service import serve
from edge_runtime.serving.signals import signals
from edge_runtime.simulation.profile_io import profile_path
from edge_runtime.spool.settings import FOLDER_MODE
from edge_runtime.unserved import unserved
from models.bundle.format import is_open_as
from models.errors import BundleError, InputError
from models.io import check_apart, check_output, describe_problem, locked_folder

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
        return checked(fitted)
    with signals(stop or threading.Event()) as asked:
        try:
            equipped, refit = prepared(config_path)
        except KeyboardInterrupt:
            if not asked.reasons:
                raise
            return unserved(asked.reasons[0])
        spool = equipped.fitted.box.config.spool
        with contextlib.nullcontext() if spool is None else locked_folder(spool.path):
            asked.is_serving = True
            summary = serve(equipped, asked, refit, seconds)
    log.info("ledger: %s", json.dumps(summary))
    return summary


def prepared(config_path: str | Path) -> tuple[EquippedBox, Refit]:
    """A box that can serve, its spool's folder there, and what makes it anew for a reload; raises as `run` does."""
    config, fitted = _fitted(config_path)
    equipped = equip(fitted)
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


def _refitted(config_path: str | Path, work: AtWork) -> EquippedBox | None:
    """The box as config and bundle are now, ready to serve; None where they are what is at work.

    Raises InputError where anything is wrong: what a box that starts can do without, a running one need not go over to.
    """
    before, config = work.box.fitted.box, _loaded(config_path)
    check_change(before.config, config)
    if config == before.config and work.vigil.fault is None and is_open_as(before.bundle.file):
        return None
    opened = open_box(config)
    for query, reason in opened.damaged.items():
        raise BundleError(config.bundle, f"query '{query}': {reason}", "copy or build the bundle again")
    if config.canary and config.spool is not None and work.vigil.fault is None:
        opened = tried(before, opened, config.spool)
    return equip(fit(opened))


def _fitted(config_path: str | Path, check: bool = False) -> tuple[BoxConfig, FittedBox]:
    config = _loaded(config_path)
    if config.http is not None:
        from edge_runtime.watching.service import check_address

        check_address(config.http, config.path)
    fitted = fit(open_box(config, check))
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
