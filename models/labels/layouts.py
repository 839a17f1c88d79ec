"""Labelled pictures as people have them: folders of classes, a table, COCO or YOLO's files, with splits or without."""

from __future__ import annotations

import codecs
import csv
import io
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from gemel.models.errors import InputError, join_names
from gemel.models.files.io import read_bounded
from gemel.models.files.pictures import (
    SPLIT_NAMES,
    SUFFIXES,
    LabelledPicture,
    list_all_pictures,
    list_pictures,
    natural_key,
)
from gemel.models.labels.coco import CocoFile, list_coco, read_coco
from gemel.models.labels.data_notes import UNIT_AND_TIME, note_unread
from gemel.models.labels.foreign_labels import ASKED, refuse_labels
from gemel.models.labels.mask_labels import read_masks
from gemel.models.labels.object_files import (
    find_picture_splits,
    has_object_files,
    read_object_files,
)
from gemel.models.labels.yolo_labels import YAML_SUFFIXES, find_yolo
from gemel.models.notes import add_note
from gemel.models.predictions import GroundTruth, IdentityLabel, LabelSet
from gemel.models.tasks import TASKS
from gemel.models.zoo import finds_outlines, preprocess_of

if TYPE_CHECKING:
    from gemel.models.workload import Query

SPLITS = tuple(SPLIT_NAMES)
COLUMNS = {
    "path": ("path", "file", "filename", "file_name", "image", "image_path", "filepath"),
    "label": ("label", "class", "category", "class_name"),
    "split": ("split", "set", "subset", "partition"),
    "unit": ("unit", "clip", "track", "sequence"),
}  # fmt: skip
"""The columns of a table, and what other programs call them."""
IMAGES, MASKS, NO_LABELS = "images", "masks", "none"
TABLE_SUFFIXES, MAX_TABLE_BYTES = (".csv", ".tsv"), 2**26
MAX_ROW_CHARACTERS, MAX_TABLE_CELLS, ROW_CELLS = 2**21, 2**24, 8
"""Of a table; a row counts as so many cells more than it has, for the memory that it takes itself."""
SETS_HINT = (
    "give a CSV file with a path, and either the labels (a;b) or a column of 0 and 1 for each class"
)
DIGIT = re.compile("[0-9]")
SEPARATOR, SEPARATORS, YES = ";", re.compile(r"[;|,]"), ("1", "1.0", "true", "True", "yes", "x")
"""Between the labels of one picture; what a column of a class holds where it is shown."""
TABLE_HINT = (
    "give a CSV file with the columns path and label, and split and unit where they are known"
)
LAST_PARTS, MIN_GROUPS = 0.2, 3
"""The fraction of a class's clips in val and in test where data have no splits; below three clips, frames are cut."""


@dataclass(frozen=True)
class Layout:
    """How labelled pictures lie: `read` gives those of a split, `list_files` their files, without reading labels.

    Where people made no splits, `has_splits` is False: the pictures are cut in order.
    """

    where: Path
    read: Callable[[str], list[LabelledPicture]]
    list_files: Callable[[str], Sequence[Path]]
    has_splits: bool = True


def find_layout(query: Query) -> Layout | None:
    """The labelled pictures of a query's data; None where they have no labels.

    Raises InputError for a table or YOLO's data.yaml that cannot be read, and for labels in formats that are not.
    """
    assert query.data is not None
    form = TASKS[query.task].layout
    if query.labels == NO_LABELS or not form:
        return None
    layout = None
    if query.data.is_dir() or query.data.suffix.lower() in (*TABLE_SUFFIXES, *YAML_SUFFIXES):
        layout = (_find_label_sets if query.multi_label else FINDERS[form])(query, query.data)
    if layout is None:
        refuse_labels(query, query.data)
    return layout


def find_splits(folder: Path) -> dict[str, Path]:
    """The folder of each split that there is one for, whatever it is called."""
    folders = (
        {path.name.lower(): path for path in sorted(folder.iterdir()) if path.is_dir()}
        if folder.is_dir()
        else {}
    )
    chosen = {
        split: next((folders[name] for name in names if name in folders), None)
        for split, names in SPLIT_NAMES.items()
    }
    return {split: path for split, path in chosen.items() if path}


