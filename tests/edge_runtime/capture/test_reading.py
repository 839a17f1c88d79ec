"""One connection to files and folders: rates, order, loops, pauses, and what a broken source does."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from edge_runtime.capture.reader import SourceReader, TimedShot
from edge_runtime.capture.sources import CameraConfig
from tests.edge_runtime.tiny import picture, write_clip, write_folder


class Clock:
    """A clock that only waiting moves; `stop_after` waits later it asks to stop."""

    def __init__(self, stop_after: int = 1000) -> None:
        self.now = 100.0
        self.left = stop_after
        self.pauses: dict[int, float] = {}

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds + self.pauses.pop(self.left, 0.0)
        self.left -= 1
        return self.left < 0


def play_source(source, fps=None, loop=False, clock=None, first=0):
    """What came of a source that was played: its reading, and what it handed over."""
    clock = clock or Clock()
    got: list[TimedShot] = []
    config = CameraConfig("c", str(source), fps, loop)
    reading = SourceReader(config, first, lambda picked, live: got.append(picked), clock=clock, wait=clock.wait)
    reading.play()
    return reading, got


def times(got):
    """The frames as (index, seconds since the start)."""
    return [(picked.index, round(picked.captured_at - 100, 6)) for picked in got]


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
def test_reader_plays_clip_at_its_rate_in_rgb(tmp_path, decoder):
    clip, clock, got = write_clip(tmp_path / "c.mp4", 6, fps=12), Clock(), []
    config = CameraConfig("c", str(clip), decoder=decoder)
    reading = SourceReader(config, 0, lambda picked, live: got.append(picked), clock=clock, wait=clock.wait)
    reading.play()
    assert times(got) == [(i, round(i / 12, 6)) for i in range(6)]
    assert (reading.index, reading.damaged, reading.problem, reading.over) == (6, 0, None, True)
    for seed, picked in enumerate(got):
        image = picked.shot()
        assert image.shape == (32, 48, 3) and image.dtype == np.uint8
        assert np.abs(image.astype(int) - picture(seed)).mean() < 12
        assert np.abs(image[..., ::-1].astype(int) - picture(seed)).mean() > 20


def test_reader_skips_frames_beyond_the_rate(tmp_path):
    clip = write_clip(tmp_path / "c.mp4", 12, fps=12)
    assert [picked.index for picked in play_source(clip, fps=6)[1]] == [0, 2, 4, 6, 8, 10]
    assert [picked.index for picked in play_source(clip, fps=5)[1]] == [0, 3, 5, 8, 10]


def test_reader_plays_folder_in_order(tmp_path):
    _, got = play_source(write_folder(tmp_path / "f", 3), fps=4)
    assert times(got) == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert np.array_equal(np.asarray(got[1].shot()), picture(101))


def test_reader_loop_continues_frame_numbers(tmp_path):
    reading, got = play_source(write_folder(tmp_path / "f", 2), fps=10, loop=True, clock=Clock(5), first=7)
    assert times(got) == [(7 + i, i / 10) for i in range(5)] and reading.problem is None


def test_reader_loop_skips_missed_laps(tmp_path):
    clock = Clock(12)
    clock.pauses[clock.left - 3] = 3 * 3600.0
    _, got = play_source(write_folder(tmp_path / "f", 4), fps=10, loop=True, clock=clock)
    assert [picked.index for picked in got[:4]] == [0, 1, 2, 3]
    assert len(got) < 14 and got[-1].index == pytest.approx(3 * 36000, abs=20)


def test_reader_counts_damaged_frames(tmp_path):
    clip = write_clip(tmp_path / "c.avi", 30, codec="MJPG")
    data = bytearray(clip.read_bytes())
    starts = [at for at in range(len(data)) if data[at : at + 4] == b"00dc"][:30]
    at = starts[10] + 8 + 20
    data[at : at + 500] = bytes(500)
    clip.write_bytes(data)
    reading, got = play_source(clip)
    assert reading.problem is None and reading.damaged >= 1 and len(got) >= 28


def test_reader_of_empty_source_reports_why(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("not a video")
    (tmp_path / "none.mp4").touch()
    writer = cv2.VideoWriter(str(tmp_path / "zero.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (48, 32))
    writer.release()
    (tmp_path / "list.m3u8").write_text(f"#EXTM3U\n#EXTINF:1,\n{write_clip(tmp_path / 'c.mp4', 3)}\n")
    (tmp_path / "concat.mp4").write_text("ffconcat version 1.0\nfile c.mp4\n")
    faults = {
        "missing.mp4": "there is no ", "empty": "has no .jpg or .png files", "text.mp4": "cannot be opened",
        "none.mp4": "cannot be opened", "zero.mp4": "no video in it", "list.m3u8": "cannot be opened",
        "concat.mp4": "cannot be opened",
    }  # fmt: skip
    for name, fault in faults.items():
        reading, got = play_source(tmp_path / name)
        assert not got and fault in (reading.problem or ""), name


def test_reader_failure_hides_secrets(tmp_path):
    def refuse(picked, live):
        raise RuntimeError("rtsp://user:secret@box/1")

    reading = SourceReader(CameraConfig("c", str(write_folder(tmp_path / "f", 1))), 0, refuse)
    reading.play()
    assert reading.over and reading.problem == "RuntimeError"
