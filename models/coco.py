"""COCO annotations of other programs, compared with the pictures they describe.

One rule serves training and scoring: `_place_boxes` decides which annotations are boxes, and where.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import unquote

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from models.errors import InputError, join_names
from models.io import read_json, validate
from models.notes import add_note
from models.pictures import PictureSize, list_pictures, read_picture, read_picture_size
from models.predictions import Box, BoxLabels

MAX_ANNOTATION_BYTES = 2**26
COCO_HINT = "correct the annotations: COCO with images, categories and annotations"


@dataclass(frozen=True)
class BoxRules:
    """What is taken for a box, and for boxes of another kind.

    A box thinner than `min_side_px` within its picture is none. One may end `rounding_px` outside without a note.
    Boxes within 0..1 are fractions where pictures are larger than `min_picture_px`, those within 0..100 may be percents
    above `min_percent_picture_px`. Boxes are corners where at least `min_leaving` of them and the fraction
    `min_leaving_share` leave the picture, and `min_fitting_share` fit as corners.
    """

    min_side_px: float = 0.1
    rounding_px: float = 1.0
    min_picture_px: int = 16
    min_percent_picture_px: int = 400
    min_leaving: int = 3
    min_leaving_share: float = 0.25
    min_fitting_share: float = 0.9


RULES = BoxRules()


class LeftOut(str, Enum):
    """Why an annotation is no box of its picture."""

    PICTURE = "of pictures that are not listed"
    CATEGORY = "of categories that are not listed"
    NO_BOX = "without bbox or polygons"
    NO_AREA = "without width or height"
    FRACTION = "within the first pixel"
    OUTSIDE = "outside the picture"
    DUPLICATE = "exact duplicates"


def _parse_id(value: Any) -> Id:
    """1, 1.0, "1", "1.0" and "001" are one id; other text is an id of its own."""
    if isinstance(value, str):
        digits = value.strip().removesuffix(".0")
        return int(digits) if digits.isdecimal() and len(digits) < 20 else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError("an id is a whole number or a text")
    return int(value)


def _parse_size(value: Any) -> Any:
    """Programs write 0, -1 or null for a size they do not know."""
    return value if isinstance(value, str) or (isinstance(value, int | float) and value > 0) else None


Id = int | str
GivenId = Annotated[Id, BeforeValidator(_parse_id)]
GivenSize = Annotated[float | None, BeforeValidator(_parse_size)]


class _CocoImage(BaseModel):
    id: GivenId
    file_name: Annotated[str, Field(min_length=1)]
    width: GivenSize = None
    height: GivenSize = None


class _CocoCategory(BaseModel):
    id: GivenId
    name: Annotated[str, Field(min_length=1)]


class _CocoAnnotation(BaseModel):
    image_id: GivenId
    category_id: GivenId
    bbox: tuple[float, float, float, float] | None = None
    segmentation: Any = None
    iscrowd: bool | None = None

    def box(self) -> Box | None:
        """x, y, width, height as given, or of all its polygons; None where there are neither."""
        if self.bbox is not None:
            return self.bbox
        try:
            parts = self.segmentation if isinstance(self.segmentation[0], list) else [self.segmentation]
            points = np.concatenate([np.asarray(part, float).reshape(-1, 2) for part in parts])
            (x0, y0), (x1, y1) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
        except (LookupError, TypeError, ValueError):  # a mask, no polygon, or one that is none
            return None
        return x0, y0, x1 - x0, y1 - y0


def _drop_empty_bbox(value: Any) -> Any:
    return {key: one for key, one in value.items() if key != "bbox" or one} if isinstance(value, dict) else value


class _Coco(BaseModel):
    images: list[_CocoImage]
    categories: list[_CocoCategory]
    annotations: list[Annotated[_CocoAnnotation, BeforeValidator(_drop_empty_bbox)]]


@dataclass(frozen=True)
class LabelledPicture:
    """A picture of the file, its size as decoded, and its objects of the query's classes."""

    path: Path
    size: PictureSize
    labels: BoxLabels

    def read(self) -> np.ndarray:
        """As `read_picture`. Raises InputError too for a picture of another size than its header says."""
        frame = read_picture(self.path)
        if frame.shape[1::-1] != self.size[:2]:
            sizes = f"{frame.shape[1]} x {frame.shape[0]} pixels, and its header {self.size.width} x {self.size.height}"
            raise InputError(self.path, f"has {sizes}: where its boxes lie is not known", "save it again")
        return frame


