"""The edge daemon: from a config to a box that serves, stage by stage, each handing a value on to the next."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_runtime.config import BoxConfig, load_config
from edge_runtime.equipping import equip
from edge_runtime.fitting import fit
from edge_runtime.frames.sinks.base import Sink
from edge_runtime.opening import open_box
from edge_runtime.rehearsal.measured import profile_path
from edge_runtime.serving.service import serve
from edge_runtime.serving.signals import signals
from models.errors import InputError
from models.files.apart import check_apart
from models.files.atomic import check_output, writing

LEDGER_FILE = "ledger.json"

log = logging.getLogger("gemel.run")


def run(
    config_path: str | Path, check: bool = False, stop: threading.Event | None = None, seconds: float = math.inf
) -> dict[str, Any]:
    """Run the box until its cameras have ended, it has served for so many seconds, `stop` is set, or SIGINT or SIGTERM
    comes; returns the summary.

    The summary holds the ledger per query, the bytes moved and swaps while serving (those of the warm-up apart),
    the most bytes resident and used, and why the box stopped; it is also logged and written to `SPOOL/ledger.json`.
    What could not be written by then, as on a full disk, is in `unwritten`, a line each. With `check` everything is
    validated, the fit included, cameras are asked for a frame, nothing runs, and the summary says what would. Raises
    InputError (one line: file, key, fault, remedy) before anything is allocated when the config or the bundle is faulty
    or when a query does not fit the budget even alone, or with `overflow: true` not even with an overflow. A camera
    that does not answer is no fault: it is tried again.
    """
    config = load_config(config_path)
    _check_outputs(config)
    fitted = fit(open_box(config, check))
    if check:
        cameras = [{"id": camera, **answer.to_json()} for camera, answer in fitted.box.answers.items()]
        return {"ok": True, "cameras": cameras, **fitted.to_json()}
    equipped = equip(fitted)
    stopping = stop or threading.Event()
    with contextlib.ExitStack() as closing:
        reasons = closing.enter_context(signals(stopping))
        sinks = [closing.enter_context(_closing(sink.open())) for sink in config.sinks]
        summary = serve(equipped, sinks, stopping, seconds)
        summary["stopped_by"] = reasons[0] if reasons else summary["stopped_by"]
    _tell(summary, config.spool)
    return summary


def _check_outputs(config: BoxConfig) -> None:
    """Refuse a trace, a sink's file (its `path`, where it has one) or a ledger that is what the box reads, or that
    cannot be written.
    """
    sinks = [(f"sinks[{index}].path", getattr(sink, "path", None)) for index, sink in enumerate(config.sinks)]
    ledger = None if config.spool is None else config.spool / LEDGER_FILE
    cameras = [(f"the source of camera {name}", one.source) for name, one in config.cameras.items()]
    read = [
        ("the config", config.path),
        ("the bundle", config.bundle),
        ("its profile", profile_path(config.bundle)),
        ("the public key", config.public_key),
    ]
    written = [("trace", config.trace), *sinks, ("spool", ledger)]
    check_apart(written, [*read, *cameras], config.path)
    for key, output in written:
        if output is not None:
            try:
                check_output(output, overwrite=True)
            except InputError as error:
                raise InputError(config.path, f"{output}: {error.fault}", error.remedy, key) from error


@contextlib.contextmanager
def _closing(sink: Sink) -> Iterator[Sink]:
    """A sink that is closed at the end; what comes of that is told, since the summary is still to come."""
    try:
        yield sink
    finally:
        try:
            sink.close()
        except (InputError, OSError) as error:
            log.error("%s", error)


def _tell(summary: dict[str, Any], spool: Path | None) -> None:
    """Log the summary and write it; that it could not be written is added to it, since somebody may still read it."""
    log.info("ledger: %s", json.dumps(summary))
    if spool is None:
        return
    try:
        with writing(spool / LEDGER_FILE, overwrite=True) as file:
            file.write(json.dumps(summary, indent=2).encode())
    except InputError as error:
        log.error("%s", error)
        summary["unwritten"].append(str(error))
