"""Boxes of other programs that lie in a file for each picture, or in one of an own format: read as they write them.

Pascal VOC (LabelImg), labelme, KITTI, CVAT for images, and MOT. Each is a few keys of XML, JSON or text, fewer than a
converter's own interface takes; what every format needs (forms, clipping, notes) is that of `models.objects.boxes`. A
reader gives back what it did not use; what is known to mean something is noted.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from gemel.models.errors import InputError, join_names
from gemel.models.files.io import read_bounded, read_json
from gemel.models.files.pictures import SPLIT_NAMES, LabelledPicture, PictureSize, read_picture_size
from gemel.models.labels.foreign_labels import list_label_files, name_format
from gemel.models.notes import add_note
from gemel.models.objects.boxes import (
    BoxedPicture,
    BoxForm,
    BoxRow,
    BoxSource,
    collect_labels,
    note_turned,
)
from gemel.models.predictions import Box

VOC, LABELME, KITTI, CVAT, MOT = (
    "Pascal VOC, as LabelImg writes it", "labelme's JSON", "KITTI", "CVAT's XML", "MOT",
)  # fmt: skip
MAX_FILE_BYTES, MAX_SET_BYTES = 2**22, 2**26
"""Of a file of one picture, and of one of many."""
MAX_UNLABELLED = 0.05
"""The fraction of pictures that may have no file: they count as pictures without objects."""
MAX_STRETCH = 0.02
"""How far the shape of a picture may differ from that which its labels state."""
HINT = "correct it, or export COCO (annotations.json beside images)"
SCORED = (
    "these are a model's answers, and count as labels",
    "give what people labelled if there is any",
)
NO_OBJECT = ("these are no objects, and are left out", "")
UNUSED: dict[str, tuple[str, str]] = {
    "score": SCORED, "confidence": SCORED, "point": NO_OBJECT, "line": NO_OBJECT, "linestrip": NO_OBJECT,
    "points": NO_OBJECT, "polyline": NO_OBJECT, "skeleton": NO_OBJECT, "cuboid": NO_OBJECT,
    "tag": ("labels of whole pictures are not read", ""),
    "group_id": ("parts of one object have a box each", "draw one polygon around the parts"),
    "rotation": ("boxes are turned, and are taken upright", "give the box around each object"),
    "subset": ("the splits that a file names are not read", "put pictures in train, val and test"),
}  # fmt: skip
"""What a file may hold that changes what it says and is not read: what that means, what to do."""
LABELME_KEYS = ("label", "points", "shape_type", "difficult")
KITTI_PARTS = 15
"""Of a line; a sixteenth is a score."""
REGION = "DontCare"
"""KITTI's class of regions in which nothing was labelled."""
MOT_CLASSES = (
    "pedestrian", "person on vehicle", "car", "bicycle", "motorbike", "non motorized vehicle", "static person",
    "distractor", "occluder", "occluder on the ground", "occluder full", "reflection",
)  # fmt: skip


class ForeignObject(NamedTuple):
    """An object as a file states it: its class, corners in pixels, and whether it is a region that does not count."""

    name: str
    box: Box
    is_crowd: bool = False


@dataclass(frozen=True)
class PictureObjects:
    """What a file says of one picture: `size` is (width, height), None where it does not say it.

    `unused` are the names of keys, columns and shapes that were not used, once for each that says something.
    """

    where: Path
    objects: Sequence[ForeignObject]
    size: tuple[float, float] | None = None
    unused: Sequence[str] = ()


Readings = Mapping[Path, PictureObjects]
"""The objects that files state, by picture."""


def has_object_files(folder: Path) -> bool:
    """Whether there are files of exactly one of these formats below a folder."""
    return (
        len({form for path in list_label_files(folder)[1] if (form := _form_of(path)) in READERS})
        == 1
    )


def _form_of(path: Path) -> str:
    """The format of a file; rows such as MOT's are its labels in gt.txt alone, elsewhere detections or VisDrone."""
    form = name_format(path)
    return "" if form == MOT and path.stem != "gt" else form


