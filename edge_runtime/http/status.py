"""The status of a box as `/api/status` answers it; metrics and dashboard show the same values."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Field(ge=0)


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LedgerStatus(_Value):
    """Counts of a query's frames: received = processed + all dropped + failed + pending, always."""

    received: int = Count
    processed: int = Count
    late: int = Field(ge=0, description="of those processed")
    failed: int = Count
    pending: int = Count
    dropped: dict[str, int] = Field(description="by reason")


class CameraStatus(_Value):
    """One camera; `frame_age_s` is null before its first frame."""

    id: str
    state: str = Field(description="connecting, streaming, away or ended")
    up: bool = Field(description="whether frames come, or all have come")
    fps: float = Field(ge=0, description="frames delivered a second, lately")
    frame_age_s: float | None
    decoded: int = Field(0, ge=0, description="frames decoded so far, those that no query asked for included")
    reconnects: int = Count
    error: str | None = Field(description="the present problem, if any")
    away_s: float | None = Field(None, description="seconds since its frames stopped, null while they come")
    undecodable: int = Field(0, ge=0, description="frames that could not be decoded")
    decoder: str | None = Field(None, description="what decodes its frames: cpu, or a kind of hardware")
    skip: str | None = Field(None, description="frames not decoded at present: none, nonref or nonkey")


class QueryStatus(_Value):
    """One query; `age_p95_ms` is of its latest results, null before the first."""

    id: str
    camera: str
    resident: bool
    bytes: int = Field(ge=0, description="of its tensors, those it shares included")
    own_bytes: int = Field(ge=0, description="of its tensors that no other query has")
    fps: float = Field(ge=0, description="results a second, lately")
    asked_fps: float = Field(0.0, ge=0, description="frames a second that it asks for, or that senders push")
    dropped_share: float = Field(
        0.0, ge=0, le=1, description="of the frames of the last minute, dropped for lack of time or memory"
    )
    age_p95_ms: float | None
    sla_ms: float
    failure: str | None = Field(description="its last failure")
    ledger: LedgerStatus
    still_fraction: float | None = Field(None, description="of its frames, not run by motion gating; null without")
    scheduled: bool | None = Field(None, description="whether its hours include now; null without hours")
    paused: bool = Field(False, description="whether it, or its camera, was switched off")
    changed: dict[str, Any] = Field({}, description="what a person has set of it in place of the config")
    tracks: int = Field(0, ge=0, description="objects that it follows")
    tracking_trouble: str | None = Field(None, description="why objects are not followed at present; null else")
    open_events: int = Field(0, ge=0, description="events that go on")
    crossed: dict[str, dict[str, int]] = Field({}, description="by event the crossings of its line, by way")


class EventStatus(_Value):
    """One event; times in Unix seconds, `end_time` null while it goes on."""

    id: str
    event: str = Field(description="the name of its rule")
    kind: str
    query: str
    camera: str
    zone: str | None
    label: str
    track: int | None
    top_score: float
    start_time: float
    end_time: float | None
    end_reason: str | None
    direction: str | None = Field(None, description="the way across a line, left or right")
    has_snapshot: bool = Field(False, description="whether /api/events/ID/snapshot.jpg has a picture")
    has_clip: bool = Field(False, description="whether /api/events/ID/clip.mp4 has a clip, some seconds after its end")


class EventList(_Value):
    """The newest events, newest first."""

    events: list[EventStatus]


class SinkStatus(_Value):
    """One sink and its results."""

    id: str
    kind: str
    state: str
    delivered: int = Count
    undelivered: dict[str, int] = Field(description="by reason")
    queued: int = Count
    trouble: str | None = Field(description="why it takes no results at present")


class DriftStatus(_Value):
    """A query at the last drift check."""

    query: str
    ratio: float | None = Field(description="of its accuracy to its original's; null where the frames were too few")
    chance_per_year: float | None = Field(description="how often a year so much is seen by chance at most; 1 alarms")
    frames: int = Count
    verdict: str = Field(description="kept, below, unsure, too few or one answer")
    checked_at: float = Field(description="Unix seconds")
    reverted: bool = Field(description="whether a bundle was made in which it has its own weights again")


