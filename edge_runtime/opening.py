"""The first stage of a box: its bundle and its cameras are opened and looked at, nothing is allocated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_runtime.config import BoxConfig
from edge_runtime.frames.sources import probe
from edge_runtime.memory.soundness import damaged_queries
from edge_runtime.schedule import Demand
from models.bundle import Bundle, open_bundle
from models.bundle.signing import check_signature
from models.errors import BundleError, InputError

if TYPE_CHECKING:
    import numpy as np

UNKNOWN_FPS = 10.0

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, eq=False)
class OpenBox:
    """A config whose bundle can be read, with a frame of the camera of every query (RGB uint8, H, W, 3).

    `damaged` are queries whose tensors are not what they were, with the reason: the others can run.
    """

    config: BoxConfig
    bundle: Bundle
    damaged: Mapping[str, str]
    frames: Mapping[str, np.ndarray]

    def demands(self) -> dict[str, Demand]:
        """What each query asks for: the lower of its own and its camera's rate, and its priority."""
        demands = {}
        for query in self.bundle.queries:
            rates = [fps for fps in (query.fps, self.config.cameras[query.camera].fps) if fps]
            demands[query.id] = Demand(min(rates, default=UNKNOWN_FPS), float(query.priority))
        return demands


def open_box(config: BoxConfig) -> OpenBox:
    """Open and rehash the bundle, and take a frame of every camera that a query looks at.

    Raises InputError (one line: file, key, fault, remedy) where the bundle or a camera is faulty, is missing, or does
    not show what a query looks at.
    """
    bundle = open_bundle(config.bundle, config.factories, config.path.resolve().parent)
    if config.public_key is not None:
        check_signature(bundle, config.public_key)
    damaged = _damaged(config, bundle)
    _check_cameras(config, bundle)
    cameras = {query.camera for query in bundle.queries}
    found = {
        camera: probe(one.source, str(config.path), f"cameras.{camera}.source")
        for camera, one in config.cameras.items()
        if camera in cameras
    }
    _check_regions(config, bundle, found)
    return OpenBox(config, bundle, damaged, {query.id: found[query.camera] for query in bundle.queries})


def _damaged(config: BoxConfig, bundle: Bundle) -> dict[str, str]:
    """Damage to some queries' tensors leaves the others running."""
    damaged = damaged_queries(bundle)
    for query, reason in damaged.items():
        log.error("query %s is out: %s; copy the bundle again", query, reason)
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


def _check_regions(config: BoxConfig, bundle: Bundle, frames: Mapping[str, np.ndarray]) -> None:
    for query in bundle.queries:
        height, width = frames[query.camera].shape[:2]
        if query.roi is not None and (round(query.roi[0]) >= width or round(query.roi[1]) >= height):
            fault = f"query '{query.id}' looks at {list(query.roi)}, outside frames of {width}x{height} pixels"
            raise InputError(config.path, fault, "give the camera it was made for", f"cameras.{query.camera}.source")