def find_picture_splits(folder: Path) -> dict[Path, str]:
    """The split of each picture that lists name (ImageSets/Main/train.txt), or folders (images/train).

    Empty where these name not all of train, val and test; a note says so of lists.
    """
    pictures = list_label_files(folder)[0]
    splits = {name: split for split, names in SPLIT_NAMES.items() for name in names}
    lists = {
        split: set(re.findall(r"^\S+", path.read_text("utf-8", "replace"), re.MULTILINE))
        for path in sorted(folder.rglob("ImageSets/**/*.txt"))
        if (split := splits.get(path.stem.lower()))
    }
    # Lists say the splits that people meant; folders may be others'.
    if lists.keys() >= set(SPLIT_NAMES):
        return {
            path: split for path in pictures for split, stems in lists.items() if path.stem in stems
        }
    if lists:
        missing = join_names([split for split in SPLIT_NAMES if split not in lists])
        add_note(folder, f"its ImageSets list no {missing}, and are not followed", "add that list")
    split_of = {
        path: split
        for path in pictures
        for part in path.relative_to(folder).parts[:-1]
        if (split := splits.get(part.lower()))
    }
    return (
        split_of
        if set(split_of.values()) == set(SPLIT_NAMES) and len(split_of) == len(pictures)
        else {}
    )


def read_object_files(
    folder: Path, sources: Mapping[str, str], query: str, with_outlines: bool = False
) -> list[LabelledPicture] | None:
    """The pictures of a folder with the boxes that such files give them; None where there are no such files.

    `with_outlines` notes that these have none.

    `sources` gives the query's class of each name. Raises InputError for files that are damaged or of several formats,
    for a class that none names, and where more than a few pictures have no file.
    """
    pictures, candidates = list_label_files(folder)
    forms = {path: _form_of(path) for path in candidates}
    formats = sorted({form for form in forms.values() if form in READERS})
    # Of several formats the right one is not clear: the next reader may know.
    if len(formats) != 1:
        return None
    files = [path for path, form in forms.items() if form == formats[0]]
    readings = READERS[formats[0]](pictures, files, candidates)
    source = BoxSource(files[0].parent, "data", BoxForm.CORNERS, "pixels", HINT)
    _check_complete(source.path, pictures, readings)
    _note_unused(source.path, readings, query)
    names = sorted({item.name for reading in readings.values() for item in reading.objects})
    if missing := [name for name in sources if name not in names]:
        problem = f"no object is called '{missing[0]}' (query {query})"
        raise InputError(source.path, problem, f"they are: {join_names(names, 20)}", "classes")
    boxed = []
    rows = []
    for picture in pictures:
        reading = readings.get(picture)
        size = read_picture_size(picture)
        boxed.append(BoxedPicture(picture, size, _scale_of(reading, size)))
        if reading is None:
            continue
        for number, item in enumerate(reading.objects, 1):
            if not item.name:
                raise InputError(reading.where, f"object {number} has no class", HINT)
            rows.append(
                BoxRow(
                    f"{reading.where.name} object {number}",
                    boxed[-1],
                    item.name,
                    item.box,
                    item.is_crowd,
                )
            )
    note_turned(source.path, boxed)
    return collect_labels(source, rows, boxed, _with_regions(sources, rows), query, with_outlines)


def _with_regions(sources: Mapping[str, str], rows: Sequence[BoxRow]) -> dict[str, str]:
    """KITTI's regions count for every class of the query."""
    regions = (
        {REGION: next(iter(sources.values()))} if any(row.name == REGION for row in rows) else {}
    )
    return {**regions, **sources}


