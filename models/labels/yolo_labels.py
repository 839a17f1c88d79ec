"""YOLO's text files: a line `class, centre x, centre y, width, height` in fractions for each object of a picture."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemel.models.errors import InputError, join_names
from gemel.models.files.documents import ParseError, parse_yaml
from gemel.models.files.io import read_bounded
from gemel.models.files.pictures import (
    SUFFIXES,
    LabelledPicture,
    list_all_pictures,
    read_picture_size,
)
from gemel.models.labels.foreign_labels import name_format
from gemel.models.labels.yolo_rows import BOX_VALUES, RowReading, UnclearRowsError, find_readings
from gemel.models.notes import add_note
from gemel.models.objects.boxes import (
    BoxedPicture,
    BoxForm,
    BoxRow,
    BoxSource,
    LeftOut,
    collect_labels,
    note_turned,
)

MAX_TEXT_BYTES = 2**22
HINT = "write a line `class, centre x, centre y, width, height` for each object, in fractions of the picture"
YAML_SUFFIXES = (".yaml", ".yml")
NAME_FILES = (
    "classes.txt",
    "obj.names",
    "names.txt",
    "labels/classes.txt",
    "train/_darknet.labels",
)
"""What holds one name a line where there is no data.yaml; LabelImg, Label Studio, CVAT and Roboflow write them."""
PLACES = (
    "",
    "images",
    "obj_train_data",
    *(f"{split}{part}" for split in ("train", "images/train") for part in ("", "/images")),
)
"""Folders whose pictures may have text files of boxes."""
LARGEST_FRACTION = 1.5
"""A value above is no fraction of a box that reaches beyond its picture, but pixels or percents."""
MAX_WITHOUT_FILE = 0.05
"""The part of pictures that may have no text file, as those without an object in some programs."""
BESIDE = (".txt", ".cache", ".labels", ".names", ".data", *YAML_SUFFIXES)
"""Suffixes of files that may be among the pictures."""


@dataclass(frozen=True)
class YoloFiles:
    """The names of the classes by number, where they come from, and what the file says about each split."""

    path: Path
    folder: Path
    names: Mapping[int, str]
    splits: Mapping[str, Any]
    has_keypoints: bool = False

    def list_files(self, names: Sequence[str]) -> list[Path]:
        """The pictures of a split that has one of these names; of all without one. Empty where there are none."""
        stated = next((self.splits[name] for name in names if self.splits.get(name)), ())
        paths = [
            located
            for entry in ([stated] if isinstance(stated, str) else stated)
            if (located := self._locate(str(entry)))
        ]
        if not paths:
            parts = [
                place for name in names for place in (f"{name}/images", f"images/{name}", name)
            ]
            parts += [] if names else ["images", "obj_train_data", ""]
            paths = [path for part in parts if (path := self.folder / part).is_dir()][:1]
            if paths and stated:
                add_note(
                    self.path, f"{stated!s:.100} is not there; {paths[0]} is read in its place"
                )
        return [file for path in paths for file in self._list(path)]

    def _locate(self, place: str) -> Path | None:
        roots = [self.folder / str(self.splits.get("path") or ""), self.folder]
        paths = (root / part for root in roots for part in (place, place.removeprefix("../")))
        return next((path for path in paths if path.exists()), None)

    def _list(self, path: Path) -> list[Path]:
        if path.is_dir():
            return list_all_pictures(path, nested=True, beside=BESIDE)
        lines = [line.strip() for line in _read_text(path).splitlines() if line.strip()]
        files = [
            next(
                (file for root in (path.parent, self.folder) if (file := root / line).is_file()),
                None,
            )
            for line in lines
        ]
        if None in files:
            problem = f"{files.count(None)} of {len(lines)} pictures are not there: {lines[files.index(None)]}"
            raise InputError(path, problem, "put them there, or take their lines out")
        return [file for file in files if file]

    def read(
        self,
        files: Sequence[Path],
        sources: Mapping[str, str],
        query: str,
        with_outlines: bool = False,
    ) -> list[LabelledPicture]:
        """These pictures with their boxes; notes and errors as `collect_labels`, and for lines that are no boxes.

        `with_outlines` adds the polygons of objects: lines that may be polygons are.
        """
        if missing := [label for label in sources if label not in self.names.values()]:
            problem = f"no class '{missing[0]}' (query {query})"
            raise InputError(
                self.path,
                problem,
                f"it has: {join_names(list(self.names.values()), 20)}",
                "classes",
            )
        labels = {file: self._find_label(file) for file in files}
        self._refuse_missing(labels)
        pictures = list[BoxedPicture]()
        lines = list[_Line]()
        for file, label in labels.items():
            size = read_picture_size(file)
            pictures.append(BoxedPicture(file, size, (float(size.width), float(size.height))))
            if label is not None:
                lines += _read_lines(label, pictures[-1])
        self._check_numbers(lines)
        rows = self._read_boxes(lines, with_outlines)
        if 2 * sum(max(map(abs, row.box)) > LARGEST_FRACTION for row in rows) > len(rows):
            problem = f"holds {max(rows[0].box):g}: pixels or percents, where YOLO has fractions of the picture"
            raise InputError(Path(rows[0].where), problem, HINT)
        note_turned(self.path, pictures)
        source = BoxSource(self.path, "labels", BoxForm.CENTRE, "fractions", HINT)
        return collect_labels(source, rows, pictures, sources, query, with_outlines)

    def _find_label(self, picture: Path) -> Path | None:
        """The text file of a picture: the first of `label_files` that is there; a note where two are."""
        labels = [path for path in label_files(picture, self.folder) if path.is_file()]
        if len(labels) > 1 and labels[0].read_bytes() != labels[1].read_bytes():
            text = f"pictures such as {picture.name} have a text file in {labels[0].parent} and another beside them"
            raise InputError(self.path, text, "keep the right ones", "data")
        return labels[0] if labels else None

    def _refuse_missing(self, labels: Mapping[Path, Path | None]) -> None:
        """Refuse pictures that share a text file, and those without one above `MAX_WITHOUT_FILE`; note fewer."""
        counts = Counter(label for label in labels.values() if label is not None)
        shared = [label for label, count in counts.items() if count > 1]
        if shared:
            names = join_names(
                [file.name for file, label in labels.items() if label == shared[0]], 3
            )
            problem = f"{len(shared)} text files belong to two pictures each: {names}"
            raise InputError(
                shared[0],
                problem,
                "keep the picture that it was made for, or rename the other",
                "data",
            )
        bare = [file for file, label in labels.items() if label is None]
        if labels and len(bare) == len(labels):
            raise InputError(
                label_files(bare[0], self.folder)[0],
                f"does not exist, nor labels of {len(bare) - 1} others",
                HINT,
            )
        if not bare:
            return
        text = f"{len(bare)} of {len(labels)} pictures have no text file"
        hint = "write an empty one where there is no object, or take them out"
        if len(bare) > max(1.0, MAX_WITHOUT_FILE * len(labels)):
            raise InputError(
                self.path, f"{text}: {join_names([file.name for file in bare], 3)}", hint, "data"
            )
        add_note(
            self.path,
            f"{text} and count as without objects: {join_names([file.name for file in bare], 3)}",
            hint,
        )

    def _check_numbers(self, lines: Sequence[_Line]) -> None:
        """Refuse classes that begin at 1, where names begin at 0; a note where they may."""
        numbers = {line.number for line in lines}
        if numbers and min(numbers) >= 1 and 0 in self.names and max(numbers) in self.names:
            text = f"no line is of class 0 ({self.names[0]}); the numbers are {join_names(sorted(map(str, numbers)))}"
            add_note(
                self.path,
                text,
                "if they begin at 1 in the text files, write the names as {1: name, 2: name}",
            )
        if (
            self.names
            and numbers
            and min(numbers) >= 1
            and max(numbers) == max(self.names) + 1
            and 0 in self.names
        ):
            problem = f"its classes are numbered {min(numbers)} to {max(numbers)}, its names 0 to {max(self.names)}"
            hint = (
                "number classes from 0 in the text files, or write the names as {1: name, 2: name}"
            )
            raise InputError(self.path, problem, hint, "names")

    def _read_boxes(self, lines: Sequence[_Line], with_outlines: bool) -> list[BoxRow]:
        """The boxes of lines whose meaning is clear; InputError for others."""
        by_length = defaultdict[int, list[_Line]](list)
        for line in lines:
            by_length[len(line.values)].append(line)
        values = {length: [line.values for line in rows] for length, rows in by_length.items()}
        try:
            readings = find_readings(values, self.has_keypoints, with_outlines)
        except UnclearRowsError as error:
            lengths = join_names([f"{1 + length}" for length in sorted(values)], 4)
            problem = f"its lines hold {lengths} numbers: behind the class are {error}"
            raise InputError(
                self.path, problem, f"{HINT}; name `kpt_shape` in data.yaml for points", "data"
            ) from error
        if not self.has_keypoints:
            self._note_unread(lines, readings)
        rows = []
        for line in lines:
            box = line.values[:BOX_VALUES]
            outline = ()
            if readings[len(line.values)] is RowReading.POLYGON:
                points = [line.values[axis : len(line.values) // 2 * 2 : 2] for axis in (0, 1)]
                outline = (tuple(zip(*points)),)
                low = [min(coordinates) for coordinates in points]
                high = [max(coordinates) for coordinates in points]
                box = (
                    *((a + b) / 2 for a, b in zip(low, high)),
                    *(b - a for a, b in zip(low, high)),
                )
            name = self.names.get(line.number, "")
            x, y, width, height = box
            reason = None if name else LeftOut.CATEGORY
            size = (x, y, width, height)
            rows.append(
                BoxRow(line.where, line.picture, name, size, reason=reason, outline=outline)
            )
        return rows

    def _note_unread(self, lines: Sequence[_Line], readings: Mapping[int, RowReading]) -> None:
        """Note the numbers behind boxes, by what they may be."""
        behind = [
            line.values[BOX_VALUES:]
            for line in lines
            if readings[len(line.values)] is RowReading.BOX
        ]
        longer = [values for values in behind if values]
        if longer:
            is_whole = all(values[0] == int(values[0]) for values in longer)
            content = (
                "tracks, or angles of turned boxes" if is_whole else "scores of a model, or points"
            )
            numbers = f"{max(map(len, longer))} numbers behind the box"
            text = f"{len(longer)} lines hold up to {numbers}, as {content}: not read"
            hint = "give what people labelled, and upright boxes, if these are others"
            add_note(self.path, text, hint)


@dataclass(frozen=True, eq=False)
class _Line:
    """A line of a text file: the number of its class, and what follows."""

    where: str
    picture: BoxedPicture
    number: int
    values: tuple[float, ...]


def _read_lines(path: Path, picture: BoxedPicture) -> list[_Line]:
    lines = []
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        try:
            first, *values = (float(part) for part in line.replace(",", " ").split())
        except ValueError as error:
            if not line.strip():
                continue
            raise InputError(path, f"line {number} is '{line:.60}', not numbers", HINT) from error
        if len(values) < BOX_VALUES or not math.isfinite(first):
            raise InputError(
                path, f"line {number} holds {len(values) + 1} numbers, not {BOX_VALUES + 1}", HINT
            )
        if first != int(first):
            raise InputError(
                path, f"line {number} begins with {first:g}, which is no number of a class", HINT
            )
        lines.append(_Line(f"{path} line {number}", picture, int(first), tuple(values)))
    return lines


def find_yolo(data: Path) -> YoloFiles | None:
    """The YOLO files of a folder, or of its data.yaml; None where there are none.

    Raises InputError for text files beside pictures without the names of their classes.
    """
    folder = data if data.is_dir() else data.parent
    candidates = (
        [data]
        if data.is_file()
        else sorted(path for path in folder.iterdir() if path.suffix in YAML_SUFFIXES)
    )
    documents = {path: document for path in candidates if "names" in (document := _read_yaml(path))}
    if len({repr(document["names"]) for document in documents.values()}) > 1:
        problem = (
            f"holds several lists of classes: {join_names([path.name for path in documents], 3)}"
        )
        raise InputError(folder, problem, "name the right one in `data:`", "data")
    for path, document in documents.items():
        return YoloFiles(
            path, folder, _read_names(path, document), document, bool(document.get("kpt_shape"))
        )
    if data.is_file():
        raise InputError(
            data, "holds no `names` of classes", "give YOLO's data.yaml, or a folder", "data"
        )
    if not any(_has_labels(folder / place, folder) for place in PLACES):
        return None
    path = next((folder / name for name in NAME_FILES if (folder / name).is_file()), None)
    lines = [line.strip() for line in _read_text(path).splitlines()] if path else []
    while lines and not lines[-1]:
        lines.pop()
    if path and not all(lines):
        raise InputError(
            path,
            f"line {lines.index('') + 1} is empty: which number is which class is not clear",
            "name a class in each line",
            "data",
        )
    if not path or not lines:
        raise InputError(
            folder,
            "holds text files of boxes and no names",
            "add data.yaml with `names: [car, bus]`",
            "data",
        )
    return YoloFiles(path, folder, dict(enumerate(lines)), {})


def _read_names(path: Path, document: Mapping[str, Any]) -> dict[int, str]:
    """The name of each number; InputError where there are more or fewer than `nc`, or none."""
    names = document["names"]
    if not isinstance(names, list | dict) or not all(
        str(key).isdecimal() for key in names if isinstance(names, dict)
    ):
        raise InputError(
            path, "has `names` that are no list, nor names by number", "write [car, bus]", "names"
        )
    by_number = {
        int(number): str(name)
        for number, name in (names.items() if isinstance(names, dict) else enumerate(names))
    }
    count = document.get("nc")
    if isinstance(count, int) and count != len(by_number):
        problem = f"has {len(by_number)} names and `nc: {count}`"
        raise InputError(
            path, problem, "name each class once, in the order of its numbers", "names"
        )
    if twice := [name for name, times in Counter(by_number.values()).items() if times > 1]:
        add_note(
            path,
            f"several numbers are called {join_names(twice, 3)} and are taken as one class each",
        )
    return by_number


def _has_labels(folder: Path, data: Path) -> bool:
    files = folder.iterdir() if folder.is_dir() else ()
    pictures = (path for path in files if path.suffix.lower() in SUFFIXES)
    labels = (label for path in pictures for label in label_files(path, data))
    return any(label.is_file() and name_format(label) != "KITTI" for label in labels)


def label_files(picture: Path, data: Path) -> list[Path]:
    """Where the text file of a picture may be: below `labels` for `images`, within the `data` folder, or beside it."""
    beside = picture.with_suffix(".txt")
    parts = (
        list(beside.relative_to(data).parts) if beside.is_relative_to(data) else list(beside.parts)
    )
    if "images" not in parts[:-1]:
        return [beside]
    parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return [data / Path(*parts), beside]


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path, MAX_TEXT_BYTES, HINT).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(path, "is no text in UTF-8", HINT) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = parse_yaml(read_bounded(path, MAX_TEXT_BYTES, HINT))
    except ParseError:
        return {}
    return document if isinstance(document, dict) else {}
