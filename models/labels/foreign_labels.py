"""Labels that no reader takes: refused by the name of their format, so that their pictures never count as unlabelled.

A file is one of labels if it names pictures of the data, is named as one of them or as labels are, or if its rows or
keys are those of a known format. It may lie among the pictures, beside their folder, or in a folder of labels beside
that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemel.models.errors import InputError, join_names
from gemel.models.files.pictures import SUFFIXES

if TYPE_CHECKING:
    from gemel.models.workload import Query

TEXT_SUFFIXES = frozenset(
    (".json", ".jsonl", ".ndjson", ".xml", ".txt", ".csv", ".tsv", ".yaml", ".yml")
)
CONFIG_SUFFIXES = frozenset((".yaml", ".yml"))
TABLES_OF_LABELS = frozenset(
    (".parquet", ".arrow", ".tfrecord", ".tfrecords", ".record", ".mat", ".xlsx")
)
"""Suffixes of files that hold the labels of whole data sets, and are not read."""
MAYBE_LABELS = frozenset((
    ".pkl", ".pickle", ".npy", ".npz", ".db", ".sqlite", ".sqlite3", ".h5", ".hdf5", ".xls", ".ods", ".zip", ".gz",
))  # fmt: skip
"""Suffixes of files that hold labels where their names, or those of their folders, say so."""
LABEL_WORDS = re.compile(r"label|annot|bbox|bbx|ground.?truth|(?<![a-z])gt(?![a-z])", re.IGNORECASE)
"""In the name of a file of labels, and in no picture's."""
LABEL_FOLDERS = frozenset((
    "annotation", "annotations", "anns", "ann", "anno", "label", "labels", "label_2", "labeltxt", "labels_with_ids",
    "gt", "det", "groundtruth", "ground_truth", "masks", "mask", "segmentationclass", "segmentationobject", "gtfine",
    "json", "jsons", "xml", "xmls", "bbox", "bboxes",
))  # fmt: skip
PICTURE_FOLDERS = frozenset((
    "images", "image", "imgs", "img", "img1", "image_2", "jpegimages", "data", "pictures", "frames", "rgb", "photos",
))  # fmt: skip
MASK_ENDS = ("_mask", "-mask", "_seg", "_gt", "_label", "_labels", "_labelids")
"""What follows the name of a picture in that of its mask."""
HEAD_BYTES, MAX_FILES, MAX_NAMES, MIN_STEM = 2**16, 2000, 50, 4
"""Read of each file; files looked at; pictures whose names are looked for, and their least length without suffix."""
NUMBER = rb"-?[0-9.eE+-]+"
FORMATS = (
    ("CVAT's XML", rb"<annotations>\s*<(version|meta|track|image)"),
    ("Pascal VOC, as LabelImg writes it", rb"<annotation\b"),
    ("labelme's JSON", rb'"shapes"\s*:\s*\['),
    ("VIA's JSON", rb'"(_via_settings|_via_img_metadata|region_attributes|shape_attributes)"'),
    (
        "FiftyOne's JSON",
        rb'"(sample_fields|bounding_box)"\s*:|"samples"\s*:\s*\[|"classes"\s*:.*"labels"\s*:\s*\{',
    ),
    ("Label Studio's JSON", rb'"(completions|from_name|rectanglelabels)"\s*:'),
    ("BDD100K's JSON", rb'"box2d"\s*:'),
    ("Create ML's JSON", rb'"annotations"\s*:\s*\[\s*\{\s*"(label|coordinates)"'),
    ("COCO", rb'"annotations"\s*:'),
    ("metadata.jsonl of Hugging Face", rb'\A\s*\{.*"file_name"\s*:'),
    ("KITTI", rb"(?m)\A[A-Za-z_]+(\s" + NUMBER + rb"){14,15}\s*$"),
    ("DOTA", rb"(?m)^(" + NUMBER + rb"\s){8}[A-Za-z][\w-]*\s[0-2]\s*$"),
    ("MOT", rb"(?m)\A[0-9]+,\s*-?[0-9]+(,\s*" + NUMBER + rb"){4,8}\s*$"),
    ("YOLO's text files", rb"(?m)\A[0-9]+(\s" + NUMBER + rb"){4,}\s*$"),
)
"""Name and what the head of such a file holds, the first that fits."""
ASKED = "or write `labels: none` if the pictures shall count as footage without labels"
HINTS = {
    "classification": "give folders of classes, or a CSV file with the columns path and label",
    "segmentation": "put pictures in images, and a mask of each, NAME.png, in masks",
    "keypoints": "export them as COCO with keypoints, annotations.json beside images",
    "embedding": "give a folder for each identity",
}
BOXES_HINT = (
    "name the folder that holds pictures and labels, or export them as COCO (annotations.json beside images) or as "
    "YOLO's text files with data.yaml"
)


