"""COCO annotations: which pictures there are, and the boxes of the classes asked for in each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from models.errors import InputError
from models.files.json_file import read_json
from models.frames.preprocess import FURTHEST_PIXEL
from models.tasks import Boxes

MAX_BYTES = 2**26
MAX_VALUES = 3_000_000
REMEDY = "add COCO annotations with images, categories and annotations"
MAX_TOLD = 60


def read_coco(path: Path, classes: Sequence[str], query: str) -> list[tuple[PurePosixPath, Boxes]]:
    """Each picture's name, and its boxes (x0, y0, x1, y1, in pixels) of these classes, in the order of the names.

    Raises InputError for a file that is no COCO within bounds (MAX_BYTES, MAX_VALUES, boxes of finite numbers below
    FURTHEST_PIXEL, names that lead out of no folder, ids that stand once), or lacks a class.
    """
    reader = _Reader(path, query)
    document = read_json(path, REMEDY, MAX_BYTES, MAX_VALUES)
    labels: dict[int, str] = {}
    for key, entry in reader.entries(document, "categories"):
        labels[reader.new_id(key, entry, labels)] = reader.text(key, entry, "name")
    names: dict[int, PurePosixPath] = {}
    for key, entry in reader.entries(document, "images"):
        names[reader.new_id(key, entry, names)] = reader.file_name(key, entry)
    found: dict[int, list[tuple[str, tuple[float, float, float, float]]]] = {image: [] for image in names}
    wanted = frozenset(classes)
    for key, entry in reader.entries(document, "annotations"):
        image, category = reader.known(key, entry, "image_id", names), reader.known(key, entry, "category_id", labels)
        box = reader.box(key, entry)
        if labels[category] in wanted:
            found[image].append((labels[category], box))
    missing = [label for label in classes if label not in labels.values()]
    if missing:
        remedy = f"it has: {', '.join(list(labels.values())[:MAX_TOLD])[: 5 * MAX_TOLD]}"
        raise InputError(path, f"no category '{missing[0][:MAX_TOLD]}' (query {query})", remedy, "classes")
    rows = [
        (name, Boxes(tuple(label for label, _ in found[image]), tuple(box for _, box in found[image])))
        for image, name in names.items()
    ]
    return sorted(rows, key=lambda row: row[0].stem)


class _Reader:
    """Values of one file, each of the kind that COCO says; every other is an InputError with its place."""

    def __init__(self, path: Path, query: str) -> None:
        self._path, self._query = path, query

    def entries(self, document: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        listed = document.get(key)
        if not isinstance(listed, list):
            raise self._fault(key, "is no list" if key in document else "is missing")
        for index, entry in enumerate(listed):
            if not isinstance(entry, dict):
                raise self._fault(f"{key}[{index}]", "is no mapping")
            yield f"{key}[{index}]", entry

    def new_id(self, key: str, entry: dict[str, Any], known: Collection[int]) -> int:
        value = self._number(key, entry, "id")
        if value in known:
            raise self._fault(f"{key}.id", f"{value} stands twice")
        return value

    def known(self, key: str, entry: dict[str, Any], name: str, known: Collection[int]) -> int:
        value = self._number(key, entry, name)
        if value not in known:
            raise self._fault(f"{key}.{name}", f"there is no {value}")
        return value

    def text(self, key: str, entry: dict[str, Any], name: str) -> str:
        value = entry.get(name)
        if not isinstance(value, str) or not value:
            raise self._fault(f"{key}.{name}", f"{_shown(value)} is no name")
        return value

    def file_name(self, key: str, entry: dict[str, Any]) -> PurePosixPath:
        name = PurePosixPath(self.text(key, entry, "file_name"))
        if name.is_absolute() or ".." in name.parts or not name.name:
            raise self._fault(f"{key}.file_name", f"{_shown(str(name))} does not lie in the folder images")
        return name

    def box(self, key: str, entry: dict[str, Any]) -> tuple[float, float, float, float]:
        box: Any = entry.get("bbox")
        numbers = type(box) is list and len(box) == 4 and all(type(value) in (int, float) for value in box)
        if not numbers or max(map(abs, box)) > FURTHEST_PIXEL or min(box[2:]) < 0:
            wanted = f"[x, y, width, height] in pixels, none beyond {FURTHEST_PIXEL:,.0f}, no side below 0"
            raise self._fault(f"{key}.bbox", f"{_shown(box)} is not {wanted}")
        x, y, width, height = box
        return float(x), float(y), float(x + width), float(y + height)

    def _number(self, key: str, entry: dict[str, Any], name: str) -> int:
        value = entry.get(name)
        if type(value) is not int:
            raise self._fault(f"{key}.{name}", "is missing" if name not in entry else f"{_shown(value)} is no integer")
        return value

    def _fault(self, key: str, fault: str) -> InputError:
        return InputError(self._path, f"is not COCO: {fault} (query {self._query})", "correct the annotations", key)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_TOLD else f"{text[:MAX_TOLD]}..."
