"""Clips and snapshots of events, kept on disk within a bound.

The packets of a camera that are decoded anyway are kept for some seconds in memory, and written to a file as they are
while an event goes on: nothing is decoded or encoded for it. Events of one camera at one time share one file, by hard
links where the file system has them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import re
import shutil
import threading
import time
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemel.edge_runtime.frames.drawing import draw_larger, draw_message
from gemel.edge_runtime.sinks.base import ResultMessage
from gemel.models.errors import one_line

if TYPE_CHECKING:
    import numpy as np

MAX_CLIP_S = 60.0
"""An event that goes on longer has a clip of its beginning."""
JOIN_S = 20.0
"""An event that begins later than this into a clip has another one, so that it is in it whole."""
MAX_RING_BYTES = 32 * 2**20
"""Packets of one camera in memory: 25 s at 10 Mbit/s."""
RING_SLACK_S = 5.0
"""Packets are kept longer by as much, as an event is certain some frames after it began."""
MIN_FREE_BYTES = 64 * 2**20
"""Clips leave as much of the disk free for results."""
MAX_WAITING = 16
"""Snapshots that wait to be written."""
POLL_INTERVAL_S, PRUNE_INTERVAL_S = 0.25, 10.0
CLIP, SNAPSHOT, PART = ".mp4", ".jpg", ".part"
MOVFLAGS = "frag_keyframe+empty_moov+default_base_moof"
"""A file that is cut short plays up to there."""
_EVENT_ID = re.compile(r"[A-Za-z0-9-]{1,80}")

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, slots=True)
class ClipConfig:
    """The absolute folder `path`, with at most `max_bytes`; a clip begins `before_s` before its event and ends
    `after_s` after it."""

    path: Path
    max_bytes: int
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class StoredPacket:
    """A packet: its number, when it came in seconds of the schedule's clock, and what a file says of it."""

    number: int
    at: float
    data: bytes
    pts: int
    dts: int
    duration: int
    time_base: Fraction
    is_key: bool

    def to_packet(self, first_dts: int) -> Any:
        """It as PyAV's, with times since this one."""
        import av

        packet: Any = av.Packet(self.data)
        packet.pts, packet.dts = self.pts - first_dts, self.dts - first_dts
        packet.duration, packet.time_base, packet.is_keyframe = self.duration, self.time_base, self.is_key
        return packet


class PacketRing:
    """The newest packets of one camera, from a key frame on. Thread-safe.

    `connection` counts connections; a clip does not go on in the next one. `template` is a stream like the camera's.
    """

    def __init__(self, seconds: float) -> None:
        self.connection = 0
        self.is_main = False
        """Whether the camera's queries see a smaller stream."""
        self.template: Any = None
        self._holder: Any = None
        self._codec: tuple[str, bytes | None] = "", None
        self._seconds, self._lock = seconds, threading.Lock()
        self._packets: deque[StoredPacket] = deque()
        self._number = self._nbytes = 0

    def begin(self, stream: Any) -> None:
        """A new connection with this stream of PyAV."""
        import av

        with self._lock:
            self.connection += 1
            self._packets.clear()
            self._nbytes = 0
            self._codec = stream.codec_context.codec.canonical_name, stream.codec_context.extradata
            self._holder = av.open(BytesIO(), "w", format="mp4")
            try:
                self.template = self._holder.add_stream_from_template(stream)
            except ValueError:  # a codec that MP4 cannot hold
                self.template = None

    def add(self, packet: Any) -> None:
        """The next packet."""
        dts: int | None = packet.pts if packet.dts is None else packet.dts
        if self.template is None or dts is None:
            return
        pts = dts if packet.pts is None else packet.pts
        with self._lock:
            self._number += 1
            stored = StoredPacket(
                self._number, time.monotonic(), bytes(packet), pts, dts, packet.duration or 0, packet.time_base,
                packet.is_keyframe,
            )  # fmt: skip
            self._packets.append(stored)
            self._nbytes += len(stored.data)
            if stored.is_key or self._nbytes > MAX_RING_BYTES:
                self._trim(stored.at - self._seconds)

    def read(self, after: int, since_at: float) -> list[StoredPacket]:
        """The packets after this number; with 0 those from the last key frame before `since_at` on."""
        with self._lock:
            if after:
                return [one for one in self._packets if one.number > after]
            keys = [one.number for one in self._packets if one.is_key]
            before = [one.number for one in self._packets if one.is_key and one.at <= since_at]
            first = before[-1] if before else next(iter(keys), math.inf)
            return [one for one in self._packets if one.number >= first]

    def picture_at(self, at: float) -> np.ndarray | None:
        """The frame that came last by this time, RGB uint8 (H, W, 3); None where its packets are gone."""
        from av.codec import CodecContext
        from av.video.reformatter import VideoReformatter

        packets = [one for one in self.read(0, at) if one.at <= at]
        if not packets or not packets[0].is_key or self.template is None:
            return None
        decoder: Any = CodecContext.create(self._codec[0], "r")
        decoder.extradata, decoder.thread_count = self._codec[1], 1
        frames = [frame for one in packets for frame in decoder.decode(one.to_packet(0))]
        frames += decoder.decode(None)
        return VideoReformatter().reformat(frames[-1], format="rgb24", threads=1).to_ndarray() if frames else None

    def _trim(self, oldest_at: float) -> None:
        """Drop what lies before the last key frame that is old enough; all of it where it takes too much memory."""
        keys = [one for one in self._packets if one.is_key and one.at <= oldest_at]
        first = keys[-1].number if keys else 0
        while self._packets and (self._packets[0].number < first or self._nbytes > MAX_RING_BYTES):
            self._nbytes -= len(self._packets.popleft().data)


