"""A pipeline for the hardware decoder of a Jetson, through an OpenCV that was built with GStreamer.

Never run: no Jetson was at hand. JetPack's own OpenCV has GStreamer, the one of the package index has not.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from edge_runtime.capture.settings import CameraConfig
from edge_runtime.capture.sources.base import Shot, SourceLost
from models.video import FASTEST, SLOWEST, opencv

DECODED = (
    "nvvidconv ! video/x-raw,format=BGRx ! videoconvert ! video/x-raw,format=BGR ! appsink max-buffers=1 sync=false"
)
"""decodebin takes nvv4l2decoder where there is one; nvvidconv brings its frames into ordinary memory."""


class GStreamerSource:
    """An address or a video file; SourceLost when it cannot be opened or a stream gives no more frames."""

    damaged = 0
    fps: float | None = None

    def __init__(self, config: CameraConfig) -> None:
        if not config.live and not Path(config.source).is_file():
            raise SourceLost(f"there is no {config.source}")
        self._live, self._cv2 = config.live, opencv()
        self._capture = self._cv2.VideoCapture(pipeline(config), self._cv2.CAP_GSTREAMER)
        if not self._capture.isOpened():
            self._capture.release()
            raise SourceLost("it cannot be opened")
        rate = self._capture.get(self._cv2.CAP_PROP_FPS)
        self.fps = rate if SLOWEST <= rate <= FASTEST and not self._live else None

    def advance(self) -> bool:
        if self._capture.grab():
            return True
        if self._live:
            raise SourceLost("it gives no frames")
        return False

    def shot(self) -> Shot:
        decoded, image = self._capture.retrieve()
        return partial(self._rgb, image) if decoded else lambda: None

    def close(self) -> None:
        self._capture.release()

    def _rgb(self, image: Any) -> Any:
        return self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB)


def has_gstreamer() -> bool:
    """Whether OpenCV was built with GStreamer here."""
    cv2 = opencv()
    return cv2.videoio_registry.hasBackend(cv2.CAP_GSTREAMER)


def pipeline(config: CameraConfig) -> str:
    """What GStreamer is told; of a stream the newest frame is kept, of a file every one."""
    named = '"' + config.source.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if not config.is_address:
        return f"filesrc location={named} ! decodebin ! {DECODED}"
    if config.source.lower().startswith("rtsp"):
        timeout_us = round(config.timeout_s * 1e6)
        begin = f"rtspsrc location={named} protocols=tcp latency=0 tcp-timeout={timeout_us}"
    else:
        begin = f"souphttpsrc location={named} is-live=true timeout={max(1, round(config.timeout_s))}"
    return f"{begin} ! decodebin ! {DECODED} drop=true"
