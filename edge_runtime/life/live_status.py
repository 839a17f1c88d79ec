"""The status of a running box, for HTTP: collected from the runtime without making the inference wait."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

from gemel.edge_runtime.capture.push import AnyCamera, PushCamera, PushQuery
from gemel.edge_runtime.capture.reconnect import CameraPhase
from gemel.edge_runtime.events.stage import MAX_EVENTS
from gemel.edge_runtime.frames.part_times import PART_TIMES
from gemel.edge_runtime.frames.queues import STILL
from gemel.edge_runtime.frames.results import BUNDLE_DIGITS
from gemel.edge_runtime.frames.samples import Spool
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
    UpdateStatus,
)
from gemel.edge_runtime.life.inference import InferenceThread
from gemel.edge_runtime.life.load_monitor import LoadMonitor, LoadShare
from gemel.edge_runtime.life.reload import ReloadManager, ReloadResult
from gemel.edge_runtime.life.runtime import ActiveConfig
from gemel.edge_runtime.life.switches import CameraSwitch
from gemel.edge_runtime.sinks.base import QUERY
from gemel.edge_runtime.sinks.worker import DOWN, SinkManager
from gemel.edge_runtime.updates.updater import Updater
from gemel.models.errors import InputError
from gemel.models.process import installed_version, private_bytes

SHOWN_EVENTS = 20
"""Events in the status, for the dashboard."""


class RuntimeStatus:
    """What HTTP needs of a running box; every call is thread-safe and returns at once."""

    def __init__(
        self,
        inference: InferenceThread,
        reloads: ReloadManager,
        sinks: SinkManager,
        observer: Observer,
        spool: Spool | None = None,
        load: LoadMonitor | None = None,
        updater: Updater | None = None,
    ) -> None:
        self._inference, self._reloads, self._sinks, self._observer = inference, reloads, sinks, observer
        self._spool, self._started = spool, time.monotonic()
        self._load, self._updater = load or LoadMonitor(), updater

    def status(self) -> Status:
        """The box at this moment; the frame counts are consistent with each other."""
        active, now = self._inference.runtime.active, time.monotonic()
        box, device = active.box, active.executor.device
        queries, loads = self._queries(active, now), self._inference.loads
        workspaces = [device.costs.queries[query.id].workspace_bytes for query in queries if query.resident]
        memory = private_bytes()
        held_bytes = device.arena.residency.resident_bytes + box.costed.held_bytes
        own_bytes = 0 if box.config.device == "cuda" else held_bytes
        return Status(
            name=box.config.name, run=active.identity.run, bundle=active.identity.bundle[:BUNDLE_DIGITS],
            workload=box.bundle.manifest.workload, device=box.config.device, policy=box.config.policy,
            version=installed_version(), uptime_s=round(now - self._started, 1),
            process_bytes=memory, beside_budget_bytes=None if memory is None else max(0, memory - own_bytes),
            overloaded=self._load.is_overloaded, dropped_share=round(self._load.box.dropped_share, 4),
            memory_bytes=box.config.memory_bytes, base_bytes=box.costed.loaded.base_bytes,
            budget_bytes=device.budget_bytes + box.costed.held_bytes,
            resident_bytes=device.arena.residency.resident_bytes + box.costed.held_bytes,
            workspace_bytes=max(workspaces, default=0), bytes_moved=loads["bytes_moved"], loads=loads["swaps"],
            reloads=dict(self._reloads.counts), refused=self._reloads.refused,
            held_back=dict(box.costed.loaded.held_back), bundle_fault=active.bundle_problem,
            cameras=[_camera_status(camera) for camera in active.cameras], queries=queries,
            sinks=self._sink_statuses(), drift=self._drift(active),
            events=self.events(SHOWN_EVENTS), events_begun=self._inference.runtime.events.event_counts(),
            clips=self._clips(), seconds=PART_TIMES.to_json(),
            spool=self._spool_status(),
            updates=None if self._updater is None else UpdateStatus(**self._updater.to_json()),
        )  # fmt: skip

    def events(self, count: int = MAX_EVENTS) -> list[EventStatus]:
        """The newest events, newest first."""
        rows = self._inference.runtime.events.events(count)
        return [EventStatus(**{key: row[key] for key in EventStatus.model_fields if key in row}) for row in rows]

    def thumbnail(self, event: str) -> bytes | None:
        """The snapshot of one of the newest events, a small JPEG; None without one."""
        return self._inference.runtime.events.thumbnail(event)

    def _spool_status(self) -> SpoolStatus | None:
        spool = self._spool
        return None if spool is None else SpoolStatus(free_bytes=spool.free_bytes, **spool.to_json())

    def _clips(self) -> ClipStatus | None:
        recorder = self._inference.runtime.recorder
        return None if recorder is None else ClipStatus(**asdict(recorder.totals))

    def order(self, kind: str, name: str, text: bytes, by: str) -> CameraSwitch:
        """Set some keys of a camera or query; raises as `Runtime.order` does."""
        return self._inference.runtime.order(kind, name, text, by)

    def event_file(self, event: str, ending: str) -> Path | None:
        """The clip or snapshot of an event on disk; None where there is none."""
        recorder = self._inference.runtime.recorder
        return None if recorder is None else recorder.find_file(event, ending)

    def is_moving(self) -> bool:
        """Whether the inference goes on; a step of it that hangs ends the box."""
        return not self._inference.over.is_set()

    def missing(self) -> list[str]:
        """What is not ready yet: the warm-up, cameras without a frame, sinks that are down, a changed bundle."""
        missing = [] if self._inference.started is not None else ["engines: the warm-up is not over"]
        missing += self._missing_cameras()
        if (problem := self.bundle_problem()) is not None:
            missing.append(f"bundle: {problem}")
        return [*missing, *(f"sink {sink.id}: {sink.state}" for sink in self._sink_statuses() if sink.state == DOWN)]

    def push_queries(self) -> dict[str, PushQuery]:
        """The queries whose frames come by HTTP."""
        active = self._inference.runtime.active
        return {
            name: PushQuery(active.queries[name], camera, active.identity.bundle[:BUNDLE_DIGITS])
            for name, camera in active.sources.items()
            if isinstance(camera, PushCamera)
        }

    def _missing_cameras(self) -> list[str]:
        """Cameras that never gave a frame; those that are away or of no use, as far as `http.ready` asks for them."""
        http = self._inference.runtime.active.box.config.http
        cameras = [_camera_status(one) for one in self._inference.cameras if not isinstance(one, PushCamera)]
        away = [camera for camera in cameras if not camera.up or camera.error is not None]
        needs_all = http is not None and http.ready == "all"
        shown = away if needs_all or len(away) == len(cameras) else [one for one in away if one.frame_age_s is None]
        return [
            f"camera {one.id}: {'no frame yet' if one.frame_age_s is None else one.error if one.up else one.state}"
            for one in shown
        ]

    def bundle_problem(self) -> str | None:
        """One line when the bundle's file was changed in place."""
        return self._inference.runtime.active.bundle_problem

    def reload(self) -> Future[ReloadResult]:
        """Reload config and bundle."""
        return self._reloads.request()

    def roll_back(self) -> Future[str]:
        """Let the bundle before the last update serve again (`Updater.roll_back`)."""
        if self._updater is not None:
            return self._updater.roll_back()
        refused: Future[str] = Future()
        problem = "its bundles come from no server, so that no update has replaced one"
        refused.set_exception(InputError("updates", problem, "install another by hand, and `gemel reload`"))
        return refused

    def snapshot(self, camera: str) -> Snapshot | None:
        """The newest frame of a camera with its results; KeyError where there is no such camera."""
        return self._observer.snapshot(camera)

    def _drift(self, active: ActiveConfig) -> list[DriftStatus]:
        report = None if self._spool is None else self._spool.drift
        if report is None:
            return []
        rows = [query.model_dump(exclude={"id", "target"}) for query in report.queries]
        return [
            DriftStatus(query=query.id, checked_at=report.checked_at, **row)
            for query, row in zip(report.queries, rows, strict=True)
            if query.id in active.queries
        ]

    def _queries(self, active: ActiveConfig, now: float) -> list[QueryStatus]:
        publisher, device, nbytes = active.executor.publisher, active.executor.device, active.query_bytes
        ledgers = {row.pop("query"): LedgerStatus(**row) for row in publisher.ledger.to_json()}
        states, paused = self._inference.runtime.events.states(), self._inference.runtime.events.paused
        switches, adjusted = self._inference.runtime.switches.values, self._inference.runtime.adjusted
        loads = {name: self._load.queries.get(name, LoadShare()) for name in active.queries}
        asked_fps = {
            name: 0.0 if states[name].scheduled is False or name in paused
            else loads[name].received_fps if isinstance(camera, PushCamera) else adjusted.rates.get(name, 0.0)
            for name, camera in active.sources.items()
        }  # fmt: skip
        return [
            QueryStatus(
                id=name, camera=query.camera, resident=device.is_resident(name), bytes=nbytes[name][0],
                own_bytes=nbytes[name][1], fps=round(publisher.per_second(name, now), 2),
                asked_fps=round(asked_fps[name], 2),
                dropped_share=round(loads[name].dropped_share, 4),
                age_p95_ms=publisher.age_p95_ms(name), sla_ms=query.sla_ms,
                failure=publisher.failures.get(name), ledger=ledgers[name],
                still_fraction=_still_fraction(ledgers[name]) if states[name].is_gated else None,
                scheduled=states[name].scheduled, tracks=states[name].tracks, open_events=states[name].open_events,
                paused=name in paused,
                changed=switches.find(QUERY, name).model_dump(mode="json", exclude_defaults=True),
                tracking_trouble=states[name].tracking_trouble,
                crossed={rule: dict(ways) for rule, ways in states[name].crossed.items()},
            )
            for name, query in active.queries.items()
        ]  # fmt: skip

    def _sink_statuses(self) -> list[SinkStatus]:
        rows = self._sinks.to_json()
        kinds = [row["kind"] for row in rows]
        return [
            SinkStatus(
                id=row["kind"] if kinds.count(row["kind"]) == 1 else f"{row['kind']}-{index}", kind=row["kind"],
                state=row["state"], delivered=row["delivered"], undelivered=row["undelivered"], queued=row["queued"],
                trouble=row["trouble"] if row["state"] == DOWN else None,
            )
            for index, row in enumerate(rows, 1)
        ]  # fmt: skip


def _still_fraction(ledger: LedgerStatus) -> float:
    return round(ledger.dropped.get(STILL, 0) / max(1, ledger.received), 4)


def _camera_status(camera: AnyCamera) -> CameraStatus:
    row = camera.to_json()
    is_up = row["state"] == CameraPhase.STREAMING or (row["state"] == CameraPhase.ENDED and not row["error"])
    return CameraStatus(up=is_up, **{key: row[key] for key in CameraStatus.model_fields if key in row})
