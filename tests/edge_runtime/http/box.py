"""A fake box for tests of HTTP: its status is made of values that a test changes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from gemel.edge_runtime.capture.push import PushQuery
from gemel.edge_runtime.frames.drawing import draw_thumbnail
from gemel.edge_runtime.frames.queues import Frame
from gemel.edge_runtime.http.snapshots import Observer, Snapshot
from gemel.edge_runtime.http.status import (
    CameraStatus,
    ClipStatus,
    DriftStatus,
    EventStatus,
    LedgerStatus,
    QueryStatus,
    SinkStatus,
    SpoolStatus,
    Status,
)
from gemel.edge_runtime.life.live_status import RuntimeStatus
from gemel.edge_runtime.life.reload import ReloadResult
from gemel.edge_runtime.life.switches import MODELS, CameraSwitch, parse_order
from gemel.models.errors import InputError


def query(name: str, camera: str, **values: Any) -> QueryStatus:
    """A query without problems."""
    ledger = LedgerStatus(
        received=100, processed=85, late=1, failed=2, pending=4, dropped={"deadline": 4, "replaced": 5}
    )
    given = {
        "resident": True, "bytes": 40_000_000, "own_bytes": 4_000_000, "fps": 4.9, "age_p95_ms": 61.5,
        "sla_ms": 100.0, "failure": None, "ledger": ledger,
    }  # fmt: skip
    return QueryStatus(id=name, camera=camera, **(given | values))


def camera(name: str, **values: Any) -> CameraStatus:
    """A camera without problems."""
    given = {"state": "streaming", "up": True, "fps": 10.0, "frame_age_s": 0.05, "reconnects": 0, "error": None}
    return CameraStatus(id=name, **(given | values))


def sink(name: str, **values: Any) -> SinkStatus:
    """A sink without problems."""
    given = {"kind": name, "state": "up", "delivered": 0, "undelivered": {}, "queued": 0, "trouble": None}
    return SinkStatus(id=name, **(given | values))


def event(name: str, **values: Any) -> EventStatus:
    """An event that goes on."""
    given = {
        "event": "enter-lane", "kind": "enter", "query": "bridge-cars", "camera": "bridge", "zone": "lane",
        "label": "car", "track": 7, "top_score": 0.91, "start_time": 1.79e9, "end_time": None, "end_reason": None,
        "has_snapshot": False,
    }  # fmt: skip
    return EventStatus(id=name, **(given | values))


EVENTS = [
    event("f3a9c1-2", has_snapshot=True),
    event("f3a9c1-1", track=5, end_time=1.79e9 + 4, end_reason="left", has_clip=True),
]


class Box(RuntimeStatus):
    """A status of fixed values; `changes` replace some of them."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.moves, self.lacks = True, list[str]()
        self.refuses: str | None = None
        self.holds_back: tuple[str, ...] = ()
        self.reloads = 0
        self.is_awake = threading.Event()
        self.is_awake.set()
        self.orders: list[tuple[str, str, bytes]] = []
        self.files: dict[str, Path] = {}
        self.observer = Observer({"bridge-cars": "bridge", "gate-kind": "gate"})
        self.metrics = self.observer.metrics

    def status(self) -> Status:
        self.is_awake.wait()
        given = {
            "name": "north-gate", "run": "f3a9c1", "bundle": "0123456789ab", "workload": "junction", "device": "cpu",
            "policy": "adaptive",
            "uptime_s": 3725.0, "version": "0.1.0", "process_bytes": 310_000_000,
            "beside_budget_bytes": 270_000_000, "budget_bytes": 64_000_000, "resident_bytes": 40_000_000,
            "workspace_bytes": 9_000_000, "bytes_moved": 123_456_789, "loads": 17,
            "reloads": {"applied": 1, "partly": 0, "refused": 2}, "refused": None, "bundle_fault": None,
            "cameras": [camera("bridge"), camera("gate")],
            "queries": [query("bridge-cars", "bridge", crossed={"cross-kerb": {"left": 1, "right": 2}}),
                         query("gate-kind", "gate", resident=False)],
            "sinks": [sink("jsonl", delivered=181, undelivered={"full": 3})],
            "drift": [
                DriftStatus(query="gate-kind", ratio=0.93, chance_per_year=0.02, frames=120, verdict="below",
                            checked_at=1.79e9, reverted=True),
                DriftStatus(query="bridge-cars", ratio=None, chance_per_year=None, frames=3, verdict="too few",
                            checked_at=1.79e9, reverted=False),
            ],
            "events": EVENTS, "events_begun": {"bridge-cars": {"enter-lane": 2}},
            "seconds": {"decode": 12.5, "run": 3.25},
            "clips": ClipStatus(files=3, nbytes=5_000_000, trouble=None),
            "spool": SpoolStatus(samples=41, unsampled={"busy": 2}, bytes=5_000_000),
        }  # fmt: skip
        return Status(**(given | self.changes))

    def events(self, count: int = 200) -> list[EventStatus]:
        return EVENTS[:count]

    def thumbnail(self, event: str) -> bytes | None:
        if event != EVENTS[0].id:
            return None
        record = {"after": {"snapshot": {"box": [40.0, 110.0, 100.0, 140.0]}}}
        return draw_thumbnail(np.full((180, 288, 3), (96, 120, 150), np.uint8), record)

    def event_file(self, event: str, ending: str) -> Path | None:
        return self.files.get(event + ending)

    def order(self, kind: str, name: str, text: bytes, by: str) -> CameraSwitch:
        if name not in ("bridge", "bridge-cars"):
            raise KeyError(name)
        keys = parse_order(kind, text)
        self.orders.append((kind, name, text))
        return MODELS[kind](**keys)

    def is_moving(self) -> bool:
        return self.moves

    def missing(self) -> list[str]:
        return self.lacks

    def bundle_problem(self) -> str | None:
        return self.status().bundle_fault

    def reload(self) -> Future[ReloadResult]:
        self.reloads += 1
        future: Future[ReloadResult] = Future()
        future.set_result(ReloadResult(self.refuses, self.holds_back))
        return future

    def roll_back(self) -> Future[str]:
        future: Future[str] = Future()
        if self.refuses is None:
            future.set_result("0" * 64)
        else:
            future.set_exception(InputError("updates", self.refuses))
        return future

    def snapshot(self, camera: str) -> Snapshot | None:
        return self.observer.snapshot(camera)

    def push_queries(self) -> dict[str, PushQuery]:
        return {}

    def add_frame(self, query: str, index: int, captured_unix: float, shift: int = 0) -> None:
        """A frame of a road, RGB uint8 (180, 288, 3), with a car moved by `shift` pixels."""
        image = np.full((180, 288, 3), (96, 120, 150), np.uint8)
        image[90:] = (70, 72, 76)
        image[110:140, 40 + shift : 100 + shift] = (200, 40, 40)
        self.observer.add_frame(query, Frame(index, captured_unix, captured_unix, image))

    def add_result(self, captured_at: float) -> None:
        """The result of `bridge-cars` for that frame."""
        found = [{"class": "car", "score": 0.91, "box": [40.0, 110.0, 100.0, 140.0]}]
        times = {"captured_at": captured_at, "finished_at": captured_at + 0.06, "age_ms": 60.0}
        self.observer.add_result({"query": "bridge-cars", "detections": found, **times})
