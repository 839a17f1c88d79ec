"""Sets from public repositories: nothing of one photograph or person is in two splits, nothing counts twice."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from benchmarks.data import prepare, public
from gemel.models.data import load_split
from gemel.models.files.pictures import read_picture
from gemel.models.workload import load_workload

CARD = """<annotation><object><name>{name}</name><bndbox><xmin>10</xmin><ymin>20</ymin><xmax>50</xmax><ymax>80</ymax>
</bndbox></object></annotation>"""


def picture(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.random.default_rng(number).integers(0, 255, (96, 64, 3), np.uint8))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The five repositories in small, as their authors lay them out."""
    folder, number = tmp_path / "data", 0
    (folder / "models").mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")
    (folder / "models" / public.INIT).write_bytes(b"x")
    roots = {name: folder / "public" / repository.split("/")[1] for name, repository in public.REPOSITORIES.items()}
    workloads = [
        load_workload(Path(prepare.REPOSITORY) / f"benchmarks/workloads/{one}.yaml") for one in ("shop", "kiosk")
    ]
    classes = {query.camera: query.classes for workload in workloads for query in workload.queries}
    for label in classes["coins"]:
        for part, photograph in [("train", 1), ("train", 5), ("test", 1)]:
            for coin in range(2):
                number += 1
                picture(roots["coins"] / "classified" / part / label / f"{part}_{photograph}_{coin}.jpg", number)
    for label in classes["clothing"]:
        for part in ("train", "validation", "test"):
            number += 1
            picture(roots["clothing"] / part / label / f"{number}.jpg", number)
    for pupil in range(15):
        for digit, label in enumerate(classes["digits"]):
            number += 1
            picture(roots["digits"] / "Dataset" / label / f"IMG_{1000 + 10 * pupil + digit}.JPG", number)
    for label in classes["masks"]:
        for person in "abcde":
            for shot in range(2):
                number += 1
                picture(roots["masks"] / "dataset" / label / f"0_0_{person}_{shot:04d}.jpg", number)
        picture(roots["masks"] / "dataset" / label / "twin.jpg", number)  # the same picture under another name
        picture(roots["masks"] / "dataset" / label / "augmented_image_1.jpg", 0)
        picture(roots["masks"] / "dataset" / label / "1 copy.jpg", 0)
    for shot in range(30):
        number += 1
        stem = roots["cards"] / "images" / ("test" if shot < 6 else "train") / f"cam_{shot:02d}"
        picture(stem.with_suffix(".JPG"), number)
        stem.with_suffix(".xml").write_text(CARD.format(name=classes["cards"][(shot if shot < 6 else shot // 4) % 6]))
    return folder


@pytest.mark.parametrize("name", ["shop", "kiosk", "door"])
def test_no_unit_is_in_two_splits(data: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    assert prepare.main([name, "--data", str(data), "--out", str(out)]) == 0
    for query in load_workload(out / "workload.yaml").queries:
        units = {split: set(load_split(query, split).units) for split in ("train", "val", "test")}
        assert all(units.values()), query.id
        assert not (units["train"] & units["val"] or units["test"] & (units["train"] | units["val"])), query.id


def test_copies_and_augmented_pictures_are_left_out(data: Path, tmp_path: Path) -> None:
    counts = prepare.prepare("door", data, tmp_path / "out")["masks"]
    assert sum(sum(own.values()) for own in counts.values()) == 20


def test_cards_are_cut_out_with_a_margin(data: Path, tmp_path: Path) -> None:
    prepare.prepare("door", data, tmp_path / "out")
    cards = list((tmp_path / "out" / "data" / "cards").rglob("*.jpg"))
    assert len(cards) == 30 and {read_picture(path).shape for path in cards} == {(72, 48, 3)}


def test_a_missing_repository_is_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "public" / "coins-dataset").rename(data / "elsewhere")
    assert prepare.main(["shop", "--data", str(data), "--out", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "coins-dataset: missing; clone github.com/kaa/coins-dataset there" in line
