"""COCO annotations of other programs, compared with the pictures they describe."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import unquote

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from gemel.models.errors import InputError, join_names
from gemel.models.files.io import read_json, validate
from gemel.models.files.pictures import (
    SPLIT_NAMES,
    LabelledPicture,
    PictureSize,
    list_pictures,
    read_picture_size,
)
from gemel.models.labels.foreign_labels import PICTURE_FOLDERS
from gemel.models.labels.rle import decode_rle, find_mask_box
from gemel.models.notes import add_note
from gemel.models.objects.boxes import (
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
from gemel.models.objects.outlines import MIN_POINTS, trace_pixels
from gemel.models.predictions import Box, Outline

MAX_ANNOTATION_BYTES = 2**26
COCO_HINT = "correct the annotations: COCO with images, categories and annotations"
COCO_NAMES = ("annotations.json", "_annotations.coco.json", "result.json", "instances_default.json")
"""Of a split's file: ours, and what Roboflow, Label Studio and CVAT call it; the keys of others decide."""
OTHER_KINDS = ("captions", "image_info", "panoptic", "stuff")
"""What names of COCO's own files begin with that hold no objects."""
ANNOTATION_FOLDERS = ("annotations", "annotation", "labels")
NOT_FOLLOWED, SPLITS_WITHIN = "it is not followed", "splits that one file holds are not read"
SCORED = "these are a model's answers, and count as labels"
UNREAD_KEYS: dict[str, dict[str, tuple[str, str]]] = {
    "annotations": {
        "score": (SCORED, "give what people labelled if there is any"),
        "confidence": (SCORED, "give what people labelled if there is any"),
        "conf": (SCORED, "give what people labelled if there is any"),
        "bbox_mode": ("boxes have a form of their own", "write x, y, width, height, and take the key out"),
        "rotation": ("boxes are turned, and are taken upright", "give the box around each object"),
        "attributes.rotation": ("boxes are turned, and are taken upright", "give the box around each object"),
        **dict.fromkeys(
            ("attributes.difficult", "attributes.ignore", "attributes.is_crowd", "is_crowd", "crowd", "ignored",
             "ignore_flag"),
            ("such objects count as others", "set ignore to 1 where they shall not count"),
        ),
        "deleted": ("such objects count as others", "take them out"),
        "weight": (NOT_FOLLOWED, "every object counts once"),
    },
    "categories": {"ignore": ("objects of these classes count as others", "set ignore to 1 in their annotations")},
    "images": {
        "ignore": ("such pictures count as others", "take them out"),
        "deleted": ("such pictures count as others", "take them out"),
        "not_exhaustive_category_ids": (
            "objects of these classes may lack boxes, and count as if there were none", "label them all"),
        "neg_category_ids": ("other classes were not looked for, as in LVIS", "label all classes of the query"),
        "split": (SPLITS_WITHIN, "write a file for each split, as train.json"),
        "subset": (SPLITS_WITHIN, "write a file for each split, as train.json"),
        "video_id": ("names alone tell clips apart", "call pictures <clip>__<milliseconds>.jpg"),
    },
}  # fmt: skip
"""Keys that change what an entry means, or say what is needed here, and are not read: what that means, what to do."""
REFUSED_KEYS, UNSET = ("bbox_mode", "split", "subset"), (None, False, 0, "")
USUAL_MODES = (None, 1, "XYWH_ABS")
"""Of detectron2: COCO's own form; 0 is corners."""


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
    return (
        value if isinstance(value, str) or (isinstance(value, int | float) and value > 0) else None
    )


Id = int | str
GivenId = Annotated[Id, BeforeValidator(_parse_id)]
GivenSize = Annotated[float | None, BeforeValidator(_parse_size)]


