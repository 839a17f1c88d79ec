"""What a running box lets others see: its status, its metrics and the snapshots of its cameras."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future

from edge_runtime.capture.camera import Camera
from edge_runtime.capture.reconnect import CameraPhase
from edge_runtime.executor import TurnTiming
from edge_runtime.http.metrics import Metrics
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
from edge_runtime.inference import InferenceThread
from edge_runtime.queues import Frame
from edge_runtime.reload import ReloadManager
from edge_runtime.results import BUNDLE_DIGITS
from edge_runtime.runtime import ActiveConfig
from edge_runtime.samples import Spool
from edge_runtime.sinks.base import ResultMessage
from edge_runtime.sinks.worker import DOWN, SinkManager
from models.bundle import Bundle

RATE_WINDOW_S = 10.0


class RecentCount:
    """Counts over the last seconds; call it from one thread at a time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def per_second(self, now: float, total: int) -> float:
        """What came a second of late, told the `total` so far each time that it is asked."""
        self._seen.append((now, total))
        while len(self._seen) > 2 and self._seen[1][0] <= now - RATE_WINDOW_S:
            self._seen.popleft()
        (since, before), (_, after) = self._seen[0], self._seen[-1]
        return (after - before) / (now - since) if now > since else 0.0


class Observer:
    """Hears of frames, results and turns while a box works; each call costs microseconds."""

    def __init__(self, bundle: Bundle) -> None:
        self._cameras = {query.id: query.camera for query in bundle.queries}
        self.gallery, self.measures = Snapshots(self._cameras), Metrics(self._cameras)

    def change(self, bundle: Bundle) -> None:
        """Other queries are served; what is known of those that stay is kept."""
        self._cameras = {query.id: query.camera for query in bundle.queries}
        self.gallery.change(self._cameras)
        self.measures.change(self._cameras)

    def saw(self, query: str, frame: Frame) -> None:
        """A frame came for a query."""
        if frame.image is not None:
            self.gallery.saw(self._cameras[query], frame.index, frame.captured_unix, frame.image)

    def answered(self, parcel: ResultMessage) -> None:
        """A result is on its way."""
        self.gallery.answered(parcel.record)
        self.measures.finished(parcel.record["query"], parcel.record["age_ms"] / 1000)

    def took(self, query: str, turn: TurnTiming) -> None:
        """A query had its turn."""
        if turn.load_s is not None and turn.moved_bytes:
            self.measures.loaded(query, turn.load_s)
        if turn.run_s is not None:
            self.measures.ran(query, turn.run_s)