def _check_complete(where: Path, pictures: Sequence[Path], readings: Readings) -> None:
    bare = [picture.name for picture in pictures if picture not in readings]
    if not bare:
        return
    text = f"{len(bare)} of {len(pictures)} pictures have no labels: {join_names(bare, 3)}"
    if len(bare) > MAX_UNLABELLED * len(pictures):
        raise InputError(
            where, text, "write an empty file for a picture without objects, or take it out", "data"
        )
    add_note(
        where, f"{text}; they count as pictures without objects", "take them out if they show any"
    )


def _note_unused(where: Path, readings: Readings, query: str) -> None:
    counts = Counter(
        name for reading in readings.values() for name in reading.unused if name in UNUSED
    )
    for name, count in counts.items():
        meaning, hint = UNUSED[name]
        add_note(where, f"{count} objects are or have `{name}`: {meaning} (query {query})", hint)


def _scale_of(reading: PictureObjects | None, size: PictureSize) -> tuple[float, float]:
    """What takes boxes from the stated size of a picture to its size as decoded."""
    if reading is None or reading.size is None or min(reading.size) <= 0:
        return 1.0, 1.0
    across = size.width / reading.size[0]
    down = size.height / reading.size[1]
    if abs(across / down - 1) > MAX_STRETCH:
        stated = f"{reading.size[0]:g} x {reading.size[1]:g}"
        raise InputError(
            reading.where,
            f"states a picture of {stated}, and it has {size.width} x {size.height}",
            HINT,
        )
    return across, down


def _by_picture(
    read: Callable[[Path], PictureObjects],
) -> Callable[[Sequence[Path], Sequence[Path], Sequence[Path]], Readings]:
    """A reader of formats with a file for each picture, of its name, beside it or in a folder of labels."""

    def read_all(
        pictures: Sequence[Path], files: Sequence[Path], candidates: Sequence[Path]
    ) -> Readings:
        folders = {file.parent for file in files}
        suffixes = {file.suffix for file in files}
        by_stem: dict[str, list[Path]] = defaultdict(list)
        for path in candidates:  # an empty file is one without objects
            if path.parent in folders and path.suffix in suffixes:
                by_stem[path.stem].append(path)
        chosen = {
            picture: _nearest(picture, by_stem[picture.stem])
            for picture in pictures
            if picture.stem in by_stem
        }
        return {picture: read(path) for picture, path in chosen.items()}

    return read_all


def _nearest(picture: Path, files: Sequence[Path]) -> Path:
    """Of files of one name the one that shares most folders with the picture."""
    return max(files, key=lambda file: len(os.path.commonpath((picture, file))))


def _number(where: Path, key: str, text: Any) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise InputError(where, f"{key} is '{text!s:.40}', no number", HINT)
    return value


def _read_xml(path: Path, max_bytes: int) -> ElementTree.Element:
    data = read_bounded(path, max_bytes, HINT)
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise InputError(path, "declares entities, which labels do not need", HINT)
    try:
        return ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise InputError(path, f"is no XML: {error}", HINT) from error


def _read_voc(path: Path) -> PictureObjects:
    root = _read_xml(path, MAX_FILE_BYTES)
    objects = []
    unused = list[str]()
    for item in root.findall("object"):
        name = item.findtext("name", "").strip()
        box = item.find("bndbox")
        unused += [
            field.tag
            for field in item
            if field.tag not in ("name", "bndbox", "difficult") and _says(field.text)
        ]
        unused += [
            attribute.findtext("name", "")
            for attribute in item.iter("attribute")
            if _says(attribute.findtext("value"))
        ]
        if box is None:
            raise InputError(path, f"the object '{name}' has no bndbox", HINT)
        sides = (_number(path, key, box.findtext(key)) for key in ("xmin", "ymin", "xmax", "ymax"))
        difficult = (item.findtext("difficult") or "0").strip() not in ("0", "")
        objects.append(ForeignObject(name, tuple(sides), difficult))  # type: ignore[arg-type]
    size = root.find("size")
    if size is None:
        return PictureObjects(path, objects, unused=unused)
    width, height = (_number(path, key, size.findtext(key) or 0) for key in ("width", "height"))
    return PictureObjects(path, objects, (width, height), unused)


