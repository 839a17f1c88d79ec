"""Splits: labelled folders, COCO files, unlabelled footage, and what is wrong with each."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from models.data import load_split
from models.errors import InputError
from models.predictions import BoxLabels
from models.preprocess import crop
from models.workload import Query


def _query(data: Path, task: str = "classification", classes=("empty", "busy"), **keys) -> Query:
    values = {
        "id": "q", "camera": "c", "task": task, "classes": classes, "model": "resnet18", "model_args": {},
        "input_size": 32, "weights": None, "init": None, "fps": None, "sla_ms": 100.0, "roi": None, "min_score": 0.0,
        "priority": 1, "data": data, "accuracy_target": 0.95,
    }  # fmt: skip
    return Query(**{**values, **keys})


def _image(path: Path, value: int = 90, size: tuple[int, int] = (20, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.full((*size, 3), value, np.uint8))


def test_classified_frames_carry_label_unit_and_time(tmp_path: Path) -> None:
    _image(tmp_path / "test/empty/monday__001500.png")
    _image(tmp_path / "test/busy/monday__000500-b.png")
    split = load_split(_query(tmp_path), "test")
    assert split.labels == ("busy", "empty")
    assert split.units == ("monday", "monday") and split.times_s == (0.5, 1.5)
    assert split.frames[0].shape == (20, 30, 3)


def test_names_without_units_are_cut_into_ten_blocks(tmp_path: Path) -> None:
    for index in range(40):
        _image(tmp_path / f"val/{'busy' if index % 2 else 'empty'}/{index:03d}.png")
    split = load_split(_query(tmp_path), "val")
    assert len(set(split.units)) == 10 and split.units.count("block-0") == 4
    assert split.times_s[3] == 3.0


def _coco(folder: Path, categories=("car", "bus"), **changes) -> None:
    _image(folder / "images/clip__000200.jpg")
    _image(folder / "images/clip__000100.jpg")
    document = {
        "images": [{"id": 7, "file_name": "clip__000200.jpg"}, {"id": 8, "file_name": "clip__000100.jpg"}],
        "categories": [{"id": index, "name": name} for index, name in enumerate(categories)],
        "annotations": [
            {"image_id": 7, "category_id": 0, "bbox": [1, 2, 10, 5]},
            {"image_id": 7, "category_id": 1, "bbox": [3, 3, 4, 4]},
        ],
    }  # fmt: skip
    (folder / "annotations.json").write_text(json.dumps({**document, **changes}))


def test_coco_boxes_become_corners_of_the_classes_asked_for(tmp_path: Path) -> None:
    _coco(tmp_path / "train")
    split = load_split(_query(tmp_path, "detection", ("car",)), "train")
    assert split.times_s == (0.1, 0.2)
    assert split.labels == (BoxLabels(), BoxLabels(("car",), ((1.0, 2.0, 11.0, 7.0),)))


@pytest.mark.parametrize(
    ("prepare", "task", "classes", "message"),
    [
        (lambda d: None, "classification", ("empty", "busy"), "has neither splits nor frames"),
        (lambda d: (d / "train").mkdir(), "classification", ("empty", "busy"), "the split 'test' is missing"),
        (lambda d: _image(d / "test/empty/a.png"), "classification", ("empty", "busy"), "no frames of class 'busy'"),
        (
            lambda d: (d / "test/images").mkdir(parents=True),
            "detection",
            ("car",),
            "annotations.json: .*cannot be read",
        ),
        (lambda d: _coco(d / "test", ("bus", "van")), "detection", ("car",), "no category 'car'"),
        (lambda d: _coco(d / "test", images=[]), "detection", ("car",), "there is no"),
        (lambda d: _coco(d / "test", images=[], annotations=[]), "detection", ("car",), "the split 'test' is empty"),
        (lambda d: _coco(d / "test", annotations=[{"image_id": 1}]), "detection", ("car",), "this key is missing"),
    ],
)
def test_faults_of_data_are_named(tmp_path: Path, prepare, task, classes, message: str) -> None:
    prepare(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        load_split(_query(tmp_path, task, classes), "test")
    assert str(tmp_path) in str(caught.value)


def test_an_image_that_does_not_decode_is_named_when_it_is_read(tmp_path: Path) -> None:
    _image(tmp_path / "test/empty/a.png")
    (tmp_path / "test/busy").mkdir()
    (tmp_path / "test/busy/b.png").write_bytes(b"\x89PNG and nothing more")
    split = load_split(_query(tmp_path), "test")
    with pytest.raises(InputError, match=r"b\.png: is not an image that decodes"):
        list(split.frames)


def test_a_folder_of_frames_is_cut_in_time_and_cropped(tmp_path: Path) -> None:
    for index in range(10):
        _image(tmp_path / f"clip__{index * 1000:06d}.jpg")
    query = _query(tmp_path, roi=(5.0, 2.0, 15.0, 12.0))
    splits = {name: load_split(query, name) for name in ("train", "val", "test")}
    assert [len(split) for split in splits.values()] == [6, 2, 2]
    assert splits["test"].times_s == (8.0, 9.0) and splits["test"].labels is None
    assert splits["train"].frames[0].shape == (10, 10, 3)


def test_a_video_is_thinned_to_the_fps_of_the_query(tmp_path: Path) -> None:
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (32, 24))
    for index in range(50):
        writer.write(np.full((24, 32, 3), index * 5, np.uint8))
    writer.release()
    query = _query(path, fps=5.0)
    assert len(load_split(query, "train")) == 15
    assert load_split(query, "test").times_s[:2] == (4.0, 4.2)


def test_crop_takes_the_roi() -> None:
    frame = np.arange(5 * 6 * 3, dtype=np.uint8).reshape(5, 6, 3)
    assert np.array_equal(crop(frame, (1.0, 2.0, 4.0, 5.0)), frame[2:5, 1:4])
    assert crop(frame, None) is frame