def refuse_labels(query: Query, data: Path) -> None:
    """Raise InputError where label-like files lie in or beside data in which no layout was found."""
    # Labels may lie among the pictures, or beside their folder.
    if data.is_dir():
        pictures, candidates = list_label_files(data)
        beside = _list_beside(data)
        masks = _find_masks(pictures)
        labels = masks or _find_label_files(pictures, candidates, beside, data)
    else:
        pictures = [data]
        masks = []
        # A YAML file beside a clip is the workload or the box that plays it.
        beside = [path for path in _list_beside(data) if path.suffix.lower() not in CONFIG_SUFFIXES]
        labels = _find_label_files(pictures, [], beside, data)
    if not labels:
        return
    form = "masks" if masks else name_format(labels[0])
    names = join_names([str(path.relative_to(data.parent)) for path in labels], 3)
    problem = f"there are labels ({form}) that are not read for query {query.id}: {names}"
    raise InputError(data, problem, f"{HINTS.get(query.task, BOXES_HINT)}, {ASKED}", "data")


def list_label_files(data: Path) -> tuple[list[Path], list[Path]]:
    """The pictures below a folder, and the other files that may hold labels; hidden ones are left out."""
    pictures = list[Path]()
    candidates = list[Path]()
    for folder, folders, names in os.walk(data):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
            suffix = path.suffix.lower()
            # Masks among the pictures are separated later.
            if suffix in SUFFIXES:
                pictures.append(path)
            elif suffix in TEXT_SUFFIXES | TABLES_OF_LABELS | MAYBE_LABELS:
                candidates.append(path)
    return pictures, candidates[:MAX_FILES]


def _list_beside(data: Path) -> list[Path]:
    """Files beside the data, and in folders of labels beside them."""
    files = list[Path]()
    for path in sorted(data.parent.iterdir()):
        if path == data or path.name.startswith("."):
            continue
        if path.is_file() and path.suffix.lower() in TEXT_SUFFIXES:
            files.append(path)
        elif path.is_dir() and path.name.lower() in LABEL_FOLDERS:
            files += list_label_files(path)[1]
    return files[:MAX_FILES]


def _find_label_files(
    pictures: Sequence[Path], within: Sequence[Path], beside: Sequence[Path], data: Path
) -> list[Path]:
    """The files of labels. Beside the data a format alone says nothing, save in a folder of labels beside `images`."""
    stems = {name for path in pictures for name in (path.stem, path.name)}
    names = [path.name.encode() for path in pictures[:: max(1, len(pictures) // MAX_NAMES)]]
    label_files = list[Path]()
    for path in within:
        head = _read_head(path)
        is_format = _find_format(head) != ""
        is_named = (
            path.stem in stems
            or LABEL_WORDS.search(path.stem)
            or path.parent.name.lower() in LABEL_FOLDERS
        )
        if (
            path.suffix.lower() in TABLES_OF_LABELS
            or is_named
            or is_format
            or _names_pictures(head, names)
        ):
            label_files.append(path)
    is_generic = data.name.lower() in PICTURE_FOLDERS
    for path in beside:
        head = _read_head(path)
        is_format = _find_format(head) != ""
        is_near = path.parent != data.parent and is_generic
        is_twin = path.stem in stems and (path.parent != data.parent or path.stem == data.stem)
        if _names_pictures(head, names) or (is_format and (is_near or is_twin)):
            label_files.append(path)
    return label_files


def _read_head(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with open(path, "rb") as file:
        return file.read(HEAD_BYTES)


def _names_pictures(head: bytes, names: Collection[bytes]) -> bool:
    """Whether a text says something of one of these pictures: a list of names alone says nothing."""
    for name in names:
        stem = name.rpartition(b".")[0]
        for line in (
            line
            for line in head.splitlines()
            if name in line or line.split(b",")[0].strip(b'" ') == stem
        ):
            bare = len(stem) < MIN_STEM and name not in line
            if not bare and len(re.findall(rb"[^\s,;:<>\"']+", line)) > 1:
                return True
    return False


def _find_masks(pictures: Sequence[Path]) -> list[Path]:
    """The pictures that are masks of others, as their folders or the ends of their names say."""
    stems = {path.stem for path in pictures if path.parent.name.lower() not in LABEL_FOLDERS}
    return [path for path in pictures if _is_mask(path, stems)]


def _is_mask(path: Path, stems: Collection[str]) -> bool:
    if path.parent.name.lower() in LABEL_FOLDERS and path.stem in stems:
        return True
    return any(
        path.stem.lower().endswith(end) and path.stem[: -len(end)] in stems for end in MASK_ENDS
    )


def name_format(path: Path) -> str:
    """The format that the head of a file is of; its suffix where that is none known."""
    return _find_format(_read_head(path)) or f"a {path.suffix.lower()} file"


def _find_format(head: bytes) -> str:
    """The format that begins so; empty for none that is known."""
    for name, pattern in FORMATS:
        if re.search(pattern, head, re.DOTALL):
            return name
    return ""