NO_SEGMENTATION = (LookupError, TypeError, ValueError, OverflowError)
"""What reading a polygon or mask raises that is none."""


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
    ignore: bool | None = None
    difficult: bool | None = None
    keypoints: list[float] | None = None
    area: float | None = None

    def is_uncounted(self) -> bool:
        """Whether this region is no object to find, though it may show some."""
        return bool(self.iscrowd or self.ignore or self.difficult)

    def pose(self) -> Pose | None:
        """The points, of which at least one is labelled; None where there are none."""
        values = self.keypoints or []
        points = tuple(
            (x, y, seen)
            for x, y, seen in zip(values[::3], values[1::3], values[2::3], strict=False)
        )
        area = self.area if self.area and np.isfinite(self.area) and self.area > 0 else None
        return Pose(points, area) if any(seen > 0 for _, _, seen in points) else None

    def box(self) -> Box | None:
        """x, y, width, height as given, or of its polygons or mask; None where there are none."""
        if self.bbox is not None:
            return self.bbox
        try:
            if isinstance(self.segmentation, dict):
                return find_mask_box(self.segmentation["counts"], self._mask_size())
            points = np.concatenate(self._polygons())
            x0, y0 = points.min(axis=0).tolist()
            x1, y1 = points.max(axis=0).tolist()
        except NO_SEGMENTATION:
            return None
        return x0, y0, x1 - x0, y1 - y0

    def outline(self) -> Outline:
        """The polygons, or those around its mask; empty where there are none."""
        try:
            if isinstance(self.segmentation, dict):
                counts = self.segmentation["counts"]
                polygons = trace_pixels(decode_rle(counts, self._mask_size()))
            else:
                polygons = self._polygons()
        except NO_SEGMENTATION:
            return ()
        return tuple(
            tuple((float(x), float(y)) for x, y in polygon)
            for polygon in polygons
            if len(polygon) >= MIN_POINTS
        )

    def _mask_size(self) -> tuple[int, int]:
        height, width = (int(side) for side in self.segmentation["size"])
        return height, width

    def _polygons(self) -> list[np.ndarray]:
        parts = self.segmentation if isinstance(self.segmentation[0], list) else [self.segmentation]
        return [np.asarray(part, float).reshape(-1, 2) for part in parts]


def _drop_empty_bbox(value: Any) -> Any:
    return (
        {key: content for key, content in value.items() if key != "bbox" or content}
        if isinstance(value, dict)
        else value
    )


class _Coco(BaseModel):
    images: list[_CocoImage]
    categories: list[_CocoCategory]
    annotations: list[Annotated[_CocoAnnotation, BeforeValidator(_drop_empty_bbox)]]


@dataclass(frozen=True)
class CocoFile:
    """A file of annotations and the folder of its pictures; `is_shared`: other files describe pictures there too."""

    path: Path
    pictures: Path
    is_shared: bool = False


def list_coco(folder: Path, kind: str) -> dict[str, CocoFile]:
    """The file of annotations of each split, of one without a split under ""; in a folder or its `annotations`.

    Raises InputError for several files of one split, of which none is called `kind`_SPLIT.json.
    """
    files: dict[str, list[Path]] = {}
    parts = [
        folder,
        *(path for path in sorted(folder.iterdir()) if path.name.lower() in ANNOTATION_FOLDERS),
    ]
    for path in (path for part in parts if part.is_dir() for path in sorted(part.iterdir())):
        if path.name in COCO_NAMES or (path.suffix.lower() == ".json" and _is_coco(path)):
            files.setdefault(_split_of(path), []).append(path)
    chosen = {split: _choose_file(folder, paths, kind) for split, paths in files.items()}
    if len(chosen) > 1 and "" in chosen:
        problem = f"holds annotations with a split and without one: {chosen[''].name}"
        raise InputError(
            folder, problem, "name the split in each file's name, as train.json", "data"
        )
    places = {split: _find_pictures(folder, path, split) for split, path in chosen.items()}
    return {
        split: CocoFile(path, places[split], list(places.values()).count(places[split]) > 1)
        for split, path in chosen.items()
    }


def _is_coco(path: Path) -> bool:
    """Whether a JSON file has the keys of COCO, with boxes, masks or points in it."""
    if path.stat().st_size > MAX_ANNOTATION_BYTES or path.name.lower().startswith(OTHER_KINDS):
        return False
    data = path.read_bytes()
    return all(f'"{key}"'.encode() in data for key in ("images", "annotations", "categories"))


def _split_of(path: Path) -> str:
    """The split that the name of a file of annotations holds as a word; empty without one."""
    words = re.findall("[a-z]+", path.stem.lower())
    return next(
        (split for word in words for split, names in SPLIT_NAMES.items() if word in names), ""
    )


def _choose_file(folder: Path, paths: Sequence[Path], kind: str) -> Path:
    """The one of these files that is named as `kind` is, or as programs name the file of a split."""
    if len(paths) == 1:
        return paths[0]
    for chosen in (
        [path for path in paths if path.stem.startswith(kind)],
        [path for path in paths if path.name in COCO_NAMES],
    ):
        if len(chosen) == 1:
            return chosen[0]
    problem = f"holds several files of annotations: {join_names([path.name for path in paths], 4)}"
    raise InputError(folder, problem, "keep one, or one for each split, as train.json", "data")


