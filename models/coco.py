"""COCO annotations of other programs, compared with the pictures they describe."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import unquote

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from models.boxes import (
    NO_BOX,
    NO_PICTURE,
    BoxedPicture,
    BoxForm,
    BoxRow,
    BoxSource,
    LeftOut,
    Pose,
    collect_labels,
    note_turned,
)
from models.errors import InputError, join_names
from models.io import read_json, validate
from models.notes import add_note
from models.pictures import LabelledPicture, PictureSize, list_pictures, read_picture_size
from models.predictions import Box
from models.rle import find_mask_box

MAX_ANNOTATION_BYTES = 2**26
COCO_HINT = "correct the annotations: COCO with images, categories and annotations"
COCO_NAMES = ("annotations.json", "_annotations.coco.json", "result.json", "instances_default.json")
"""Of a split's file: ours, and what Roboflow, Label Studio and CVAT call it."""


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
    keypoints: list[float] | None = None
    area: float | None = None

    def pose(self) -> Pose | None:
        """The points, of which at least one is labelled; None where there are none."""
        given = self.keypoints or []
        points = tuple((x, y, seen) for x, y, seen in zip(given[::3], given[1::3], given[2::3], strict=False))
        area = self.area if self.area and np.isfinite(self.area) and self.area > 0 else None
        return Pose(points, area) if any(seen > 0 for _, _, seen in points) else None

    def box(self) -> Box | None:
        """x, y, width, height as given, or of its polygons or mask; None where there are none."""
        if self.bbox is not None:
            return self.bbox
        try:
            if isinstance(self.segmentation, dict):
                height, width = (int(side) for side in self.segmentation["size"])
                return find_mask_box(self.segmentation["counts"], (height, width))
            parts = self.segmentation if isinstance(self.segmentation[0], list) else [self.segmentation]
            points = np.concatenate([np.asarray(part, float).reshape(-1, 2) for part in parts])
            (x0, y0), (x1, y1) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
        except (LookupError, TypeError, ValueError, OverflowError):  # no polygon or mask, or one that is none
            return None
        return x0, y0, x1 - x0, y1 - y0


def _drop_empty_bbox(value: Any) -> Any:
    return {key: one for key, one in value.items() if key != "bbox" or one} if isinstance(value, dict) else value


class _Coco(BaseModel):
    images: list[_CocoImage]
    categories: list[_CocoCategory]
    annotations: list[Annotated[_CocoAnnotation, BeforeValidator(_drop_empty_bbox)]]


def find_coco(folder: Path) -> tuple[Path, Path] | None:
    """The file of annotations in a folder, and the folder of its pictures: `images`, or itself; None without a file."""
    found = [folder / part / name for part in ("", "annotations") for name in COCO_NAMES]
    path = next((path for path in found if path.exists()), None)
    return (path, folder / "images" if (folder / "images").is_dir() else folder) if path else None


def read_coco(
    path: Path, folder: Path, sources: Mapping[str, str], query: str, with_points: bool = False
) -> list[LabelledPicture]:
    """The pictures of a file of annotations, which are in `folder`, in the order of their names.

    `with_points` gives PoseLabels; objects without a labelled point are among the crowds then.

    `sources` gives the query's class of each category. Boxes are clipped to their picture; where the file gives its
    size, boxes are scaled to the size as decoded. Notes count what was left out, scaled, clipped or taken from
    elsewhere. Raises InputError for a file that is no COCO, is too large or lacks a class, for pictures that are
    missing or of another shape, and for boxes in another form or unit.
    """
    coco = validate(path, read_json(path, COCO_HINT, MAX_ANNOTATION_BYTES, foreign=True), _Coco)
    categories = _by_id(path, "categories", coco.categories)
    images = _by_id(path, "images", coco.images)
    names = {category.name: None for category in coco.categories}
    if len(names) < len(categories):
        count = len(categories) - len(names)
        add_note(path, f"{count} categories have the name of another and are taken as one with it")
    if missing := [label for label in sources if label not in names]:
        problem = f"no category '{missing[0]}' (query {query})"
        raise InputError(path, problem, f"it has: {join_names(names, 20)}", "classes")
    files = _find_files(path, folder, images)
    sizes = {image: read_picture_size(file) for image, file in files.items()}
    scales = _find_scales(path, images, files, sizes)
    pictures = {
        image: BoxedPicture(file, sizes[image], scales[image], poses=[] if with_points else None)
        for image, file in files.items()
    }
    note_turned(path, list(pictures.values()))
    names_by_id = {number: category.name for number, category in categories.items()}
    rows = [_row(index, one, pictures, names_by_id) for index, one in enumerate(coco.annotations)]
    if with_points:
        _take_poses(path, rows, coco.annotations, sources, query)
    source = BoxSource(path, "annotations.bbox", BoxForm.SIZE, "pixels", COCO_HINT)
    return collect_labels(source, rows, list(pictures.values()), sources, query)


def _take_poses(
    path: Path, rows: Sequence[BoxRow], annotations: Sequence[_CocoAnnotation], sources: Mapping[str, str], query: str
) -> None:
    """Give the rows their points; one without any is ignored like a crowd. InputError where there are none at all."""
    own = [(row, one.pose()) for row, one in zip(rows, annotations, strict=True) if row.name in sources]
    widths = {len(pose.points) for _, pose in own if pose}
    if len(widths) != 1:
        problem = f"objects have {' and '.join(map(str, sorted(widths)))} points" if widths else "has no keypoints"
        raise InputError(path, f"{problem} (query {query})", "give all the same", "annotations.keypoints")
    for row, pose in own:
        row.pose, row.is_crowd = pose, row.is_crowd or pose is None
    if bare := sum(pose is None and not row.reason for row, pose in own):
        add_note(path, f"{bare} of {len(own)} objects have no labelled point (query {query}) and are ignored")


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
                moved.append(f"{image.file_name} is read as {folder.name}/{file.name}")
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
        text = f"{len(unused)} pictures of {folder.name} are not listed and are left out: {join_names(unused, 3)}"
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
    scaled, odd = [], []
    for number, image in images.items():
        (width, height, orientation), name = sizes[number], files[number].name
        if image.width is None or image.height is None:
            continue
        given = (image.width, image.height)
        text = f"{name} has {width} x {height} pixels, the file says {given[0]:.0f} x {given[1]:.0f}"
        if (width, height) == given:
            continue
        # Sides that were rounded differ by a pixel.
        if abs(width * given[1] - height * given[0]) <= max(width, height, *given):
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
    return scales


def _row(index: int, one: _CocoAnnotation, pictures: Mapping[Id, BoxedPicture], categories: Mapping[Id, str]) -> BoxRow:
    picture, name, box = pictures.get(one.image_id), categories.get(one.category_id), one.box()
    missing = {LeftOut.PICTURE: picture, LeftOut.CATEGORY: name, LeftOut.NO_BOX: box}
    reason = next((reason for reason, found in missing.items() if found is None), None)
    where = f"annotations[{index}]"
    return BoxRow(where, picture or NO_PICTURE, name or "", box or NO_BOX, bool(one.iscrowd), reason)
