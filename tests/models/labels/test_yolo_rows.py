"""What the numbers of YOLO's lines mean is tested against the lines; text files are found in both places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from gemel.models.data import load_split
from gemel.models.errors import InputError
from gemel.models.labels.yolo_rows import RowReading, UnclearRowsError, find_readings
from gemel.models.notes import collect_notes
from gemel.models.predictions import BoxLabels
from tests.models.queries import make_query

ROWS = 40
RNG = np.random.default_rng(8)
Row = list[float]


def box() -> Row:
    width, height = RNG.uniform(0.1, 0.3, 2)
    return [RNG.uniform(width / 2, 1 - width / 2), RNG.uniform(height / 2, 1 - height / 2), width, height]


def points(count: int, form: Row) -> np.ndarray:
    """Points around the middle of a box, in order of their angle (N, 2)."""
    angles = np.sort(RNG.uniform(0, 2 * np.pi, count))
    x, y, width, height = form
    return np.stack([x + width / 2 * np.cos(angles), y + height / 2 * np.sin(angles)], axis=1)


def polygon(count: int) -> Row:
    return points(count, box()).ravel().tolist()


def pose(count: int, seen: Callable[[], float] | None) -> Row:
    form = box()
    found = RNG.permutation(points(count, form))
    columns = found if seen is None else np.hstack([found, [[seen()] for _ in found]])
    return form + columns.ravel().tolist()


READINGS: dict[str, tuple[Callable[[], Row], RowReading]] = {
    "box": (box, RowReading.BOX),
    "box and score": (lambda: [*box(), RNG.uniform()], RowReading.BOX),
    "box and track": (lambda: [*box(), int(RNG.integers(1, 90))], RowReading.BOX),
    "box, score and track": (lambda: [*box(), RNG.uniform(), int(RNG.integers(1, 90))], RowReading.BOX),
    "box, one score and track 1": (lambda: [*box(), 0.9, 1], RowReading.BOX),
    "pose of 17 with visibility": (lambda: pose(17, lambda: int(RNG.integers(0, 3))), RowReading.BOX),
    "pose of 5 with scores": (lambda: pose(5, RNG.uniform), RowReading.BOX),
    "pose of 6 without": (lambda: pose(6, None), RowReading.BOX),
    "pose of 4, a score and a track": (lambda: [*pose(4, RNG.uniform), RNG.uniform(), 7], RowReading.BOX),
    "turned box": (lambda: polygon(4), RowReading.POLYGON),
    "polygon": (lambda: polygon(9), RowReading.POLYGON),
    "polygon and score": (lambda: [*polygon(9), RNG.uniform()], RowReading.POLYGON),
}


@pytest.mark.parametrize("kind", READINGS)
def test_find_readings_tests_lines_against_both(kind: str) -> None:
    make, reading = READINGS[kind]
    rows = [make() for _ in range(ROWS)]
    assert find_readings({len(rows[0]): rows}, has_keypoints=False) == {len(rows[0]): reading}


def test_find_readings_takes_lines_of_many_lengths_for_polygons() -> None:
    rows = {2 * count: [polygon(count)] for count in (3, 4, 5)} | {4: [box()]}
    assert find_readings(rows, False) == {4: RowReading.BOX, **dict.fromkeys((6, 8, 10), RowReading.POLYGON)}


UNCLEAR: dict[str, tuple[Callable[[], Row], str]] = {
    "box and two scores": (lambda: [*box(), RNG.uniform(), RNG.uniform()], "either a box and 2 more numbers, or"),
    "box and angle": (lambda: [*box(), RNG.uniform(-90, 90)], "a fifth number such as .* an angle"),
    "score first": (lambda: [RNG.uniform(0.9, 1), *box()], "a score, and a box behind it"),
    "noise": (lambda: RNG.uniform(0, 1, 12).tolist(), "neither a box and 8 more numbers, nor a polygon of 6 points"),
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_find_readings_refuses_what_stays_unclear_with_both_readings(kind: str) -> None:
    rows = [UNCLEAR[kind][0]() for _ in range(ROWS)]
    with pytest.raises(UnclearRowsError, match=UNCLEAR[kind][1]):
        find_readings({len(rows[0]): rows}, has_keypoints=False)


def test_find_readings_believes_data_that_name_points() -> None:
    rows = [[*box(), *RNG.uniform(0, 1, 4)] for _ in range(ROWS)]
    assert find_readings({8: rows}, has_keypoints=True) == {8: RowReading.BOX}


# Files

LINE, CAR = "1 0.5 0.5 0.5 0.5\n", BoxLabels(("car",), ((8.0, 6.0, 24.0, 18.0),))


def write_set(pictures: Path, labels: Path, count: int = 6, line: str = LINE) -> None:
    for folder in (pictures, labels):
        folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        Image.fromarray(RNG.integers(0, 256, (24, 32, 3), np.uint8)).save(pictures / f"{index}.png")
        (labels / f"{index}.txt").write_text(line)


def write_splits(root: Path, line: str = LINE, names: object = ("bus", "car"), **keys: object) -> Path:
    for split in ("train", "val", "test"):
        write_set(root / split, root / split, line=line)
    given = names if isinstance(names, str | dict) else list(names)  # type: ignore[call-overload]
    (root / "data.yaml").write_text(yaml.safe_dump({"names": given, **keys}))
    return root


def load(data: Path, split: str = "test"):
    return load_split(make_query(data=data, task="detection", classes=("car",)), split)


def test_text_files_beside_pictures_are_read_below_a_folder_called_images(tmp_path: Path) -> None:
    root = write_splits(tmp_path / "images/site")
    assert load(root).labels == (CAR,) * 6
    assert load(root / "data.yaml").labels == (CAR,) * 6


def test_text_files_of_both_places_are_read(tmp_path: Path) -> None:
    write_splits(tmp_path)
    write_set(tmp_path / "images/more", tmp_path / "images/more")
    write_set(tmp_path / "images/last", tmp_path / "labels/last")
    keys = {"test": ["test", "images/more", "images/last"], "train": "train", "val": "val", "names": ["bus", "car"]}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(keys))
    assert load(tmp_path).labels == (CAR,) * 18


def add_other_text(root: Path) -> None:
    write_set(root / "images", root / "labels")
    (root / "images/0.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (root / "data.yaml").write_text(yaml.safe_dump({"names": ["bus", "car"], "test": "images"}))


def drop_two_texts(root: Path) -> None:
    for index in (1, 2):
        (root / f"test/{index}.txt").unlink()


def add_second_picture(root: Path) -> None:
    Image.new("RGB", (32, 24)).save(root / "test/3.jpg")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "two text files that differ": (add_other_text, "have a text file in .*labels and another beside them"),
    "two pictures with one text file": (add_second_picture, "1 text files belong to two pictures each: 3.jpg, 3.png"),
    "a third without text files": (drop_two_texts, "2 of 6 pictures have no text file: 1.png, 2.png; write"),
    "classes from 1": (lambda d: write_splits(d, "1 .5 .5 .5 .5\n2 .5 .5 .5 .5\n"), "numbered 1 to 2, its names 0"),
    "fewer names than nc": (lambda d: write_splits(d, nc=3), "has 2 names and `nc: 3`"),
    "names as text": (lambda d: write_splits(d, names="bus, car"), "has `names` that are no list"),
    "a class of 0.5": (lambda d: write_splits(d, "0.5 .5 .5 .5 .5\n"), "line 1 begins with 0.5, which is no number of"),
    "two lists of names": (
        lambda d: (d / "other.yaml").write_text("names: [car, bus]"),
        "holds several lists of classes: data.yaml, other.yaml",
    ),
    "an empty line among names": (
        lambda d: [(d / "data.yaml").unlink(), (d / "classes.txt").write_text("bus\n\ncar\n")],
        "line 2 is empty: which number is which class",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_yolo_files_that_say_two_things_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    change, message = WRONG[kind]
    write_splits(tmp_path)
    change(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_names_given_twice_are_one_class_with_a_note(tmp_path: Path) -> None:
    write_splits(tmp_path, names=["car", "car"], nc=2)
    with collect_notes() as notes:
        assert load(tmp_path).labels == (CAR,) * 6
    assert any("several numbers are called car and are taken as one class each" in note for note in notes)


@pytest.mark.parametrize(("behind", "what"), [(" 0.8", "scores of a model"), (" 7", "tracks, or angles")])
def test_numbers_behind_boxes_are_noted(tmp_path: Path, behind: str, what: str) -> None:
    write_splits(tmp_path)
    for path in tmp_path.rglob("*.txt"):
        path.write_text("".join(f"{line}{behind}\n" for line in path.read_text().splitlines()))
    with collect_notes() as notes:
        assert load(tmp_path).labels == (CAR,) * 6
    assert any(f"lines hold up to 1 numbers behind the box, as {what}" in note for note in notes)


def test_first_class_without_a_line_is_noted(tmp_path: Path) -> None:
    write_splits(tmp_path, names=["truck", "car", "bus"], line=f"1{LINE[1:]}")
    with collect_notes() as notes:
        assert load(tmp_path).labels == (CAR,) * 6
    assert any("no line is of class 0 (truck); the numbers are 1; if they begin at 1" in note for note in notes)
