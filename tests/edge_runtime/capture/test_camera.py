"""Cameras that fail: lost within their timeout, retried, logged once, without their password."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gemel.edge_runtime.capture.camera import MAX_ABANDONED, Camera
from gemel.edge_runtime.capture.failures import SourceLost
from gemel.edge_runtime.capture.reader import FramePool
from gemel.edge_runtime.capture.sources import CameraConfig, FrameRequest
from gemel.edge_runtime.frames.queues import Frame
from gemel.models.notes import collect_notes
from gemel.models.preprocess import Region
from tests.edge_runtime.capture.faulty_cameras import FaultyCamera, HttpCamera, RtspCamera
from tests.edge_runtime.tiny import write_clip, write_folder

CAMERA_TIMEOUT_S = 0.8
TIMEOUT_S = 60.0
KINDS = [RtspCamera, HttpCamera]


class RecordedCamera:
    """A camera that plays, and what it has delivered."""

    def __init__(self, config: CameraConfig, queries=None, **keys) -> None:
        self.frames: list[tuple[str, Frame]] = []
        self._came = threading.Condition()
        self.camera = Camera(config, queries or {"q": FrameRequest()}, self._put, **keys)

    def _put(self, query: str, frame: Frame) -> None:
        with self._came:
            self.frames.append((query, frame))
            self._came.notify_all()

    def more(self, count: int = 3) -> None:
        """Wait for more frames."""
        with self._came:
            target = len(self.frames) + count
            assert self._came.wait_for(lambda: len(self.frames) >= target, TIMEOUT_S), self.camera.to_json()

    def until(self, is_true: Callable[[dict], bool]) -> dict:
        """Wait for a state of the camera."""
        deadline = time.monotonic() + TIMEOUT_S
        while not is_true(row := self.camera.to_json()):
            assert time.monotonic() < deadline, row
            time.sleep(0.01)
        return row

    def until_state(self, state: str) -> dict:
        return self.until(lambda now: now["state"] == state)


@contextmanager
def play_camera(
    source, queries=None, fps=None, loop=False, timeout_s=CAMERA_TIMEOUT_S, every_s=None, decode="auto", skip="auto",
    **keys,
) -> Iterator[RecordedCamera]:  # fmt: skip
    """A camera that plays this source."""
    config = CameraConfig("c", str(source), fps, loop, decode, timeout_s, every_s, skip)
    watched = RecordedCamera(config, queries, **keys)
    watched.camera.start()
    try:
        yield watched
    finally:
        watched.camera.stop()
        assert watched.camera.join(TIMEOUT_S)


def test_frames_that_no_query_is_due_for_are_not_converted(monkeypatch):
    converted = []
    decode = FramePool.decode
    monkeypatch.setattr(FramePool, "decode", lambda pool, shot: converted.append(1) or decode(pool, shot))
    off = set()
    with (
        RtspCamera() as camera,
        play_camera(
            camera.url,
            {"slow": FrameRequest(1.0), "slower": FrameRequest(0.5)},
            skip="none",
            is_on=lambda query: query not in off,
        ) as watched,
    ):
        watched.more(4)
        row = watched.until(lambda row: row["decoded"] >= 3 * len(converted))
        assert row["delivered"] > len(converted) and watched.camera._needed_fps() == 1.0
        watched.camera.answered_fps = {"slow": 0.3}
        assert watched.camera._needed_fps() == 0.5, "an overloaded box answers less of one"
        off |= {"slow", "slower"}
        assert watched.camera._needed_fps() == 0.0
        before = len(converted)
        watched.more(2)
        assert len(converted) <= before + 1 and watched.frames[-1][1].image is None


class Packets:
    """Takes the packets of a camera, as the ring of clips does."""

    count = 0

    def begin(self, stream) -> None: ...

    def add(self, packet) -> None:
        self.count += 1


def test_queries_see_the_smaller_stream_and_clips_get_the_main_one(caplog):
    packets = Packets()
    with RtspCamera(size=(96, 64)) as large, RtspCamera(size=(48, 48)) as small:
        keys = {"timeout_s": CAMERA_TIMEOUT_S, "skip": "nonkey"}
        main = Camera(CameraConfig("c, main stream", large.url, **keys), {}, lambda *_: None, packets=packets)
        with play_camera(small.url, main=main) as watched:
            watched.more(4)
            watched.until(lambda row: packets.count > 4 and "another aspect" in caplog.text)
            assert {frame.image.shape for _, frame in watched.frames if frame.image is not None} == {(48, 48, 3)}
            large.refuse()
            watched.until(lambda row: (row["error"] or "").startswith("its main stream: "))
            assert watched.camera.state == "streaming"
    assert caplog.text.count("48x48 pixels, its main one 96x64, another aspect") == 1 and not main.alive


def mute(camera: FaultyCamera) -> None:
    camera.muted = True


def stall(camera: FaultyCamera) -> None:
    camera.silent = True
    camera.cut()


def babble(camera: FaultyCamera) -> None:
    camera.garbage = True


@pytest.mark.parametrize("fail", [FaultyCamera.refuse, mute, stall, babble], ids=lambda fail: fail.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_camera_failing_is_logged_once_and_reconnects(kind, fail, caplog):
    caplog.set_level(logging.INFO)
    with kind() as camera, kind() as other, play_camera(camera.url) as watched, play_camera(other.url) as beside:
        watched.more()
        assert watched.until(lambda row: row["fps"] > 0)["state"] == "streaming"
        fail(camera)
        failed = time.monotonic()
        away = watched.until_state("away")
        assert time.monotonic() - failed < CAMERA_TIMEOUT_S + 30, "what its timeout allows, and a slow machine"
        assert away["error"] and away["fps"] == 0.0
        beside.more()
        camera.mend()
        watched.more()
        back = watched.until_state("streaming")
        assert back["error"] is None and back["reconnects"] >= 1
    numbers = [frame.index for _, frame in watched.frames]
    assert numbers == sorted(set(numbers)), "they go on, and none comes twice"
    reconnects = sum(one.camera.to_json()["reconnects"] for one in (watched, beside))
    away_lines, back_lines = (caplog.text.count(words) for words in ("is away", "is back"))
    assert back_lines == reconnects <= away_lines <= reconnects + 2, "once each; on a slow machine they are away again"
    assert "secret" not in caplog.text + str(away)


@pytest.mark.parametrize("fail", [FaultyCamera.refuse, stall, babble], ids=lambda fail: fail.__name__)
def test_camera_away_at_start_connects_later(fail, caplog):
    with RtspCamera() as camera:
        fail(camera)
        with play_camera(camera.url) as watched:
            row = watched.until_state("away")
            assert row["error"] and row["frame_age_s"] is None and not watched.frames
            camera.mend()
            watched.more()
    assert caplog.text.count("is away") <= 1 + watched.camera.to_json()["reconnects"], "logged once each time"
    assert "is away" in caplog.text and "secret" not in caplog.text


def test_camera_with_new_frame_size_reports_regions_outside(caplog):
    queries = {"all": FrameRequest(), "corner": FrameRequest(region=Region((70.0, 10.0, 90.0, 40.0)))}
    with RtspCamera(size=(96, 64)) as camera, play_camera(camera.url, queries) as watched:
        watched.more(6)
        assert {query for query, _ in watched.frames} == {"all", "corner"} and watched.camera.error is None
        camera.size = (64, 48)
        fault = "query 'corner' looks at [70.0, 10.0, 90.0, 40.0], outside frames of 64x48 pixels"
        assert watched.until(lambda row: row["error"] == fault)["state"] == "streaming"
        seen = len(watched.frames)
        watched.more(6)
        assert {query for query, _ in watched.frames[seen:]} == {"all"}
        camera.size = (96, 64)
        watched.until(lambda row: row["error"] is None)
        watched.more(6)
        assert {query for query, _ in watched.frames[-6:]} == {"all", "corner"}
    assert {frame.image.shape[:2] for _, frame in watched.frames if frame.image is not None} == {(64, 96), (48, 64)}
    assert caplog.text.count("looks at") == 1


def test_camera_of_another_aspect_is_an_error_of_the_camera():
    regions = {"all": Region(), "corner": Region((48.0, 32.0, 96.0, 64.0), (96, 64))}
    queries = {query: FrameRequest(region=region) for query, region in regions.items()}
    with RtspCamera(size=(48, 32)) as camera, play_camera(camera.url, queries) as watched:
        watched.more(6)
        assert {query for query, _ in watched.frames} == {"all", "corner"} and watched.camera.error is None
        camera.size = (64, 64)
        fault = "query 'corner' looks at a part of frames of 96x64; 64x64 pixels have another aspect"
        assert watched.until(lambda row: row["error"] == fault)["state"] == "streaming"
        seen = len(watched.frames)
        watched.more(6)
        assert {query for query, _ in watched.frames[seen:]} == {"all"}


def test_camera_notes_a_region_cut_at_the_edge(tmp_path):
    regions = {"whole": Region((0, 0, 48, 32)), "wide": Region((8, 0, 80, 32))}
    queries = {query: FrameRequest(region=region) for query, region in regions.items()}
    with collect_notes() as notes, play_camera(write_clip(tmp_path / "c.mp4", 3, fps=30), queries) as watched:
        watched.until_state("ended")
    assert notes == [
        "query wide: its roi [8, 0, 80, 32] reaches beyond frames of 48 x 32 pixels and is cut at their edge; "
        "correct `roi`"
    ]


def test_camera_looping_a_file_survives_its_removal(tmp_path):
    clip = write_clip(tmp_path / "c.mp4", 3, fps=30)
    with play_camera(clip, loop=True) as watched:
        watched.more(5)
        clip.rename(tmp_path / "elsewhere.mp4")
        assert f"there is no {clip}" in watched.until_state("away")["error"]
        (tmp_path / "elsewhere.mp4").rename(clip)
        watched.more(5)
    numbers = [frame.index for _, frame in watched.frames]
    assert numbers == sorted(set(numbers))


def test_camera_of_a_file_ends_and_of_none_ends_in_error(tmp_path):
    ends = []
    for source in (write_clip(tmp_path / "c.mp4", 3, fps=30), tmp_path / "missing.mp4"):
        watched = RecordedCamera(CameraConfig("c", str(source)), ended=lambda: ends.append(1))
        watched.camera.play()
        row = watched.camera.to_json()
        assert row["state"] == "ended" and (row["error"] is None) == source.exists() == (len(watched.frames) == 3)
    assert ends == [1, 1]


def test_camera_gives_each_query_its_own_rate(tmp_path):
    clip = write_clip(tmp_path / "c.mp4", 12, fps=60)
    queries = {"all": FrameRequest(), "few": FrameRequest(10.0), "more": FrameRequest(90.0)}
    watched = RecordedCamera(CameraConfig("c", str(clip), 30.0), queries)
    watched.camera.play()
    numbers = {query: [frame.index for one, frame in watched.frames if one == query] for query in queries}
    assert numbers == {"all": [0, 2, 4, 6, 8, 10], "few": [0, 6], "more": [0, 2, 4, 6, 8, 10]}
    row = watched.camera.to_json()
    assert (row["frames"], row["delivered"], row["undecodable"]) == (12, 6, 0)


def test_camera_counts_undecodable_pictures(tmp_path):
    folder = write_folder(tmp_path / "f", 2)
    (folder / "000a.jpg").write_bytes(b"no image")
    watched = RecordedCamera(CameraConfig("c", str(folder), 60.0))
    watched.camera.play()
    assert [frame.index for _, frame in watched.frames] == [0, 2]
    assert watched.camera.to_json()["undecodable"] == 1


def test_camera_ends_when_its_receiver_fails(tmp_path):
    def refuse(query, frame):
        raise OSError("disk full")

    ends = []
    config = CameraConfig("c", str(write_folder(tmp_path / "f", 1)), loop=True)
    camera = Camera(config, {"q": FrameRequest()}, refuse, ended=lambda: ends.append(1))
    camera.start()
    assert camera.join(TIMEOUT_S) and not camera.alive
    assert camera.error == "OSError: disk full" and ends == [1] and camera.to_json()["state"] == "ended"


def test_camera_limits_decoders_that_never_return():
    tried, free = [], threading.Event()

    def open_once(config):
        tried.append(config)
        assert free.wait(TIMEOUT_S)
        raise SourceLost("it is back, but empty")

    config = CameraConfig("c", "rtsp://box/1", timeout_s=0.1)
    watched = RecordedCamera(config, open_source=open_once)
    watched.camera.start()
    watched.until(lambda row: row["error"] == "its decoder does not return")
    assert len(tried) == MAX_ABANDONED
    free.set()
    watched.until(lambda row: row["error"] == "it is back, but empty")
    watched.camera.stop()
    assert watched.camera.join(TIMEOUT_S)
