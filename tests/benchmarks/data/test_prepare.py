"""Preparing a workload: from a tiny data folder of the same shape, and from the real one where it is there."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest

from benchmarks.data import files as prepare_files
from benchmarks.data import gti as prepare_gti
from benchmarks.data import junction as prepare_junction
from benchmarks.data import prepare
from gemel.models.workload import load_workload


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A data folder whose GTI pack holds 40 crops of each view and 160 of road, in the wrong order."""
    data = tmp_path / "data"
    (data / "datasets").mkdir(parents=True)
    (data / "MANIFEST.json").write_text("{}")
    crop = cv2.imencode(".png", np.zeros((4, 4, 3), np.uint8))[1].tobytes()
    with tarfile.open(data / "datasets" / "gti_vehicles_pack.tar", "w") as tar:
        folders = [(f"vehicles/{folder}", 40) for folder in prepare_gti.VIEWS.values()] + [("non-vehicles/GTI", 160)]
        for folder, count in folders:
            for number in sorted(range(count), key=str):
                member = tarfile.TarInfo(f"data/{folder}/image{number}.png")
                member.size = len(crop)
                tar.addfile(member, io.BytesIO(crop))
    return data


def planned_numbers(planned: dict[str, str], split: str, label: str, unit: str) -> list[int]:
    names = [name for path, name in sorted(planned.items()) if path.startswith(f"{split}/{label}/{unit}__")]
    return [int(name.rsplit("image", 1)[1].removesuffix(".png")) for name in names]


def test_gti_segments_are_cut_in_order_of_time(pack: Path):
    with tarfile.open(pack / "datasets" / "gti_vehicles_pack.tar") as tar:
        planned = prepare_gti.plan(prepare_gti.lists_in(tar.getnames()))
    assert planned_numbers(planned["far"], "train", "vehicle", "far-s0") == [0, 1, 2]
    assert planned_numbers(planned["far"], "val", "vehicle", "far-s0") == [3]
    assert planned_numbers(planned["far"], "test", "vehicle", "far-s0") == [4]
    assert planned_numbers(planned["far"], "train", "vehicle", "far-s7") == [35, 36, 37]


def test_gti_views_share_no_crop_and_no_name(pack: Path):
    with tarfile.open(pack / "datasets" / "gti_vehicles_pack.tar") as tar:
        planned = prepare_gti.plan(prepare_gti.lists_in(tar.getnames()))
    used = Counter(name for paths in planned.values() for name in paths.values())
    assert len(used) == 4 * 40 + 160 and set(used.values()) == {1}
    for paths in planned.values():
        moments = Counter((path.split("/")[0], path.split("/")[2]) for path in paths)
        assert set(moments.values()) == {1}, "two crops of one clip at the same moment"


