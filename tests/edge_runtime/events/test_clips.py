"""Clips of events: packets of a camera as they are, before, in and after an event, within a bound on the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest

from gemel.edge_runtime.events import clips
from gemel.edge_runtime.events.clips import CLIP, SNAPSHOT, ClipConfig, ClipRecorder, PacketRing
from gemel.edge_runtime.life.config import load_config
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.sinks.base import ResultMessage
from gemel.models.errors import InputError
from tests.edge_runtime.events.bright import SIDE, draw_spot, write_spot_box
from tests.edge_runtime.local_box import LocalBox

FPS, GOP = 10, 5


def write_video(path: Path, places: Sequence[int | None]) -> Path:
    """An H.264 video of a spot at these places, with a key frame every GOP frames."""
    with av.open(str(path), "w") as file:
        stream: Any = file.add_stream("libx264", Fraction(FPS), options={"preset": "ultrafast", "bf": "0"})
        stream.width = stream.height = 2 * SIDE
        stream.pix_fmt, stream.codec_context.gop_size, stream.codec_context.thread_count = "yuv420p", GOP, 1
        for place in places:
            image = np.kron(draw_spot(place), np.ones((2, 2, 1), np.uint8))
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")))
        file.mux(stream.encode())
    return path


def fill_ring(ring: PacketRing, video: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All packets of a video, as they would come in time; the clock stands at its end then."""
    with av.open(str(video)) as file:
        stream = file.streams.video[0]
        ring.begin(stream)
        for number, packet in enumerate(one for one in file.demux(stream) if one.size):
            monkeypatch.setattr(clips.time, "monotonic", lambda at=100 + number / FPS: at)
            ring.add(packet)


def count_frames(path: Path) -> int:
    with av.open(str(path)) as file:
        return sum(1 for _ in file.decode(video=0))


def make_recorder(folder: Path, max_bytes: int = 10**6) -> ClipRecorder:
    folder.mkdir(exist_ok=True)
    return ClipRecorder(ClipConfig(folder, max_bytes, 1.0, 0.5))


def message_of(event: str) -> ResultMessage:
    snapshot = {"box": [4.0, 14.0, 8.0, 18.0], "label": "car", "score": 0.9}
    return ResultMessage({"query": "q", "after": {"id": event, "snapshot": snapshot}}, draw_spot(4))


def test_ring_holds_from_the_last_key_frame_before_its_seconds(tmp_path: Path, monkeypatch) -> None:
    ring = PacketRing(2.0)
    fill_ring(ring, write_video(tmp_path / "clip.mp4", [4] * 60), monkeypatch)
    packets = ring.read(0, 104.7)
    assert packets[0].is_key and packets[0].at == pytest.approx(104.5)
    assert len(ring.read(0, 0.0)) <= 2.0 * FPS + GOP and ring.read(58, 0.0)[0].number == 59


def test_snapshot_of_a_camera_with_a_smaller_stream_is_from_the_main_one(tmp_path: Path, monkeypatch) -> None:
    recorder = make_recorder(tmp_path / "clips")
    ring = recorder.ring("hall")
    fill_ring(ring, write_video(tmp_path / "clip.mp4", [4] * 20 + [None] * 20), monkeypatch)
    lit, dark = ring.picture_at(101.45), ring.picture_at(103.0)
    assert lit is not None and dark is not None and lit.shape == (2 * SIDE, 2 * SIDE, 3)
    assert lit.max() > 200 > 100 > dark.max() and ring.picture_at(50.0) is None
    monkeypatch.setattr(clips.time, "time", lambda: 1000.0)  # the monotonic clock stands at 103.9
    message = message_of("e-1")
    message.record["after"]["snapshot"]["frame_time"] = 1000.0 - 2.45
    record = {**message.record, "camera": "hall"}
    small = recorder._draw_snapshot(ResultMessage(record, message.image))
    ring.is_main = True
    large = recorder._draw_snapshot(ResultMessage(record, message.image))
    assert small is not None and large is not None
    pictures = [cv2.imdecode(np.frombuffer(one, np.uint8), cv2.IMREAD_COLOR) for one in (small, large)]
    assert [len(one) for one in pictures if one is not None] == [SIDE, 2 * SIDE]


def test_ring_stays_below_its_bytes_of_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(clips, "MAX_RING_BYTES", 1500)
    ring = PacketRing(60.0)
    fill_ring(ring, write_video(tmp_path / "clip.mp4", [4, 20] * 30), monkeypatch)
    assert 0 < sum(len(one.data) for one in ring.read(1, 0.0)) <= 1500


