"""What a box at work lets others see of it: its status, and the pictures of its cameras."""

from __future__ import annotations

import threading
import time
from collections import Counter

from edge_runtime.capture.camera import Camera
from edge_runtime.capture.reconnection import Phase
from edge_runtime.delivery.courier import DOWN
from edge_runtime.delivery.parcel import Parcel
from edge_runtime.delivery.post import Post
from edge_runtime.frames.mailbox import Frame
from edge_runtime.frames.results import BUNDLE_DIGITS, Identity
from edge_runtime.opening import OpenBox
from edge_runtime.serving.executor import Turn
from edge_runtime.serving.inference import Inference
from edge_runtime.spool.spool import Spool
from edge_runtime.watching.gallery import Gallery, Picture
from edge_runtime.watching.measures import Measures
from edge_runtime.watching.rate import Rate
from edge_runtime.watching.status import (
    Account,
    CameraStatus,
    DriftStatus,
    QueryStatus,
    SinkStatus,
    SpoolStatus,
    Status,
)
from models.bundle import Bundle


class Observer:
    """Hears of frames, results and turns while a box works; each call costs microseconds."""

    def __init__(self, bundle: Bundle) -> None:
        self._cameras = {query.id: query.camera for query in bundle.queries}
        self.gallery, self.measures = Gallery(self._cameras), Measures(self._cameras)

    def saw(self, query: str, frame: Frame) -> None:
        """A frame came for a query."""
        if frame.image is not None:
            self.gallery.saw(self._cameras[query], frame.index, frame.captured_unix, frame.image)

    def answered(self, parcel: Parcel) -> None:
        """A result is on its way."""
        self.gallery.answered(parcel.record)
        self.measures.finished(parcel.record["query"], parcel.record["age_ms"] / 1000)

    def took(self, query: str, turn: Turn) -> None:
        """A query had its turn."""
        if turn.load_s is not None and turn.moved_bytes:
            self.measures.loaded(query, turn.load_s)
        if turn.run_s is not None:
            self.measures.ran(query, turn.run_s)


class WatchedBox:
    """A box at work, as `edge_runtime.watching` asks for it: safe from any thread, never waiting for the inference."""

    def __init__(
        self,
        box: OpenBox,
        identity: Identity,
        inference: Inference,
        post: Post,
        observer: Observer,
        spool: Spool | None = None,
    ) -> None:
        self._config, self._bundle, self._identity = box.config, box.bundle, identity
        self._inference, self._post, self._observer = inference, post, observer
        self._started, self._spool = time.monotonic(), spool
        names = {query.id: set(box.bundle.names_in_order(query.id)) for query in box.bundle.queries}
        having = Counter(name for given in names.values() for name in given)
        self._bytes = {query: sum(map(box.bundle.nbytes, given)) for query, given in names.items()}
        self._own_bytes = {query: sum(box.bundle.nbytes(name) for name in given if having[name] == 1)
                           for query, given in names.items()}  # fmt: skip
        self._rates = {query: Rate() for query in self._bytes}
        self._lock = threading.Lock()

    def status(self) -> Status:
        """The box at this moment; the counts of frames are of one."""
        executor, bundle, now = self._inference.executor, self._bundle, time.monotonic()
        device = executor.device
        queries = self._queries(now)
        workspaces = [device.costs.queries[one.id].workspace_bytes for one in queries if one.resident]
        return Status(
            run=self._identity.run, bundle=bundle.digest[:BUNDLE_DIGITS], workload=bundle.manifest.workload,
            device=self._config.device, policy=self._config.policy, uptime_s=round(now - self._started, 1),
            budget_bytes=device.budget_bytes, resident_bytes=device.arena.residency.resident_bytes,
            workspace_bytes=max(workspaces, default=0), bytes_moved=device.arena.bytes_moved, loads=device.arena.swaps,
            reloads={"applied": 0, "refused": 0}, cameras=[_camera(camera) for camera in self._inference.cameras],
            queries=queries, sinks=self._sinks(), drift=self._drift(),
            spool=None if self._spool is None else SpoolStatus(**self._spool.to_json()),
        )  # fmt: skip

    def _drift(self) -> list[DriftStatus]:
        """What the last drift check found of the queries that are served."""
        found = None if self._spool is None else self._spool.checked
        return [] if found is None else [
            DriftStatus(
                query=one.id, ratio=one.ratio, ci95=one.ci95, frames=one.frames, verdict=one.verdict,
                checked_at=found.checked_at, reverted=one.reverted,
            )
            for one in found.queries if one.id in self._bytes
        ]  # fmt: skip

    def _queries(self, now: float) -> list[QueryStatus]:
        publisher, device = self._inference.executor.publisher, self._inference.executor.device
        ledger = publisher.ledger.to_json()
        accounts = {row["query"]: {key: row[key] for key in row.keys() - {"query"}} for row in ledger}
        with self._lock:
            rates = {query: one.per_second(now, accounts[query]["processed"]) for query, one in self._rates.items()}
        return [
            QueryStatus(
                id=query.id, camera=query.camera, resident=device.is_resident(query.id), bytes=self._bytes[query.id],
                own_bytes=self._own_bytes[query.id], fps=round(rates[query.id], 2),
                age_p95_ms=publisher.age_p95_ms(query.id), sla_ms=query.sla_ms,
                failure=publisher.failures.get(query.id), ledger=Account(**accounts[query.id]),
            )
            for query in self._bundle.queries
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
        return [*lacking, *(f"sink {one.id}: {one.state}" for one in self._sinks() if one.state == DOWN)]

    def picture(self, camera: str) -> Picture | None:
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
    up = row["state"] == Phase.STREAMING or (row["state"] == Phase.ENDED and not row["error"])
    return CameraStatus(
        id=row["id"], state=row["state"], up=up,
        fps=row["fps"], frame_age_s=row["frame_age_s"], reconnects=row["reconnects"], error=row["error"],
    )  # fmt: skip
