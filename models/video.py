"""Videos, streams and devices through OpenCV, without its messages and with an allow-list of formats."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from models.errors import InputError
from models.io import DEVICE, is_path, open_regular
from models.pictures import MAX_PIXELS

if TYPE_CHECKING:
    import numpy as np


SCHEMES = ("rtsp", "rtsps", "rtmp", "rtmps", "http", "https", "udp", "tcp", "rtp", "srt")
VIDEO_FORMATS = (
    *("mov", "matroska", "avi", "mpegts", "mpeg", "mpegvideo", "m4v", "flv", "live_flv", "asf", "ogg", "ivf", "obu"),
    *("h264", "hevc", "mjpeg", "mpjpeg", "dhav", "dv", "mxf", "yuv4mpegpipe", "rtsp", "rtp", "hls"),
)
"""Formats that FFmpeg may open: none that names other files, except playlists of streams."""
PROTOCOLS = ("file", *SCHEMES, "tls", "crypto", "httpproxy", "rtmpt", "rtmpe", "rtmpte", "rtmpts", "ffrtmphttp")
PLAYLISTS = (b"#EXTM3U", b"ID3")
"""First bytes of files that FFmpeg treats as playlists; it looks behind an ID3 tag, too."""
OPTIONS, LOG_LEVEL = "OPENCV_FFMPEG_CAPTURE_OPTIONS", "OPENCV_FFMPEG_LOGLEVEL"
os.environ.setdefault(LOG_LEVEL, "-8")  # at import: OpenCV reads it at its first use of FFmpeg
MIN_FPS, MAX_FPS = 0.01, 1000.0
"""Plausible frames a second of a video."""


class Video:
    """An open video file, stream or device; `fps` is its own rate, None if it is not plausible.

    Raises InputError for a path that is no video file, an address that is no stream's, and frames of more than
    MAX_PIXELS. A stream or device that does not answer has no frames.
    """

    def __init__(self, source: str) -> None:
        if is_path(source):
            _check_file(Path(source))
        elif "://" in source and source.partition("://")[0].lower() not in SCHEMES:
            remedy = f"begin with {', '.join(SCHEMES)}, or give a path"
            raise InputError(without_secret(source), "is no address of a stream", remedy)
        cv2 = opencv()
        device = DEVICE.fullmatch(source) is not None
        self._capture = cv2.VideoCapture(int(source)) if device else cv2.VideoCapture(source, cv2.CAP_FFMPEG)
        self._error, self._turn = cv2.error, lambda image: cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        rate = self._capture.get(cv2.CAP_PROP_FPS) if self._capture.isOpened() else 0.0
        self.fps: float | None = rate if MIN_FPS <= rate <= MAX_FPS else None
        width, height = (self._capture.get(side) for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
        if width * height > MAX_PIXELS:
            self.close()
            fault = f"has frames of {width:.0f} x {height:.0f} pixels, more than {MAX_PIXELS:,}"
            raise InputError(without_secret(source), fault, "make them smaller")

    def advance(self) -> bool:
        """Go to the next frame; False at the end, or where nothing more can be read."""
        try:
            return self._capture.grab()
        except self._error:
            return False

    def image(self) -> np.ndarray | None:
        """The frame advanced to, uint8 RGB (H, W, 3); None if it does not decode."""
        try:
            decoded, image = self._capture.retrieve()
        except self._error:
            return None
        if not decoded or image.shape[0] * image.shape[1] > MAX_PIXELS:
            return None
        return self._turn(image)

    def close(self) -> None:
        """Close the file or connection."""
        self._capture.release()


@cache
def opencv() -> ModuleType:
    """OpenCV without messages, with FFmpeg limited to our formats and protocols; the environment's options win."""
    given = os.environ.get(OPTIONS, "rtsp_transport;tcp")
    ours = {"protocol_whitelist": PROTOCOLS, "format_whitelist": VIDEO_FORMATS}
    added = [f"{name};{','.join(values)}" for name, values in ours.items() if f"{name};" not in given]
    os.environ[OPTIONS] = "|".join([given, *added] if given else added)
    import cv2

    cv2.utils.logging.setLogLevel(0)
    return cv2


def without_secret(source: str) -> str:
    """An address without user and password; a path unchanged."""
    scheme, separator, rest = source.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}" if separator else source


def _check_file(path: Path) -> None:
    remedy = "give an existing video, or a folder of frames"
    with open_regular(path, remedy) as file:
        if file.read(max(map(len, PLAYLISTS))).startswith(PLAYLISTS):
            raise InputError(path, "is a playlist, not a video", "give the video itself, or a stream's address")
