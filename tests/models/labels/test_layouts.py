"""Labelled data as people have them: folders of classes, tables, COCO and YOLO's files, with splits and without."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from gemel.models.data import Split, load_split
from gemel.models.errors import InputError
from gemel.models.notes import collect_notes
from gemel.models.predictions import BoxLabels
from gemel.models.workload import load_workload
from tests.models.queries import make_query

RNG = np.random.default_rng(11)
SPLITS = ("train", "val", "test")
MATERIALS = {"paper": "paper", "cardboard": "paper", "glass": "other", "metal": "other"}


def write_picture(path: Path, width: int = 32, height: int = 24) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8)).save(path)
    return path


def load_all(data: Path, **keys: Any) -> tuple[dict[str, Split], list[str]]:
    """Each split, and the notes without the folder."""
    with collect_notes() as notes:
        splits = {name: load_split(make_query(data=data, **keys), name) for name in SPLITS}
    root = data if data.is_dir() else data.parent
    return splits, [note.replace(str(root), "DATA") for note in notes]


def labels_of(split: Split) -> Counter[Any]:
    return Counter(split.labels or ())


# Classes


def write_classes(folder: Path, names: list[str], count: int = 10, name: str = "{}{:03}.png") -> None:
    for label in names:
        for index in range(count):
            write_picture(folder / label / name.format(label, index))


def test_one_folder_of_classes_is_cut_class_by_class(tmp_path: Path) -> None:
    write_classes(tmp_path, ["empty", "busy", "spare"])
    splits, notes = load_all(tmp_path)
    assert [labels_of(split) for split in splits.values()] == [{"empty": count, "busy": count} for count in (6, 2, 2)]
    assert any("has no splits: its 20 pictures are cut in order into 12 / 4 / 4 (query gate)" in note for note in notes)
    assert any("left out: spare/" in note for note in notes)


@pytest.mark.parametrize("share_clips", [False, True])
def test_one_folder_of_classes_keeps_each_clip_in_one_split(tmp_path: Path, share_clips: bool) -> None:
    for label in ("empty", "busy"):
        for clip in range(5):
            own = f"c{clip}" if share_clips else f"{label}{clip}"
            for ms in range(3):
                write_picture(tmp_path / label / f"{own}__{ms + 10 * (label == 'busy'):04}.png")
    splits, _ = load_all(tmp_path)
    units = [set(split.units) for split in splits.values()]
    assert not units[0] & units[1] and not units[1] & units[2] and not units[0] & units[2]
    assert [labels_of(split) for split in splits.values()] == [{"empty": n, "busy": n} for n in (9, 3, 3)]


def test_one_clip_of_a_class_is_cut_in_time(tmp_path: Path) -> None:
    for label in ("empty", "busy"):
        for ms in range(10):
            write_picture(tmp_path / label / f"{label}__{ms:04}.png")
    splits, _ = load_all(tmp_path)
    assert [len(split) for split in splits.values()] == [12, 4, 4]
    assert min(splits["test"].times_s) == 0.008


def test_classes_may_be_a_map_of_several_labels(tmp_path: Path) -> None:
    write_classes(tmp_path, [*MATERIALS, "organic"])
    splits, _ = load_all(tmp_path, classes=("paper", "other"), label_map=MATERIALS)
    assert labels_of(splits["train"]) == {"paper": 12, "other": 12}
    other, _ = load_all(tmp_path, classes=("glass", "organic"), label_map={"glass": "glass", "organic": "organic"})
    assert labels_of(other["test"]) == {"glass": 2, "organic": 2}


@pytest.mark.parametrize("names", ["train valid test", "Train Validation Test", "training dev testing"])
def test_splits_may_have_other_names(tmp_path: Path, names: str) -> None:
    for name in names.split():
        write_classes(tmp_path / name, ["empty", "busy"], 2)
    splits, notes = load_all(tmp_path)
    assert [len(split) for split in splits.values()] == [4, 4, 4] and notes == []


def test_pictures_in_subfolders_are_read_in_order_of_their_paths(tmp_path: Path) -> None:
    for name in SPLITS:
        for day, index in ((1, 9), (1, 10), (2, 1)):
            for label in ("empty", "busy"):
                write_picture(tmp_path / name / label / f"day{day}" / f"{index}.png")
    splits, notes = load_all(tmp_path)
    assert [len(split) for split in splits.values()] == [6, 6, 6] and notes == []
    frames = Path(tmp_path / "frames")
    for day in (1, 2, 10):
        for index in range(10):
            write_picture(frames / f"day{day}" / f"{index}.png")
    unlabelled, notes = load_all(frames)
    assert [len(split) for split in unlabelled.values()] == [18, 6, 6] and unlabelled["train"].labels is None
    assert notes == ["DATA: is read without labels: its folders (day1, day10, day2) are no classes of query gate; "
                     "if they are, name them in `classes`"]  # fmt: skip


def workload(folder: Path, classes: Any) -> Path:
    query = {"id": "gate", "camera": "c", "task": "classification", "classes": classes, "model": "resnet18",
             "input_size": 32}  # fmt: skip
    path = folder / "w.yaml"
    path.write_text(
        yaml.safe_dump({"name": "w", "cameras": {"c": {"source": "c.mp4"}}, "queries": [query]}, sort_keys=False)
    )
    return path


def test_workload_takes_classes_as_a_map(tmp_path: Path) -> None:
    given = {"paper": ["paper", "cardboard"], "other": ["glass", "metal"], "organic": "food"}
    query = load_workload(workload(tmp_path, given)).query("gate")
    assert query.classes == ("paper", "other", "organic") and query.sources == {**MATERIALS, "food": "organic"}
    assert load_workload(workload(tmp_path, ["a", "b"])).query("gate").sources == {"a": "a", "b": "b"}


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({"paper": ["glass"], "other": ["glass"]}, "'glass' is of 'paper' and of 'other'; name it once"),
        ({"paper": [], "other": ["glass"]}, "'paper' has no labels; write paper: "),
        ({"paper": ["paper"]}, "classification needs two classes or more"),
        ({"paper": 3, "other": ["a"]}, "classes"),
        ({"paper": {"a": "b"}, "other": ["a"]}, "classes"),
    ],
)
def test_workload_refuses_a_map_of_classes_in_one_line(tmp_path: Path, classes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_workload(workload(tmp_path, classes))
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


# Tables


def write_table(folder: Path, header: str = "path,label,split,unit", separator: str = ",") -> Path:
    """Two classes in three splits, each of two units, as a table in `folder`."""
    lines = [header.replace(",", separator)]
    for split in SPLITS:
        for index in range(8):
            path = write_picture(folder / "pictures" / f"{split}-{index}.png")
            label, unit = ("empty", "busy")[index % 2], f"{split}-{index // 4}"
            row = {"path": f"pictures/{path.name}", "label": label, "split": split, "unit": unit}
            lines.append(separator.join(row.get(COLUMN_OF.get(name, name), "1") for name in header.split(",")))
    table = folder / "labels.csv"
    table.write_text("\n".join(lines))
    return table


COLUMN_OF = {"Filename": "path", "class": "label", "image": "path", "category": "label", "set": "split"}


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize(
    ("header", "separator"),
    [("path,label,split,unit", ","), ("Filename,class,set,unit", ";"), ("unit,split,label,path", "\t")],
)
def test_table_gives_labels_splits_and_units(tmp_path: Path, header: str, separator: str, as_folder: bool) -> None:
    table = write_table(tmp_path, header, separator)
    splits, notes = load_all(tmp_path if as_folder else table)
    assert notes == [] and {name: labels_of(split) for name, split in splits.items()} == {
        name: {"empty": 4, "busy": 4} for name in SPLITS
    }
    assert splits["val"].units == ("val-0",) * 4 + ("val-1",) * 4 and splits["val"].times_s[:5] == (0, 1, 2, 3, 0)


def test_table_without_splits_is_cut_by_unit(tmp_path: Path) -> None:
    splits, notes = load_all(write_table(tmp_path, "image,category,unit,score"))
    assert [len(split) for split in splits.values()] == [16, 4, 4]
    assert not set(splits["train"].units) & set(splits["test"].units)
    assert any("its columns score are not read" in note for note in notes)
    assert any("has no splits: its 24 pictures are cut in order into 16 / 4 / 4" in note for note in notes)


def edit(table: Path, change: Callable[[list[str]], object], encoding: str = "utf-8") -> None:
    lines = table.read_text().splitlines()
    change(lines)
    table.write_bytes("\n".join(lines).encode(encoding))


PICTURE = "pictures/val-0"


def change_rows(old: str, new: str) -> Callable[[list[str]], None]:
    return lambda rows: rows.__setitem__(slice(None), [row.replace(old, new) for row in rows])


TABLES: dict[str, tuple[Callable[[list[str]], object], str]] = {
    "no header": (lambda rows: rows.pop(0), r"has the columns .*; give a CSV file with the columns path and label"),
    "an unknown split": (lambda rows: rows.append(f"{PICTURE}.png,busy,own,a"), "has rows of the split 'own'"),
    "a row without a split": (lambda rows: rows.append(f"{PICTURE}.png,busy"), "has rows without a split"),
    "a split is missing": (lambda rows: rows.__setitem__(slice(1, None), rows[1:17]), "the split 'test' is empty"),
    "a class is missing": (
        lambda rows: rows.__setitem__(slice(1, None), [row for row in rows[1:] if "busy,val" not in row]),
        r"no frames of class 'busy' in the split 'val'",
    ),
    "a picture is missing": (lambda rows: rows.append("gone.png,busy,val,a"), "1 of 25 pictures are not there: gone"),
    "two labels": (lambda rows: rows.append(f"{PICTURE}.png,busy,val,a"), f"has two rows that differ for {PICTURE}"),
    "two splits": (lambda rows: rows.append(f"{PICTURE}.png,empty,test,a"), f"has two rows that differ for {PICTURE}"),
    "an open quote": (lambda rows: rows.append(f'"{PICTURE}.png,busy,val,a'), "is no CSV file in UTF-8 or UTF-16"),
    "nothing": (lambda rows: rows.clear(), "is no CSV file in UTF-8 or UTF-16"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_table_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    change, message = TABLES[kind]
    edit(table := write_table(tmp_path), change)
    with pytest.raises(InputError, match=message) as caught:
        load_all(table)
    assert str(caught.value).startswith(str(table)) and "\n" not in str(caught.value)


HARMLESS_TABLES: dict[str, tuple[Callable[[list[str]], object], list[str]]] = {
    "blank lines": (lambda rows: rows.extend(["", ",,,"]), []),
    "splits of other names": (change_rows(",val,", ",Valid,"), []),
    "names without suffix": (change_rows(".png", ""), []),
    "a class that is not asked for": (
        lambda rows: rows.append("gone.png,van,val,a"),
        ["DATA/labels.csv: 1 of 25 rows are left out: van; if these are classes of query gate, name them in `classes`"],
    ),
    "a row twice": (lambda rows: rows.append(rows[-1]), ["DATA/labels.csv: 1 rows repeat others and are left out"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", HARMLESS_TABLES)
def test_table_is_read_and_notes_what_is_left_out(tmp_path: Path, kind: str) -> None:
    change, expected = HARMLESS_TABLES[kind]
    edit(table := write_table(tmp_path), change, "utf-8-sig")
    splits, notes = load_all(table)
    assert [len(split) for split in splits.values()] == [8, 8, 8] and notes == expected


@pytest.mark.parametrize(("name", "encoding"), [("labels.tsv", "utf-8"), ("LABELS.CSV", "utf-16")])
def test_table_may_be_tab_separated_or_of_a_spreadsheet(tmp_path: Path, name: str, encoding: str) -> None:
    table = write_table(tmp_path, separator="\t")
    (tmp_path / name).write_bytes(table.read_text().encode(encoding))
    table.unlink()
    for data in (tmp_path, tmp_path / name):
        assert [len(split) for split in load_all(data)[0].values()] == [8, 8, 8]


def test_table_holds_no_boxes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no boxes"):
        load_all(write_table(tmp_path), task="detection", classes=("car",))


# Boxes

NAMES = ["bus", "car", "van"]
CAR = (8.0, 6.0, 24.0, 18.0)


def write_yolo(
    pictures: Path, labels: Path, count: int = 5, line: str = "1 0.5 0.5 0.5 0.5\n0 0.2 0.2 0.2 0.2\n"
) -> None:
    labels.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        path = write_picture(pictures / f"{index}.png")
        (labels / f"{path.stem}.txt").write_text(line)


def roboflow(folder: Path) -> None:
    for split in ("train", "valid", "test"):
        write_yolo(folder / split / "images", folder / split / "labels")
    keys = {"train": "../train/images", "val": "../valid/images", "test": "../test/images", "nc": 3, "names": NAMES}
    (folder / "data.yaml").write_text(yaml.safe_dump(keys))


def ultralytics(folder: Path) -> None:
    for split in SPLITS:
        write_yolo(folder / "images" / split, folder / "labels" / split)
    keys = {"path": "/content/yard", **{split: f"images/{split}" for split in SPLITS}, "names": dict(enumerate(NAMES))}
    (folder / "yard.yaml").write_text(yaml.safe_dump(keys))


def by_lists(folder: Path) -> None:
    for split in SPLITS:
        write_yolo(folder / "all" / "images" / split, folder / "all" / "labels" / split)
        lines = [f"./all/images/{split}/{index}.png" for index in range(5)]
        (folder / f"{split}.txt").write_text("\n".join(lines))
    (folder / "data.yaml").write_text(yaml.safe_dump({**{one: f"{one}.txt" for one in SPLITS}, "names": NAMES}))


def elsewhere(folder: Path) -> None:
    ultralytics(folder)
    keys = {"train": "/content/a/train", "val": ["/content/a/val"], "test": "/content/a/test", "names": NAMES}
    (folder / "yard.yaml").write_text(yaml.safe_dump(keys))


def beside(folder: Path) -> None:
    for split in SPLITS:
        write_yolo(folder / split, folder / split)
    (folder / "obj.names").write_text("\n".join(NAMES))


YOLO = {"Roboflow": roboflow, "Ultralytics": ultralytics, "lists": by_lists, "paths of elsewhere": elsewhere,
        "beside the pictures": beside}  # fmt: skip


@pytest.mark.parametrize("kind", YOLO)
def test_yolo_files_are_read_with_their_splits(tmp_path: Path, kind: str) -> None:
    YOLO[kind](tmp_path)
    splits, notes = load_all(tmp_path, task="detection", classes=("car",))
    assert [len(split) for split in splits.values()] == [5, 5, 5]
    assert all(split.labels == (BoxLabels(("car",), (CAR,)),) * 5 for split in splits.values())
    assert len(notes) == (3 if kind == "paths of elsewhere" else 0)
    for path in [*tmp_path.glob("*.yaml")][:1]:
        assert len(load_all(path, task="detection", classes=("car",))[0]["val"]) == 5


@pytest.mark.parametrize("names", ["classes.txt", "labels/classes.txt", "obj.names"])
def test_yolo_files_without_splits_are_cut(tmp_path: Path, names: str) -> None:
    pictures = tmp_path / ("obj_train_data" if names == "obj.names" else "images")
    write_yolo(pictures, pictures if names == "obj.names" else tmp_path / "labels", 10)
    (tmp_path / names).write_text("\n".join(NAMES))
    splits, notes = load_all(tmp_path, task="detection", classes=("any",), label_map={"car": "any", "bus": "any"})
    assert [len(split) for split in splits.values()] == [6, 2, 2]
    assert splits["val"].labels
    first = splits["val"].labels[0]
    assert isinstance(first, BoxLabels) and first.classes == ("any", "any")
    assert any("has no splits: its 10 pictures" in note for note in notes)


@pytest.mark.parametrize(
    "line",
    ["1 0.25 0.25 0.75 0.25 0.75 0.75 0.25 0.75", "1 .25 .25 .75 .75 .25 .75", "1 0.5 0.5 0.5 0.5 0.93",
     "1.0 5e-1 0.5 0.5 0.5", "\n 1\t0.5 0.5  0.5 0.5 \n"],
)  # fmt: skip
def test_yolo_lines_may_be_polygons_or_have_a_score(tmp_path: Path, line: str) -> None:
    roboflow(tmp_path)
    write_yolo(tmp_path / "train/images", tmp_path / "train/labels", line=line)
    splits, _ = load_all(tmp_path, task="detection", classes=("car",))
    assert splits["train"].labels == (BoxLabels(("car",), (CAR,)),) * 5


def test_yolo_pictures_without_labels_count_as_empty_with_a_note(tmp_path: Path) -> None:
    roboflow(tmp_path)
    (tmp_path / "train/labels/3.txt").unlink()
    (tmp_path / "train/labels/2.txt").write_text("")
    splits, (note,) = load_all(tmp_path, task="detection", classes=("car",))
    labels = splits["train"].labels or ()
    assert [len(label.boxes) for label in labels if isinstance(label, BoxLabels)] == [1, 1, 0, 0, 1]
    assert note.startswith("DATA/data.yaml: 1 of 5 pictures have no text file and count as without objects: 3.png;")


WRONG_LINES = {
    "pixels": ("1 16 12 16 12", "holds 16: pixels or percents, where YOLO has fractions of the picture"),
    "percents": ("1 50 50 50 50", "holds 50: pixels or percents, where YOLO has fractions of the picture"),
    "corners": (
        "1 0.6 0.6 0.9 0.9",
        "leave their picture as centre x, centre y, width, height and fit as x0, y0, x1, y1",
    ),
    "from the corner": ("1 0.1 0.1 0.5 0.5", "leave their picture as .* and fit as x, y, width, height"),
    "four numbers": ("1 0.5 0.5 0.5", "line 1 holds 4 numbers, not 5"),
    "a name": ("car 0.5 0.5 0.5 0.5", "line 1 is 'car 0.5 0.5 0.5 0.5', not numbers"),
    "unknown classes": ("7 0.5 0.5 0.5 0.5", "none of its annotations is a box: 5 of categories that are not listed"),
    "NaN": ("nan 0.5 0.5 0.5 0.5", "line 1 holds 5 numbers"),
}


@pytest.mark.parametrize("kind", WRONG_LINES)
def test_yolo_lines_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    line, message = WRONG_LINES[kind]
    roboflow(tmp_path)
    write_yolo(tmp_path / "train/images", tmp_path / "train/labels", line=line)
    with pytest.raises(InputError, match=message) as caught:
        load_all(tmp_path, task="detection", classes=("car",))
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


WRONG_YOLO: dict[str, tuple[Callable[[Path], object], str]] = {
    "no names": (lambda d: (d / "data.yaml").unlink(), "holds text files of boxes and no names; add data.yaml with"),
    "no such class": (lambda d: (d / "data.yaml").write_text("names: [bus]"), "no class 'car' .*it has: bus"),
    "no test": (lambda d: (d / "test").rename(d / "more"), "the split 'test' is missing"),
    "no labels of a split": (
        lambda d: (d / "valid/labels").rename(d / "more"),
        "0.txt: does not exist, nor labels of 4",
    ),
}


@pytest.mark.parametrize("kind", WRONG_YOLO)
def test_yolo_files_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    change, message = WRONG_YOLO[kind]
    roboflow(tmp_path)
    change(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        load_all(tmp_path, task="detection", classes=("car",))
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def write_coco(path: Path, pictures: Path, count: int = 5) -> None:
    names = [write_picture(pictures / f"{path.parent.name}-{index}.png").name for index in range(count)]
    document = {
        "images": [{"id": index, "file_name": name} for index, name in enumerate(names)],
        "categories": [{"id": 1, "name": "car"}, {"id": 2, "name": "van"}],
        "annotations": [{"image_id": n, "category_id": 1 + n % 2, "bbox": [8, 6, 16, 12]} for n in range(count)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def test_coco_of_roboflow_lies_beside_its_pictures(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        write_coco(tmp_path / split / "_annotations.coco.json", tmp_path / split)
    splits, notes = load_all(tmp_path, task="detection", classes=("car",))
    assert [len(split) for split in splits.values()] == [5, 5, 5] and notes == []
    assert splits["val"].labels and splits["val"].labels[0] == BoxLabels(("car",), (CAR,))


@pytest.mark.parametrize("pictures", ["{}2017", "images/{}", "images"])
def test_coco_as_it_is_published_has_its_splits(tmp_path: Path, pictures: str) -> None:
    for split in SPLITS:
        made = tmp_path / pictures.format(split)
        write_coco(tmp_path / split / "made.json", made)
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / split / "made.json").rename(tmp_path / f"annotations/instances_{split}2017.json")
        (tmp_path / split).rmdir()
    splits, _ = load_all(tmp_path, task="detection", classes=("car",))
    assert [len(split) for split in splits.values()] == [5, 5, 5]
    assert all(split.labels and split.labels[0] == BoxLabels(("car",), (CAR,)) for split in splits.values())


@pytest.mark.parametrize("name", ["result.json", "annotations.json", "annotations/instances_default.json"])
def test_coco_without_splits_is_cut(tmp_path: Path, name: str) -> None:
    write_coco(tmp_path / name, tmp_path / "images", 10)
    splits, _ = load_all(tmp_path, task="detection", classes=("any",), label_map={"car": "any", "van": "any"})
    assert [len(split) for split in splits.values()] == [6, 2, 2]
    assert splits["test"].labels == (BoxLabels(("any",), (CAR,)),) * 2
