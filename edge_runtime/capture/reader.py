"""One connection to a camera: a thread that decodes every frame and delivers those that are wanted, when due."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from gemel.edge_runtime.capture.decoders import PacketDecoder
from gemel.edge_runtime.capture.failures import SourceLost, to_source_lost
from gemel.edge_runtime.capture.skipping import FrameSkipper, Skip
from gemel.edge_runtime.capture.sources import DEFAULT_FPS, CameraConfig, Source, note_once, open_source
from gemel.edge_runtime.capture.still import StillSource
from gemel.edge_runtime.frames.part_times import PART_TIMES, Part
from gemel.models.files.rgb import memory_of
from gemel.models.files.video import RateGate, Shot, Video, decode_shot

MAX_LATE_S = 1.0
"""A file that is later than this skips the frames that it missed."""
MAX_AHEAD_S = 0.25
"""Frames of a file that are not wanted are decoded so early: each wait costs a wake-up."""
RATE_FRAMES, RATE_WINDOW_S = 32, 10.0
MAX_LENT = 2
"""Frames of a camera in FFmpeg's own memory: one that waits, and one that runs or is shown."""


class Playback:
    """A file of this mean rate, played in real time from `start` on, in seconds of any clock.

    After a pause (of the process, of the disk) missed frames are not made up for: until playback has caught up, frames
    pass no faster than the mean rate, and whole laps of a loop are skipped.
    """

    def __init__(self, start: float, fps: float) -> None:
        self.start, self.fps = start, fps
        self._clock_gate = RateGate(fps)
        self._is_catching_up = False

    def wait_s(self, media_s: float, now: float) -> float:
        """Seconds until the frame at this time of the file is due; 0 if it is late."""
        return max(0.0, -self._late_s(media_s, now))

    def passes(self, media_s: float, now: float) -> bool:
        """Whether the frame at this time of the file, read now, is to be delivered; times must not fall."""
        late_s, is_first_of_period = self._late_s(media_s, now), self._clock_gate.passes(now - self.start)
        self._is_catching_up = late_s > (1 / self.fps if self._is_catching_up else MAX_LATE_S)
        return is_first_of_period or not self._is_catching_up

    def missed_laps(self, media_s: float, lap_s: float, now: float) -> int:
        """How many whole laps of `lap_s` a loop that is about to play the frame at `media_s` has missed."""
        late_s = self._late_s(media_s, now)
        return int(late_s // lap_s) if late_s > MAX_LATE_S else 0

    def _late_s(self, media_s: float, now: float) -> float:
        return now - self.start - media_s


class RecentRate:
    """Frames a second over the newest frames of the last ten seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=RATE_FRAMES)

    def add(self, now: float) -> None:
        """Count a frame; times must not fall."""
        self._times.append(now)

    def per_second(self, now: float) -> float:
        """The rate; 0 with fewer than two frames."""
        times = [time for time in list(self._times) if now - time <= RATE_WINDOW_S]
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0


class FramePool:
    """Memory for the frames of one camera, mapped apart from the heap and reused; call it from one thread.

    In the heap, small objects that live longer come to lie between frames, so that the heap never shrinks and the
    process grows. Here a buffer is free once the last array, view or tensor over it is gone, in whatever thread that
    is; one is kept for the next frame, the others go back to the system at once. What FFmpeg keeps for later frames
    itself is not copied, for at most MAX_LENT frames at a time: it never gives any back.
    """

    def __init__(self) -> None:
        self._resize(0)
        self._lent: list[None] = []

    def _resize(self, nbytes: int) -> None:
        self._nbytes, self._buffer_type = nbytes, ctypes.c_ubyte * nbytes
        self._spare: deque[mmap.mmap] = deque(maxlen=1)

    def decode(self, shot: Shot) -> np.ndarray | None:
        """The picture of a decoded frame; None where it does not decode, or there is no memory for it."""
        picture = decode_shot(shot)
        if picture is None:
            return None
        memory = memory_of(picture)
        if memory is not None and len(self._lent) < MAX_LENT:
            self._lent.append(None)
            weakref.finalize(memory, self._lent.pop).atexit = False
            return picture
        try:
            return self.copy(picture)
        except (OSError, ValueError):
            return None

    def copy(self, picture: np.ndarray) -> np.ndarray:
        """The same pixels in memory of the pool; OSError where there is none."""
        if picture.nbytes != self._nbytes:
            self._resize(picture.nbytes)
        memory = (
            self._spare.pop() if self._spare else mmap.mmap(-1, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )
        # Every view of the bytes references this object, so that its end is the picture's.
        pixels: Any = self._buffer_type.from_buffer(memory)
        weakref.finalize(pixels, self._spare.append, memory).atexit = False
        copy = np.frombuffer(pixels, np.uint8).reshape(picture.shape)
        copy[...] = picture
        return copy


@dataclass(frozen=True, slots=True, eq=False)
class TimedShot:
    """A decoded frame that is wanted: its number, seconds into this connection, and when it was decoded, on the
    schedule's clock and in Unix seconds."""

    index: int
    media_s: float
    captured_at: float
    captured_unix: float
    shot: Shot


class PacketReceiver(Protocol):
    """What keeps the packets of a camera: `begin` takes PyAV's stream of each connection, `add` each packet."""

    def begin(self, stream: Any) -> object:
        """A connection begins."""
        ...

    def add(self, packet: Any) -> object:
        """The next packet of it."""
        ...


class SourceReader:
    """A connection from its opening to its end; with `loop` a file begins again, lap after lap.

    `index` is the number of the next frame, `decoded` and `damaged` count those that did and did not decode.
    `busy_since` is when the decoder began with a frame that it has not given yet, None while it is idle. Once `over`,
    `problem` says what went wrong, if anything, and `permanent` whether it cannot pass by itself. `deliver` takes each
    wanted frame, `ended` is called at the end. `packets` gets those of files and streams before `decoder` decodes them.
    `needed_fps` gives the frames a second that queries need at present, None for all.
    """

    def __init__(
        self,
        config: CameraConfig,
        first: int,
        deliver: Callable[[SourceReader, TimedShot], object],
        ended: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
        open_source: Callable[[CameraConfig], Source] = open_source,
        packets: PacketReceiver | None = None,
        needed_fps: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._packets, self._needed_fps = packets, needed_fps
        self.decoder: PacketDecoder | None = None
        self.index, self.damaged, self.decoded = first, 0, 0
        self.busy_since: float | None = clock()
        self.over, self.problem, self.permanent = False, None, False
        self._config, self._deliver, self._ended, self._clock, self._open = config, deliver, ended, clock, open_source
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        self._gate = RateGate(config.fps)
        self._lap_start_s = 0.0
        self._playback: Playback | None = None
        self.thread = threading.Thread(target=self.play, name=f"reader-{config.id}", daemon=True)

    def stop(self) -> None:
        """End at the next frame; returns at once."""
        self._stopping.set()

    def play(self) -> None:
        """Read until the end, a failure or `stop`."""
        try:
            while self._play_lap() and self._config.loop and not self._config.live and not self._stopping.is_set():
                pass
        except Exception as error:
            lost = to_source_lost(error)
            self.problem, self.permanent = str(lost), lost.permanent
        finally:
            self.over = True
            self._ended()

    def _play_lap(self) -> bool:
        """Open the source and play it through; False if it has no frame."""
        self.busy_since = self._clock()
        source = self._open(self._config)
        if isinstance(source, Video):
            source.decode_with(self._begin_decoding, self._config.fixed_skip is not Skip.NONE)
            if self._packets is not None:
                source.watch_packets(self._packets.begin, self._packets.add)
        first, damaged = self.index, self.damaged
        try:
            playback = self._playback or Playback(self._clock(), source.fps or self._config.fps or DEFAULT_FPS)
            self._playback = playback
            while self._advance(source):
                self.damaged = damaged + source.damaged
                self.decoded += 1
                number, self.index = self.index, self.index + 1  # before the delivery: no number comes twice
                media_s = self._wanted_at(self._lap_start_s + source.time_s, playback)
                if media_s is not None:
                    self._deliver(self, TimedShot(number, media_s, self._clock(), time.time(), source.shot()))
        finally:
            self.damaged = damaged + source.damaged
            source.close()
        lap = self.index - first
        if self._config.loop:
            lap_s = source.time_s + 1 / playback.fps
            missed = playback.missed_laps(self._lap_start_s + lap_s, lap_s, self._clock())
            self.index += lap * missed
            self._lap_start_s += lap_s * (1 + missed)
        return lap > 0

    def _begin_decoding(self, stream: Any) -> PacketDecoder:
        config = self._config
        skipper = FrameSkipper(config.fixed_skip, self._needed_fps)
        note = partial(note_once, config.id)
        self.decoder = PacketDecoder(stream, config.decode, skipper, note, self._stay_busy)
        return self.decoder

    def _stay_busy(self) -> None:
        """A frame is left out on purpose, so that none can come: the camera is not lost."""
        if self.busy_since is not None:
            self.busy_since = self._clock()

    def _advance(self, source: Source) -> bool:
        if isinstance(source, StillSource):
            self.busy_since = None
            self._wait(source.pause_s)
        self.busy_since = self._clock()
        with PART_TIMES.count(Part.DECODE):
            has_frame = not self._stopping.is_set() and source.advance()
        self.busy_since = None
        if self._stopping.is_set():
            return False
        if self._config.live and not has_frame:
            raise SourceLost("it gives no more frames")
        return has_frame

    def _wanted_at(self, file_s: float, playback: Playback) -> float | None:
        """Seconds into this connection of the frame at this time of a file, once it is due; None if not wanted."""
        if self._config.live:
            media_s = self._clock() - playback.start
            return media_s if self._gate.passes(media_s) else None
        is_due, wait_s = self._gate.passes(file_s), playback.wait_s(file_s, self._clock())
        if not is_due and wait_s <= MAX_AHEAD_S:
            return None
        if self._wait(wait_s):
            self._stopping.set()
            return None
        return file_s if playback.passes(file_s, self._clock()) and is_due else None
