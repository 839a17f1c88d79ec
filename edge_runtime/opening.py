"""The first stage of a box: its bundle is opened and its cameras are asked for a frame, nothing is allocated."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from edge_runtime.capture.asking import Answer, ask
from edge_runtime.capture.regions import region_fault
from edge_runtime.capture.settings import Wanted
from edge_runtime.config import ACCURACY, FRAMES, BoxConfig
from edge_runtime.integrity.hashing import damaged_queries, damaged_tensors
from edge_runtime.scheduler import QuerySpec
from edge_runtime.scheduler.types import Curve
from edge_runtime.simulation.profile_io import read_staleness
from models.bundle import Bundle, BundleQuery, open_bundle
from models.bundle.signing import check_signature
from models.errors import BundleError, InputError

UNKNOWN_FPS = 10.0
AT_ONCE_S = 1.0
"""How long a box that starts waits for its files' first frames."""
CLOCK_TICK_S = 0.02
"""File systems note times no finer than this."""
PLAUSIBLE_SIZE = (1280, 720)
"""Width and height of the frames of a camera that has shown none yet."""

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, eq=False)
class OpenBox:
    """A config whose bundle can be read, with a frame for every query (RGB uint8, H, W, 3).

    It is one of its camera's where that has answered, else a blank one. `answers` are those of the cameras that were
    asked. `bad` are tensors that are not what they were, `damaged` the queries with such, and why: the others can run.
    `staleness` holds the queries' curves where accuracy over time is aimed at.
    `held_back` are queries that kept the weights of the bundle before, and why (`edge_runtime.reloading.canary`).
    """

    config: BoxConfig
    bundle: Bundle
    bad: frozenset[str]
    damaged: Mapping[str, str]
    frames: Mapping[str, np.ndarray]
    answers: Mapping[str, Answer]
    held_back: Mapping[str, str] = field(default_factory=dict)
    staleness: Mapping[str, Curve] = field(default_factory=dict)

    def demands(self) -> dict[str, QuerySpec]:
        """What each query asks for: the lower of its own and its camera's rate, its priority, what its answers are
        worth as they age."""
        demands = {}
        for query in self.bundle.queries:
            rates = [fps for fps in (query.fps, self.config.cameras[query.camera].fps) if fps]
            fps, known = min(rates, default=UNKNOWN_FPS), self.staleness.get(query.id)
            demands[query.id] = QuerySpec(fps, float(query.priority), () if known is None else known)
        return demands


def open_box(config: BoxConfig, check: bool = False) -> OpenBox:
    """Open and rehash the bundle, and ask cameras that a query looks at for a frame, all at the same time.

    With `check` every one is asked and has its `timeout_s`. Else only files are, for a moment: a live camera is
    connected once, when the box serves, and no camera keeps a box from starting.
    Raises InputError (one line: file, key, fault, remedy) where the bundle is faulty, or a query has no camera.
    """
    bundle = open_bundle(config.bundle, config.factories, config.path.resolve().parent)
    if config.public_key is not None:
        check_signature(bundle, config.public_key)
    bad = _bad_tensors(bundle)
    damaged = _damaged(config, bundle, bad)
    _check_cameras(config, bundle)
    looked_at = {query.camera for query in bundle.queries}
    asked = [one for one in config.cameras.values() if one.id in looked_at and (check or not one.live)]
    answers = ask(asked, None if check else AT_ONCE_S)
    frames = {query.id: _frame(query, answers.get(query.camera)) for query in bundle.queries}
    return OpenBox(config, bundle, bad, damaged, frames, answers, staleness=_staleness(config, bundle))


def _staleness(config: BoxConfig, bundle: Bundle) -> dict[str, Curve]:
    """The curves to aim by; InputError where they are asked for by name and were never measured."""
    if config.objective == FRAMES:
        return {}
    with contextlib.nullcontext() if config.objective == ACCURACY else contextlib.suppress(InputError):
        return read_staleness(bundle)
    return {}


def wanted(query: BundleQuery) -> Wanted:
    """What a query wants of its camera."""
    return Wanted(query.fps, query.roi)


def _frame(query: BundleQuery, answer: Answer | None) -> np.ndarray:
    """What the query's camera shows, or a blank picture in which its region lies."""
    if answer is not None and answer.image is not None:
        height, width = answer.image.shape[:2]
        if region_fault(query.id, wanted(query), width, height) is None:
            return answer.image
    width, height = PLAUSIBLE_SIZE
    if query.roi is not None:
        width, height = max(width, math.ceil(query.roi[2])), max(height, math.ceil(query.roi[3]))
    return np.zeros((height, width, 3), np.uint8)


def _bad_tensors(bundle: Bundle) -> frozenset[str]:
    """Hash every tensor; from then on the file is read only as long as it looks as it did before.

    Raises BundleError where it changes meanwhile.
    """
    before = bundle.file.opened_as
    age_s = time.time() - before.mtime_ns / 1e9
    if 0 <= age_s < CLOCK_TICK_S:  # what is written a moment later could not be told by its time
        time.sleep(CLOCK_TICK_S)
    bad = damaged_tensors(bundle)
    if bundle.file.stamp() != before:
        raise BundleError(bundle.path, "changes while it is read", "write it under another name and rename it")
    bundle.file.proven = before
    return bad


def _damaged(config: BoxConfig, bundle: Bundle, bad: frozenset[str]) -> dict[str, str]:
    """Damage to some queries' tensors leaves the others running."""
    damaged = damaged_queries(bundle, bad)
    if len(damaged) == len(bundle.queries):
        fault = f"every query has damaged tensors: {next(iter(damaged.values()))}"
        raise BundleError(config.bundle, fault, "copy or build the bundle again")
    return damaged


def _check_cameras(config: BoxConfig, bundle: Bundle) -> None:
    for query in bundle.queries:
        if query.camera not in config.cameras:
            fault = f"query '{query.id}' of the bundle needs a camera '{query.camera}'"
            raise InputError(config.path, fault, f"add `{query.camera}: {{source: ...}}`", "cameras")
    for camera in config.cameras.keys() - {query.camera for query in bundle.queries}:
        log.warning("camera %s is not opened: no query of the bundle uses it", camera)
