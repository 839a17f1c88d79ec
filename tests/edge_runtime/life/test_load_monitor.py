"""Overload: drops of the last minute as a share, and a state that is logged once."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gemel.edge_runtime.capture.camera import Camera
from gemel.edge_runtime.capture.sources import CameraConfig, FrameRequest
from gemel.edge_runtime.life.load_monitor import LoadMonitor
from gemel.edge_runtime.life.runtime import Runtime


def rows(received: int, dropped: int, reason: str = "deadline") -> Sequence[dict]:
    return [{"query": "gate", "received": received, "dropped": {reason: dropped}},
            {"query": "yard", "received": received, "dropped": {}}]  # fmt: skip


def feed(monitor: LoadMonitor, start_s: float, seconds: int, counts: list[int], share: float, **more: str) -> None:
    """Ten frames a second of each query, of which `share` of one are dropped; `counts` go on."""
    for second in range(seconds):
        counts[0] += 10
        counts[1] += round(10 * share)
        monitor.add(start_s + second, lambda: rows(counts[0], counts[1], **more))


def test_overload_begins_and_ends_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monitor, counts = LoadMonitor(), [0, 0]
    feed(monitor, 0.0, 70, counts, 0.0)
    assert not monitor.is_overloaded and monitor.box.dropped_share == 0
    feed(monitor, 70.0, 120, counts, 0.5)
    assert monitor.is_overloaded and monitor.box.dropped_share == pytest.approx(0.25, abs=0.01)
    assert monitor.queries["gate"].dropped_share == pytest.approx(0.5, abs=0.01)
    assert monitor.queries["yard"].dropped_share == 0
    feed(monitor, 190.0, 120, counts, 0.0)
    assert not monitor.is_overloaded
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and lines[1].startswith("no longer overloaded")
    assert lines[0].startswith("overloaded: ") and "20.0 frames a second are asked for" in lines[0]
    assert "query gate" in lines[0]


def test_cameras_of_an_overloaded_box_decode_no_more_than_it_answers() -> None:
    camera = Camera(CameraConfig("c", "rtsp://x/y"), {"gate": FrameRequest(10.0)}, lambda query, frame: None)
    runtime: Any = SimpleNamespace(active=SimpleNamespace(cameras=(camera,)))
    monitor, counts = LoadMonitor(), [0, 0]
    feed(monitor, 0.0, 120, counts, 0.5)
    Runtime.ease_decoding(runtime, monitor)
    assert camera._needed_fps() == pytest.approx(5.0, abs=0.3)
    feed(monitor, 120.0, 120, counts, 0.0)
    Runtime.ease_decoding(runtime, monitor)
    assert camera._needed_fps() == 10.0


def test_overload_is_no_matter_of_pauses_or_few_frames() -> None:
    monitor, counts = LoadMonitor(), [0, 0]
    feed(monitor, 0.0, 120, counts, 1.0, reason="paused")
    feed(few := LoadMonitor(), 0.0, 5, [0, 0], 1.0)
    assert not monitor.is_overloaded and not few.is_overloaded