@dataclass(slots=True, eq=False)
class ClipFile:
    """A file that is being written: its events, those that go on, and until when it lasts."""

    camera: str
    ring: PacketRing
    connection: int
    begin_at: float
    events: list[str]
    open_events: set[str]
    until: float = math.inf
    last_number: int = 0
    container: Any = None
    stream: Any = None
    first_dts: int = 0

    @property
    def name(self) -> str:
        """Its file, without ending."""
        return self.events[0]


@dataclass(frozen=True, slots=True)
class ClipTotals:
    """What the folder holds, and why nothing more is written, if so."""

    files: int = 0
    nbytes: int = 0
    trouble: str | None = None


class ClipRecorder:
    """Writes the clips and snapshots of events, in a thread. `begin`, `end` and `keep_snapshot` never wait."""

    def __init__(self, config: ClipConfig) -> None:
        self.totals = ClipTotals()
        self._config, self._lock = config, threading.Lock()
        self._rings: dict[str, PacketRing] = {}
        self._clips: list[ClipFile] = []
        self._snapshots: queue.Queue[ResultMessage] = queue.Queue(MAX_WAITING)
        self._stopping, self._pruned_at, self._is_changed = threading.Event(), -math.inf, False
        self._thread = threading.Thread(target=self._work, name="clips", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Close what is being written."""
        self._stopping.set()
        self._thread.join()

    def ring(self, camera: str) -> PacketRing:
        """Where the packets of a camera go."""
        return self._rings.setdefault(camera, PacketRing(self._config.before_s + RING_SLACK_S))

    def begin(self, camera: str, event: str, since_at: float) -> bool:
        """An event began, at this time of the schedule's clock; whether there will be a clip of it."""
        ring = self._rings.get(camera)
        if ring is None or ring.template is None or self.totals.trouble is not None:
            return False
        with self._lock:
            for clip in self._clips:
                if clip.camera == camera and clip.begin_at <= since_at <= clip.begin_at + JOIN_S:
                    clip.events.append(event)
                    clip.open_events.add(event)
                    clip.until = math.inf
                    return True
            begin_at = since_at - self._config.before_s
            self._clips.append(ClipFile(camera, ring, ring.connection, begin_at, [event], {event}))
        return True

    def end(self, event: str) -> None:
        """An event has ended."""
        with self._lock:
            for clip in self._clips:
                if event in clip.open_events:
                    clip.open_events.discard(event)
                    if not clip.open_events:
                        clip.until = time.monotonic() + self._config.after_s

    def keep_snapshot(self, message: ResultMessage) -> None:
        """Write the picture of an event that has ended; where too many wait, it is left out."""
        with contextlib.suppress(queue.Full):
            self._snapshots.put_nowait(message)

    def find_file(self, event: str, ending: str) -> Path | None:
        """The file of an event, if it is there."""
        path = self._config.path / f"{event}{ending}"
        return path if _EVENT_ID.fullmatch(event) and path.is_file() else None

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            self._config.path.mkdir(parents=True, exist_ok=True)
            for path in self._config.path.glob(f"*{PART}"):
                path.unlink()
        self._prune()
        while not self._stopping.wait(POLL_INTERVAL_S):
            self._step()
        with self._lock:
            for clip in self._clips:
                clip.until = -math.inf
        self._step()

    def _step(self) -> None:
        with self._lock:
            clips = list(self._clips)
        while not self._snapshots.empty():
            self._write_snapshot(self._snapshots.get())
            self._is_changed = True
        now = time.monotonic()
        for clip in clips:
            try:
                self._write_packets(clip)
                is_over = now >= min(clip.until, clip.begin_at + MAX_CLIP_S) or clip.ring.connection != clip.connection
                if is_over:
                    with self._lock:
                        self._clips.remove(clip)
                    self._finish(clip)
            except Exception as error:  # FFmpeg or the disk
                self._abandon(clip, error)
        self._is_changed = self._is_changed or bool(clips) or self.totals.trouble is not None
        if self._is_changed and now >= self._pruned_at + PRUNE_INTERVAL_S:
            self._prune()

    def _write_packets(self, clip: ClipFile) -> None:
        import av

        packets = clip.ring.read(clip.last_number, clip.begin_at) if clip.ring.connection == clip.connection else []
        for stored in packets:
            if clip.container is None:
                file = str(self._config.path / f"{clip.name}{CLIP}{PART}")
                clip.container = av.open(file, "w", format="mp4", options={"movflags": MOVFLAGS})
                clip.stream = clip.container.add_stream_from_template(clip.ring.template)
                clip.first_dts = stored.dts
            packet = stored.to_packet(clip.first_dts)
            packet.stream = clip.stream
            clip.container.mux(packet)
            clip.last_number = stored.number

    def _finish(self, clip: ClipFile) -> None:
        if clip.container is None:
            return
        clip.container.close()
        path = self._config.path / f"{clip.name}{CLIP}"
        os.replace(f"{path}{PART}", path)
        for event in clip.events[1:]:
            with contextlib.suppress(OSError):  # a file system without hard links
                os.link(path, path.with_name(f"{event}{CLIP}"))

    def _abandon(self, clip: ClipFile, error: Exception) -> None:
        log.warning("clip of camera %s is lost: %s", clip.camera, one_line(str(error)))
        with self._lock, contextlib.suppress(ValueError):
            self._clips.remove(clip)
        with contextlib.suppress(Exception):
            clip.container.close()
        with contextlib.suppress(OSError):
            (self._config.path / f"{clip.name}{CLIP}{PART}").unlink()

    def _draw_snapshot(self, message: ResultMessage) -> bytes | None:
        """The snapshot, of a camera with a smaller stream from the main one, where its packets are still there."""
        ring = self._rings.get(message.record.get("camera", ""))
        if ring is None or not ring.is_main or message.image is None:
            return draw_message(message)
        snapshot = message.record["after"]["snapshot"]
        ago_s = time.time() - snapshot["frame_time"]
        try:
            picture = ring.picture_at(time.monotonic() - ago_s)
        except Exception as error:  # FFmpeg can fail in any way
            log.debug("no snapshot from the main stream: %s", error)
            picture = None
        return draw_message(message) if picture is None else draw_larger(message, picture)

    def _write_snapshot(self, message: ResultMessage) -> None:
        picture = self._draw_snapshot(message)
        if picture is None or self.totals.trouble is not None:
            return
        path = self._config.path / f"{message.record['after']['id']}{SNAPSHOT}"
        part = path.with_name(path.name + PART)
        try:
            part.write_bytes(picture)
            os.replace(part, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            log.warning("snapshot of an event is lost: %s", error.strerror)

    def _prune(self) -> None:
        """Remove the oldest files until the rest is within the bound and the disk has room."""
        trouble, self._pruned_at, self._is_changed = None, time.monotonic(), False
        try:
            rows = sorted(_list_files(self._config.path))
            free = shutil.disk_usage(self._config.path).free
        except OSError as error:
            rows, free, trouble = [], 0, f"the folder of clips cannot be used: {error.strerror}"
        total = sum(share for _, share, _ in rows)
        while rows and (total > self._config.max_bytes or free < MIN_FREE_BYTES):
            _, share, path = rows.pop(0)
            with contextlib.suppress(OSError):
                path.unlink()
            total, free = total - share, free + share
        if trouble is None and free < MIN_FREE_BYTES:
            trouble = f"the disk of the clips has less than {MIN_FREE_BYTES >> 20} MiB free"
        if trouble is not None and self.totals.trouble is None:
            log.warning("no clips are written: %s", trouble)
        self.totals = ClipTotals(len(rows), round(total), trouble)


def _list_files(folder: Path) -> list[tuple[float, float, Path]]:
    """(time, share of the bytes, path) of each clip and snapshot; a file with several names counts once over them."""
    rows = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((CLIP, SNAPSHOT)):
                state = entry.stat()
                rows.append((state.st_mtime, state.st_size / max(1, state.st_nlink), Path(entry.path)))
    return rows