def _says(value: Any) -> bool:
    """Whether a value of a key is other than the one that programs write where nothing is known."""
    return str(value).strip().lower() not in (
        "none",
        "",
        "0",
        "0.0",
        "false",
        "{}",
        "[]",
        "unspecified",
    )


def _around(where: Path, points: Sequence[Any]) -> Box:
    """The box around points (x, y)."""
    try:
        across, down = (
            [_number(where, "a point", point[side]) for point in points] for side in (0, 1)
        )
        return min(across), min(down), max(across), max(down)
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(where, "holds points that are none", HINT) from error


def _read_labelme(path: Path) -> PictureObjects:
    document = read_json(path, HINT, MAX_FILE_BYTES, foreign=True)
    shapes = document.get("shapes")
    objects = []
    unused = list[str]()
    if not isinstance(shapes, list):
        raise InputError(path, "has no list of shapes", HINT, "shapes")
    for shape in shapes:
        if not isinstance(shape, dict) or not isinstance(shape.get("points"), list):
            raise InputError(path, "holds a shape without points", HINT, "shapes.points")
        kind = shape.get("shape_type", "polygon")
        points = shape["points"]
        unused += [
            str(key) for key, value in shape.items() if key not in LABELME_KEYS and _says(value)
        ]
        box = _around(path, points)
        if kind == "circle":  # its centre, and a point on it
            x, y, *_ = _around(path, points[:1])
            radius = math.hypot(box[2] - box[0], box[3] - box[1])
            box = (x - radius, y - radius, x + radius, y + radius)
        if kind in ("point", "line", "linestrip"):
            unused.append(kind)
            continue
        objects.append(
            ForeignObject(str(shape.get("label", "")), box, bool(shape.get("difficult")))
        )
    width = document.get("imageWidth")
    height = document.get("imageHeight")
    size = (
        (float(width), float(height))
        if isinstance(width, int) and isinstance(height, int)
        else None
    )
    return PictureObjects(path, objects, size, unused)


def _read_kitti(path: Path) -> PictureObjects:
    objects = []
    unused = list[str]()
    text = read_bounded(path, MAX_FILE_BYTES, HINT).decode("utf-8", "replace")
    for number, words in enumerate(map(str.split, text.splitlines()), 1):
        if words and len(words) < 8:
            raise InputError(path, f"line {number} has {len(words)} parts, not 15", HINT)
        if words:
            box = tuple(_number(path, f"line {number}", word) for word in words[4:8])
            objects.append(ForeignObject(words[0], box, words[0] == REGION))  # type: ignore[arg-type]
            unused += ["score"] * (len(words) > KITTI_PARTS)
    return PictureObjects(path, objects, unused=unused)


def _read_cvat(
    pictures: Sequence[Path], files: Sequence[Path], candidates: Sequence[Path]
) -> Readings:
    by_name: dict[str, list[Path]] = defaultdict(list)
    for picture in pictures:
        by_name[picture.name].append(picture)
    readings = {}
    for path in files:
        root = _read_xml(path, MAX_SET_BYTES)
        # Tracks refer to frames of a video that is not there.
        if root.find("track") is not None:
            raise InputError(
                path, "holds tracks of a video", "export it as CVAT for images, or as COCO", "data"
            )
        for image in root.findall("image"):
            name = image.get("name", "").replace("\\", "/")
            namesakes = by_name[name.rpartition("/")[2]]
            if not namesakes:
                raise InputError(
                    path, f"names {name}, which is not there", "put it beside it", "data"
                )
            picture = max(
                namesakes,
                key=lambda path: (
                    path.as_posix().endswith(f"/{name}"),
                    image.get("subset") in path.parts,
                ),
            )
            if picture in readings:
                raise InputError(
                    path, f"names {name} twice", "name each picture with its folder", "data"
                )
            objects = []
            unused = ["subset"] * (image.get("subset") not in (None, "default", *picture.parts))
            for shape in image:
                box = _cvat_box(path, shape)
                if box is None:
                    unused.append(shape.tag)
                else:
                    objects.append(ForeignObject(shape.get("label", ""), box))
            size = tuple(_number(path, key, image.get(key) or 0) for key in ("width", "height"))
            readings[picture] = PictureObjects(path, objects, size, unused)  # type: ignore[arg-type]
    return readings


