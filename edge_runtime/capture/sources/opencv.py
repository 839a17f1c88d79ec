"""Devices and files, decoded by OpenCV: USB cameras by their number, on every system."""

from __future__ import annotations

from edge_runtime.capture.settings import CameraConfig
from edge_runtime.capture.sources.base import Shot, SourceLost
from models.errors import InputError
from models.video import Video


class OpenCVSource:
    """A device or a video file; SourceLost when it cannot be opened, or a device gives no more frames."""

    damaged = 0

    def __init__(self, config: CameraConfig) -> None:
        self._live = config.live
        try:
            self._video = Video(config.source)
        except InputError as error:
            raise SourceLost(error.problem) from None
        self.fps = None if config.live else self._video.fps

    def advance(self) -> bool:
        if self._video.advance():
            return True
        if self._live:
            raise SourceLost("it gives no frames")
        return False

    def shot(self) -> Shot:
        image = self._video.image()
        return lambda: image

    def close(self) -> None:
        self._video.close()
