"""Clips: the same seed gives the same bytes, the file is H.264 that OpenCV reads, the truth matches its frames."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from gemel.video_samples.clips import SCENES, Clip, Recorder, join, read_frames, record

CODES = {"avc1", "h264", "H264", "AVC1"}


@pytest.fixture(scope="module")
def clip_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    record(Clip("one", "square", 3, 0.8), folder)
    return folder / "one.mp4"


def test_the_same_seed_gives_the_same_bytes(clip_file: Path, tmp_path: Path):
    record(Clip("one", "square", 3, 0.8), tmp_path)
    record(Clip("other", "square", 4, 0.8), tmp_path)
    for suffix in (".mp4", ".gt.jsonl"):
        again = (tmp_path / "one").with_suffix(suffix).read_bytes()
        assert again == clip_file.with_suffix(suffix).read_bytes()
        assert again != (tmp_path / "other").with_suffix(suffix).read_bytes()


def test_a_clip_is_h264_with_every_frame(clip_file: Path):
    video = cv2.VideoCapture(str(clip_file))
    fourcc = int(video.get(cv2.CAP_PROP_FOURCC))
    assert bytes((fourcc >> 8 * i) & 0xFF for i in range(4)).decode() in CODES
    assert video.get(cv2.CAP_PROP_FPS) == pytest.approx(10)
    assert int(video.get(cv2.CAP_PROP_FRAME_COUNT)) == 8
    video.release()
    frames = [frame for _, frame in read_frames(clip_file)]
    assert len(frames) == 8
    assert all(frame.shape == (360, 640, 3) for frame in frames)


def test_decoded_frames_look_like_what_was_rendered(tmp_path: Path):
    ramp = np.linspace(30, 220, 640, dtype=np.uint8)
    frame = np.dstack([np.tile(ramp, (360, 1)), np.full((360, 640), 90, np.uint8), np.tile(ramp[::-1], (360, 1))])
    with Recorder(tmp_path / "ramp.mp4", (640, 360), 10) as recorder:
        for _ in range(3):
            recorder.add(frame)
    decoded = [image for _, image in read_frames(tmp_path / "ramp.mp4")]
    assert np.abs(decoded[-1].astype(int) - frame).mean() < 4


def test_the_truth_has_one_line_for_each_object_of_a_frame(clip_file: Path):
    rows = [json.loads(line) for line in clip_file.with_suffix(".gt.jsonl").read_text().splitlines()]
    assert {row["frame"] for row in rows} == set(range(8))
    seen = set()
    for row in rows:
        assert set(row) == {"frame", "track", "class", "box", "visible"}
        assert row["class"] in ("car", "bus", "truck", "bicycle", "person")
        assert (row["frame"], row["track"]) not in seen
        seen.add((row["frame"], row["track"]))


def test_every_nth_frame_is_the_same_picture_as_when_all_are_read(clip_file: Path):
    everything = dict(read_frames(clip_file))
    thinned = dict(read_frames(clip_file, every=3))
    assert list(thinned) == [0, 3, 6]
    assert all(np.array_equal(thinned[i], everything[i]) for i in thinned)


def test_joined_clips_play_one_after_the_other(clip_file: Path, tmp_path: Path):
    join([clip_file, clip_file], tmp_path / "both.mp4")
    assert sum(1 for _ in read_frames(tmp_path / "both.mp4")) == 16
    assert not list(tmp_path.glob("*.txt"))


def test_a_clip_that_cannot_be_written_says_so(tmp_path: Path):
    with (
        pytest.raises(OSError, match="encoder failed"),
        Recorder(tmp_path / "missing" / "x.mp4", (640, 360), 10) as recorder,
    ):
        for _ in range(60):
            recorder.add(np.zeros((360, 640, 3), np.uint8))


def test_night_is_darker_than_day_and_both_show_the_same_place():
    day, night = (SCENES[f"junction-{time}"]().backdrop.lit for time in ("day", "night"))
    assert day.shape == night.shape
    assert night.mean() < 0.6 * day.mean()
