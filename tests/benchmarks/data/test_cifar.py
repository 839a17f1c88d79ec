"""Preparing the `cifar` workload: no image twice, test apart, clips in which every class takes its turn."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest

from benchmarks.data import cifar as prepare_cifar
from benchmarks.data import prepare
from benchmarks.real import real
from gemel.models.data import load_split
from gemel.models.workload import load_workload

LABELS = sorted({label for labels in prepare_cifar.CLASSES.values() for label in labels})


def make_archive(train: int, test: int) -> dict[str, list[str]]:
    """What a pack of so many images per class holds, in a wrong order."""
    names = [
        f"{part}/{label}/{number:04d}.jpg"
        for label in LABELS for part, count in (("train", train), ("test", test)) for number in reversed(range(count))
    ]  # fmt: skip
    return prepare_cifar.lists_in(names)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A data folder whose CIFAR-10 pack holds 40 images of each class to train on and 16 to test."""
    data = tmp_path / "data"
    (data / "datasets").mkdir(parents=True)
    (data / "MANIFEST.json").write_text("{}")
    with tarfile.open(data / "datasets" / "cifar10_jpeg_pack.tar", "w") as tar:
        for folder, names in make_archive(40, 16).items():
            for place, name in enumerate(names):
                image = np.full((32, 32, 3), (LABELS.index(folder.split("/")[1]) * 20, place * 5, 0), np.uint8)
                content = cv2.imencode(".jpg", image)[1].tobytes()
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return data


@pytest.mark.parametrize("size", [(3000, 500), (3000, 384), (40, 16)])
def test_no_image_is_used_twice_and_test_comes_from_the_test_part(size: tuple[int, int]):
    planned = prepare_cifar.plan(make_archive(*size))
    used = Counter(name for paths in planned.values() for name in paths.values())
    assert set(used.values()) == {1}
    for query, paths in planned.items():
        for path, name in paths.items():
            split, label, _ = path.split("/")
            assert name.startswith(f"{'test' if split == 'test' else 'train'}/{label}/")
        counts = Counter(tuple(path.split("/")[:2]) for path in paths)
        for label in prepare_cifar.CLASSES[query]:
            for split, most in prepare_cifar.MOST.items():
                assert 0 < counts[split, label] <= most
        if size[0] == 3000:
            assert all(counts[split, label] >= 0.76 * prepare_cifar.MOST[split] for split, label in counts)


def test_two_queries_never_see_one_moment_twice():
    for paths in prepare_cifar.plan(make_archive(300, 100)).values():
        moments = Counter((path.split("/")[0], path.split("/")[2]) for path in paths)
        assert set(moments.values()) == {1}, "two images of one clip at the same moment"


def test_every_class_takes_its_turn_in_every_clip():
    paths = sorted(prepare_cifar.plan(make_archive(3000, 500))["quay-kind"], key=lambda path: path.split("/")[2])
    first = [path.split("/")[1] for path in paths if "quay-c0__" in path and path.startswith("test/")]
    assert len(first) == prepare_cifar.CLIP
    assert first[:10] == ["bird"] * 5 + ["dog"] * 5
    clips = Counter(path.split("/")[2].split("__")[0] for path in paths if path.startswith("test/"))
    assert set(clips.values()) == {prepare_cifar.CLIP} and len(clips) == 10


def test_cifar_is_prepared_and_loads(pack: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert prepare.main(["cifar", "--data", str(pack), "--out", str(out), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert set(counts) == set(prepare_cifar.CLASSES)
    workload = load_workload(out / "workload.yaml")
    for query in workload.queries:
        assert query.classes == prepare_cifar.CLASSES[query.id]
        for split in ("train", "val", "test"):
            found = load_split(query, split)
            assert len(found) == sum(counts[query.id][split].values())
            assert set(found.labels or ()) == set(query.classes)
        played = sorted(path.name for path in Path(workload.cameras[query.camera].source).glob("*.jpg"))
        tested = sorted(path.name for path in (out / "data" / query.id / "test").rglob("*-c0__*.jpg"))
        assert played == tested and played
    assert prepare.main(["cifar", "--data", str(pack), "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == counts and captured.err.count("already prepared") == 4


def test_the_driver_has_bounds_for_every_workload_and_trains_no_query_that_is_not_there(repository: Path):
    others = {"ancestor", "boxes", "door", "elsewhere", "kinds", "kiosk", "london", "published", "questions", "shop"}
    others |= {"simple", "streets"}
    assert set(real.WORKLOADS) == set(real.BOUNDS) == set(prepare.WORKLOADS) - others
    workloads = [load_workload(repository / "benchmarks" / "workloads" / f"{name}.yaml") for name in real.WORKLOADS]
    assert set(real.TRAINING) <= {query.id for workload in workloads for query in workload.queries}


def test_a_pack_without_a_class_is_one_clear_line(tmp_path: Path):
    lists = make_archive(40, 16)
    del lists["test/frog"]
    with pytest.raises(prepare.PrepareError, match="test/frog; fetch the data again"):
        prepare_cifar.plan(lists)


@pytest.mark.real
def test_the_real_pack_fills_every_split(real_data: Path):
    with tarfile.open(real_data / "datasets" / "cifar10_jpeg_pack.tar") as tar:
        planned = prepare_cifar.plan(prepare_cifar.lists_in(tar.getnames()))
    for paths in planned.values():
        counts = Counter(tuple(path.split("/")[:2]) for path in paths)
        assert {split: {n for (own, _), n in counts.items() if own == split} for split in prepare_cifar.MOST} == {
            split: {most} for split, most in prepare_cifar.MOST.items()
        }
