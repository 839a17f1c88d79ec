"""COCO annotations: the pictures of a split and their boxes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, Field, StrictInt

from models.errors import InputError, join_names
from models.io import read_json, validate
from models.predictions import BoxLabels
from models.preprocess import FURTHEST_PIXEL

MAX_ANNOTATION_BYTES = 2**26
COCO_HINT = "correct the annotations: COCO with images, categories and annotations"
Pixel = Annotated[float, Field(ge=-FURTHEST_PIXEL, le=FURTHEST_PIXEL, allow_inf_nan=False)]
Side = Annotated[float, Field(ge=0, le=FURTHEST_PIXEL, allow_inf_nan=False)]


class _CocoImage(BaseModel):
    id: StrictInt
    file_name: Annotated[str, Field(min_length=1)]


class _CocoCategory(BaseModel):
    id: StrictInt
    name: Annotated[str, Field(min_length=1)]


class _CocoAnnotation(BaseModel):
    image_id: StrictInt
    category_id: StrictInt
    bbox: tuple[Pixel, Pixel, Side, Side]


class _Coco(BaseModel):
    images: list[_CocoImage]
    categories: list[_CocoCategory]
    annotations: list[_CocoAnnotation]


def read_coco(path: Path, classes: Sequence[str], query: str) -> list[tuple[PurePosixPath, BoxLabels]]:
    """Each picture's name and its boxes (x0, y0, x1, y1, in pixels) of these classes, in the order of the names.

    Raises InputError for a file that is no valid COCO (unique ids, finite boxes below FURTHEST_PIXEL, names within the
    folder), is too large, or lacks a class.
    """
    coco = validate(path, read_json(path, COCO_HINT, MAX_ANNOTATION_BYTES), _Coco)
    labels = _by_id(path, "categories", coco.categories)
    images = _by_id(path, "images", coco.images)
    for image in coco.images:
        name = PurePosixPath(image.file_name)
        if name.is_absolute() or ".." in name.parts or not name.name:
            problem = f"file_name '{image.file_name}' is not within the folder images"
            raise InputError(path, problem, COCO_HINT, f"images (id {image.id})")
    names = {category.name: None for category in coco.categories}
    if missing := [label for label in classes if label not in names]:
        problem = f"no category '{missing[0]}' (query {query})"
        raise InputError(path, problem, f"it has: {join_names(names, 20)}", "classes")
    found: dict[int, list[tuple[str, tuple[float, float, float, float]]]] = {image: [] for image in images}
    for index, one in enumerate(coco.annotations):
        for key, value, ids in (("image_id", one.image_id, images), ("category_id", one.category_id, labels)):
            if value not in ids:
                raise InputError(path, f"there is no {value}", COCO_HINT, f"annotations[{index}].{key}")
        label = labels[one.category_id].name
        if label in classes:
            x, y, width, height = one.bbox
            found[one.image_id].append((label, (x, y, x + width, y + height)))
    rows = [
        (PurePosixPath(image.file_name), BoxLabels(*(tuple(zip(*found[image.id], strict=True)) or ((), ()))))
        for image in coco.images
    ]
    return sorted(rows, key=lambda row: row[0].stem)


def _by_id(path: Path, key: str, entries: Sequence[Any]) -> dict[int, Any]:
    found = {entry.id: entry for entry in entries}
    if len(found) < len(entries):
        raise InputError(path, "an id occurs twice", COCO_HINT, f"{key}.id")
    return found
