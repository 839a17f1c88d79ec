"""COCO annotations of other programs, compared with the pictures they describe.

One rule serves training and scoring: `_place_boxes` decides which annotations are boxes, and where.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
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
MIN_SIDE_PX = 0.1
"""A box of less than this width or height, after it was clipped to its picture, is no object."""
ROUNDING_PX = 1.0
"""A box may end this far outside its picture without a note."""
MIN_PICTURE_PX = 16
"""Pictures above this size hold no objects that all lie within the first pixel."""
MIN_CORNERS, MIN_CORNERS_SHARE, MIN_FITTING_SHARE = 3, 0.25, 0.9
"""Boxes are x0 y0 x1 y1 where at least so many, and this share, leave the picture as x y width height, and nearly all
fit as corners.
"""


class LeftOut(StrEnum):
    """Why an annotation is no box of its picture."""

    PICTURE = "of pictures that are not listed"
    CATEGORY = "of categories that are not listed"
    NO_BOX = "without bbox or polygons"
    NO_AREA = "without width or height"
    FRACTION = "within the first pixel"
    OUTSIDE = "outside the picture"
    DUPLICATE = "exact duplicates"


def _parse_id(value: Any) -> int | str:
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


Id = Annotated[int | str, BeforeValidator(_parse_id)]
Size = Annotated[float | None, BeforeValidator(_parse_size)]


class _CocoImage(BaseModel):
    id: Id
    file_name: Annotated[str, Field(min_length=1)]
    width: Size = None
    height: Size = None


class _CocoCategory(BaseModel):
    id: Id
    name: Annotated[str, Field(min_length=1)]


class _CocoAnnotation(BaseModel):
    image_id: Id
    category_id: Id
    bbox: tuple[float, float, float, float] | None = None
    segmentation: Any = None
    iscrowd: bool | None = None

    def box(self) -> Box | None:
        """x, y, width, height as given, or of all its polygons; None where there are neither."""
        if self.bbox is not None:
            return self.bbox
        try:
            points = np.concatenate([np.asarray(part, float).reshape(-1, 2) for part in self.segmentation])
            (x0, y0), (x1, y1) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
        except (TypeError, ValueError):  # a mask, no polygon, or one that is none
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
    path: Path
    size: PictureSize
    scale: tuple[float, float]
    objects: list[tuple[str, Box]] = field(default_factory=list)
    crowds: list[tuple[str, Box]] = field(default_factory=list)


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
    if missing := [label for label in classes if label not in names]:
        problem = f"no category '{missing[0]}' (query {query})"
        raise InputError(path, problem, f"it has: {join_names(names, 20)}", "classes")
    files = _find_files(path, folder / "images", images)
    sizes = {image: read_picture_size(file) for image, file in files.items()}
    scales = _find_scales(path, images, files, sizes)
    pictures = {image: _Picture(file, sizes[image], scales[image]) for image, file in files.items()}
    names_by_id = {number: category.name for number, category in categories.items()}
    _place_boxes(path, coco.annotations, pictures, names_by_id, classes, query)
    found = [LabelledPicture(one.path, one.size, _labels(one)) for one in pictures.values()]
    return sorted(found, key=lambda picture: picture.path.stem)


def _labels(picture: _Picture) -> BoxLabels:
    objects, crowds = (tuple(zip(*rows, strict=True)) or ((), ()) for rows in (picture.objects, picture.crowds))
    return BoxLabels(*objects, BoxLabels(*crowds) if picture.crowds else None)


def _by_id(path: Path, key: str, entries: Sequence[Any]) -> dict[int | str, Any]:
    found = {entry.id: entry for entry in entries}
    if len(found) < len(entries):
        raise InputError(path, "an id occurs twice", COCO_HINT, f"{key}.id")
    return found


def _find_files(path: Path, folder: Path, images: Mapping[int | str, _CocoImage]) -> dict[int | str, Path]:
    """The file of each picture: at its file_name, or under the last part of that in the folder."""
    found: dict[int | str, Path] = {}
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
    images: Mapping[int | str, _CocoImage],
    files: Mapping[int | str, Path],
    sizes: Mapping[int | str, PictureSize],
) -> dict[int | str, tuple[float, float]]:
    """What takes boxes from the size that the file gives to the picture's; refuses another shape."""
    scales = dict.fromkeys(images, (1.0, 1.0))
    scaled, odd, turned = [], [], []
    for number, image in images.items():
        (width, height, orientation), name = sizes[number], files[number].name
        given = (image.width, image.height)
        if given[0] is None or given[1] is None:
            turned += [name] if orientation > 1 else []
            continue
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
    pictures: Mapping[int | str, _Picture],
    categories: Mapping[int | str, str],
    classes: Sequence[str],
    query: str,
) -> None:
    """Give each picture its boxes (x0, y0, x1, y1) of these classes, clipped; note what is left out."""
    reasons: list[LeftOut | None] = [None] * len(annotations)
    located: list[int] = []
    boxes: list[Box] = []
    for index, one in enumerate(annotations):
        if one.image_id not in pictures:
            reasons[index] = LeftOut.PICTURE
        elif one.category_id not in categories:
            reasons[index] = LeftOut.CATEGORY
        elif (box := one.box()) is None:
            reasons[index] = LeftOut.NO_BOX
        else:
            located.append(index)
            boxes.append(box)
    own = [pictures[annotations[index].image_id] for index in located]
    given = np.array(boxes, float).reshape(-1, 4)
    scaled = given * np.tile(np.array([one.scale for one in own], float).reshape(-1, 2), 2)
    corners, found_reasons, is_clipped = _clip_boxes(
        path, given, scaled, np.array([one.size[:2] for one in own], float).reshape(-1, 2)
    )
    clipped = crowds = 0
    seen: set[tuple[int | str, str, Box]] = set()
    for index, picture, box, reason, cut in zip(
        located, own, map(tuple, corners.tolist()), found_reasons, is_clipped.tolist(), strict=True
    ):
        one = annotations[index]
        name = categories[one.category_id]
        key = (one.image_id, name, box)
        if reason is None and not one.iscrowd and key in seen:
            reason = LeftOut.DUPLICATE
        reasons[index] = reason
        if reason is None and name in classes:
            (picture.crowds if one.iscrowd else picture.objects).append((name, box))
            crowds += bool(one.iscrowd)
            clipped += cut
        if not one.iscrowd:
            seen.add(key)
    left_out = [index for index, reason in enumerate(reasons) if reason]
    if left_out and len(left_out) == len(annotations):
        raise InputError(path, f"none of its annotations is a box: {_count_reasons(reasons)}", COCO_HINT, "annotations")
    shown = [
        reason if categories.get(one.category_id, classes[0]) in classes else None
        for one, reason in zip(annotations, reasons, strict=True)
    ]
    if any(shown):
        text = f"annotations are left out of training and scoring (query {query}): {_count_reasons(shown)}"
        add_note(path, text, "correct them, or take them out")
    if clipped:
        add_note(path, f"{clipped} boxes end outside their picture and are clipped to it (query {query})")
    if crowds:
        text = f"{crowds} crowd regions (iscrowd) are no objects to train on or to find (query {query})"
        add_note(path, f"{text}; detections in them are not counted", "set iscrowd to 0 if they are single objects")