def test_gti_is_prepared_once_and_resumed(pack: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert prepare.main(["gti", "--data", str(pack), "--out", str(out), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["far-vehicle"]["train"] == {"vehicle": 24, "non-vehicle": 24}
    workload = load_workload(out / "workload.yaml")
    for query in workload.queries:
        assert query.data is not None and (query.data / "train" / "vehicle").is_dir()
        assert any(Path(workload.cameras[query.camera].source).glob("*.png"))

    shutil.rmtree(out / "data" / "left-vehicle")
    (out / "data" / ".left-vehicle.partial").mkdir()  # what an interruption leaves behind
    assert prepare.main(["gti", "--data", str(pack), "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == counts
    assert captured.err.count("already prepared") == 3
    assert not list(out.rglob("*.partial"))


def test_an_interrupted_folder_never_gets_its_name(tmp_path: Path):
    def stop_early(folder: Path) -> dict:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_files.once(tmp_path / "query", stop_early)
    assert not (tmp_path / "query").exists()
    assert prepare_files.once(tmp_path / "query", lambda folder: {"made": 1}) == {"made": 1}
    assert not (tmp_path / "query" / "half").exists()


def test_folders_of_older_rules_are_made_anew(tmp_path: Path, monkeypatch):
    prepare_files.once(tmp_path / "query", lambda folder: {"made": 1})
    monkeypatch.setattr(prepare_files, "RULES", prepare_files.RULES + 1)
    assert prepare_files.once(tmp_path / "query", lambda folder: {"made": 2}) == {"made": 2}


def test_absent_data_is_one_clear_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.delenv("GEMEL_DATA", raising=False)
    out = tmp_path / "out"
    assert prepare.main(["gti", "--data", str(tmp_path / "nowhere"), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nowhere" in error and "GEMEL_DATA" in error
    assert not out.exists()


def test_a_missing_pack_names_the_file(tmp_path: Path, capsys):
    (tmp_path / "MANIFEST.json").write_text("{}")
    assert prepare.main(["gti", "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "gti_vehicles_pack.tar: missing" in capsys.readouterr().err
    assert not (tmp_path / "out" / "workload.yaml").exists()


def test_coco_boxes_are_cut_off_at_the_edge_and_empty_frames_stay(tmp_path: Path):
    coco = prepare_files.CocoSplit(tmp_path, ["vehicle"])
    frame = np.zeros((20, 30, 3), np.uint8)
    coco.add("clip__000000", frame, [(-5.0, 2.0, 10.0, 12.0), (29.5, 0.0, 40.0, 9.0)])
    coco.add("clip__000200", frame, [])
    assert coco.close() == {"frames": 2, "boxes": 1}
    document = json.loads((tmp_path / "annotations.json").read_text())
    assert document["annotations"][0]["bbox"] == [0.0, 2.0, 10.0, 10.0]
    assert [image["file_name"] for image in document["images"]] == ["clip__000000.jpg", "clip__000200.jpg"]
    assert (tmp_path / "images" / "clip__000200.jpg").is_file()


def test_crops_leave_out_what_is_small_occluded_or_covered():
    def row(track: int, box: list[float], name: str = "car", occluded: bool = False) -> dict:
        return {"frame": 0, "track": track, "class": name, "occluded": occluded, "box": box}

    rows = [
        row(1, [0, 0, 20, 20]),
        row(2, [50, 0, 60, 40]),  # ten pixels wide
        row(3, [100, 0, 130, 40], occluded=True),
        row(4, [200, 0, 230, 40]),
        row(5, [200, 10, 230, 60]),  # stands before 4 and hides three quarters of it
        row(6, [300, 0, 330, 40], name="motorbike"),
    ]
    assert set(prepare_junction.usable_crops(rows, ("car", "truck"))) == {1, 5}


def test_all_large_vehicles_are_cropped_and_cars_thinned():
    cars = [{"frame": n, "class": "car", "score": 0.9, "box": [0.0, 0.0, 20.0, 20.0]} for n in range(100)]
    rows = [
        *cars,
        {"frame": 0, "class": "bus", "score": 0.9, "box": [50.0, 0.0, 80.0, 40.0]},
        {"frame": 1, "class": "truck", "score": 0.2, "box": [50.0, 0.0, 80.0, 40.0]},  # the teacher is not sure
        {"frame": 2, "class": "truck", "score": 0.9, "box": [50.0, 0.0, 60.0, 40.0]},  # too narrow
        {"frame": 3, "class": "bus", "score": 0.9, "box": [0.0, 0.0, 20.0, 20.0]},  # as near as the car before it
        {"frame": 4, "class": "bus", "score": 0.9, "box": [0.0, 0.0, 20.0, 18.0]},  # hidden by the car
    ]
    found = prepare_junction.crops_by_size(rows)
    assert [row["frame"] for row in found["large"]] == [0, 3]
    assert len(found["car"]) == prepare_junction.CARS_PER_CLIP and found["car"][0]["frame"] < 5


@pytest.mark.parametrize("name", sorted({*prepare.WORKLOADS} - {"london", "streets"}))  # theirs is read from a file
def test_the_workload_files_are_valid(repository: Path, name: str):
    workload = load_workload(repository / "benchmarks" / "workloads" / f"{name}.yaml")
    assert workload.name == name
    assert len({query.weights for query in workload.queries}) == len(workload.queries)


def test_junction_has_the_queries_it_promises(repository: Path):
    workload = load_workload(repository / "benchmarks" / "workloads" / "junction.yaml")
    detectors = [query for query in workload.queries if query.task == "detection"]
    kinds = [query for query in workload.queries if query.task == "classification"]
    assert len(detectors) >= 4 and len({query.model for query in detectors}) >= 2 and len(kinds) == 2
    assert all(query.init is not None for query in workload.queries)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["london", "streets"])
def test_real_detectors_start_from_a_file_of_other_classes(real_data: Path, tmp_path: Path, name: str):
    prepare.prepare(name, real_data, tmp_path)
    for query in load_workload(tmp_path / "workload.yaml").queries:
        assert query.classes == ("car",) and query.input_size == 416 and query.init is not None


@pytest.mark.real
@pytest.mark.slow
def test_real_streets_are_tested_on_a_camera_that_is_not_trained_on(real_data: Path, tmp_path: Path):
    prepare.prepare("streets", real_data, tmp_path)
    for query in load_workload(tmp_path / "workload.yaml").queries:
        cameras = {
            split: {path.name.split("__")[0] for path in (tmp_path / "data" / query.id / split / "images").iterdir()}
            for split in ("train", "val", "test")
        }
        assert cameras["test"] == {query.camera.removeprefix("c")} and cameras["train"] == cameras["val"]
        assert len(cameras["train"]) == 2 and not cameras["train"] & cameras["test"]


@pytest.mark.real
@pytest.mark.slow
def test_real_junction_splits_share_no_day_and_no_track(real_data: Path, tmp_path: Path):
    counts = prepare.prepare("junction", real_data, tmp_path)
    assert sum(split["clips"] for split in counts["a13-vehicles"].values()) == 23
    days: dict[str, set[str]] = {}
    for split in ("train", "val", "test"):
        for image in (tmp_path / "data" / "a13-vehicles" / split / "images").iterdir():
            days.setdefault(image.name.split("_")[1][:8], set()).add(split)
    assert len(days) == 7 and all(len(splits) == 1 for splits in days.values())
    for query in ("a13-kind", "c03604-kind"):
        units: dict[str, set[str]] = {}
        for image in (tmp_path / "data" / query).rglob("*.jpg"):
            units.setdefault(image.name.split("__")[0], set()).add(image.parent.parent.name)
        assert all(len(splits) == 1 for splits in units.values())
    assert all(cell["crops"] > 0 for split in counts["c03604-kind"].values() for cell in split.values())
    assert all(crops > 100 for split in counts["a13-kind"].values() for crops in split.values())
    for query in load_workload(tmp_path / "workload.yaml").queries:
        assert isinstance(query.init, Path) and query.init.is_file()
