"""Notes on a query's labelled and unlabelled pictures: what is not read, what occurs twice, what changes its shape."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from models.errors import join_names
from models.notes import add_note
from models.pictures import SUFFIXES
from models.preprocess import Roi

if TYPE_CHECKING:
    from models.workload import Query

Size = tuple[int, int]
"""Width and height in pixels."""
SHAPE_TOLERANCE = 1.1
"""Proportions that differ by less look alike once they are squashed to a square."""
MAX_NAMES = 5


def note_unread(folder: Path, known: Collection[str], hint: str) -> None:
    """Note the folders and pictures of a folder whose names are not `known`."""
    unread = [
        f"{path.name}/" if path.is_dir() else path.name
        for path in folder.iterdir()
        if path.name not in known
        and not path.name.startswith(".")
        and (path.is_dir() or path.suffix.lower() in SUFFIXES)
    ]
    if unread:
        names = join_names(sorted(unread), MAX_NAMES)
        add_note(folder, f"is read only in {join_names(known, MAX_NAMES)}; left out: {names}", hint)


def note_copies(folder: Path, pictures: Sequence[tuple[Path, object]], earlier: Iterable[Path]) -> None:
    """Note the pictures of a split that occur in it twice, with two labels, or in `earlier` splits, byte for byte.

    `pictures` are the split's with their labels. Only files of equal size are read.
    """
    labels = dict(pictures)
    by_size: dict[int, list[Path]] = defaultdict(list)
    for path in (*labels, *earlier):
        by_size[os.path.getsize(path)].append(path)
    by_content: dict[bytes, list[Path]] = defaultdict(list)
    for path in (path for paths in by_size.values() if len(paths) > 1 for path in paths):
        by_content[hashlib.sha256(path.read_bytes()).digest()].append(path)
    counts = Counter[str]()
    for paths in by_content.values():
        own = [path for path in paths if path in labels]
        counts["earlier"] += len(own) if len(paths) > len(own) else 0
        counts["labels"] += len(own) if len({labels[path] for path in own}) > 1 else 0
        counts["copies"] += max(len(own) - 1, 0)
    of_all = f"of {len(labels)} pictures are"
    if counts["earlier"]:
        hint = "take them out of one: scores on them prove nothing"
        add_note(folder, f"{counts['earlier']} {of_all} also in an earlier split, byte for byte", hint)
    if counts["labels"]:
        hint = "take those with the wrong label out"
        add_note(folder, f"{counts['labels']} {of_all} there with other labels too, byte for byte", hint)
    elif counts["copies"]:
        add_note(folder, f"{counts['copies']} {of_all} copies of others and count again", "remove the copies")


def note_names(pictures: Sequence[Path], named: int) -> None:
    """Note that only some names tell a unit and a time, so that none is used."""
    folder = os.path.commonpath([path.parent for path in pictures])
    text = f"{len(pictures) - named} of {len(pictures)} file names are not <unit>__<milliseconds>"
    add_note(folder, f"{text}; all count as ten blocks at one frame a second", "rename them, or take them out")


def note_shapes(query: Query, sizes: Collection[Size], is_cut_out: bool) -> None:
    """Note frames of several proportions, and those `is_cut_out` already whose shape is not that of the `roi`."""
    if not sizes or query.data is None:
        return
    narrow, wide = min(sizes, key=_proportion), max(sizes, key=_proportion)
    side = f"{query.input_size} x {query.input_size}"
    if _proportion(wide) > SHAPE_TOLERANCE * _proportion(narrow):
        text = f"frames from {_text(narrow)} to {_text(wide)} pixels are all squashed to {side}"
        add_note(query.data, text, "cut them to one shape, that of the camera's frames or the `roi`")
    if query.roi is not None and is_cut_out:
        wanted = (round(query.roi[2]) - round(query.roi[0]), round(query.roi[3]) - round(query.roi[1]))
        odd = max((narrow, wide), key=lambda size: abs(_proportion(size) / _proportion(wanted) - 1))
        if not 1 / SHAPE_TOLERANCE <= _proportion(odd) / _proportion(wanted) <= SHAPE_TOLERANCE:
            text = f"labelled frames of {_text(odd)} pixels are used whole, the roi of query {query.id} is"
            add_note(
                query.data, f"{text} {_text(wanted)}", "cut the roi out of each frame and its labels, or correct `roi`"
            )


def note_clipped_roi(query: str, roi: Roi | None, size: Size) -> None:
    """Note a roi that reaches beyond the frames, whose part within them is used."""
    if roi is not None and (round(roi[2]) > size[0] or round(roi[3]) > size[1]):
        text = f"its roi {[round(side) for side in roi]} reaches beyond frames of {_text(size)} pixels"
        add_note(f"query {query}", f"{text} and is cut at their edge", "correct `roi`")


def _proportion(size: Size) -> float:
    return size[0] / max(size[1], 1)


def _text(size: Size) -> str:
    return f"{size[0]} x {size[1]}"
