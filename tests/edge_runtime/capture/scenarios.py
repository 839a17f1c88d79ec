"""Faults of cameras as often as asked, and what capture costs: each scenario gives a row of JSON.

`python -m tests.edge_runtime.capture.scenarios drops --count 100`
`python -m tests.edge_runtime.capture.scenarios muted --cameras 16 --seconds 20` (or silent, garbage)
`python -m tests.edge_runtime.capture.scenarios cost --source rtsp --cameras 16 --seconds 20`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.capture.camera import Camera
from edge_runtime.capture.sources import CameraConfig, FrameRequest
from edge_runtime.queues import Frame
from tests.edge_runtime.capture.faulty_cameras import HttpCamera, RtspCamera
from tests.edge_runtime.tiny import write_clip

SIZE = (352, 288)
SERVED_FPS, ASKED_FPS = 25.0, 5.0
WARM_DROPS = 3
TIMEOUT_S = 30.0
SERVE = "from tests.edge_runtime.capture.scenarios import serve; serve({count}, {kind!r})"


class Counted:
    """Counts frames, and waits for them."""

    def __init__(self) -> None:
        self.frames = 0
        self._came = threading.Condition()

    def put(self, query: str, frame: Frame) -> None:
        with self._came:
            self.frames += 1
            self._came.notify_all()

    def next(self, count: int = 1) -> None:
        """Wait for so many more frames; TimeoutError without them."""
        with self._came:
            target = self.frames + count
            if not self._came.wait_for(lambda: self.frames >= target, TIMEOUT_S):
                raise TimeoutError(f"{target - self.frames} frames did not come within {TIMEOUT_S:g} s")


def drops(count: int, source: str = "rtsp", away_s: float = 0.0) -> dict[str, Any]:
    """A camera is lost so many times, each time for `away_s` seconds; seconds from its return to its next frame, and
    what the process holds more than after the first few times."""
    got, took = Counted(), []
    with (RtspCamera if source == "rtsp" else HttpCamera)() as server:
        camera = Camera(CameraConfig("c", server.url, timeout_s=2.0), {"q": FrameRequest()}, got.put)
        camera.start()
        before: dict[str, int] = {}
        for index in range(WARM_DROPS + count):
            got.next(2)
            if index == WARM_DROPS:
                before = _held()
            server.refuse()
            threading.Event().wait(away_s)
            server.listen()
            returned = time.monotonic()
            while camera.to_json()["reconnects"] <= index:  # a frame of before may still come
                got.next()
            took.append(time.monotonic() - returned)
        more = {name: value - before[name] for name, value in _held().items()}
        camera.stop()
        camera.join(TIMEOUT_S)
    back = took[WARM_DROPS:]
    return {
        "fault": "drops", "source": source, "count": count, "away_s": away_s, "back_s_mean": round(np.mean(back), 3),
        "back_s_max": round(max(back), 3), "reconnects": camera.to_json()["reconnects"], **more,
    }  # fmt: skip


def cost(cameras: int, seconds: float, source: str = "rtsp") -> dict[str, Any]:
    """What cameras of 352x288 pixels cost this process that are decoded and of which 5 frames a second are taken."""
    with _sources(cameras, source) as urls:
        got = Counted()
        playing = [
            Camera(CameraConfig(str(index), url, ASKED_FPS, loop=True), {"q": FrameRequest()}, got.put)
            for index, url in enumerate(urls)
        ]
        for camera in playing:
            camera.start()
        while any(camera.delivered < 2 for camera in playing):
            got.next()
        before, started, frames = time.process_time(), time.monotonic(), got.frames
        decoded = sum(camera.to_json()["frames"] for camera in playing)
        threading.Event().wait(seconds)
        used, took, frames = time.process_time() - before, time.monotonic() - started, got.frames - frames
        decoded = sum(camera.to_json()["frames"] for camera in playing) - decoded
        threads = threading.active_count()
        for camera in playing:
            camera.stop()
        for camera in playing:
            camera.join(TIMEOUT_S)
    return {
        "source": source, "cameras": cameras, "seconds": round(took, 1), "core_share": round(used / took, 3),
        "cpu_ms_per_delivered": round(1000 * used / frames, 3), "cpu_ms_per_decoded": round(1000 * used / decoded, 3),
        "delivered_share": round(frames / (cameras * ASKED_FPS * took), 3), "threads": threads,
    }  # fmt: skip


def beside(fault: str, cameras: int, seconds: float) -> dict[str, Any]:
    """One camera is muted, silent from the start or sends garbage: what the others, in all so many, lose by it."""
    with _sources(cameras - 1, "rtsp") as urls, RtspCamera(SERVED_FPS, SIZE) as faulty:
        got = [Counted() for _ in range(cameras)]
        playing = [
            Camera(CameraConfig(str(index), url, ASKED_FPS, timeout_s=2.0), {"q": FrameRequest()}, counted.put)
            for index, (url, counted) in enumerate(zip([faulty.url, *urls], got, strict=True))
        ]
        faulty.silent = fault == "silent"
        for camera in playing:
            camera.start()
        for counted in got[0 if fault != "silent" else 1 :]:
            counted.next(2)
        faulty.muted, faulty.garbage = fault == "muted", fault == "garbage"
        started, before = time.monotonic(), [counted.frames for counted in got]
        threading.Event().wait(seconds)
        took = time.monotonic() - started
        came = [counted.frames - count for counted, count in zip(got, before, strict=True)]
        state = playing[0].to_json()["state"]
        for camera in playing:
            camera.stop()
        for camera in playing:
            camera.join(TIMEOUT_S)
    expected = int(ASKED_FPS * took)
    return {
        "fault": fault, "cameras": cameras, "seconds": round(took, 1), "state": state,
        "others_lost_share": round(max(0.0, 1 - sum(came[1:]) / (expected * (cameras - 1))), 4),
        "worst_lost_share": round(max(0.0, 1 - min(came[1:]) / expected), 4),
    }  # fmt: skip


def serve(count: int, kind: str) -> None:
    """Be so many cameras until stdin ends, and print where they are."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context((RtspCamera if kind == "rtsp" else HttpCamera)(SERVED_FPS, SIZE)) for _ in range(count)
        ]
        print(json.dumps([server.url for server in servers]), flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def _sources(count: int, kind: str) -> Iterator[Sequence[str]]:
    """Looped files, or servers in a process of their own."""
    if kind == "file":
        with tempfile.TemporaryDirectory() as folder:
            clip = write_clip(Path(folder) / "c.mp4", 100, SERVED_FPS, size=SIZE)
            yield [str(clip)] * count
        return
    command, pipe = [sys.executable, "-c", SERVE.format(count=count, kind=kind)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        yield json.loads(server.stdout.readline())
        server.stdin.close()


def _held() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=["drops", "cost", "muted", "silent", "garbage"])
    parser.add_argument("--source", choices=["rtsp", "http", "file"], default="rtsp")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--away", type=float, default=0.0)
    parser.add_argument("--cameras", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    if asked.scenario == "drops":
        row = drops(asked.count, asked.source, asked.away)
    elif asked.scenario == "cost":
        row = cost(asked.cameras, asked.seconds, asked.source)
    else:
        row = beside(asked.scenario, asked.cameras, asked.seconds)
    print(json.dumps(row))
