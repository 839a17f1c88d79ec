"""Capture from GStreamer's RTSP server; skipped where that is not installed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.edge_runtime.capture.test_camera import play_camera

PYTHON = "/usr/bin/python3"
SERVER = Path(__file__).with_name("gstreamer_server.py")
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