class RuntimeStatus:
    """A box at work, as `edge_runtime.watching` asks for it: safe from any thread, never waiting for the inference."""

    def __init__(
        self,
        inference: InferenceThread,
        reloads: ReloadManager,
        post: SinkManager,
        observer: Observer,
        spool: Spool | None = None,
    ) -> None:
        self._inference, self._reloads, self._post, self._observer = inference, reloads, post, observer
        self._started, self._spool = time.monotonic(), spool
        self._rates: dict[str, RecentCount] = {}
        self._lock = threading.Lock()

    def status(self) -> Status:
        """The box at this moment; the counts of frames are of one."""
        work, outcomes, now = self._inference.workplace.now, self._reloads.state, time.monotonic()
        opened, device = work.box.fitted.box, work.executor.device
        queries = self._queries(work, now)
        workspaces = [device.costs.queries[one.id].workspace_bytes for one in queries if one.resident]
        return Status(
            run=work.identity.run, bundle=work.identity.bundle[:BUNDLE_DIGITS],
            workload=opened.bundle.manifest.workload, device=opened.config.device, policy=opened.config.policy,
            uptime_s=round(now - self._started, 1),
            budget_bytes=device.budget_bytes, resident_bytes=device.arena.residency.resident_bytes,
            workspace_bytes=max(workspaces, default=0), bytes_moved=device.arena.bytes_moved, loads=device.arena.swaps,
            reloads={"applied": outcomes.applied, "refused": outcomes.refused}, refused=outcomes.reason,
            held_back=dict(opened.held_back),
            bundle_fault=work.bundle_problem, cameras=[_camera(camera) for camera in work.cameras],
            queries=queries, sinks=self._sinks(), drift=self._drift(work),
            spool=None if self._spool is None else SpoolStatus(**self._spool.to_json()),
        )  # fmt: skip

    def _drift(self, work: ActiveConfig) -> list[DriftStatus]:
        """What the last drift check found of the queries that are served."""
        found = None if self._spool is None else self._spool.checked
        return [] if found is None else [
            DriftStatus(
                query=one.id, ratio=one.ratio, ci95=one.ci95, frames=one.frames, verdict=one.verdict,
                checked_at=found.checked_at, reverted=one.reverted,
            )
            for one in found.queries if one.id in work.queries
        ]  # fmt: skip

    def _queries(self, work: ActiveConfig, now: float) -> list[QueryStatus]:
        publisher, device, nbytes = work.executor.publisher, work.executor.device, work.bytes
        ledger = publisher.ledger.to_json()
        accounts = {row["query"]: {key: row[key] for key in row.keys() - {"query"}} for row in ledger}
        with self._lock:
            self._rates = {query: self._rates.get(query) or RecentCount() for query in work.queries}
            rates = {query: one.per_second(now, accounts[query]["processed"]) for query, one in self._rates.items()}
        return [
            QueryStatus(
                id=query.id, camera=query.camera, resident=device.is_resident(query.id), bytes=nbytes[query.id][0],
                own_bytes=nbytes[query.id][1], fps=round(rates[query.id], 2),
                age_p95_ms=publisher.age_p95_ms(query.id), sla_ms=query.sla_ms,
                failure=publisher.failures.get(query.id), ledger=LedgerStatus(**accounts[query.id]),
            )
            for query in work.queries.values()
        ]  # fmt: skip

    def moving(self) -> bool:
        """Whether the inference goes on; a step of it that hangs ends the box."""
        return not self._inference.over.is_set()

    def missing(self) -> list[str]:
        """What is not there yet: the warm-up's end, cameras that never gave a frame, sinks that are down."""
        lacking = [] if self._inference.began is not None else ["engines: the warm-up is not over"]
        for camera in self._inference.cameras:
            if camera.to_json()["frame_age_s"] is None:
                lacking.append(f"camera {camera.id}: no frame yet")
        if (fault := self.bundle_fault()) is not None:
            lacking.append(f"bundle: {fault}")
        return [*lacking, *(f"sink {one.id}: {one.state}" for one in self._sinks() if one.state == DOWN)]

    def bundle_fault(self) -> str | None:
        """What became of the bundle's file in place; None while it is what it was."""
        return self._inference.workplace.now.bundle_problem

    def reload(self) -> Future[str | None]:
        """Take up config and bundle as they are now; the reason where they are not applied."""
        return self._reloads.ask()

    def picture(self, camera: str) -> Snapshot | None:
        """The newest frame of a camera with its results; KeyError where there is no such camera."""
        return self._observer.gallery.picture(camera)

    def _sinks(self) -> list[SinkStatus]:
        rows = self._post.to_json()
        kinds = [row["kind"] for row in rows]
        return [
            SinkStatus(
                id=row["kind"] if kinds.count(row["kind"]) == 1 else f"{row['kind']}-{index}", kind=row["kind"],
                state=row["state"], delivered=row["delivered"], undelivered=row["undelivered"], queued=row["queued"],
                trouble=row["trouble"] if row["state"] == DOWN else None,
            )
            for index, row in enumerate(rows, 1)
        ]  # fmt: skip


def _camera(camera: Camera) -> CameraStatus:
    row = camera.to_json()
    up = row["state"] == CameraPhase.STREAMING or (row["state"] == CameraPhase.ENDED and not row["error"])
    return CameraStatus(
        id=row["id"], state=row["state"], up=up,
        fps=row["fps"], frame_age_s=row["frame_age_s"], reconnects=row["reconnects"], error=row["error"],
    )  # fmt: skip
