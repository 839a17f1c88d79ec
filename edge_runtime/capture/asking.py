"""Cameras asked for a frame, all at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_runtime.capture.settings import CameraConfig
from edge_runtime.capture.sources.base import SourceLost, picture_of, reason_of
from edge_runtime.capture.sources.opening import open_source

if TYPE_CHECKING:
    import numpy as np

NO_ANSWER = "no frame came in time"


@dataclass(frozen=True, eq=False)
class Answer:
    """A camera's first frame, RGB uint8 (H, W, 3), or why there is none."""

    image: np.ndarray | None = None
    fault: str = NO_ANSWER

    def to_json(self) -> dict[str, Any]:
        """Whether it answered, with the size of its frames, or what is wrong."""
        if self.image is None:
            return {"answers": False, "error": self.fault}
        return {"answers": True, "width": self.image.shape[1], "height": self.image.shape[0]}


def ask(cameras: Iterable[CameraConfig], most_s: float | None = None) -> dict[str, Answer]:
    """What each camera answers within its `timeout_s`, or within `most_s` seconds."""
    started = time.monotonic()
    found: dict[str, Answer] = {}
    asked = []
    for camera in cameras:
        thread = threading.Thread(target=_ask, args=(camera, found), name=f"asking-{camera.id}", daemon=True)
        thread.start()
        asked.append((camera, thread))
    for camera, thread in asked:
        patience_s = camera.timeout_s if most_s is None else most_s
        thread.join(max(0.0, started + patience_s - time.monotonic()))
    return {camera.id: found.get(camera.id, Answer()) for camera, _ in asked}


def _ask(camera: CameraConfig, found: dict[str, Answer]) -> None:
    try:
        found[camera.id] = Answer(first_frame(camera))
    except Exception as error:  # a decoder can fail in any way
        found[camera.id] = Answer(fault=reason_of(error))


def first_frame(camera: CameraConfig) -> np.ndarray:
    """The first frame that decodes, RGB uint8 (H, W, 3); SourceLost if there is none."""
    source = open_source(camera)
    try:
        while source.advance():
            image = picture_of(source.shot())
            if image is not None:
                return image
    finally:
        source.close()
    raise SourceLost("it has no frame that can be decoded")
