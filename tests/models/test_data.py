"""Splits: labelled folders, COCO files, unlabelled footage, what is wrong with each, and frames resized once."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from gemel.models.data import Frames, PreparedFrames, Split, load_split
from gemel.models.errors import InputError
from gemel.models.notes import collect_notes
from gemel.models.predictions import BoxLabels
from gemel.models.preprocess import Region
from tests.models.queries import make_query


def write_image(path: Path, size: tuple[int, int] = (20, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.full((*size, 3), 90, np.uint8))


def write_coco(folder: Path, categories=("car", "bus"), **changes) -> None:
    write_image(folder / "images/clip__000200.jpg")
    write_image(folder / "images/clip__000100.jpg")
    document = {
        "images": [{"id": 7, "file_name": "clip__000200.jpg"}, {"id": 8, "file_name": "clip__000100.jpg"}],
        "categories": [{"id": index, "name": name} for index, name in enumerate(categories)],
        "annotations": [
            {"image_id": 7, "category_id": 0, "bbox": [1, 2, 10, 5]},
            {"image_id": 7, "category_id": 1, "bbox": [3, 3, 4, 4]},
        ],
    }  # fmt: skip
    (folder / "annotations.json").write_text(json.dumps({**document, **changes}))


def test_load_split_gives_label_unit_and_time_of_classified_frames(tmp_path: Path) -> None:
    write_image(tmp_path / "test/empty/monday__001500.png")
    write_image(tmp_path / "test/busy/monday__000500-b.png")
    split = load_split(make_query(data=tmp_path), "test")
    assert split.labels == ("busy", "empty")
    assert split.units == ("monday", "monday") and split.times_s == (0.5, 1.5)
    assert split.frames[0].shape == (20, 30, 3)


def test_load_split_cuts_frames_without_units_into_ten_blocks(tmp_path: Path) -> None:
    for index in range(40):
        write_image(tmp_path / f"val/{'busy' if index % 2 else 'empty'}/{index:03d}.png")
    split = load_split(make_query(data=tmp_path), "val")
    assert len(set(split.units)) == 10 and split.units.count("block-0") == 4
    assert split.times_s[3] == 3.0


def test_load_split_gives_corners_of_the_coco_boxes_of_its_classes(tmp_path: Path) -> None:
    write_coco(tmp_path / "train")
    split = load_split(make_query(data=tmp_path, task="detection", classes=("car",)), "train")
    assert split.times_s == (0.1, 0.2)
    assert split.labels == (BoxLabels(), BoxLabels(("car",), ((1.0, 2.0, 11.0, 7.0),)))


CLASSIFIED, DETECTED = ("classification", ("empty", "busy")), ("detection", ("car",))


@pytest.mark.parametrize(
    ("prepare", "asked", "message"),
    [
        (lambda d: None, CLASSIFIED, "has neither splits nor frames"),
        (lambda d: (d / "train").mkdir(), CLASSIFIED, "the split 'test' is missing"),
        (lambda d: write_image(d / "test/empty/a.png"), CLASSIFIED, "no frames of class 'busy'"),
        (lambda d: (d / "test/images").mkdir(parents=True), DETECTED, "annotations.json: .*cannot be read"),
        (lambda d: write_coco(d / "test", ("bus", "van")), DETECTED, "no category 'car'"),
        (lambda d: write_coco(d / "test", images=[], annotations=[]), DETECTED, "the split 'test' is empty"),
        (lambda d: write_coco(d / "test", annotations=[{"image_id": 1}]), DETECTED, "this key is missing"),
    ],
)
def test_load_split_names_what_is_wrong_with_the_data(tmp_path: Path, prepare, asked, message: str) -> None:
    prepare(tmp_path)
    task, classes = asked
    with pytest.raises(InputError, match=message) as caught:
        load_split(make_query(data=tmp_path, task=task, classes=classes), "test")
    assert str(tmp_path) in str(caught.value)


def test_load_split_refuses_a_class_that_is_no_folder_name(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    with pytest.raises(InputError, match=r"the class '\.\./x' is no name of a folder"):
        load_split(make_query(data=tmp_path, classes=("../x",)), "test")


def test_frames_name_an_image_that_does_not_decode(tmp_path: Path) -> None:
    write_image(tmp_path / "test/empty/a.png")
    (tmp_path / "test/busy").mkdir()
    (tmp_path / "test/busy/b.png").write_bytes(b"\x89PNG and nothing more")
    split = load_split(make_query(data=tmp_path), "test")
    with pytest.raises(InputError, match=r"b\.png: is not an image that decodes"):
        list(split.frames)


def test_load_split_cuts_a_folder_of_frames_in_time_and_crops_it(tmp_path: Path) -> None:
    for index in range(10):
        write_image(tmp_path / f"clip__{index * 1000:06d}.jpg")
    query = make_query(data=tmp_path, roi=(5.0, 2.0, 15.0, 12.0))
    splits = {name: load_split(query, name) for name in ("train", "val", "test")}
    assert [len(split) for split in splits.values()] == [6, 2, 2]
    assert splits["test"].times_s == (8.0, 9.0) and splits["test"].labels is None
    assert splits["train"].frames[0].shape == (10, 10, 3)
    with pytest.raises(InputError, match="does not fit: query gate looks at"):
        list(load_split(make_query(data=tmp_path, roi=(500.0, 2.0, 600.0, 12.0)), "test").frames)


def test_load_split_thins_a_video_to_the_fps_of_the_query(tmp_path: Path) -> None:
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (32, 24))
    for index in range(50):
        writer.write(np.full((24, 32, 3), index * 5, np.uint8))
    writer.release()
    query = make_query(data=path, fps=5.0)
    with collect_notes() as notes:
        train = load_split(query, "train")
    assert len(notes) == 1 and "clip.avi: 25 of 50 frames are used, thinned to 5 a second; set `fps`" in notes[0]
    assert len(train) == 15 and train.frames[0].shape == (24, 32, 3)
    assert load_split(query, "test").times_s[:2] == (4.0, 4.2)


def test_load_split_bounds_the_memory_of_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (32, 24))
    for _ in range(2):
        writer.write(np.zeros((24, 32, 3), np.uint8))
    writer.release()
    monkeypatch.setattr("gemel.models.data.MAX_VIDEO_BYTES", 100)
    with pytest.raises(InputError, match="its frames take more than 100 bytes"):
        load_split(make_query(data=path), "train")


def test_crop_takes_the_roi() -> None:
    frame = np.arange(5 * 6 * 3, dtype=np.uint8).reshape(5, 6, 3)
    assert np.array_equal(Region((1.0, 2.0, 4.0, 5.0)).crop(frame), frame[2:5, 1:4])
    assert Region().crop(frame) is frame


@pytest.mark.parametrize("region", [Region((0.25, 0.5, 0.75, 1.0)), Region((30, 40, 90, 80), (120, 80))])
@pytest.mark.parametrize("size", [(120, 80), (240, 160), (60, 40)])
def test_region_is_scaled_to_frames_of_another_size(region: Region, size: tuple[int, int]) -> None:
    width, height = size
    assert region.pixels(size) == (width // 4, height // 2, width * 3 // 4, height) and region.find_problem(size) == ""


def test_region_refuses_another_aspect_than_its_frames() -> None:
    region = Region((30, 40, 90, 80), (120, 80))
    assert region.find_problem((121, 80)) == ""
    assert region.find_problem((120, 90)) == "looks at a part of frames of 120x80; 120x90 pixels have another aspect"
    assert Region((0.25, 0.5, 0.75, 1.0)).find_problem((120, 90)) == ""


def make_split(loaders: list[Callable[[], np.ndarray]]) -> Split:
    return Split("train", Frames(loaders), None, ("u",) * len(loaders), tuple(map(float, range(len(loaders)))))


def make_frame(value: int) -> np.ndarray:
    return np.full((20, 30, 3), value, np.uint8)


@pytest.mark.parametrize("cached", [True, False])
def test_prepared_frames_decode_several_at_a_time(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    if not cached:
        monkeypatch.setattr("gemel.models.data.MAX_CACHED_BYTES", 0)
    two = threading.Barrier(2, timeout=60)  # no thread passes alone

    def load(value: int) -> np.ndarray:
        two.wait()
        return make_frame(value)

    found = PreparedFrames(make_query(), make_split([lambda value=value: load(value) for value in range(4)]))
    progress: list[float] = []
    if cached:
        found.load(progress.append)
        assert progress == [0.25, 0.5, 0.75, 1.0]
    assert found.batch([2, 0])[:, 0, 0, 0].tolist() == [2, 0] and found.sizes([2]) == [(30, 20)]


def test_prepared_frames_name_the_first_that_does_not_decode() -> None:
    def fail(name: str) -> np.ndarray:
        raise InputError(name, "is no image")

    loaders: list[Callable[[], np.ndarray]] = [lambda: make_frame(1) for _ in range(6)]
    loaders[2:4] = [lambda: fail("a.png"), lambda: fail("b.png")]
    with pytest.raises(InputError, match=r"a\.png"):
        PreparedFrames(make_query(), make_split(loaders)).load()