def _count_reasons(reasons: Sequence[LeftOut | None]) -> str:
    counts = Counter(reason for reason in reasons if reason)
    return ", ".join(
        f"{count} {reason} (first annotations[{reasons.index(reason)}])" for reason, count in counts.items()
    )


def _clip_boxes(
    path: Path, given: np.ndarray, scaled: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, list[LeftOut | None], np.ndarray]:
    """Corners (N, 4) within the pictures, why each is left out, and whether more than rounding was cut off.

    `given` and `scaled` are x, y, width, height (N, 4), as in the file and in pixels; `sizes` (N, 2). Raises InputError
    for boxes that are in fractions, corners, or of other pictures.
    """
    with np.errstate(all="ignore"):  # NaN and infinities are no boxes
        real = np.isfinite(scaled).all(axis=1) & (scaled[:, 2:] > 0).all(axis=1)
        ends = scaled[:, :2] + scaled[:, 2:]
        low, high = np.clip(scaled[:, :2], 0, sizes), np.clip(ends, 0, sizes)
        outside = (np.minimum(ends, sizes) - np.maximum(scaled[:, :2], 0) < MIN_SIDE_PX).any(axis=1)
        flat = ~real | (scaled[:, 2:] < MIN_SIDE_PX).any(axis=1)
        fraction = (
            real & ((given >= 0) & (given <= 1)).all(axis=1) & (sizes.min(axis=1, initial=np.inf) > MIN_PICTURE_PX)
        )
        leaves = real & (ends > sizes + ROUNDING_PX).any(axis=1)
        fits = real & (scaled[:, 2:] > scaled[:, :2]).all(axis=1) & (scaled[:, 2:] <= sizes + ROUNDING_PX).all(axis=1)
        cut = (low - scaled[:, :2] > ROUNDING_PX).any(axis=1) | (ends - high > ROUNDING_PX).any(axis=1)
    count = np.count_nonzero(real)
    if 2 * np.count_nonzero(fraction) > count:
        problem = (
            f"{np.count_nonzero(fraction)} of {count} boxes lie within 0..1: these are fractions; COCO wants pixels"
        )
        hint = "multiply x and width by the picture's width, y and height by its height"
        raise InputError(path, problem, hint, "annotations.bbox")
    left = np.count_nonzero(leaves)
    if left >= max(MIN_CORNERS, MIN_CORNERS_SHARE * count) and np.count_nonzero(fits) >= MIN_FITTING_SHARE * count:
        problem = f"{left} of {count} boxes leave their picture as x, y, width, height and fit as x0, y0, x1, y1"
        raise InputError(path, problem, "write width = x1 - x0 and height = y1 - y0", "annotations.bbox")
    if 2 * np.count_nonzero(real & outside & ~fraction) > count:
        problem = f"{np.count_nonzero(real & outside)} of {count} boxes lie outside their picture"
        hint = "they are of pictures of another size: give its width and height, or correct them"
        raise InputError(path, problem, hint, "annotations.bbox")
    reasons = np.select(
        [flat & ~fraction, fraction, outside], [LeftOut.NO_AREA, LeftOut.FRACTION, LeftOut.OUTSIDE], ""
    ).tolist()
    return np.hstack([low, high]), [LeftOut(one) if one else None for one in reasons], cut