def _find_pictures(folder: Path, path: Path, split: str) -> Path:
    """The folder that holds the first picture of a file, or `images`, or the data folder itself."""
    match = re.search(rb'"file_name"\s*:\s*"((?:[^"\\]|\\.)+)"', path.read_bytes())
    name = (
        match[1].decode("utf-8", "replace").replace("\\/", "/").replace("\\", "/") if match else ""
    )
    folders = [*sorted(folder.glob("images/*/")), *sorted(folder.glob("*/"))]
    places = [
        place for place in folders if place.name.lower().startswith(SPLIT_NAMES.get(split, ()))
    ]
    places += [place for place in folders if place.name.lower() in PICTURE_FOLDERS]
    places += [folder, path.parent]
    last = name.rpartition("/")[2]
    for relative in dict.fromkeys((name, last)):
        holders = [place for place in places if relative and (place / relative).is_file()]
        # The first picture tells where all of them are.
        if holders:
            return holders[0]
    return places[0]


def read_coco(
    file: CocoFile,
    sources: Mapping[str, str],
    query: str,
    with_points: bool = False,
    with_outlines: bool = False,
) -> list[LabelledPicture]:
    """The pictures of a file of annotations, in the order of their names.

    `with_points` gives PoseLabels; objects without a labelled point are among the crowds then. `with_outlines` adds the
    polygons of objects.

    `sources` gives the query's class of each category. Boxes are clipped to their picture; where the file gives its
    size, boxes are scaled to the size as decoded. Notes count what was left out, scaled, clipped or taken from
    elsewhere. Raises InputError for a file that is no COCO, is too large or lacks a class, for pictures that are
    missing or of another shape, and for boxes in another form or unit.
    """
    path = file.path
    document = read_json(path, COCO_HINT, MAX_ANNOTATION_BYTES, foreign=True)
    coco = validate(path, document, _Coco)
    _account_for_keys(path, document, query)
    categories = _by_id(path, "categories", coco.categories)
    images = _by_id(path, "images", coco.images)
    names = {category.name: None for category in coco.categories}
    if len(names) < len(categories):
        count = len(categories) - len(names)
        add_note(path, f"{count} categories have the name of another and are taken as one with it")
    if missing := [label for label in sources if label not in names]:
        problem = f"no category '{missing[0]}' (query {query})"
        raise InputError(path, problem, f"it has: {join_names(names, 20)}", "classes")
    files = _find_files(file, images)
    sizes = {image: read_picture_size(file) for image, file in files.items()}
    scales = _find_scales(path, images, files, sizes)
    pictures = {
        image: BoxedPicture(file, sizes[image], scales[image], poses=[] if with_points else None)
        for image, file in files.items()
    }
    note_turned(path, list(pictures.values()))
    names_by_id = {number: category.name for number, category in categories.items()}
    rows = [
        _row(index, annotation, pictures, names_by_id)
        for index, annotation in enumerate(coco.annotations)
    ]
    if with_points:
        _take_poses(path, rows, coco.annotations, sources, query)
    for row, annotation in zip(rows, coco.annotations, strict=True) if with_outlines else ():
        row.outline = () if row.is_crowd else annotation.outline()
    source = BoxSource(path, "annotations.bbox", BoxForm.SIZE, "pixels", COCO_HINT)
    return collect_labels(source, rows, list(pictures.values()), sources, query, with_outlines)


def _take_poses(
    path: Path,
    rows: Sequence[BoxRow],
    annotations: Sequence[_CocoAnnotation],
    sources: Mapping[str, str],
    query: str,
) -> None:
    """Give the rows their points; one without any is ignored like a crowd. InputError where there are none at all."""
    posed = [
        (row, annotation.pose())
        for row, annotation in zip(rows, annotations, strict=True)
        if row.name in sources
    ]
    widths = {len(pose.points) for _, pose in posed if pose}
    if len(widths) != 1:
        problem = (
            f"objects have {' and '.join(map(str, sorted(widths)))} points"
            if widths
            else "has no keypoints"
        )
        raise InputError(
            path, f"{problem} (query {query})", "give all the same", "annotations.keypoints"
        )
    for row, pose in posed:
        row.pose = pose
        row.is_crowd = row.is_crowd or pose is None
    if bare := sum(pose is None and not row.reason for row, pose in posed):
        add_note(
            path,
            f"{bare} of {len(posed)} objects have no labelled point (query {query}) and are ignored",
        )


def _by_id(path: Path, key: str, entries: Sequence[Any]) -> dict[Id, Any]:
    by_id = {entry.id: entry for entry in entries}
    if len(by_id) < len(entries):
        raise InputError(path, "an id occurs twice", COCO_HINT, f"{key}.id")
    return by_id


