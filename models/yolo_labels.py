"""YOLO's text files: a line `class, centre x, centre y, width, height` in fractions for each object of a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.boxes import BoxedPicture, BoxForm, BoxRow, BoxSource, LeftOut, collect_labels, note_turned
from models.errors import InputError, join_names
from models.io import ParseError, parse_yaml, read_bounded
from models.notes import add_note
from models.pictures import SUFFIXES, LabelledPicture, list_all_pictures, read_picture_size

MAX_TEXT_BYTES = 2**22
HINT = "write a line `class, centre x, centre y, width, height` for each object, in fractions of the picture"
YAML_SUFFIXES = (".yaml", ".yml")
NAME_FILES = ("classes.txt", "obj.names", "names.txt", "labels/classes.txt", "train/_darknet.labels")
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
COLUMNS = 5
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
        given = next((self.splits[name] for name in names if self.splits.get(name)), ())
        paths = [found for one in ([given] if isinstance(given, str) else given) if (found := self._locate(str(one)))]
        if not paths:
            parts = [place for name in names for place in (f"{name}/images", f"images/{name}", name)]
            parts += [] if names else ["images", "obj_train_data", ""]
            paths = [path for part in parts if (path := self.folder / part).is_dir()][:1]
            if paths and given:
                add_note(self.path, f"{given!s:.100} is not there; {paths[0]} is read in its place")
        return [file for path in paths for file in self._list(path)]

    def _locate(self, given: str) -> Path | None:
        roots = [self.folder / str(self.splits.get("path") or ""), self.folder]
        found = (root / part for root in roots for part in (given, given.removeprefix("../")))
        return next((path for path in found if path.exists()), None)

    def _list(self, path: Path) -> list[Path]:
        if path.is_dir():
            return list_all_pictures(path, nested=True, beside=BESIDE)
        lines = [line.strip() for line in _read_text(path).splitlines() if line.strip()]
        found = [
            next((file for root in (path.parent, self.folder) if (file := root / one).is_file()), None) for one in lines
        ]
        if None in found:
            problem = f"{found.count(None)} of {len(lines)} pictures are not there: {lines[found.index(None)]}"
            raise InputError(path, problem, "put them there, or take their lines out")
        return [file for file in found if file]

    def read(self, files: Sequence[Path], sources: Mapping[str, str], query: str) -> list[LabelledPicture]:
        """These pictures with their boxes; notes and errors as `collect_labels`, and for lines that are no boxes."""
        if missing := [label for label in sources if label not in self.names.values()]:
            problem = f"no class '{missing[0]}' (query {query})"
            raise InputError(self.path, problem, f"it has: {join_names(list(self.names.values()), 20)}", "classes")
        pictures, rows, unlabelled = list[BoxedPicture](), list[BoxRow](), list[Path]()
        for file in files:
            size, label = read_picture_size(file), label_file(file)
            pictures.append(BoxedPicture(file, size, (float(size.width), float(size.height))))
            if label.is_file():
                rows += self._read_rows(label, pictures[-1])
            else:
                unlabelled.append(file)
        if files and len(unlabelled) == len(files):
            raise InputError(label_file(files[0]), f"does not exist, nor labels of {len(files) - 1} others", HINT)
        if unlabelled:
            text = f"{len(unlabelled)} of {len(files)} pictures have no text file and count as without objects"
            add_note(
                self.path, f"{text}: {join_names([one.name for one in unlabelled], 3)}", "label them, or take them out"
            )
        if 2 * sum(max(map(abs, row.box)) > LARGEST_FRACTION for row in rows) > len(rows):
            problem = f"holds {max(rows[0].box):g}: pixels or percents, where YOLO has fractions of the picture"
            raise InputError(Path(rows[0].where), problem, HINT)
        note_turned(self.path, pictures)
        source = BoxSource(self.path, "labels", BoxForm.CENTRE, "fractions", HINT)
        return collect_labels(source, rows, pictures, sources, query)

    def _read_rows(self, path: Path, picture: BoxedPicture) -> list[BoxRow]:
        rows = []
        for number, line in enumerate(_read_text(path).splitlines(), 1):
            where = f"{path} line {number}"
            try:
                first, *values = (float(part) for part in line.replace(",", " ").split())
            except ValueError as error:
                if not line.strip():
                    continue
                raise InputError(path, f"line {number} is '{line:.60}', not numbers", HINT) from error
            if len(values) >= COLUMNS + 1 and not self.has_keypoints:  # the corners of a polygon
                points = [values[axis : len(values) // 2 * 2 : 2] for axis in (0, 1)]
                low, high = [min(one) for one in points], [max(one) for one in points]
                values = [*((a + b) / 2 for a, b in zip(low, high)), *(b - a for a, b in zip(low, high))]
            if len(values) < COLUMNS - 1 or not math.isfinite(first):
                raise InputError(path, f"line {number} holds {len(values) + 1} numbers, not {COLUMNS}", HINT)
            name = self.names.get(int(first), "")
            x, y, width, height = values[:4]
            reason = None if name else LeftOut.CATEGORY
            rows.append(BoxRow(where, picture, name, (x, y, width, height), reason=reason))
        return rows


def find_yolo(data: Path) -> YoloFiles | None:
    """The YOLO files of a folder, or of its data.yaml; None where there are none.

    Raises InputError for text files beside pictures without the names of their classes.
    """
    folder = data if data.is_dir() else data.parent
    candidates = [data] if data.is_file() else sorted(path for path in folder.iterdir() if path.suffix in YAML_SUFFIXES)
    for path in candidates:
        document = _read_yaml(path)
        names = document.get("names")
        if isinstance(names, list | dict) and all(str(key).isdecimal() for key in names if isinstance(names, dict)):
            found = dict(enumerate(names)) if isinstance(names, list) else {int(key): names[key] for key in names}
            named = {number: str(name) for number, name in found.items()}
            return YoloFiles(path, folder, named, document, bool(document.get("kpt_shape")))
    if data.is_file():
        raise InputError(data, "holds no `names` of classes", "give YOLO's data.yaml, or a folder", "data")
    path = next((folder / name for name in NAME_FILES if (folder / name).is_file()), None)
    lines = _read_text(path).splitlines() if path else []
    found = YoloFiles(path or folder, folder, dict(enumerate(line.strip() for line in lines if line.strip())), {})
    if not any(_has_labels(folder / place) for place in PLACES):
        return None
    if not found.names:
        raise InputError(
            folder, "holds text files of boxes and no names", "add data.yaml with `names: [car, bus]`", "data"
        )
    return found


def _has_labels(folder: Path) -> bool:
    files = folder.iterdir() if folder.is_dir() else ()
    return any(path.suffix.lower() in SUFFIXES and label_file(path).is_file() for path in files)


def label_file(picture: Path) -> Path:
    """The text file of a picture: under `labels` where the picture is under `images`, else beside it."""
    parts = list(picture.with_suffix(".txt").parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return Path(*parts)


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
