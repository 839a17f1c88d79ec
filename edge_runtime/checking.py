"""`gemel run --check`: what would run, which cameras answer, and which sinks take results; nothing is left behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from edge_runtime.at_once import at_once
from edge_runtime.capture.asking import Answer
from edge_runtime.capture.regions import region_fault
from edge_runtime.config import BoxConfig
from edge_runtime.delivery.base import SinkConfig
from edge_runtime.fitting import FittedBox
from edge_runtime.opening import wanted
from models.bundle import Bundle

log = logging.getLogger("gemel.run")


def checked(box: FittedBox) -> dict[str, Any]:
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


def _of_cameras(bundle: Bundle, answers: Mapping[str, Answer]) -> Iterator[str]:
    """Cameras that do not answer, and queries that look outside of what one shows."""
    for camera, answer in answers.items():
        if answer.image is None:
            yield f"camera {camera} does not answer: {answer.fault}"
            continue
        height, width = answer.image.shape[:2]
        for query in bundle.queries:
            fault = region_fault(query.id, wanted(query), width, height) if query.camera == camera else None
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
