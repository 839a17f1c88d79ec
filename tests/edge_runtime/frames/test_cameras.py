"""Cameras from files and folders: rates, order, loops and what a broken source does."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from edge_runtime.frames.cameras import Camera, CameraConfig, RateGate
from edge_runtime.frames.sources import open_source, probe
from models.errors import InputError
from tests.edge_runtime.tiny import picture, write_clip, write_folder


class Clock:
    """A clock that only waiting moves; `stop_after` waits later it asks to stop."""

    def __init__(self, stop_after: int = 1000) -> None:
        self.now = 100.0
        self.left = stop_after

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.left -= 1
        return self.left < 0


def played(source, fps=None, queries=None, loop=False, stop_after=1000):
    """The frames each query got, as (index, captured_at since the start)."""
    clock = Clock(stop_after)
    got: dict[str, list] = {}

    def put(query, frame):
        got.setdefault(query, []).append(frame)

    camera = Camera(CameraConfig("c", str(source), fps, loop), queries or {"q": None}, put, clock, clock.wait)
    camera.play()
    return (
        camera,
        {
            query: [(frame.index, round(frame.captured_at - 100, 6)) for frame in frames]
            for query, frames in got.items()
        },
        got,
    )


def test_a_clip_plays_at_its_own_rate_and_in_rgb(tmp_path):
    camera, times, frames = played(write_clip(tmp_path / "c.mp4", 6, fps=12))
    assert times["q"] == [(i, round(i / 12, 6)) for i in range(6)]
    assert camera.to_json() == {"id": "c", "frames": 6, "delivered": 6, "undecodable": 0, "error": None}
    for seed, frame in enumerate(frames["q"]):
        assert frame.image.shape == (32, 48, 3) and frame.image.dtype == np.uint8
        assert np.abs(frame.image.astype(int) - picture(seed)).mean() < 12
        assert np.abs(frame.image[..., ::-1].astype(int) - picture(seed)).mean() > 20


def test_frames_beyond_the_cameras_rate_are_skipped_and_a_query_may_take_fewer(tmp_path):
    clip = write_clip(tmp_path / "c.mp4", 12, fps=12)
    _, times, _ = played(clip, fps=6, queries={"all": None, "few": 2.0, "more": 50.0})
    assert [index for index, _ in times["all"]] == [0, 2, 4, 6, 8, 10] == [index for index, _ in times["more"]]
    assert [index for index, _ in times["few"]] == [0, 6]
    _, times, _ = played(clip, fps=5)
    assert [index for index, _ in times["q"]] == [0, 3, 5, 8, 10]


def test_a_folder_plays_in_the_order_of_names_at_the_cameras_rate(tmp_path):
    _, times, frames = played(write_folder(tmp_path / "f", 3), fps=4)
    assert times["q"] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert np.array_equal(frames["q"][1].image, picture(101))


def test_a_loop_goes_on_numbering_and_ends_when_asked(tmp_path):
    camera, times, _ = played(write_folder(tmp_path / "f", 2), fps=10, loop=True, stop_after=5)
    assert times["q"] == [(i, i / 10) for i in range(5)]
    assert camera.error is None


def test_an_image_that_does_not_decode_is_counted_and_passed_over(tmp_path):
    folder = write_folder(tmp_path / "f", 2)
    (folder / "000a.jpg").write_bytes(b"no image")
    camera, times, _ = played(folder)
    assert [index for index, _ in times["q"]] == [0, 2]
    assert camera.to_json()["undecodable"] == 1


def test_what_goes_wrong_in_the_thread_ends_that_camera_and_is_told(tmp_path):
    ends = []

    def refuse(query, frame):
        raise OSError("disk full")

    camera = Camera(
        CameraConfig("c", str(write_folder(tmp_path / "f", 1))), {"q": None}, refuse, ended=lambda: ends.append(1)
    )
    camera.start()
    assert camera.join(30) and not camera.alive
    assert camera.error == "OSError: disk full" and ends == [1]


def test_a_gate_lets_the_first_frame_of_each_period_through():
    gate = RateGate(10)
    assert [i for i in range(30) if gate.passes(i / 30)] == [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]


def test_sources_without_a_frame_are_refused_with_what_is_wrong(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("not a video")
    (tmp_path / "none.mp4").touch()
    writer = cv2.VideoWriter(str(tmp_path / "zero.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (48, 32))
    writer.release()
    bad = write_folder(tmp_path / "bad", 0)
    (bad / "x.png").write_bytes(b"no image")
    faults = {
        "missing.mp4": "there is no",
        "empty": "has no .jpg or .png files",
        "text.mp4": "no frame that can be",
        "none.mp4": "no frame that can be",
        "zero.mp4": "no frame that can be",
        "bad": "no frame that can be",
    }
    for name, fault in faults.items():
        with pytest.raises(InputError, match=rf"^box.yaml: cameras.a.source: .*{fault}.*; "):
            probe(str(tmp_path / name), "box.yaml", "cameras.a.source")


def test_an_unreachable_stream_is_refused_without_showing_its_password():
    with pytest.raises(InputError) as error:
        probe("http://user:secret@127.0.0.1:9/stream", "box.yaml", "cameras.a.source")
    assert "127.0.0.1:9/stream" in str(error.value) and "secret" not in str(error.value)


def test_probing_shows_the_first_frame_that_decodes(tmp_path):
    folder = write_folder(tmp_path / "f", 1)
    (folder / "0.png").write_bytes(b"no image")
    assert np.array_equal(probe(str(folder)), picture(100))
    source = open_source(str(folder))
    assert (source.fps, source.live) == (None, False)
