"""One connection to files and folders: rates, order, loops, pauses, frame memory, and broken sources."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import av
import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.capture.reader import (
    MAX_AHEAD_S,
    MAX_LATE_S,
    FramePool,
    Playback,
    RecentRate,
    SourceReader,
    TimedShot,
)
from gemel.edge_runtime.capture.sources import CameraConfig
from gemel.models.files.rgb import RgbConverter, memory_of
from gemel.models.files.video import RateGate
from tests.edge_runtime.tiny import picture, write_clip, write_folder
from tests.video_files import draw_frame, write_video


class Clock:
    """A clock that only waiting moves; it requests a stop after `stop_after` waits."""

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


def play_source(source, fps=None, loop=False, clock=None, first=0, **keys):
    """The reader of a source that was played, and the frames that it delivered."""
    clock = clock or Clock()
    got: list[TimedShot] = []
    config = CameraConfig("c", str(source), fps, loop, **keys)
    reader = SourceReader(config, first, lambda _, shot: got.append(shot), clock=clock, wait=clock.wait)
    reader.play()
    return reader, got


def times(got):
    """The frames as (index, seconds since the start)."""
    return [(shot.index, round(shot.captured_at - 100, 6)) for shot in got]


def test_reader_plays_clip_at_its_rate_in_rgb(tmp_path):
    reader, got = play_source(write_clip(tmp_path / "c.mp4", 6, fps=12))
    assert times(got) == [(i, round(i / 12, 6)) for i in range(6)]
    assert (reader.index, reader.damaged, reader.problem, reader.over) == (6, 0, None, True)
    for seed, shot in enumerate(got):
        image = shot.shot()
        assert image is not None and image.shape == (32, 48, 3) and image.dtype == np.uint8
        assert np.abs(image.astype(int) - picture(seed)).mean() < 12
        assert np.abs(image[..., ::-1].astype(int) - picture(seed)).mean() > 20


def test_reader_plays_a_variable_rate_by_the_times_of_the_file(tmp_path):
    clip = write_video(tmp_path / "c.mp4", map(draw_frame, range(6)), times_ms=[0, 40, 80, 500, 1500, 1600])
    assert times(play_source(clip)[1]) == [(0, 0), (1, 0.04), (2, 0.08), (3, 0.5), (4, 1.5), (5, 1.6)]
    assert [index for index, _ in times(play_source(clip, fps=10)[1])] == [0, 3, 4, 5]
    looped = times(play_source(clip, loop=True, clock=Clock(9))[1])
    lap_s = looped[6][1]
    assert lap_s > 1.6 and [round(at - lap_s, 3) for _, at in looped[6:]] == [0, 0.04, 0.08]


def test_reader_skips_frames_beyond_the_rate(tmp_path):
    clip = write_clip(tmp_path / "c.mp4", 12, fps=12)
    assert [shot.index for shot in play_source(clip, fps=6)[1]] == [0, 2, 4, 6, 8, 10]
    assert [shot.index for shot in play_source(clip, fps=5)[1]] == [0, 3, 5, 8, 10]


def test_reader_waits_for_wanted_frames_alone_and_decodes_others_a_little_ahead(tmp_path):
    clip, clock = write_clip(tmp_path / "c.mp4", 24, fps=12), Clock()
    assert times(play_source(clip, fps=4, clock=clock)[1]) == [(i, round(i / 12, 6)) for i in range(0, 24, 3)]
    assert clock.left == 1000 - 8
    clock = Clock()
    assert times(play_source(clip, fps=1, clock=clock)[1]) == [(0, 0.0), (12, 1.0)]
    assert 1000 - clock.left == 2 + 2 * 3 and clock.now - 100 >= 23 / 12 - MAX_AHEAD_S


def test_reader_plays_folder_in_order(tmp_path):
    _, got = play_source(write_folder(tmp_path / "f", 3), fps=4)
    assert times(got) == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert np.array_equal(np.asarray(got[1].shot()), picture(101))


def test_reader_loop_continues_frame_numbers(tmp_path):
    reader, got = play_source(write_folder(tmp_path / "f", 2), fps=10, loop=True, clock=Clock(5), first=7)
    assert times(got) == [(7 + i, i / 10) for i in range(5)] and reader.problem is None


def test_reader_loop_skips_missed_laps(tmp_path):
    clock = Clock(12)
    clock.pauses[clock.left - 3] = 3 * 3600.0
    _, got = play_source(write_folder(tmp_path / "f", 4), fps=10, loop=True, clock=clock)
    assert [shot.index for shot in got[:4]] == [0, 1, 2, 3]
    assert len(got) < 14 and got[-1].index == pytest.approx(3 * 36000, abs=20)


def test_reader_counts_damaged_frames(tmp_path):
    clip = write_clip(tmp_path / "c.avi", 30, codec="MJPG")
    data = bytearray(clip.read_bytes())
    starts = [at for at in range(len(data)) if data[at : at + 4] == b"00dc"][:30]
    at = starts[10] + 8 + 20
    data[at : at + 500] = bytes(500)
    clip.write_bytes(data)
    reader, got = play_source(clip)
    assert reader.problem is None and reader.damaged >= 1 and len(got) >= 28


def test_reader_of_empty_source_reports_why(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("not a video")
    (tmp_path / "none.mp4").touch()
    writer = cv2.VideoWriter(str(tmp_path / "zero.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (48, 32))
    writer.release()
    (tmp_path / "list.m3u8").write_text(f"#EXTM3U\n#EXTINF:1,\n{write_clip(tmp_path / 'c.mp4', 3)}\n")
    (tmp_path / "concat.mp4").write_text("ffconcat version 1.0\nfile c.mp4\n")
    (tmp_path / "stream.sdp").write_text("v=0\nm=video 5004 RTP/AVP 96\n")
    faults = {"missing.mp4": "there is no ", "empty": "has no .jpg or .png files", "zero.mp4": "no video in it"}
    faults |= dict.fromkeys(["text.mp4", "none.mp4", "list.m3u8", "concat.mp4", "stream.sdp"], "cannot be opened")
    for name, fault in faults.items():
        reader, got = play_source(tmp_path / name)
        assert not got and fault in (reader.problem or ""), name


def test_reader_failure_hides_secrets(tmp_path):
    def refuse(_, shot):
        raise RuntimeError("rtsp://user:secret@box/1")

    reader = SourceReader(CameraConfig("c", str(write_folder(tmp_path / "f", 1))), 0, refuse)
    reader.play()
    assert reader.over and reader.problem == "RuntimeError"


def test_rate_gate_passes_first_frame_of_each_period():
    gate = RateGate(10)
    assert [i for i in range(30) if gate.passes(i / 30)] == [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]


@given(st.floats(1, 60), st.floats(1.1, 600), st.floats(0.0001, 0.01))
def test_playback_after_a_pause_has_no_burst(fps, retry_pause_s, decode_s):
    playback, now, index, passed = Playback(0.0, fps), retry_pause_s, 0, 0
    while playback.wait_s(index / fps, now) == 0 and index < 5000:
        passed += playback.passes(index / fps, now)
        index, now = index + 1, now + decode_s
    assert passed <= (now - retry_pause_s) * fps + 3


def test_playback_with_slow_decoder_delivers_every_frame():
    playback = Playback(0.0, 10.0)
    assert all(playback.passes(index / 10, index * 0.2) for index in range(200))


def test_playback_counts_whole_missed_laps():
    playback = Playback(0.0, 10.0)
    assert playback.missed_laps(0.0, 2.0, MAX_LATE_S) == 0
    assert playback.missed_laps(2.0, 2.0, 2.0 + 7.5) == 3


def test_recent_rate_covers_ten_seconds():
    rate = RecentRate()
    assert rate.per_second(0.0) == 0.0
    for index in range(100):
        rate.add(index / 5)
    assert rate.per_second(20.0) == pytest.approx(5.0)
    assert rate.per_second(40.0) == 0.0


SIZE = (24, 32, 3)
VIEWS: dict[str, Callable[[Any], Any]] = {
    "frame": lambda image: image,
    "crop": lambda image: image[2:, 2:][1:5, 1:5],
    "mirrored": lambda image: image[:, ::-1, ::-1],
    "other type": lambda image: image.reshape(-1).view(np.int8),
    "tensor": lambda image: torch.from_numpy(image).permute(2, 0, 1)[:, 4:, 2:8],
    "array over a buffer": lambda image: np.frombuffer(memoryview(image), np.uint8)[100:],
}


def draw_image(memory: FramePool, value: int, size: tuple[int, int, int] = SIZE) -> np.ndarray:
    """A frame that is all of this value."""
    image = memory.decode(lambda: np.full(size, value, np.uint8))
    assert image is not None and image.shape == size and (image == value).all()
    return image


def test_frame_pool_reuses_memory():
    memory, addresses, shown = FramePool(), set(), None
    for value in range(100):
        shown = draw_image(memory, value)
        addresses.add(shown.__array_interface__["data"][0])
    assert shown is not None and len(addresses) <= 2


@pytest.mark.parametrize("view", VIEWS)
def test_frame_pool_keeps_referenced_frames(view):
    memory = FramePool()
    image = draw_image(memory, 200)
    kept = VIEWS[view](image)
    del image
    for value in range(50):
        draw_image(memory, value)
    assert set(np.asarray(kept).tobytes()) == {200}


def test_frame_pool_follows_the_frame_size():
    memory = FramePool()
    small = [draw_image(memory, value) for value in range(4)]
    large = [draw_image(memory, value, (48, 64, 3)) for value in range(4)]
    del small[1:], large[1:]
    again = [draw_image(memory, value) for value in range(9, 12)]
    assert (small[0] == 0).all() and (large[0] == 0).all()
    assert [int(image[0, 0, 0]) for image in again] == [9, 10, 11]


def test_frame_pool_takes_two_frames_in_the_memory_of_ffmpeg_and_copies_others():
    memory, convert = FramePool(), RgbConverter()

    def decode(value: int) -> np.ndarray:
        frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), value, np.uint8), "rgb24")
        image = memory.decode(partial(convert, frame))
        assert image is not None and set(image.flat) == {value}
        return image

    images = [decode(value) for value in range(6)]
    assert [memory_of(image) is not None for image in images] == [True, True, False, False, False, False]
    assert [set(image.flat) for image in images] == [{value} for value in range(6)]
    view = images[0][2:, 3:]
    images.clear()
    later = [decode(value) for value in (7, 8)]
    assert [memory_of(image) is not None for image in later] == [True, False] and set(view.flat) == {0}