@dataclass
class _Picture:
    number: Id
    path: Path
    size: PictureSize
    scale: tuple[float, float]
    objects: list[tuple[str, Box]] = field(default_factory=list)
    crowds: list[tuple[str, Box]] = field(default_factory=list)


NO_PICTURE, NO_BOX = _Picture("", Path(), PictureSize(0, 0), (1.0, 1.0)), (0.0, 0.0, 0.0, 0.0)


@dataclass
class _Row:
    """An annotation; `box` is x, y, width, height as given, and then corners in the picture."""

    index: int
    picture: _Picture
    name: str
    is_crowd: bool
    box: Box
    reason: LeftOut | None
    is_clipped: bool = False


def read_coco(folder: Path, classes: Sequence[str], query: str) -> list[LabelledPicture]:
    """The pictures of `folder`/annotations.json in `folder`/images, in the order of their names.

    Boxes are clipped to their picture; where the file gives its size, boxes are scaled to the size as decoded. Notes
    count what was left out, scaled, clipped or taken from elsewhere. Raises InputError for a file that is no COCO,
    is too large or lacks a class, for pictures that are missing or of another shape, and for boxes in fractions or as
    corners.
    """
    path = folder / "annotations.json"
    coco = validate(path, read_json(path, COCO_HINT, MAX_ANNOTATION_BYTES, foreign=True), _Coco)
    categories = _by_id(path, "categories", coco.categories)
    images = _by_id(path, "images", coco.images)
    names = {category.name: None for category in coco.categories}
    if len(names) < len(categories):
        count = len(categories) - len(names)
        add_note(path, f"{count} categories have the name of another and are taken as one with it")
    if missing := [label for label in classes if label not in names]:
        problem = f"no category '{missing[0]}' (query {query})"
        raise InputError(path, problem, f"it has: {join_names(names, 20)}", "classes")
    files = _find_files(path, folder / "images", images)
    sizes = {image: read_picture_size(file) for image, file in files.items()}
    scales = _find_scales(path, images, files, sizes)
    pictures = {image: _Picture(image, file, sizes[image], scales[image]) for image, file in files.items()}
    names_by_id = {number: category.name for number, category in categories.items()}
    _place_boxes(path, coco.annotations, pictures, names_by_id, classes, query)
    found = [
        LabelledPicture(one.path, one.size, _labels(one.objects, _labels(one.crowds) if one.crowds else None))
        for one in pictures.values()
    ]
    return sorted(found, key=lambda picture: picture.path.stem)


def _labels(rows: Sequence[tuple[str, Box]], crowds: BoxLabels | None = None) -> BoxLabels:
    return BoxLabels(tuple(name for name, _ in rows), tuple(box for _, box in rows), crowds)


def _by_id(path: Path, key: str, entries: Sequence[Any]) -> dict[Id, Any]:
    found = {entry.id: entry for entry in entries}
    if len(found) < len(entries):
        raise InputError(path, "an id occurs twice", COCO_HINT, f"{key}.id")
    return found


def _find_files(path: Path, folder: Path, images: Mapping[Id, _CocoImage]) -> dict[Id, Path]:
    """The file of each picture: at its file_name, or under the last part of that in the folder."""
    found: dict[Id, Path] = {}
    missing, moved = [], []
    for number, image in images.items():
        name = image.file_name.replace("\\", "/")
        own, last = PurePosixPath(name), name.rpartition("/")[2]
        bare = unquote(name.partition("?")[0]).rpartition("/")[2]
        within = [] if own.is_absolute() or ".." in own.parts else [name]
        file = next((folder / one for one in (*within, last, bare) if one and os.path.isfile(folder / one)), None)
        if file is None:
            missing.append(image.file_name)
        else:
            found[number] = file
            if not within or file != folder / name:
                moved.append(f"{image.file_name} is read as images/{file.name}")
    if missing:
        problem = f"{len(missing)} of {len(images)} pictures are not in {folder}: {join_names(missing, 3)}"
        raise InputError(path, problem, "put them there, or take them and their annotations out", "images.file_name")
    twice = [file for file, count in Counter(found.values()).items() if count > 1]
    if twice:
        problem = f"{len(twice)} pictures are listed more than once: {join_names([one.name for one in twice], 3)}"
        raise InputError(path, problem, "list each once, with all of its annotations", "images.file_name")
    if moved:
        add_note(path, f"{len(moved)} file names have another folder before them: {moved[0]}")
    used = set(found.values())
    if unused := [file.name for file in list_pictures(folder) if file not in used]:
        text = f"{len(unused)} pictures of images are not listed and are left out: {join_names(unused, 3)}"
        add_note(path, text, "list them, also those without objects")
    return found