def _find_files(source: CocoFile, images: Mapping[Id, _CocoImage]) -> dict[Id, Path]:
    """The file of each picture: at its file_name, or under the last part of that in the folder."""
    path = source.path
    folder = source.pictures
    files: dict[Id, Path] = {}
    missing = []
    moved = []
    for number, image in images.items():
        name = image.file_name.replace("\\", "/")
        relative = PurePosixPath(name)
        last = name.rpartition("/")[2]
        bare = unquote(name.partition("?")[0]).rpartition("/")[2]
        within = [] if relative.is_absolute() or ".." in relative.parts else [name]
        file = next(
            (
                folder / candidate
                for candidate in (*within, last, bare)
                if candidate and os.path.isfile(folder / candidate)
            ),
            None,
        )
        if file is None:
            missing.append(image.file_name)
        else:
            files[number] = file
            if not within or file != folder / name:
                moved.append(f"{image.file_name} is read as {folder.name}/{file.name}")
    if missing:
        problem = f"{len(missing)} of {len(images)} pictures are not in {folder}: {join_names(missing, 3)}"
        raise InputError(
            path,
            problem,
            "put them there, or take them and their annotations out",
            "images.file_name",
        )
    twice = [file for file, count in Counter(files.values()).items() if count > 1]
    if twice:
        problem = f"{len(twice)} pictures are listed more than once: {join_names([file.name for file in twice], 3)}"
        raise InputError(
            path, problem, "list each once, with all of its annotations", "images.file_name"
        )
    if moved:
        add_note(path, f"{len(moved)} file names have another folder before them: {moved[0]}")
    used = set(files.values())
    if not source.is_shared and (
        unused := [file.name for file in list_pictures(folder) if file not in used]
    ):
        text = f"{len(unused)} pictures of {folder.name} are not listed and are left out: {join_names(unused, 3)}"
        add_note(path, text, "list them, also those without objects")
    return files


def _find_scales(
    path: Path,
    images: Mapping[Id, _CocoImage],
    files: Mapping[Id, Path],
    sizes: Mapping[Id, PictureSize],
) -> dict[Id, tuple[float, float]]:
    """What takes boxes from the size that the file gives to the picture's; refuses another shape."""
    scales = dict.fromkeys(images, (1.0, 1.0))
    scaled = []
    odd = []
    for number, image in images.items():
        width, height, orientation = sizes[number]
        name = files[number].name
        if image.width is None or image.height is None:
            continue
        stated = (image.width, image.height)
        text = (
            f"{name} has {width} x {height} pixels, the file says {stated[0]:.0f} x {stated[1]:.0f}"
        )
        if (width, height) == stated:
            continue
        # Sides that were rounded differ by a pixel.
        if abs(width * stated[1] - height * stated[0]) <= max(width, height, *stated):
            scales[number] = (width / stated[0], height / stated[1])
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


def _row(
    index: int,
    annotation: _CocoAnnotation,
    pictures: Mapping[Id, BoxedPicture],
    categories: Mapping[Id, str],
) -> BoxRow:
    picture = pictures.get(annotation.image_id)
    name = categories.get(annotation.category_id)
    box = annotation.box()
    missing = {LeftOut.PICTURE: picture, LeftOut.CATEGORY: name, LeftOut.NO_BOX: box}
    reason = next((reason for reason, value in missing.items() if value is None), None)
    where = f"annotations[{index}]"
    return BoxRow(
        where, picture or NO_PICTURE, name or "", box or NO_BOX, annotation.is_uncounted(), reason
    )


def _account_for_keys(path: Path, document: Any, query: str) -> None:
    """Note each key of known meaning that is not read, with how many hold it; InputError for those that cannot be."""
    for part, keys in UNREAD_KEYS.items():
        entries = [entry for entry in document.get(part, ()) if isinstance(entry, dict)]
        for key, (reading, hint) in keys.items():
            unset = USUAL_MODES if key == "bbox_mode" else UNSET
            holders = [
                entry
                for entry in entries
                if key.partition(".")[0] in entry and _value_of(entry, key) not in unset
            ]
            if not holders:
                continue
            if (
                reading == SPLITS_WITHIN
                and len({_value_of(holder, key) for holder in holders}) == 1
            ):
                continue
            text = (
                f"{len(holders)} of {len(entries)} {part} have `{key}`: {reading} (query {query})"
            )
            # Read without it, all boxes or splits would be wrong.
            if key in REFUSED_KEYS:
                raise InputError(path, text, hint, f"{part}.{key}")
            add_note(path, text, hint)


def _value_of(entry: dict[str, Any], key: str) -> Any:
    """The value of a key, or of a key of a mapping in it: `attributes.rotation`."""
    first, _, second = key.partition(".")
    value = entry.get(first)
    if second:
        value = value.get(second) if isinstance(value, dict) else None
    return value if isinstance(value, str | int | float) else bool(value)
