"""COCO annotations that mean harm: one line that names the file and the key."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.data import load_split
from models.errors import InputError
from models.workload import load_workload
from tests.exhaustive import one_in
from tests.hostile.asking import D, ask
from tests.hostile.damages import damages
from tests.hostile.harness import tried

PATH = Path("data", "d", "train", "annotations.json")
DEEP = "[" * 100_000 + "]" * 100_000
TEXTS: dict[str, str] = {
    "nothing": "",
    "text": "these are annotations, believe me",
    "a list": "[]",
    "a number": "5",
    "null": "null",
    "empty": "{}",
    "torn": '{"images": [{"id": 1, "file_name": "u0__0.jpg"}, ',
    "100,000 deep": DEEP,
    "100,000 deep within": '{"images": ' + DEEP + ', "annotations": [], "categories": []}',
    "mappings 100,000 deep": '{"a":' * 100_000,
    "a key twice": '{"images": [], "images": [], "annotations": [], "categories": [{"id": 1, "name": "car"}]}',
    "a surrogate": '{"images": [{"id": 1, "file_name": "\\ud800.jpg"}], "annotations": [], "categories": []}',
    "a NUL": '{"images": [{"id": 1, "file_name": "a\\u0000.jpg"}], "annotations": [], "categories": []}',
    "an integer of 5,000 digits": '{"images": [{"id": ' + "9" * 5000 + "}]}",
    "not a number": '{"images": [], "annotations": [{"bbox": [NaN, 1, 1, 1]}], "categories": []}',
    "infinity": '{"images": [], "annotations": [{"bbox": [1, 1, Infinity, 1]}], "categories": []}',
    "1e999": '{"images": [], "annotations": [{"bbox": [1, 1, 1e999, 1]}], "categories": []}',
}
BOXES: tuple[Any, ...] = (
    None, 5, "1234", [], [1, 2, 3], [1, 2, 3, 4, 5], ["1", "2", "3", "4"], [None] * 4, [[1], 2, 3, 4], [True] * 4,
    [1, 2, -3, 4], [1, 2, 3, -0.5], [1e7, 2, 3, 4], [-1e7, 2, 3, 4], [1, 2, 1e308, 4], [10**19, 2, 3, 4], {"x": 1},
)  # fmt: skip
NAMES: tuple[Any, ...] = (
    None, 5, "", ".", "..", "/", "/etc/passwd", "../../../../etc/passwd", "a/../../b.jpg", "images/../..", ["a.jpg"],
)  # fmt: skip


def _change(*place: Any, **keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        entry = document
        for step in place:
            entry = entry[step]
        entry.update(keys)

    return change


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"the box {box}": _change("annotations", 0, bbox=box) for box in BOXES},
    **{f"the file {name}": _change("images", 0, file_name=name) for name in NAMES},
    **{f"no {key}": lambda document, key=key: document.pop(key) for key in ("images", "annotations", "categories")},
    "an image twice": lambda document: document["images"].append(document["images"][0]),
    "a category twice": lambda document: document["categories"].append({"id": 1, "name": "bus"}),
    "no such image": _change("annotations", 0, image_id=99),
    "no such category": _change("annotations", 0, category_id=99),
    "an id that is a truth": _change("images", 1, id=True),
    "an id that is a fraction": _change("images", 1, id=1.0),
    "an id that is a text": _change("images", 1, id="1"),
    "an id that is a list": _change("images", 1, id=[1]),
    "a category without a name": _change("categories", 0, name=None),
    "another category": _change("categories", 0, name="bus"),
    "1e6 annotations": lambda document: document.update(annotations=document["annotations"][:1] * 10**6),
    "1e6 categories": lambda document: document.update(
        categories=[{"id": index, "name": f"c{index}"} for index in range(10**6)]
    ),
    "300,000 categories, none of them asked for": lambda document: document.update(
        categories=[{"id": index, "name": f"c{index}"} for index in range(300_000)], annotations=[]
    ),
    "no images": _change(images=[], annotations=[]),
    "a picture that is missing": _change("images", 0, file_name="missing.jpg"),
    "a picture in a folder that is none": _change("images", 0, file_name="u1__1.jpg/a.jpg"),
    "a name of 5,000 letters": _change("images", 0, file_name="a" * 2000 + ".jpg"),
}


def _refused(house: Path, *names: object) -> str:
    """The last line of a training that these annotations end; above it stands how far that had come."""
    seen = tried(["train", ask(house, {**D, "weights": "new.safetensors"})], house).held()
    *told, line = seen.err.splitlines()
    assert (
        seen.code == 2
        and seen.out == ""
        and not seen.changed
        and all(re.match(r"\[ +[0-9.]+ s\]", one) for one in told)
    )
    assert len(line) < 1000 and line.isprintable()
    assert all(str(name) in line for name in names), line
    return line


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_is_no_coco(house: Path, text: str) -> None:
    (house / PATH).write_text(text)
    _refused(house, house / PATH)


@pytest.mark.parametrize("change", one_in(3, CHANGES.values()), ids=CHANGES)
def test_entries_that_are_none(house: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads((house / PATH).read_text())
    change(document)
    (house / PATH).write_text(json.dumps(document))
    line = _refused(house)
    assert "data/d/train" in line or "..." in line


def test_whatever_stands_where_it_is_read_or_told_in_one_line(house: Path) -> None:
    query = load_workload(house / ask(house, D)).queries[0]
    document = json.loads((house / PATH).read_text())
    for key in ("images", "annotations", "categories"):
        document[key] = document[key][:1]
    tried_so_far = 0
    for what, damaged in damages(document):
        (house / PATH).write_text(json.dumps(damaged))
        try:
            split = load_split(query, "train")
        except InputError as error:
            assert str(house / PATH) in str(error) or "is empty" in str(error), what
        else:
            assert split.labels is not None
            assert all(math.isfinite(side) for truth in split.labels for box in truth.boxes for side in box)  # type: ignore[union-attr]
        tried_so_far += 1
    assert tried_so_far > 300


@pytest.mark.parametrize("kind", ["pipe", "directory", "/dev/zero", "nowhere", "itself", "missing", "100 MB"])
def test_what_is_no_file(house: Path, kind: str) -> None:
    path = house / PATH
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "100 MB":
        path.touch()
        os.truncate(path, 10**8)
    elif kind != "missing":
        path.symlink_to(path if kind == "itself" else kind)
    _refused(house, path)


def test_linked_pictures_and_folders_within_folders_are_read(house: Path) -> None:
    images = house / PATH.parent / "images"
    (images / "inner").mkdir()
    os.rename(images / "u0__0.jpg", house / "elsewhere.jpg")
    (images / "inner" / "u0__0.jpg").symlink_to(house / "elsewhere.jpg")
    document = json.loads((house / PATH).read_text())
    document["images"][0]["file_name"] = "inner/u0__0.jpg"
    document["annotations"][0].update(bbox=[-2, 0.5, 10, 0], segmentation=[[1, 2, 3]], unknown=None)
    (house / PATH).write_text(json.dumps(document))
    split = load_split(load_workload(house / ask(house, D)).queries[0], "train")
    assert split.frames[0].shape == (32, 48, 3)
    assert split.labels is not None and split.labels[0].boxes == ((-2.0, 0.5, 8.0, 0.5),)  # type: ignore[union-attr]
