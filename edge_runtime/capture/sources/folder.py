"""The pictures of a folder, one frame each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from edge_runtime.capture.sources.base import Shot, SourceLost
from models.pictures import list_pictures, read_picture


class FolderSource:
    """The .jpg and .png files of a folder in the order of their names; SourceLost if there are none."""

    fps: float | None = None
    damaged = 0

    def __init__(self, folder: Path) -> None:
        found = list_pictures(folder)
        if not found:
            raise SourceLost(f"the folder {folder} has no .jpg or .png files")
        self._paths: Iterator[Path] = iter(found)
        self._path: Path | None = None

    def advance(self) -> bool:
        self._path = next(self._paths, None)
        return self._path is not None

    def shot(self) -> Shot:
        assert self._path is not None
        return partial(read_picture, self._path)

    def close(self) -> None:
        self._path = None