class ClipStatus(_Value):
    """The folder of clips and snapshots; `trouble` says why nothing more is written."""

    files: int
    nbytes: int
    trouble: str | None


class SpoolStatus(_Value):
    """What is kept for a drift check."""

    samples: int = Field(ge=0, description="written since the start")
    unsampled: dict[str, int] = Field(description="answers that could not be kept, by reason")
    bytes: int = Field(ge=0, description="of all that are kept")
    free_bytes: int | None = Field(default=None, description="on the disk of the spool")


class TlsStatus(_Value):
    """The certificate of HTTPS."""

    expires_at: float = Field(description="Unix seconds")
    warning: str | None = Field(description="set days before it runs out, and where new files cannot be used")


class UpdateStatus(_Value):
    """Updates that the box pulls."""

    state: str = Field(
        default="current", description="current, downloading, on trial or refused, until another is offered"
    )
    checked_at: float | None = Field(description="of the last answer of the server, Unix seconds")
    trial: str | None = Field(description="first digits of a bundle that has to prove itself")
    refused: dict[str, str] = Field(description="bundles that were taken back, and why")
    trouble: str | None = Field(description="why nothing new comes, or nothing can be installed")
    sequence: int = Field(default=0, ge=0, description="the signed number of the bundle that serves, 0 without one")
    valid_until: float | None = Field(default=None, description="its signed end, Unix seconds")
    why: str | None = Field(default=None, description="why the newest offer is refused; null where it is not")
    since: float | None = Field(default=None, description="when it was, Unix seconds")
    offered: str | None = Field(default=None, description="first digits of the newest offer, where it was loaded")


class Status(_Value):
    """A whole box at one moment."""

    version: str = Field("", description="of Gemel")
    name: str = Field(description="of the box")
    run: str = Field(description="made new at each start")
    bundle: str = Field(description="first 12 digits of its SHA-256")
    workload: str
    device: str
    policy: str
    uptime_s: float
    memory_bytes: int | None = Field(None, description="what the whole process may take, where the config says it")
    base_bytes: int = Field(0, description="what the process takes without weights and workspaces")
    budget_bytes: int = Field(description="what weights and workspaces may take")
    resident_bytes: int
    workspace_bytes: int = Field(description="the largest that a resident query needs beside its weights")
    process_bytes: int | None = Field(None, description="memory of the process that is no mapped file")
    beside_budget_bytes: int | None = Field(None, description="of those, all but the weights in memory")
    overloaded: bool = Field(False, description="whether it loses frames that it was asked to answer")
    dropped_share: float = Field(
        0.0, ge=0, le=1, description="of the frames of the last minute, dropped for lack of time or memory"
    )
    bytes_moved: int = Field(description="by loads since the warm-up, in which the box measures itself")
    loads: int
    reloads: dict[Literal["applied", "partly", "refused"], int]
    refused: str | None = Field(description="why the last reload was not applied, null where it was")
    held_back: dict[str, str] = Field({}, description="queries that kept their old weights in a reload, and why")
    bundle_fault: str | None = Field(description="set when the bundle's file was changed in place")
    cameras: list[CameraStatus]
    queries: list[QueryStatus]
    sinks: list[SinkStatus]
    drift: list[DriftStatus]
    events: list[EventStatus] = Field([], description="the newest ones, newest first")
    seconds: dict[str, float] = Field({}, description="processor time of the threads that do it, by part of the work")
    events_begun: dict[str, dict[str, int]] = Field({}, description="since the start, by query and name")
    clips: ClipStatus | None = None
    spool: SpoolStatus | None = Field(None, description="null where the box keeps no samples")
    updates: UpdateStatus | None = Field(None, description="null where the box pulls none")
    tls: TlsStatus | None = Field(default=None, description="null without TLS")


class Readiness(_Value):
    """Whether a box is ready: nothing is missing."""

    missing: list[str] = Field(description="what the box still lacks, a line each")
    cameras: dict[str, str] = Field({}, description="the state of each camera")


class ReloadOutcome(_Value):
    """The outcome of a reload."""

    applied: bool | Literal["partly"] = Field(description="partly where queries keep their old weights")
    held_back: list[str] | None = Field(None, description="queries that keep their old weights")
    reason: str | None = Field(None, description="why it was not applied")
