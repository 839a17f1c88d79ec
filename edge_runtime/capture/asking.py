"""Cameras asked for a frame, all at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from edge_runtime.at_once import at_once
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
    asked = list(cameras)
    questions = [(partial(_ask, camera), camera.timeout_s if most_s is None else most_s) for camera in asked]
    answers = at_once(questions, Answer())
    return {camera.id: answer for camera, answer in zip(asked, answers, strict=True)}


def _ask(camera: CameraConfig) -> Answer:
    try:
        return Answer(first_frame(camera))
    except Exception as error:  # a decoder can fail in any way
        return Answer(fault=reason_of(error))


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
