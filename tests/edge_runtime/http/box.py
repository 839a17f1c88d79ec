"""A box to be watched that is made of values: what it says is for a test to change."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np

from edge_runtime.http.snapshots import Snapshot, Snapshots
from edge_runtime.http.status import (
    CameraStatus,
    DriftStatus,
    LedgerStatus,
    QueryStatus,
    SinkStatus,
    SpoolStatus,
    Status,
)

CAMERAS = ("bridge", "gate")


def account(received: int = 100, **counts: Any) -> LedgerStatus:
    """An account that adds up, whatever was processed the rest."""
    known = {"late": 1, "failed": 2, "pending": 3, "dropped": {"deadline": 4, "replaced": 5}, **counts}
    settled = known["failed"] + known["pending"] + sum(known["dropped"].values())
    return LedgerStatus(received=received, processed=received - settled, **known)


def query(name: str, camera: str, **values: Any) -> QueryStatus:
    """A query at work."""
    given = {
        "resident": True, "bytes": 40_000_000, "own_bytes": 4_000_000, "fps": 4.9, "age_p95_ms": 61.5,
        "sla_ms": 100.0, "failure": None, "ledger": account(),
    }  # fmt: skip
    return QueryStatus(id=name, camera=camera, **(given | values))


def camera(name: str, **values: Any) -> CameraStatus:
    """A camera at work."""
    given = {"state": "streaming", "up": True, "fps": 10.0, "frame_age_s": 0.05, "reconnects": 0, "error": None}
    return CameraStatus(id=name, **(given | values))


def sink(name: str, **values: Any) -> SinkStatus:
    """A sink at work."""
    given = {"kind": name, "state": "up", "delivered": 0, "undelivered": {}, "queued": 0, "trouble": None}
    return SinkStatus(id=name, **(given | values))


class Box:
    """Says what `changes` do not say otherwise."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.moves, self.lacks = True, list[str]()
        self.refuses: str | None = None
        self.reloads = 0
        self.snapshots = Snapshots({"bridge-cars": "bridge", "gate-kind": "gate"})

    def status(self) -> Status:
        given = {
            "run": "f3a9c1", "bundle": "0123456789ab", "workload": "junction", "device": "cpu", "policy": "adaptive",
            "uptime_s": 3725.0, "budget_bytes": 64_000_000, "resident_bytes": 40_000_000,
            "workspace_bytes": 9_000_000, "bytes_moved": 123_456_789, "loads": 17,
            "reloads": {"applied": 1, "refused": 2}, "refused": None, "bundle_fault": None,
            "cameras": [camera(name) for name in CAMERAS],
            "queries": [query("bridge-cars", "bridge"), query("gate-kind", "gate", resident=False)],
            "sinks": [sink("jsonl", delivered=181, undelivered={"full": 3})],
            "drift": [
                DriftStatus(query="gate-kind", ratio=0.93, ci95=[0.91, 0.94], frames=120, verdict="below",
                            checked_at=1.79e9, reverted=True),
                DriftStatus(query="bridge-cars", ratio=None, ci95=None, frames=3, verdict="too few",
                            checked_at=1.79e9, reverted=False),
            ],
            "spool": SpoolStatus(samples=41, unsampled={"busy": 2}, bytes=5_000_000),
        }  # fmt: skip
        return Status(**(given | self.changes))

    def is_moving(self) -> bool:
        return self.moves

    def missing(self) -> list[str]:
        return self.lacks

    def bundle_problem(self) -> str | None:
        return self.status().bundle_fault

    def reload(self) -> Future[str | None]:
        self.reloads += 1
        future: Future[str | None] = Future()
        future.set_result(self.refuses)
        return future

    def snapshot(self, camera: str) -> Snapshot | None:
        return self.snapshots.newest(camera)


def scene(shift: int = 0) -> np.ndarray:
    """A picture of a road, RGB uint8 (180, 288, 3), with a car at so many pixels."""
    image = np.full((180, 288, 3), (96, 120, 150), np.uint8)
    image[90:] = (70, 72, 76)
    image[110:140, 40 + shift : 100 + shift] = (200, 40, 40)
    return image


def detection(captured_at: float, shift: int = 0) -> dict[str, Any]:
    """What `bridge-cars` says of that picture."""
    found = [{"class": "car", "score": 0.91, "box": [40.0 + shift, 110.0, 100.0 + shift, 140.0]}]
    return {"query": "bridge-cars", "captured_at": captured_at, "finished_at": captured_at + 0.06, "detections": found}