def _cvat_box(path: Path, shape: ElementTree.Element) -> Box | None:
    """The box around a shape, turned ones too; None for one that is no object."""

    def numbers(*keys: str) -> list[float]:
        return [_number(path, key, shape.get(key)) for key in keys]

    if shape.tag == "polygon":
        return _around(path, [point.split(",") for point in shape.get("points", "").split(";")])
    if shape.tag == "box":
        x0, y0, x1, y1 = numbers("xtl", "ytl", "xbr", "ybr")
    elif shape.tag == "ellipse":
        x, y, across, down = numbers("cx", "cy", "rx", "ry")
        x0 = x - across
        y0 = y - down
        x1 = x + across
        y1 = y + down
    elif shape.tag == "mask":
        x0, y0, width, height = numbers("left", "top", "width", "height")
        x1 = x0 + width
        y1 = y0 + height
    else:
        return None
    angle = math.radians(_number(path, "rotation", shape.get("rotation") or 0))
    across = (x1 - x0) / 2
    down = (y1 - y0) / 2
    wide = abs(across * math.cos(angle)) + abs(down * math.sin(angle))
    high = abs(across * math.sin(angle)) + abs(down * math.cos(angle))
    x = (x0 + x1) / 2
    y = (y0 + y1) / 2
    return x - wide, y - high, x + wide, y + high


def _read_mot(
    pictures: Sequence[Path], files: Sequence[Path], candidates: Sequence[Path]
) -> Readings:
    """Rows frame, number, x, y, width, height, confidence, class; every frame of a sequence is described."""
    readings: dict[Path, PictureObjects] = {}
    for path in files:
        frames = [picture for picture in pictures if picture.is_relative_to(path.parent.parent)]
        by_frame = {int(picture.stem): picture for picture in frames if picture.stem.isdecimal()}
        objects: dict[int, list[ForeignObject]] = defaultdict(list)
        text = read_bounded(path, MAX_SET_BYTES, HINT).decode("utf-8", "replace")
        for line in filter(str.strip, text.splitlines()):
            cells = [_number(path, "a cell", part) for part in line.split(",")]
            if len(cells) < 6:
                raise InputError(path, f"has a row of {len(cells)} numbers, not 9", HINT)
            frame, _, x, y, width, height, *extras = cells
            # Confidence, class and seen since MOT16; before it -1.
            kind = int(extras[1]) if len(extras) > 2 else 1
            name = (
                MOT_CLASSES[kind - 1]
                if 0 < kind <= len(MOT_CLASSES)
                else str(kind)
                if kind > 0
                else MOT_CLASSES[0]
            )
            if int(frame) not in by_frame:
                raise InputError(
                    path, f"describes frame {frame:g}, whose picture is not there", HINT, "data"
                )
            is_ignored = bool(extras) and extras[0] == 0
            objects[int(frame)].append(
                ForeignObject(name, (x, y, x + width, y + height), is_ignored)
            )
        for frame, picture in by_frame.items():
            readings[picture] = PictureObjects(path, objects[frame])
    return readings


READERS: dict[str, Callable[[Sequence[Path], Sequence[Path], Sequence[Path]], Readings]] = {
    VOC: _by_picture(_read_voc), LABELME: _by_picture(_read_labelme), KITTI: _by_picture(_read_kitti),
    CVAT: _read_cvat, MOT: _read_mot,
}  # fmt: skip
"""Name of a format in `foreign_labels.FORMATS`, and what reads its files."""
