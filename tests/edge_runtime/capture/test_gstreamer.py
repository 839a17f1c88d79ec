"""Capture from GStreamer's RTSP server, and the pipeline for a Jetson; skipped where GStreamer is not installed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gemel.edge_runtime.capture.sources import CameraConfig, FrameRequest, gstreamer_pipeline
from tests.edge_runtime.capture.test_camera import play_camera
from tests.video_files import draw_frame, set_turn, turn_frame, write_video

PYTHON = "/usr/bin/python3"
SERVER, PLAYER = (Path(__file__).with_name(name) for name in ("gstreamer_server.py", "gstreamer_player.py"))
BARS = [(192, 192, 192), (192, 192, 0), (0, 192, 192), (0, 192, 0), (192, 0, 192), (192, 0, 0), (0, 0, 192)]
"""RGB of the seven bars, from left to right."""


class Server:
    """GStreamer's server, which can end and start again at its port."""

    def __init__(self) -> None:
        self.port, self._process = "0", None
        self.start()

    def start(self) -> None:
        command = [PYTHON, str(SERVER), self.port]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None and self._process.stderr is not None
        self.port = self._process.stdout.readline().strip()
        if not self.port:
            pytest.skip(f"GStreamer's RTSP server is not installed: {self._process.stderr.read().strip()[-200:]}")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def url(self, path: str, password: str = "secret") -> str:
        return f"rtsp://user:{password}@127.0.0.1:{self.port}/{path}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.end()


@pytest.mark.parametrize("path", ["h264", "jpeg"])
def test_gstreamer_source_decodes_correctly(server: Server, path: str) -> None:
    with play_camera(server.url(path), timeout_s=10.0) as watched:
        watched.more(5)
        frame = watched.frames[-1][1]
    assert frame.image is not None and frame.image.shape == (288, 352, 3)
    colours = [frame.image[20:120, round((bar + 0.5) * 352 / 7)].mean(axis=0) for bar in range(7)]
    assert np.abs(np.array(colours) - BARS).max() < 25, colours


@pytest.mark.parametrize(
    ("path", "fps", "skip"), [("bframes", 5.0, "nonref"), ("h264", 1.0, "nonkey"), ("jpeg", 5.0, "nonkey")]
)
def test_camera_of_a_real_server_decodes_what_is_needed(server: Server, path: str, fps: float, skip: str) -> None:
    with play_camera(server.url(path), {"q": FrameRequest(fps)}, timeout_s=10.0) as watched:
        watched.until(lambda row: row["skip"] == skip)
        decoded = watched.camera.to_json()["decoded"]
        first = len(watched.frames)
        watched.more(10)
        times = [frame.captured_at for _, frame in watched.frames[first : first + 10]]
        decoded = watched.camera.to_json()["decoded"] - decoded
    assert (times[-1] - times[0]) * fps == pytest.approx(9, abs=2), "as many frames as were asked for"
    assert decoded < 0.8 * 25 * (times[-1] - times[0] + 2 / fps) and watched.camera.error is None


def test_gstreamer_source_hides_password_and_reconnects(server: Server) -> None:
    with play_camera(server.url("h264", "wrong-one"), timeout_s=10.0) as watched:
        row = watched.until_state("away")
        assert "401" in row["error"] and "wrong-one" not in str(row)
    with play_camera(server.url("h264"), timeout_s=2.0) as watched:
        watched.more()
        server.end()
        watched.until_state("away")
        server.start()
        watched.more()


def test_gstreamer_pipeline_gives_upright_frames_at_their_own_times(tmp_path: Path) -> None:
    times_ms = [*range(0, 400, 40), *range(800, 4800, 400)]
    clip = set_turn(write_video(tmp_path / "a.mp4", options={"bf": "0"}, times_ms=times_ms), "90")
    pipeline = gstreamer_pipeline(CameraConfig("c", str(clip))).replace("nvvidconv", "videoconvert")
    command = [PYTHON, PLAYER, pipeline, tmp_path / "frames"]
    played = subprocess.run(command, check=False, capture_output=True, text=True)
    if played.returncode:
        pytest.skip(f"GStreamer cannot play it: {played.stderr[-200:]}")
    width, height, times_s = json.loads(played.stdout)
    assert (width, height) == (64, 96) and times_s == pytest.approx([ms / 1000 for ms in times_ms], abs=0.002)
    frames = np.fromfile(tmp_path / "frames", np.uint8).reshape(-1, height, width, 3)[..., ::-1]
    for number, image in enumerate(frames):
        assert np.abs(image.astype(int) - turn_frame(draw_frame(number), "90")).mean() < 5