def _find_scales(
    path: Path,
    images: Mapping[Id, _CocoImage],
    files: Mapping[Id, Path],
    sizes: Mapping[Id, PictureSize],
) -> dict[Id, tuple[float, float]]:
    """What takes boxes from the size that the file gives to the picture's; refuses another shape."""
    scales = dict.fromkeys(images, (1.0, 1.0))
    scaled, odd, turned = [], [], []
    for number, image in images.items():
        (width, height, orientation), name = sizes[number], files[number].name
        if image.width is None or image.height is None:
            turned += [name] if orientation > 1 else []
            continue
        given = (image.width, image.height)
        text = f"{name} has {width} x {height} pixels, the file says {given[0]:.0f} x {given[1]:.0f}"
        if (width, height) == given:
            turned += [name] if orientation in (2, 3, 4) or (orientation > 1 and width == height) else []
        # Sides that were rounded differ by a pixel.
        elif abs(width * given[1] - height * given[0]) <= max(width, height, *given):
            scales[number] = (width / given[0], height / given[1])
            scaled.append(text)
        else:
            odd.append(text + (" (an EXIF tag turns it)" if orientation >= 5 else ""))
    if odd:
        problem = f"{odd[0]}{f' (so do {len(odd) - 1} more)' if len(odd) > 1 else ''}: where its boxes lie is not known"
        hint = "label the pictures as they are shown, upright; or, if the boxes lie right on these, correct the sizes"
        raise InputError(path, problem, hint, "images.width")
    if scaled:
        text = f"boxes of {len(scaled)} of {len(images)} pictures are scaled to their size: {scaled[0]}"
        add_note(path, text, "if the boxes lay right already, correct width and height")
    if turned:
        text = f"{len(turned)} pictures are turned or mirrored by an EXIF tag: {join_names(turned, 3)}"
        add_note(path, f"{text}; boxes are taken as drawn on the turned picture", "else save the pictures without tag")
    return scales


def _place_boxes(
    path: Path,
    annotations: Sequence[_CocoAnnotation],
    pictures: Mapping[Id, _Picture],
    categories: Mapping[Id, str],
    classes: Sequence[str],
    query: str,
) -> None:
    """Give each picture its boxes of these classes, clipped; note what is left out."""
    rows = [_row(index, one, pictures, categories) for index, one in enumerate(annotations)]
    _clip_boxes(path, [row for row in rows if row.reason is None])
    seen: set[tuple[Id, str, Box]] = set()
    for row in rows:
        key = (row.picture.number, row.name, row.box)
        if row.reason is None and not row.is_crowd:
            row.reason = LeftOut.DUPLICATE if key in seen else None
            seen.add(key)
    if rows and all(row.reason for row in rows):
        raise InputError(path, f"none of its annotations is a box: {_count_reasons(rows)}", COCO_HINT, "annotations")
    rows = [row for row in rows if row.name in classes or not row.name]
    kept = [row for row in rows if row.reason is None]
    for row in kept:
        (row.picture.crowds if row.is_crowd else row.picture.objects).append((row.name, row.box))
    if kept and all(row.is_crowd for row in kept):
        problem = f"all {len(kept)} annotations of query {query} are crowd regions, so there is no object to find"
        raise InputError(path, problem, "set iscrowd to 0 where it is one object", "annotations.iscrowd")
    if len(kept) < len(rows):
        text = f"annotations are left out of training and scoring (query {query}): {_count_reasons(rows)}"
        add_note(path, text, "correct them, or take them out")
    if clipped := sum(row.is_clipped for row in kept):
        text = f"{clipped} boxes end outside their picture and are clipped to it (query {query})"
        add_note(path, text, "COCO wants x, y, width, height in pixels of the upright picture")
    if crowds := sum(row.is_crowd for row in kept):
        text = f"{crowds} crowd regions (iscrowd) are no objects to train on or to find (query {query})"
        add_note(path, f"{text}; detections in them are not counted", "set iscrowd to 0 if they are single objects")


