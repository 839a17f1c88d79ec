"""One connection to files and folders: rates, order, loops, pauses, and what a broken source does."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from edge_runtime.capture.reader import SourceReader, TimedShot
from edge_runtime.capture.sources import CameraConfig, FFmpegSource, decode_shot, open_source
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


def played(source, fps=None, loop=False, clock=None, first=0):
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
def test_a_clip_plays_at_its_own_rate_and_in_rgb(tmp_path, decoder):
    clip, clock, got = write_clip(tmp_path / "c.mp4", 6, fps=12), Clock(), []
    config = CameraConfig("c", str(clip), decoder=decoder)
    reading = SourceReader(config, 0, lambda picked, live: got.append(picked), clock=clock, wait=clock.wait)
    reading.play()
    assert times(got) == [(i, round(i / 12, 6)) for i in range(6)]
    assert (reading.index, reading.damaged, reading.fault, reading.over) == (6, 0, None, True)
    for seed, picked in enumerate(got):
        image = picked.shot()
        assert image.shape == (32, 48, 3) and image.dtype == np.uint8
        assert np.abs(image.astype(int) - picture(seed)).mean() < 12
        assert np.abs(image[..., ::-1].astype(int) - picture(seed)).mean() > 20


def test_frames_beyond_the_cameras_rate_are_skipped(tmp_path):
    clip = write_clip(tmp_path / "c.mp4", 12, fps=12)
    assert [picked.index for picked in played(clip, fps=6)[1]] == [0, 2, 4, 6, 8, 10]
    assert [picked.index for picked in played(clip, fps=5)[1]] == [0, 3, 5, 8, 10]


def test_a_folder_plays_in_the_order_of_names_at_the_cameras_rate(tmp_path):
    _, got = played(write_folder(tmp_path / "f", 3), fps=4)
    assert times(got) == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert np.array_equal(np.asarray(got[1].shot()), picture(101))


def test_a_loop_goes_on_numbering_from_where_the_last_connection_was_and_ends_when_asked(tmp_path):
    reading, got = played(write_folder(tmp_path / "f", 2), fps=10, loop=True, clock=Clock(5), first=7)
    assert times(got) == [(7 + i, i / 10) for i in range(5)] and reading.fault is None


def test_after_a_pause_a_file_goes_on_where_it_would_be_without_a_burst_of_what_it_missed(tmp_path):
    clip, clock = write_clip(tmp_path / "c.mp4", 60, fps=10), Clock()
    clock.pauses[clock.left - 10] = 3.0
    at = times(played(clip, clock=clock)[1])
    assert at[:10] == [(i, i / 10) for i in range(10)]
    after = [(index, time) for index, time in at if time >= 3.9]
    assert sum(time == pytest.approx(4.0) for _, time in after) <= 3, "not what it missed meanwhile"
    assert [index for index, time in after if time > 4.05] == list(range(41, 60))


def test_a_loop_that_was_paused_for_hours_leaves_out_the_laps_that_it_missed(tmp_path):
    clock = Clock(12)
    clock.pauses[clock.left - 3] = 3 * 3600.0
    _, got = played(write_folder(tmp_path / "f", 4), fps=10, loop=True, clock=clock)
    assert [picked.index for picked in got[:4]] == [0, 1, 2, 3]
    assert len(got) < 14 and got[-1].index == pytest.approx(3 * 36000, abs=20)


def test_a_picture_that_does_not_decode_is_none_and_the_others_come(tmp_path):
    folder = write_folder(tmp_path / "f", 2)
    (folder / "000a.jpg").write_bytes(b"no image")
    _, got = played(folder)
    assert [decode_shot(picked.shot) is None for picked in got] == [False, True, False]


def test_damage_within_a_clip_is_counted_and_the_good_frames_come(tmp_path):
    clip = write_clip(tmp_path / "c.avi", 30, codec="MJPG")
    data = bytearray(clip.read_bytes())
    starts = [at for at in range(len(data)) if data[at : at + 4] == b"00dc"][:30]
    at = starts[10] + 8 + 20
    data[at : at + 500] = bytes(500)
    clip.write_bytes(data)
    reading, got = played(clip)
    assert reading.fault is None and reading.damaged >= 1 and len(got) >= 28


def test_a_source_without_a_frame_tells_why(tmp_path):
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
        reading, got = played(tmp_path / name)
        assert not got and fault in (reading.fault or ""), name


def test_what_takes_frames_may_fail_and_that_is_told_without_what_stands_in_the_message(tmp_path):
    def refuse(picked, live):
        raise RuntimeError("rtsp://user:secret@box/1")

    reading = SourceReader(CameraConfig("c", str(write_folder(tmp_path / "f", 1))), 0, refuse)
    reading.play()
    assert reading.over and reading.fault == "RuntimeError"


def test_a_folder_has_no_rate_and_a_clip_its_own(tmp_path):
    for source, fps in ((write_folder(tmp_path / "f", 1), None), (write_clip(tmp_path / "c.mp4", 2, fps=7), 7)):
        opened = open_source(CameraConfig("c", str(source)))
        assert opened.fps == fps
        opened.close()


def test_a_source_that_is_closed_on_the_way_leaves_no_packets_behind(tmp_path):
    source = FFmpegSource(CameraConfig("c", str(write_clip(tmp_path / "c.mp4", 6, fps=12))))
    assert source.advance()
    source.close()
    assert list(source._packets) == [], "what reads packets ends, or the one that it holds is never freed"