def test_events_of_one_time_share_one_clip_that_begins_before_them(tmp_path: Path, monkeypatch) -> None:
    recorder = make_recorder(tmp_path / "kept")
    fill_ring(recorder.ring("hall"), write_video(tmp_path / "clip.mp4", [4] * 60), monkeypatch)
    assert recorder.begin("hall", "run-1", 105.0) and recorder.begin("hall", "run-2", 105.5)
    recorder.end("run-1")
    recorder.end("run-2")
    recorder._step()
    assert recorder.find_file("run-1", CLIP) is None
    monkeypatch.setattr(clips.time, "monotonic", lambda: 106.5)
    recorder._step()
    paths = [recorder.find_file(event, CLIP) or tmp_path for event in ("run-1", "run-2")]
    assert count_frames(paths[0]) == 20 and os.path.samefile(paths[0], paths[1])
    assert not recorder.begin("yard", "run-3", 105.0) and recorder.find_file("../run-1", CLIP) is None


def test_event_late_in_a_clip_has_another_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(clips, "JOIN_S", 2.0)
    recorder = make_recorder(tmp_path / "kept")
    fill_ring(recorder.ring("hall"), write_video(tmp_path / "clip.mp4", [4] * 60), monkeypatch)
    for event, since_at in (("run-1", 102.0), ("run-2", 102.5), ("run-3", 104.5)):
        recorder.begin("hall", event, since_at)
        recorder.end(event)
    monkeypatch.setattr(clips.time, "monotonic", lambda: 106.9)
    recorder._step()
    paths = [recorder.find_file(f"run-{number}", CLIP) or tmp_path for number in (1, 2, 3)]
    assert os.path.samefile(paths[0], paths[1]) and [count_frames(path) for path in paths] == [50, 50, 25]


def test_clip_ends_with_its_connection(tmp_path: Path, monkeypatch) -> None:
    recorder, video = make_recorder(tmp_path / "kept"), write_video(tmp_path / "clip.mp4", [4] * 20)
    fill_ring(recorder.ring("hall"), video, monkeypatch)
    recorder.begin("hall", "run-1", 101.5)
    recorder._step()
    fill_ring(recorder.ring("hall"), video, monkeypatch)
    recorder._step()
    path = recorder.find_file("run-1", CLIP)
    assert path is not None and count_frames(path) == 15


def test_oldest_files_go_first_where_the_folder_is_full(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "kept", max_bytes=2500)
    for number in range(4):
        path = tmp_path / "kept" / f"run-{number}{SNAPSHOT}"
        path.write_bytes(bytes(1000))
        os.utime(path, (number, number))
    recorder._prune()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["run-2.jpg", "run-3.jpg"]
    assert (recorder.totals.files, recorder.totals.nbytes, recorder.totals.trouble) == (2, 2000, None)


def test_snapshots_of_cameras_without_clips_keep_the_bound(tmp_path: Path, monkeypatch) -> None:
    recorder = make_recorder(tmp_path / "kept", max_bytes=1000)
    for number in range(4):
        monkeypatch.setattr(clips.time, "monotonic", lambda at=100.0 * number: at)
        recorder.keep_snapshot(message_of(f"run-{number}"))
        recorder._step()
    assert recorder.totals.nbytes <= 1000 and recorder.find_file("run-3", SNAPSHOT) is not None
    assert recorder.find_file("run-0", SNAPSHOT) is None


def test_full_disk_stops_clips_and_says_so(tmp_path: Path, monkeypatch, caplog) -> None:
    recorder = make_recorder(tmp_path / "kept")
    fill_ring(recorder.ring("hall"), write_video(tmp_path / "clip.mp4", [4] * 20), monkeypatch)
    monkeypatch.setattr(clips, "MIN_FREE_BYTES", 1 << 62)
    recorder._prune()
    recorder.keep_snapshot(message_of("run-1"))
    recorder._step()
    assert not recorder.begin("hall", "run-1", 101.0) and recorder.find_file("run-1", SNAPSHOT) is None
    assert recorder.totals.trouble is not None and "no clips are written" in caplog.text


def test_box_keeps_a_clip_and_a_snapshot_of_its_events(tmp_path: Path) -> None:
    places = [None] * 10 + [20] * 15 + [None] * 35
    write_video(tmp_path / "spots.mp4", places)
    rules = {"tracking": True, "events": [{"kind": "enter", "frames": "2 of 3"}]}
    cameras = {"left": {"source": "spots.mp4"}}
    kept = {"path": "kept", "before_s": 0.5, "after_s": 0.2}
    run(write_spot_box(tmp_path, [4], {"spot": rules}, cameras=cameras, clips=kept))
    events = [record for record in LocalBox(tmp_path / "box.yaml").records() if "event" in record]
    assert events and all(one["after"]["has_clip"] for one in events)
    name = events[0]["after"]["id"]
    assert (tmp_path / "kept" / f"{name}{SNAPSHOT}").read_bytes().startswith(b"\xff\xd8")
    assert count_frames(tmp_path / "kept" / f"{name}{CLIP}") >= 15


def test_clips_in_place_of_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    with pytest.raises(InputError, match=r"clips\.path: .* is no directory"):
        load_config(write_spot_box(tmp_path, [4], {}, clips="kept"))