def _row(index: int, one: _CocoAnnotation, pictures: Mapping[Id, _Picture], categories: Mapping[Id, str]) -> _Row:
    picture, name, box = pictures.get(one.image_id), categories.get(one.category_id), one.box()
    missing = {LeftOut.PICTURE: picture, LeftOut.CATEGORY: name, LeftOut.NO_BOX: box}
    reason = next((reason for reason, found in missing.items() if found is None), None)
    return _Row(index, picture or NO_PICTURE, name or "", bool(one.iscrowd), box or NO_BOX, reason)


def _count_reasons(rows: Sequence[_Row]) -> str:
    counts = Counter(row.reason for row in rows if row.reason)
    first = {row.reason: row.index for row in reversed(rows)}
    return ", ".join(f"{count} {reason.value} (first annotations[{first[reason]}])" for reason, count in counts.items())


def _clip_boxes(path: Path, rows: Sequence[_Row]) -> None:
    """Make the boxes corners in pixels of the picture, clipped to it, and find those that are none.

    Raises InputError for boxes that are in fractions, corners, or of other pictures.
    """
    given = np.array([row.box for row in rows], float).reshape(-1, 4)
    scales = np.array([row.picture.scale * 2 for row in rows], float).reshape(-1, 4)
    sizes = np.array([row.picture.size[:2] for row in rows], float).reshape(-1, 2)
    with np.errstate(all="ignore"):  # NaN and infinities are no boxes
        starts, sides = np.hsplit(given * scales, 2)
        ends = starts + sides
        low, high = np.clip(starts, 0, sizes), np.clip(ends, 0, sizes)
        real = np.all(np.isfinite(given), axis=1) & np.all(sides >= RULES.min_side_px, axis=1)
        fraction = np.all((given >= 0) & (given <= 1) & (given[:, 2:].min(axis=1, keepdims=True) > 0), axis=1)
        fraction &= np.all(sizes > RULES.min_picture_px, axis=1)
        outside = real & ~fraction & np.any(high - low < RULES.min_side_px, axis=1)
        leaves = real & np.any(ends > sizes + RULES.rounding_px, axis=1)
        fits = real & np.all((sides > starts) & (sides <= sizes + RULES.rounding_px), axis=1)
        cut = np.any((low - starts > RULES.rounding_px) | (ends - high > RULES.rounding_px), axis=1)
    boxes, fractions, left, away = (np.count_nonzero(one) for one in (real | fraction, fraction, leaves, outside))
    if 2 * fractions > boxes:
        problem = f"{fractions} of {boxes} boxes lie within 0..1: these are fractions; COCO wants pixels"
        hint = "multiply x and width by the picture's width, y and height by its height"
        raise InputError(path, problem, hint, "annotations.bbox")
    if (
        left >= max(RULES.min_leaving, RULES.min_leaving_share * boxes)
        and np.count_nonzero(fits) >= RULES.min_fitting_share * boxes
    ):
        problem = f"{left} of {boxes} boxes leave their picture as x, y, width, height and fit as x0, y0, x1, y1"
        raise InputError(path, problem, "write width = x1 - x0 and height = y1 - y0", "annotations.bbox")
    if 2 * away > boxes:
        hint = "they are of pictures of another size: give its width and height, or correct them"
        raise InputError(path, f"{away} of {boxes} boxes lie outside their picture", hint, "annotations.bbox")
    if boxes >= RULES.min_leaving and np.all(ends[real] <= 100) and np.all(sizes > RULES.min_percent_picture_px):
        text = f"all {boxes} boxes lie within 0..100, a corner of pictures of {sizes.min():.0f} pixels and more"
        add_note(path, text, "if these are percents, make them pixels")
    corners = np.hstack([low, high]).tolist()
    for place, row in enumerate(rows):
        row.box, row.is_clipped = tuple(corners[place]), bool(cut[place])
        if fraction[place]:
            row.reason = LeftOut.FRACTION
        elif not real[place]:
            row.reason = LeftOut.NO_AREA
        elif outside[place]:
            row.reason = LeftOut.OUTSIDE
