"""The sample workload: the layout others read, splits that share nothing, questions answered both ways."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import pytest
import yaml

import gemel.video_samples.__main__ as command
from gemel.models.data import load_split
from gemel.models.workload import load_workload
from gemel.video_samples.clips import Clip
from gemel.video_samples.queries import SAMPLE_QUERIES, Zone
from gemel.video_samples.renderer import FrameTruth
from gemel.video_samples.sample import SPLITS, SplitSize, select_seed, write_sample

TINY = {"train": SplitSize(1, 4.0, 1.0, 1), "val": SplitSize(1, 3.0, 1.0, 1), "test": SplitSize(2, 0.8, 10.0, 4)}


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample"), seed=1, splits=TINY, workers=2)


def stems(folder: Path) -> list[str]:
    return [path.stem for path in folder.rglob("*.jpg")]


def test_the_workload_file_is_one_that_gemel_reads(sample: Path):
    workload = load_workload(sample)
    assert set(workload.cameras) == {"junction-day", "junction-night", "square"}
    assert len(workload.queries) >= 4
    assert len({query.model for query in workload.queries}) >= 2
    assert any(query.task == "detection" for query in workload.queries)
    for query in workload.queries:
        assert query.weights == sample.parent / "weights" / f"{query.id}.safetensors"
        assert 100 <= query.sla_ms <= 200 and query.fps == 5
        assert query.roi is not None
        x0, y0, x1, y1 = query.roi
        assert 0 <= x0 < x1 <= 640 and 0 <= y0 < y1 <= 360


def test_each_camera_plays_its_test_clips(sample: Path):
    for camera in load_workload(sample).cameras.values():
        video = cv2.VideoCapture(camera.source)
        assert int(video.get(cv2.CAP_PROP_FRAME_COUNT)) == 16
        rows = Path(camera.source).with_suffix(".gt.jsonl").read_text().splitlines()
        assert {json.loads(row)["frame"] for row in rows} == set(range(16))


def test_splits_share_no_unit_and_names_tell_unit_and_time(sample: Path):
    for question in SAMPLE_QUERIES:
        units: dict[str, set[str]] = {}
        for split in TINY:
            for stem in stems(sample.parent / "data" / question.id / split):
                unit, milliseconds = stem.split("__")
                assert unit.startswith(f"{question.camera}-{split}-")
                assert milliseconds.isdigit()
                units.setdefault(split, set()).add(unit)
        assert not units.get("train", set()) & units.get("test", set())
        assert not units.get("val", set()) & units.get("test", set())


def test_labelled_frames_are_crops_of_the_query_region(sample: Path):
    for question in SAMPLE_QUERIES:
        x0, y0, x1, y1 = question.roi
        image = next((sample.parent / "data" / question.id).rglob("*.jpg"))
        picture = cv2.imread(str(image))
        assert picture is not None and picture.shape == (y1 - y0, x1 - x0, 3)


def test_detection_frames_load_with_boxes_inside_them(sample: Path):
    query = load_workload(sample).query("day-vehicles")
    for name, count in (("train", 4), ("val", 3), ("test", 4)):
        split = load_split(query, name)
        assert len(split) == count
        assert split.labels is not None and any(truth.boxes for truth in split.labels)  # type: ignore[union-attr]
        height, width = split.frames[0].shape[:2]
        for truth in split.labels:
            for x0, y0, x1, y1 in truth.boxes:  # type: ignore[union-attr]
                assert 0 <= x0 < x1 <= width + 0.1 and 0 <= y0 < y1 <= height + 0.1


def files_under(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_seed_gives_the_same_sample_and_replaces_an_earlier_one(sample: Path, tmp_path: Path):
    stale = tmp_path / "data" / "night-lane" / "train" / "busy" / "junction-night-train-9__000000.jpg"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"old")
    told: list[float] = []
    write_sample(tmp_path, seed=1, splits=TINY, workers=1, on_progress=told.append)
    assert told == sorted(told) and told[-1] == 1.0, "how much is rendered is told clip by clip"
    assert files_under(tmp_path) == files_under(sample.parent)


def test_the_full_sample_is_large_enough_to_learn_from():
    labelled = {name: size.clips * round(size.seconds * size.fps / size.label_every) for name, size in SPLITS.items()}
    assert 250 <= labelled["train"] <= 400
    assert 150 <= labelled["val"] <= 250 and 100 <= labelled["test"] <= 150
    assert all(size.clips >= 3 for size in SPLITS.values())


def test_cast_clips_answer_their_question_both_ways():
    chosen = select_seed(Clip("unit", "square", 70, 13.0))
    assert chosen == select_seed(Clip("unit", "square", 70, 13.0))
    question = next(q for q in SAMPLE_QUERIES if q.camera == "square")
    from gemel.video_samples.square import square

    world = square().start_world(chosen.seed)
    answers = []
    for _ in range(26):
        seen = [FrameTruth(a.track, a.kind, (0, 0, 0, 0), 1.0, (a.x, a.y)) for a in world.actors()]
        answers.append(question.label(seen))
        for _ in range(5):
            world.step()
    yes, no = answers.count("people"), answers.count("empty")
    assert 0.3 <= yes / (yes + no) <= 0.7


def test_a_zone_says_yes_no_or_nothing():
    zone = Zone((0, 0, 4, 4), (-2, -2, 6, 6))

    def at(x: float, visible: float = 1.0, kind: str = "bus") -> list[FrameTruth]:
        return [FrameTruth(1, kind, (0, 0, 50, 50), visible, (x, 1.0))]

    assert zone.answer(at(2.0), ("bus",)) is True
    assert zone.answer(at(5.0), ("bus",)) is None
    assert zone.answer(at(2.0, visible=0.2), ("bus",)) is None
    assert zone.answer(at(9.0), ("bus",)) is False
    assert zone.answer(at(2.0, kind="car"), ("bus",)) is False


def test_objects_mostly_outside_the_region_are_no_boxes():
    question = next(q for q in SAMPLE_QUERIES if q.task == "detection")
    top = question.roi[1]
    inside = FrameTruth(1, "car", (100, top + 20, 160, top + 50), 1.0, (0, 0))
    mostly_out = FrameTruth(2, "car", (300, top - 40, 360, top + 10), 1.0, (0, 0))
    cut = FrameTruth(3, "bus", (200, top - 20, 300, top + 40), 1.0, (0, 0))
    someone = FrameTruth(4, "person", (10, top + 20, 30, top + 80), 1.0, (0, 0))
    assert question.boxes([inside, mostly_out, cut, someone]) == [(100, 20, 160, 50), (200, 0, 300, 40)]


def test_the_command_writes_where_it_is_told(tmp_path: Path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(command, "write_sample", lambda out, seed: asked.append((out, seed)) or out / "workload.yaml")
    monkeypatch.setattr("sys.argv", ["video_samples", str(tmp_path / "there"), "--seed", "7"])
    assert command.main() == 0
    assert asked == [(tmp_path / "there", 7)]
    assert capsys.readouterr().out.strip() == str(tmp_path / "there" / "workload.yaml")


def test_the_workload_file_is_plain_yaml(sample: Path):
    document = yaml.safe_load(sample.read_text())
    assert list(document) == ["name", "accuracy_target", "cameras", "queries"]
    assert document["cameras"]["square"]["source"] == "clips/square.mp4"
