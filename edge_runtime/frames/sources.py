"""Sources of frames: video files, folders of images, streams and devices, all through one small interface."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from models.errors import InputError
from models.frames.pictures import pictures_in, read_picture
from models.frames.video import Video, is_path, without_secret

if TYPE_CHECKING:
    import numpy as np


class Source(Protocol):
    """Where a camera's frames come from. `fps` is the source's own rate, None if it has none.

    A `live` source sets its own pace; others are read as fast as asked. `skipped` counts frames that could not be
    decoded.
    """

    fps: float | None
    live: bool
    skipped: int

    def advance(self) -> bool:
        """Go to the next frame; False at the end."""
        ...

    def image(self) -> np.ndarray | None:
        """The frame advanced to, RGB uint8 (H, W, 3); None if it does not decode."""
        ...

    def close(self) -> None: ...


class VideoSource:
    """A video file, a URL (rtsp://, http://) or a device index, decoded by OpenCV. A lost stream is its end."""

    def __init__(self, source: str) -> None:
        self.live = not is_path(source)
        self.skipped = 0
        self._video = Video(source)
        self.fps = self._video.fps

    def advance(self) -> bool:
        return self._video.advance()

    def image(self) -> np.ndarray | None:
        image = self._video.image()
        self.skipped += image is None
        return image

    def close(self) -> None:
        self._video.close()


class FolderSource:
    """The .jpg and .png files of a folder in the order of their names, one frame each."""

    live = False
    fps: float | None = None

    def __init__(self, folder: Path) -> None:
        found = pictures_in(folder)
        if not found:
            raise InputError(folder, "has no .jpg or .png files", "give a folder of frames")
        self._paths: Iterator[Path] = iter(found)
        self._path: Path | None = None
        self.skipped = 0

    def advance(self) -> bool:
        self._path = next(self._paths, None)
        return self._path is not None

    def image(self) -> np.ndarray | None:
        assert self._path is not None
        try:
            return read_picture(self._path)
        except InputError:
            self.skipped += 1
            return None

    def close(self) -> None:
        self._path = None


def open_source(source: str, where: str = "camera", key: str = "") -> Source:
    """Open a source at its first frame; InputError for one that is no video, folder of frames, stream or device."""
    if is_path(source) and not os.path.exists(source):
        raise InputError(where, f"there is no {source}", "give an existing video file or folder of images", key)
    try:
        return FolderSource(Path(source)) if is_path(source) and os.path.isdir(source) else VideoSource(source)
    except InputError as error:
        raise InputError(where, f"{error.where} {error.fault}", error.remedy, key) from error


def probe(source: str, where: str = "camera", key: str = "") -> np.ndarray:
    """The first frame of a source; InputError when there is none that decodes."""
    opened = open_source(source, where, key)
    try:
        while opened.advance():
            image = opened.image()
            if image is not None:
                return image
    finally:
        opened.close()
    if opened.live:
        remedy = "check that it is reachable from here, and the user and password if it has any"
        raise InputError(where, f"no frame comes from {without_secret(source)}", remedy, key)
    raise InputError(where, f"{source} has no frame that can be decoded", "give a video or folder with frames", key)
