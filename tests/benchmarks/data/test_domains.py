"""The six domains as a workload: nothing of one unit in two splits, and archives that are not as they should be."""

from __future__ import annotations

import io
import json
import tarfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from benchmarks.data import domains, prepare
from gemel.models.data import load_split
from gemel.models.predictions import BoxLabels
from gemel.models.workload import load_workload

IMAGE = cv2.imencode(".jpg", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
SPLITS = {"train": ["a", "b"], "val": ["c"], "test": ["d", "e"]}
UNITS = {"a": "board 1", "b": "board 1", "c": "board 2", "d": "board 3", "e": "board 4"}


def write(path: Path, files: Mapping[str, Any]) -> None:
    """An archive of these files; what is no bytes becomes JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, value in files.items():
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def archive(classes: tuple[str, ...], annotated: bool) -> dict[str, Any]:
    """The files of a made-up archive: of each split five images of each class, or five with a box of each class."""
    labels = ("images",) if annotated else classes
    split_of = {
        f"{label}/{split}{number}.jpg": split
        for label in labels
        for split in ("train", "val", "test")
        for number in range(5)
    }
    files: dict[str, Any] = dict.fromkeys(split_of, IMAGE)
    named = {name.removeprefix("images/"): split for name, split in split_of.items()}
    files["units.json"] = {name: f"{split}-{name[-5]}" for name, split in named.items()}
    files["splits.json"] = {
        split: [name for name in named if named[name] == split] for split in ("train", "val", "test")
    }
    if annotated:
        categories = [{"id": number, "name": label} for number, label in enumerate(classes)]
        images = [{"id": n, "file_name": name, "width": 8, "height": 8} for n, name in enumerate(named)]
        boxes = [
            {"id": len(categories) * n + c, "image_id": n, "category_id": c, "bbox": [1, 2, 3, 4], "area": 12}
            for n in range(len(images))
            for c in range(len(categories))
        ]
        files["annotations.json"] = {"images": images, "annotations": boxes, "categories": categories}
    return files


@pytest.fixture
def pack(tmp_path: Path, repository: Path) -> Path:
    """A data folder with made-up archives of the classes that the workload asks for."""
    data = tmp_path / "data"
    (data / "models").mkdir(parents=True)
    (data / "MANIFEST.json").write_text("{}")
    (data / "models" / domains.INIT).write_bytes(b"weights")
    for query in load_workload(repository / "benchmarks" / "workloads" / "domains.yaml").queries:
        files = archive(query.classes, query.task == "detection")
        write(data / "domains" / f"{query.camera}.tar", files)
    write(data / "domains" / "manaus.tar", archive(("car", "people"), True))
    return data


def test_every_query_finds_its_frames_boxes_and_units(pack: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert prepare.main(["domains", "--data", str(pack), "--out", str(out), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    workload = load_workload(out / "workload.yaml")
    assert {query.camera for query in workload.queries} == set(workload.cameras) == set(counts) - {"manaus"}
    assert len({query.model for query in workload.queries}) >= 3
    for query in workload.queries:
        units: dict[str, set[str]] = defaultdict(set)
        for name in ("train", "val", "test"):
            split = load_split(query, name)
            assert split.labels is not None and len(set(split.units)) == counts[query.camera][name]["units"] == 5
            assert all(unit.startswith(f"{query.camera}-u") for unit in split.units)
            if query.task == "detection":
                boxes = [one for one in split.labels if isinstance(one, BoxLabels)]
                assert len(boxes) == 5 and {len(one.classes) for one in boxes} == {len(query.classes)}
            else:
                assert len(split) == 5 * len(query.classes) and set(split.labels) == set(query.classes)
            for unit in split.units:
                units[unit].add(name)
        assert all(len(splits) == 1 for splits in units.values())
        assert any(Path(workload.cameras[query.camera].source).glob("*.jpg"))
        assert query.init is None or Path(str(query.init)).read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("splits", "units", "said"),
    [
        (SPLITS, {**UNITS, "c": "board 1"}, "unit board 1 is in train and in val"),
        ({**SPLITS, "test": ["d", "f"]}, UNITS, "units.json says nothing of f"),
        ({**SPLITS, "test": ["d", "d"]}, UNITS, "d stands twice in splits.json"),
        ({**SPLITS, "val": []}, UNITS, "splits.json has no images of val"),
        ({"train": ["a"]}, UNITS, "splits.json has no images of val"),
        (SPLITS, list(UNITS), "must be mappings"),
    ],
)
def test_splits_and_units_that_do_not_fit_are_one_clear_line(splits: Any, units: Any, said: str) -> None:
    with pytest.raises(prepare.PrepareError, match=said) as caught:
        domains.plan("x.tar", splits, units)
    assert str(caught.value).startswith("x.tar: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("image", "annotated"), [("../x.jpg", False), ("a/b/x.jpg", False), ("a/x.jpg", True), ("x.exe", True)]
)
def test_an_image_that_leads_elsewhere_is_refused(image: str, annotated: bool) -> None:
    with pytest.raises(prepare.PrepareError, match=r"x\.tar: .* is not "):
        domains.paths("x", {image: domains.Place("test", 0, 0)}, annotated)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("bccd", {"annotations.json": None}, "bccd.tar: holds no annotations.json"),
        ("bccd", {"annotations.json": {"images": []}}, "bccd.tar: annotations.json lacks 'annotations'"),
        ("bccd", {"images/test3.jpg": None}, "images/test3.jpg: is not a file in the pack"),
        ("bccd", {"units.json": b"{"}, "bccd.tar: units.json is no JSON"),
        ("bccd", {"splits.json": None}, "bccd.tar: holds no splits.json"),
        ("bccd", None, "bccd.tar: missing from the data folder"),
    ],
)
def test_an_archive_that_lacks_something_is_one_clear_line(
    pack: Path, tmp_path: Path, capsys, name: str, change: dict[str, Any] | None, said: str
) -> None:
    path, out = pack / "domains" / f"{name}.tar", tmp_path / "out"
    path.unlink()
    if change is not None:
        files = {**archive(("RBC", "WBC", "Platelets"), True), **change}
        write(path, {key: value for key, value in files.items() if value is not None})
    assert prepare.main(["domains", "--data", str(pack), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert said in error.splitlines()[-1] and error.splitlines()[-1].startswith("error: ")
    assert not (out / "workload.yaml").exists()


@pytest.mark.real
def test_the_real_archives_have_what_the_workload_asks_for(real_data: Path, tmp_path: Path) -> None:
    if not (real_data / "domains").is_dir():
        pytest.skip("the archives of domains are not in the folder of real footage")
    prepare.prepare("domains", real_data, tmp_path)
    for query in load_workload(tmp_path / "workload.yaml").queries:
        units: dict[str, str] = {}
        for name in ("train", "val", "test"):
            split = load_split(query, name)
            assert len(split) >= 50 and {units.setdefault(unit, name) for unit in split.units} == {name}