def _of_split(splits: Mapping[str, Path], name: str, query: Query) -> Path:
    if name in splits:
        return splits[name]
    assert query.data is not None
    raise InputError(
        query.data / name, f"the split '{name}' is missing (query {query.id})", "add it", "data"
    )


def _in_splits(
    query: Query,
    data: Path,
    splits: Mapping[str, Path],
    read: Callable[[Path], list[LabelledPicture]],
    list_files: Callable[[Path], Sequence[Path]],
) -> Layout:
    def read_split(name: str) -> list[LabelledPicture]:
        names = tuple(path.name for path in splits.values())
        note_unread(data, names, "put their frames in a split, or remove them")
        return read(_of_split(splits, name, query))

    return Layout(data, read_split, lambda name: list_files(splits[name]) if name in splits else [])


# Classes


def _find_classes(query: Query, data: Path) -> Layout | None:
    for name in query.sources:
        if PurePosixPath(name).name != name:
            problem = f"the class '{name}' is no name of a folder (query {query.id})"
            raise InputError(query.file or data, problem, "call it otherwise", "classes")
    splits = find_splits(data)
    if any((path / name).is_dir() for path in splits.values() for name in query.sources):
        return _class_splits(query, data, splits)
    # A table says more than folders, which may be those of cameras.
    if table := _find_table(query, data):
        return table
    if splits:
        return _class_splits(query, data, splits)
    if any((data / name).is_dir() for name in query.sources):
        return _without_splits(query, data, lambda: _read_classes(query, data))
    folders = sorted(
        path.name for path in data.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    # Those of cameras and days are numbered.
    if len(folders) > 1 and not any(DIGIT.search(name) for name in folders):
        problem = f"its folders ({join_names(folders, 3)}) are no classes of query {query.id}"
        raise InputError(
            data,
            problem,
            f"name them in `classes`, as {{class: label}} or as they are, {ASKED}",
            "data",
        )
    if folders:
        text = f"is read without labels: its folders ({join_names(folders, 3)}) are no classes of query {query.id}"
        add_note(data, text, "if they are, name them in `classes`")
    return None


def _class_splits(query: Query, data: Path, splits: Mapping[str, Path]) -> Layout:
    def list_files(folder: Path) -> list[Path]:
        return [
            file for name in query.sources for file in list_all_pictures(folder / name, nested=True)
        ]

    return _in_splits(query, data, splits, partial(_read_classes, query), list_files)


def _read_classes(query: Query, folder: Path) -> list[LabelledPicture]:
    """The pictures of a folder of classes, in natural order of their names whatever their class."""
    note_unread(
        folder,
        tuple(query.sources),
        f"if they are classes of query {query.id}, name them in `classes`",
    )
    pictures: list[tuple[Path, LabelledPicture]] = []
    for name, label in query.sources.items():
        files = list_all_pictures(folder / name, nested=True)
        if not files:
            hint = "add frames of it, or take it out of `classes`"
            raise InputError(
                folder / name, f"no frames of class '{name}' (query {query.id})", hint, "data"
            )
        pictures += [
            (file.relative_to(folder / name), LabelledPicture(file, label)) for file in files
        ]
    return [picture for _, picture in sorted(pictures, key=lambda item: natural_key(item[0]))]


# Tables


def _find_label_sets(query: Query, data: Path) -> Layout | None:
    """Frames with any number of classes: a table, or one in the folder of each split."""

    def read(folder: Path) -> list[LabelledPicture]:
        if (table := _open_table(query, folder)) is None:
            raise InputError(
                folder, f"holds no table of labels (query {query.id})", SETS_HINT, "data"
            )
        return [picture for _, picture in _read_rows(query, *table)]

    splits = {} if data.is_file() else find_splits(data)
    has_tables = any(
        file.suffix.lower() in TABLE_SUFFIXES for path in splits.values() for file in path.iterdir()
    )
    if has_tables and not _open_table(query, data):
        return _in_splits(
            query, data, splits, read, lambda folder: [picture.path for picture in read(folder)]
        )
    return _find_table(query, data)


def _find_table(query: Query, data: Path) -> Layout | None:
    table = _open_table(query, data)
    return _table_layout(query, *table) if table else None


def _open_table(query: Query, data: Path) -> tuple[Path, list[_Row]] | None:
    """The table that `data` is, or the first one with a path and a label in its folder.

    For several labels a frame, a column for each class may hold 0 and 1 instead.
    """
    files = [data] if data.is_file() else sorted(data.iterdir())
    for path in (
        path for path in files if path.suffix.lower() in TABLE_SUFFIXES and path.is_file()
    ):
        header, rows = _read_table(path)
        places = {
            name: next((at for at, title in enumerate(header) if title in COLUMNS[name]), None)
            for name in COLUMNS
        }
        if places["path"] is not None and places["label"] is not None:
            if unread := [
                name for at, name in enumerate(header) if at not in places.values() and name
            ]:
                add_note(path, f"its columns {join_names(unread, 3)} are not read")
            return path, [_Row(*(_cell(row, at) for at in places.values())) for row in rows]
        columns = {
            name: header.index(name.lower()) for name in query.sources if name.lower() in header
        }
        if query.multi_label and places["path"] is not None and columns:
            if missing := query.sources.keys() - columns.keys():
                raise InputError(
                    path, f"has no column '{min(missing)}' (query {query.id})", SETS_HINT, "classes"
                )
            texts = (
                SEPARATOR.join(name for name, at in columns.items() if _cell(row, at) in YES)
                for row in rows
            )
            return path, [
                _Row(
                    _cell(row, places["path"]),
                    text,
                    _cell(row, places["split"]),
                    _cell(row, places["unit"]),
                )
                for row, text in zip(rows, texts, strict=True)
            ]
        if data.is_file():
            raise InputError(path, f"has the columns {join_names(header, 6)}", TABLE_HINT, "data")
    return None


class _Row(NamedTuple):
    path: str
    label: str
    split: str
    unit: str


def _cell(row: Sequence[str], at: int | None) -> str:
    return "" if at is None or at >= len(row) else row[at].strip()


def _read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """The names of the columns and the rows of a CSV file; its separator is a comma, semicolon or tab."""
    data = read_bounded(path, MAX_TABLE_BYTES, TABLE_HINT)
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    rows: list[list[str]] = []
    cells = 0
    try:
        lines = _RowLines(
            io.TextIOWrapper(io.BytesIO(data), "utf-16" if is_wide else "utf-8-sig", newline="")
        )
        first = next(lines, "")
        if not first:
            raise ValueError("empty")
        reader = csv.reader(
            chain([first], lines), delimiter=max(",;\t", key=first.count), strict=True
        )
        for row in reader:
            lines.start_row()
            rows.append(row)
            cells += len(row) + ROW_CELLS
            if cells > MAX_TABLE_CELLS:
                raise ValueError(f"more than {MAX_TABLE_CELLS} cells")
    except (ValueError, csv.Error) as error:
        raise InputError(
            path, f"is no CSV file in UTF-8 or UTF-16 ({error})", TABLE_HINT, "data"
        ) from error
    header = rows.pop(0)
    return [name.strip().lower() for name in header], [row for row in rows if any(row)]


class _RowLines:
    """The lines of a table; ValueError for one row, of one line or of many, that is too long."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream
        self._characters = 0

    def start_row(self) -> None:
        """Count anew: a row has ended."""
        self._characters = 0

    def __iter__(self) -> _RowLines:
        return self

    def __next__(self) -> str:
        line = self._stream.readline(MAX_ROW_CHARACTERS + 1)
        self._characters += len(line)
        if self._characters > MAX_ROW_CHARACTERS:
            raise ValueError(f"a row of more than {MAX_ROW_CHARACTERS} characters")
        if not line:
            raise StopIteration
        return line


def _table_layout(query: Query, path: Path, rows: Sequence[_Row]) -> Layout:
    names = {name: split for split, names in SPLIT_NAMES.items() for name in names}
    splits = {row.split for row in rows}
    if splits <= {""}:
        return _without_splits(
            query, path, lambda: [picture for _, picture in _read_rows(query, path, rows)]
        )
    if unknown := sorted(split for split in splits if split.lower() not in names):
        problem = (
            f"has rows of the split '{unknown[0]}'" if unknown[0] else "has rows without a split"
        )
        raise InputError(path, problem, f"write one of {join_names(SPLITS)}", "data")

    read_all = cache(partial(_read_rows, query, path, rows))

    def read_split(name: str) -> list[LabelledPicture]:
        return [picture for row, picture in read_all() if names[row.split.lower()] == name]

    return Layout(path, read_split, lambda name: [picture.path for picture in read_split(name)])


def _read_rows(
    query: Query, path: Path, rows: Sequence[_Row]
) -> list[tuple[_Row, LabelledPicture]]:
    """The pictures of the query's classes, each with its row, in natural order of their paths."""
    if left_out := Counter(
        row.label or "without a label" for row in rows if _label(query, row.label) is None
    ):
        text = (
            f"{left_out.total()} of {len(rows)} rows are left out: {join_names(list(left_out), 5)}"
        )
        add_note(path, text, f"if these are classes of query {query.id}, name them in `classes`")
    pictures: dict[Path, tuple[_Row, LabelledPicture]] = {}
    missing = []
    twice = 0
    for row, label in (
        (row, label) for row in rows if (label := _label(query, row.label)) is not None
    ):
        listed = path.parent / row.path.replace("\\", "/")
        files = (listed, *(Path(f"{listed}{suffix}") for suffix in sorted(SUFFIXES)))
        if (file := next((candidate for candidate in files if candidate.is_file()), None)) is None:
            missing.append(row.path)
            continue
        twice += file in pictures
        first, _ = pictures.setdefault(file, (row, LabelledPicture(file, label, unit=row.unit)))
        if (_label(query, first.label), first.split) != (label, row.split):
            raise InputError(
                path, f"has two rows that differ for {row.path}", "keep one row a picture", "data"
            )
    if missing:
        problem = f"{len(missing)} of {len(rows)} pictures are not there: {join_names(missing, 3)}"
        raise InputError(
            path, problem, "paths are relative to the table's folder; put them there", "data"
        )
    if twice:
        add_note(path, f"{twice} rows repeat others and are left out")
    return sorted(pictures.values(), key=lambda item: natural_key(item[1].path))


def _label(query: Query, text: str) -> GroundTruth | None:
    """The query's class of a label, or its classes of several; None where it has no such class."""
    if not query.multi_label:
        return query.sources.get(text)
    shown = {
        query.sources[name]
        for part in SEPARATORS.split(text)
        if (name := part.strip()) in query.sources
    }
    return LabelSet(tuple(name for name in query.classes if name in shown))


# Boxes


def _find_boxes(query: Query, data: Path) -> Layout | None:
    if data.suffix.lower() in TABLE_SUFFIXES:
        raise InputError(
            data,
            f"holds no boxes (query {query.id} detects)",
            "give COCO or YOLO's text files",
            "data",
        )
    kind = "person_keypoints" if query.task == "keypoints" else "instances"
    splits = find_splits(data)
    coco = list_coco(data, kind) if data.is_dir() else {}

    def read_folder(folder: Path) -> list[LabelledPicture]:
        return _read_coco(query, folder, kind)

    def list_files(folder: Path) -> list[Path]:
        return [
            path
            for file in list_coco(folder, kind).values()
            for path in list_pictures(file.pictures)
        ]

    if any(list_coco(path, kind) for path in splits.values()):
        return _in_splits(query, data, splits, read_folder, list_files)
    # All files name a split.
    if coco and "" not in coco:
        return _named_splits(query, data, coco)
    yolo = find_yolo(data) if query.task != "keypoints" else None
    if yolo:
        files_by_split = {split: yolo.list_files(names) for split, names in SPLIT_NAMES.items()}

        def read_split(name: str) -> list[LabelledPicture]:
            if not files_by_split[name]:
                raise InputError(
                    yolo.path, f"the split '{name}' is missing (query {query.id})", "add it", "data"
                )
            return yolo.read(files_by_split[name], query.sources, query.id, finds_outlines(query))

        if any(files_by_split.values()):
            return Layout(yolo.path, read_split, lambda name: files_by_split[name])

        def read_all() -> list[LabelledPicture]:
            return yolo.read(yolo.list_files(()), query.sources, query.id, finds_outlines(query))

        return _without_splits(query, yolo.path, read_all)
    if coco:
        return _without_splits(query, data, lambda: _read_annotations(query, coco[""]))
    if query.task == "detection" and (layout := _find_object_files(query, data, splits)):
        return layout
    if splits:
        refuse_labels(query, data)
        return _in_splits(query, data, splits, read_folder, list_files)
    return None


def _find_object_files(query: Query, data: Path, splits: Mapping[str, Path]) -> Layout | None:
    """Labels of other programs, a file for each picture: in the folder of each split, or in one without splits."""

    @cache
    def read(folder: Path) -> list[LabelledPicture]:
        pictures = read_object_files(folder, query.sources, query.id, finds_outlines(query))
        if pictures is None:
            refuse_labels(query, folder)
            raise InputError(
                folder, f"holds no labels (query {query.id})", f"add them, {ASKED}", "data"
            )
        return pictures

    if any(has_object_files(folder) for folder in splits.values()):
        return _in_splits(
            query, data, splits, read, lambda folder: [picture.path for picture in read(folder)]
        )
    if not data.is_dir() or not has_object_files(data):
        return None
    split_of = find_picture_splits(data)
    if not split_of:
        return _without_splits(query, data, lambda: read(data))

    def read_split(name: str) -> list[LabelledPicture]:
        return [picture for picture in read(data) if split_of.get(picture.path) == name]

    return Layout(
        data, read_split, lambda name: [path for path, split in split_of.items() if split == name]
    )


def _named_splits(query: Query, data: Path, files: Mapping[str, CocoFile]) -> Layout:
    """Files of annotations whose names say the split, as train.json or annotations/instances_Train.json."""

    @cache
    def read(name: str) -> list[LabelledPicture]:
        if name not in files:
            raise InputError(
                data, f"the split '{name}' is missing (query {query.id})", "add its file", "data"
            )
        return _read_annotations(query, files[name])

    return Layout(
        data, read, lambda name: [picture.path for picture in read(name)] if name in files else []
    )


def _read_annotations(query: Query, file: CocoFile) -> list[LabelledPicture]:
    return read_coco(
        file, query.sources, query.id, query.task == "keypoints", finds_outlines(query)
    )


def _read_coco(query: Query, folder: Path, kind: str) -> list[LabelledPicture]:
    """The pictures of a split's folder, which has one file of annotations."""
    files = list_coco(folder, kind) or {"": CocoFile(folder / "annotations.json", folder / IMAGES)}
    if len(files) > 1:
        problem = f"holds several files of annotations: {join_names([file.path.name for file in files.values()], 3)}"
        raise InputError(folder, problem, "keep that of this split", "data")
    (file,) = files.values()
    if file.pictures != folder and file.path.parent == folder:
        names = (file.pictures.name, file.path.name)
        note_unread(folder, names, f"put pictures in {names[0]}, boxes in {names[1]}")
    return _read_annotations(query, file)


# Masks


def _find_masks(query: Query, data: Path) -> Layout | None:
    def list_files(folder: Path) -> list[Path]:
        return list_pictures(folder / IMAGES)

    def read(folder: Path) -> list[LabelledPicture]:
        note_unread(
            folder,
            (IMAGES, MASKS),
            "put pictures in images, and a mask of each, NAME.png, in masks",
        )
        return read_masks(
            folder / MASKS, list_all_pictures(folder / IMAGES), query.classes, preprocess_of(query)
        )

    splits = find_splits(data)
    if any((path / MASKS).is_dir() for path in splits.values()):
        return _in_splits(query, data, splits, read, list_files)
    return _without_splits(query, data, lambda: read(data)) if (data / MASKS).is_dir() else None


# Identities


def _find_identities(query: Query, data: Path) -> Layout | None:
    """A folder for each identity; those of one split need not be those of another."""

    def folders(folder: Path) -> list[Path]:
        return sorted(
            path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
        )

    def list_files(folder: Path) -> list[Path]:
        return [
            file
            for identity in folders(folder)
            for file in list_all_pictures(identity, nested=True)
        ]

    def read(folder: Path) -> list[LabelledPicture]:
        pictures = []
        for file in list_files(folder):
            identity = file.relative_to(folder).parts[0]
            unit = UNIT_AND_TIME.match(file.stem)
            pictures.append(
                LabelledPicture(file, IdentityLabel(identity, unit[1] if unit else str(file)))
            )
        return sorted(pictures, key=lambda picture: natural_key(picture.path))

    splits = find_splits(data)
    if splits:
        return _in_splits(query, data, splits, read, list_files)
    return (
        _without_splits(query, data, lambda: read(data))
        if data.is_dir() and folders(data)
        else None
    )


FINDERS = {
    "classes": _find_classes, "boxes": _find_boxes, "masks": _find_masks, "identities": _find_identities
}  # fmt: skip
"""`Task.layout` -> what finds such labels."""


# Without splits


def _without_splits(query: Query, where: Path, read: Callable[[], list[LabelledPicture]]) -> Layout:
    """A layout whose pictures are cut 60 / 20 / 20: the clips of each class in order, or its pictures in order."""

    @cache
    def cut() -> dict[str, list[LabelledPicture]]:
        pictures = read()
        kinds = _cut(pictures)
        parts = {
            split: [picture for picture, kind in zip(pictures, kinds, strict=True) if kind == split]
            for split in SPLITS
        }
        sizes = " / ".join(str(len(part)) for part in parts.values())
        add_note(
            where,
            f"has no splits: its {len(pictures)} pictures are cut in order into {sizes} (query {query.id})",
            "give train, val and test, disjoint in time",
        )
        return parts

    return Layout(
        where,
        lambda name: cut()[name],
        lambda name: [picture.path for picture in cut()[name]],
        has_splits=False,
    )


def _cut(pictures: Sequence[LabelledPicture]) -> list[str]:
    """The split of each picture: the last fifth of the clips of each class is test, the fifth before it val.

    A class of fewer than three clips is cut within them. Classes that share a clip are cut together.
    """
    clips = [
        picture.unit or (match[1] if (match := UNIT_AND_TIME.match(picture.path.stem)) else "")
        for picture in pictures
    ]
    kinds = [picture.label if isinstance(picture.label, str) else "" for picture in pictures]
    labels_of_clip: dict[str, set[str]] = defaultdict(set)
    for clip, kind in zip(clips, kinds, strict=True):
        labels_of_clip[clip].add(kind)
    # A clip with several classes must not be on both sides of a cut.
    if any(len(labels) > 1 for clip, labels in labels_of_clip.items() if clip):
        kinds = [""] * len(pictures)
    members: dict[str, list[int]] = defaultdict(list)
    for at, kind in enumerate(kinds):
        members[kind].append(at)
    splits = [""] * len(pictures)
    for indices in members.values():
        named_clips = {clips[at] for at in indices if clips[at]}
        whole = len(named_clips) >= MIN_GROUPS and all(clips[at] for at in indices)
        groups = list(dict.fromkeys(clips[at] if whole else at for at in indices))
        part_size = max(1, round(LAST_PARTS * len(groups)))
        bounds = [len(groups) - 2 * part_size, len(groups) - part_size]
        places = {group: SPLITS[bisect_right(bounds, place)] for place, group in enumerate(groups)}
        for at in indices:
            splits[at] = places[clips[at] if whole else at]
    return splits
