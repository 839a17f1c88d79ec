"""Sources of frames: video files, folders of images, streams and devices, all through one small interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from models.errors import InputError

if TYPE_CHECKING:
    import numpy as np

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png"))


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

    def __init__(self, source: str, where: str, key: str) -> None:
        import cv2

        self.live = "://" in source or source.isdigit()
        self.skipped = 0
        if not self.live and not Path(source).is_file():
            raise InputError(where, f"there is no {source}", "give an existing video file or folder of images", key)
        self._capture = cv2.VideoCapture(int(source) if source.isdigit() else source)
        rate = self._capture.get(cv2.CAP_PROP_FPS) if self._capture.isOpened() else 0.0
        self.fps = rate if 0 < rate < 1000 else None

    def advance(self) -> bool:
        return self._capture.grab()

    def image(self) -> np.ndarray | None:
        import cv2

        decoded, image = self._capture.retrieve()
        if not decoded:
            self.skipped += 1
            return None
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)

    def close(self) -> None:
        self._capture.release()


class FolderSource:
    """The .jpg and .png files of a folder in the order of their names, one frame each."""

    live = False
    fps: float | None = None

    def __init__(self, folder: Path) -> None:
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        self._paths: Iterator[Path] = iter(paths)
        self._path: Path | None = None
        self.skipped = 0

    def advance(self) -> bool:
        self._path = next(self._paths, None)
        return self._path is not None

    def image(self) -> np.ndarray | None:
        import cv2

        image = cv2.imread(str(self._path), cv2.IMREAD_COLOR)
        if image is None:
            self.skipped += 1
            return None
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)

    def close(self) -> None:
        self._path = None


def open_source(source: str, where: str = "camera", key: str = "") -> Source:
    """Open a source at its first frame; InputError when a path does not exist or holds no image files."""
    if "://" in source or source.isdigit() or not Path(source).is_dir():
        return VideoSource(source, where, key)
    if not any(path.suffix.lower() in IMAGE_SUFFIXES for path in Path(source).iterdir()):
        raise InputError(where, f"the folder {source} has no .jpg or .png files", "give a folder of frames", key)
    return FolderSource(Path(source))


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
        raise InputError(where, f"no frame comes from {_without_secret(source)}", remedy, key)
    raise InputError(where, f"{source} has no frame that can be decoded", "give a video or folder with frames", key)


def _without_secret(source: str) -> str:
    """The URL with user and password left out."""
    scheme, separator, rest = source.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}" if separator else source
