"""Notes on a query's labelled and unlabelled pictures: what is not read, what occurs twice, what changes its shape."""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from gemel.models.errors import join_names
from gemel.models.files.pictures import SUFFIXES, LabelledPicture
from gemel.models.notes import add_note
from gemel.models.preprocess import Preprocess, Region

if TYPE_CHECKING:
    from gemel.models.workload import Query

Size = tuple[int, int]
"""Width and height in pixels."""
SHAPE_TOLERANCE = 1.1
"""Proportions that differ by less look alike once they are squashed to a square."""
MAX_NAMES, SAMPLE_BYTES = 5, 256
UNIT_AND_TIME = re.compile("(.*?)__([0-9]{1,15})")
"""In the stem of a file: clip or track, and milliseconds into it."""


def note_unread(folder: Path, names_read: Collection[str], hint: str) -> None:
    """Note the folders and pictures of a folder whose names are not `names_read`."""
    unread = [
        f"{path.name}/" if path.is_dir() else path.name
        for path in folder.iterdir()
        if path.name not in names_read
        and not path.name.startswith(".")
        and (path.is_dir() or path.suffix.lower() in SUFFIXES)
    ]
    if unread:
        names = join_names(sorted(unread), MAX_NAMES)
        add_note(
            folder, f"is read only in {join_names(names_read, MAX_NAMES)}; left out: {names}", hint
        )


def note_copies(where: Path, pictures: Sequence[LabelledPicture]) -> None:
    """Note the pictures of a split that occur in it twice, or with two labels, byte for byte."""
    labels = {picture.path: picture.label for picture in pictures}
    groups = _group_equal(list(labels))
    twice = sum(len(paths) for paths in groups if len({labels[path] for path in paths}) > 1)
    copies = sum(len(paths) - 1 for paths in groups)
    of_all = f"of {len(labels)} pictures are"
    if twice:
        hint = "take those with the wrong label out"
        add_note(where, f"{twice} {of_all} there with other labels too, byte for byte", hint)
    elif copies:
        add_note(where, f"{copies} {of_all} copies of others and count again", "remove the copies")


def find_copies(pictures: Sequence[Path], earlier: Collection[Path]) -> float:
    """The part of pictures that are in `earlier` splits too, byte for byte."""
    pictures_of_split = set(pictures)
    again = pictures_of_split & set(earlier)
    for paths in _group_equal(
        [*pictures_of_split, *(path for path in earlier if path not in pictures_of_split)]
    ):
        within = pictures_of_split.intersection(paths)
        # A copy within the split alone is no overlap.
        if len(within) < len(paths):
            again |= within
    return len(again) / len(pictures)


def _group_equal(paths: Sequence[Path]) -> list[list[Path]]:
    """Groups of equal files; those of equal size and samples alone are read, once while they stay as they are."""
    groups = [list(paths)]
    for digest in (_size_digest, _sample_digest, _whole_digest):
        by_digest: dict[bytes, list[Path]] = defaultdict(list)
        for path in (path for group in groups for path in group):
            by_digest[digest(path)].append(path)
        groups = [group for group in by_digest.values() if len(group) > 1]
    return groups


def _size_digest(path: Path) -> bytes:
    return str(os.path.getsize(path)).encode()


def _sample_digest(path: Path) -> bytes:
    """The bytes in the middle, which differ between compressed pictures of one size."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - SAMPLE_BYTES) // 2)
        return _size_digest(path) + file.read(SAMPLE_BYTES)


def _whole_digest(path: Path) -> bytes:
    state = os.stat(path)
    return _digest_file(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=2**16)
def _digest_file(path: Path, nbytes: int, changed_ns: int) -> bytes:
    """Of the file as it was at this size and time."""
    return hashlib.sha256(path.read_bytes()).digest()


def note_names(pictures: Sequence[Path], timed: int) -> None:
    """Note that only some names tell a unit and a time, so that none is used."""
    folder = os.path.commonpath([path.parent for path in pictures])
    text = f"{len(pictures) - timed} of {len(pictures)} file names are not <unit>__<milliseconds>"
    add_note(
        folder,
        f"{text}; all count as ten blocks at one frame a second",
        "rename them, or take them out",
    )


def note_shapes(
    query: Query, preprocess: Preprocess, sizes: Collection[Size], is_cut_out: bool
) -> None:
    """Note frames of several proportions that are stretched, and those `is_cut_out` whose shape is not the `roi`'s."""
    if not sizes or query.data is None:
        return
    narrow, wide = min(sizes, key=_proportion), max(sizes, key=_proportion)
    if preprocess.resize == "stretch" and _proportion(wide) > SHAPE_TOLERANCE * _proportion(narrow):
        side = _text((preprocess.size[1], preprocess.size[0]))
        text = f"frames from {_text(narrow)} to {_text(wide)} pixels are all squashed to the network's input, {side}"
        hint = "cut them to one shape, that of the camera's frames or the `roi`"
        add_note(query.data, text, hint, once="shapes")
    camera_size = query.region.least_frame()
    # Cut-out frames have the shape of the part that the box will cut.
    if query.roi is not None and is_cut_out and min(camera_size) > 0:
        x0, y0, x1, y1 = query.region.pixels(camera_size)
        roi_size = (x1 - x0, y1 - y0)
        odd = max(
            (narrow, wide), key=lambda size: abs(_proportion(size) / _proportion(roi_size) - 1)
        )
        if not 1 / SHAPE_TOLERANCE <= _proportion(odd) / _proportion(roi_size) <= SHAPE_TOLERANCE:
            text = f"labelled frames of {_text(odd)} pixels are used whole, the roi of query {query.id} is"
            add_note(
                query.data,
                f"{text} {_text(roi_size)}",
                "cut the roi out of each frame and its labels, or correct `roi`",
            )


def note_clipped_roi(query: str, region: Region, size: Size) -> None:
    """Note a roi that reaches beyond the frames, whose part within them is used."""
    if region.roi is None:
        return
    edges = region.pixels(size)
    if edges[2] > size[0] or edges[3] > size[1]:
        text = f"its roi {list(edges)} reaches beyond frames of {_text(size)} pixels"
        add_note(f"query {query}", f"{text} and is cut at their edge", "correct `roi`")


def _proportion(size: Size) -> float:
    return size[0] / max(size[1], 1)


def _text(size: Size) -> str:
    return f"{size[0]} x {size[1]}"
