"""Where a camera's frames come from: files, folders, addresses and devices, each behind the same small interface."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gemel.edge_runtime.capture.addresses import CameraAddress
from gemel.edge_runtime.capture.decoders import ACCELERATORS, AUTO, CPU
from gemel.edge_runtime.capture.failures import (
    SourceLost,
    is_no_video,
    may_be_redirect,
    open_failure,
    refuses_transport,
    to_source_lost,
)
from gemel.edge_runtime.capture.parts import NoPartsError, PartsSource
from gemel.edge_runtime.capture.skipping import Skip
from gemel.edge_runtime.capture.still import StillSource
from gemel.models.errors import InputError
from gemel.models.files.io import is_path
from gemel.models.files.pictures import list_all_pictures, read_picture
from gemel.models.files.video import SCHEMES, UDP, MediaClock, Shot, Video, decode_shot, plausible_rate
from gemel.models.notes import MAX_NOTES, add_note
from gemel.models.preprocess import WHOLE_FRAME, Region

if TYPE_CHECKING:
    import numpy as np

Value = TypeVar("Value")

TIMEOUT_S = 5.0
HOST_SCHEMES = ("rtsp", "rtsps", "rtmp", "rtmps", "http", "https")
LOGIN_HINT = "percent-encode what is not a letter or digit in user and password, as %23 for #"
POLL_S = 1.0
DEFAULT_FPS = 10.0
"""The rate of a folder where the config names none."""
GSTREAMER = "gstreamer"
DECODERS = (AUTO, CPU, *ACCELERATORS, GSTREAMER)
SKIPS = (AUTO, *map(str, Skip))
PUSH = "push"
"""The source of a camera whose frames come by HTTP."""
NO_ANSWER, NO_PICTURE = "no frame came in time", "it has no frame that can be decoded"


@dataclass(frozen=True, slots=True)
class CameraConfig:
    """One camera: `source` is an absolute path, a URL or a device index; `fps` None means the source's own.

    A camera is lost when a frame takes longer than `timeout_s`. `decode` is one of DECODERS, `skip` one of SKIPS. With
    `every_s` the source is the address of a single picture, asked for at this interval. The source PUSH takes frames by
    HTTP, each answered within `timeout_s`. `detect` is the address of a smaller stream of the same view: queries get
    its frames, clips the packets of `source`.
    """

    id: str
    source: str
    fps: float | None = None
    loop: bool = False
    decode: str = AUTO
    timeout_s: float = TIMEOUT_S
    every_s: float | None = None
    skip: str = AUTO
    detect: str | None = None

    @property
    def is_push(self) -> bool:
        """Whether its frames come by HTTP."""
        return self.source == PUSH

    @property
    def seen(self) -> CameraConfig:
        """The camera as queries see it: by its smaller stream, if it has one."""
        return self if self.detect is None else replace(self, source=self.detect, detect=None)

    @property
    def is_address(self) -> bool:
        """Whether the source is a URL."""
        return "://" in self.source

    @property
    def is_device(self) -> bool:
        """Whether the source is the index of a device of this machine."""
        return self.live and not self.is_address and not self.is_push

    @property
    def live(self) -> bool:
        """Whether frames come at the camera's pace, not as fast as they are read."""
        return self.is_push or not is_path(self.source)

    @property
    def forever(self) -> bool:
        """Whether a lost camera is retried until the box stops."""
        return self.live or self.loop

    @property
    def is_http(self) -> bool:
        """Whether the source is a URL of HTTP or HTTPS."""
        return self.source.startswith(("http://", "https://"))

    @property
    def fixed_skip(self) -> Skip | None:
        """What is left out whatever queries need; None where that decides. Of a file nothing is left out by itself: its
        frames are numbered."""
        if self.skip == AUTO:
            return None if self.live else Skip.NONE
        return Skip(self.skip)

    @property
    def poll_s(self) -> float:
        """Seconds between two pictures where the source turns out to send single ones."""
        return self.every_s or (1 / self.fps if self.fps else POLL_S)

    def problem(self) -> tuple[str, str, str] | None:
        """What can never work, whatever the camera does: the key, the problem and a hint; None if nothing."""
        if self.is_push and (key := self._unused_key()):
            return key, "does not apply to a camera whose frames come by HTTP", "leave it out"
        for key, address in (("source", self.source), ("detect", self.detect)):
            if address is not None and (found := _address_problem(address)):
                return key, *found
        if self.detect is not None and not (self.is_address and "://" in self.detect):
            return (
                "detect",
                "a smaller stream belongs to the address of a camera",
                "give two addresses, or leave it out",
            )
        if self.every_s and not self.is_http:
            return "every_s", "only a picture behind http:// or https:// is asked for", "leave it out; use `fps`"
        for key, value, known in (("decode", self.decode, DECODERS), ("skip", self.skip, SKIPS)):
            if value not in known:
                return key, f"unknown value '{value}'", f"use {', '.join(known)}"
            if value != AUTO and self.is_device:
                return key, "applies to files and addresses, not to devices", "leave it out"
        if self.decode == GSTREAMER and not has_gstreamer():
            return "decode", "OpenCV was built without GStreamer here", "use cpu, or the OpenCV that JetPack brings"
        return None

    def _unused_key(self) -> str:
        given = {"loop": self.loop, "every_s": self.every_s, "decode": self.decode != AUTO, "fps": self.fps}
        given |= {"skip": self.skip != AUTO, "detect": self.detect}
        return next((key for key, value in given.items() if value), "")


@dataclass(frozen=True, slots=True)
class FrameRequest:
    """What a query takes of its camera: frames a second (None: all), and the part of each frame."""

    fps: float | None = None
    region: Region = WHOLE_FRAME

    def region_problem(self, query: str, width: int, height: int) -> str | None:
        """What is wrong with the query's region in frames of this size, if anything."""
        problem = self.region.find_problem((width, height))
        return f"query '{query}' {problem}" if problem else None


class Source(Protocol):
    """A source of frames; used by one thread. `fps` is a file's or folder's mean rate, None if it has none.

    `damaged` counts frames that did not decode; `time_s` is the time of the frame advanced to.
    """

    fps: float | None
    damaged: int

    @property
    def time_s(self) -> float:
        """Seconds since the first frame."""
        ...

    def advance(self) -> bool:
        """Go to the next frame that decodes; False at the end of a file or stream."""
        ...

    def shot(self) -> Shot:
        """The frame advanced to; the expensive conversion to RGB is left to the caller."""
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...


class FolderSource:
    """The .jpg and .png files of a folder by name, at the camera's rate; SourceLost if there are none."""

    damaged, time_s = 0, 0.0

    def __init__(self, config: CameraConfig) -> None:
        found = list_all_pictures(Path(config.source))
        if not found:
            raise SourceLost(f"the folder {config.source} has no .jpg or .png files")
        self.fps: float | None = config.fps or DEFAULT_FPS
        self._clock, self._paths, self._path = MediaClock(self.fps), iter(found), found[0]

    def advance(self) -> bool:
        path = next(self._paths, None)
        if path is not None:
            self._path, self.time_s = path, self._clock.advance(None)
        return path is not None

    def shot(self) -> Shot:
        return partial(read_picture, self._path)

    def close(self) -> None: ...


class OpenCVSource:
    """A USB device by its number, or a GStreamer pipeline for the hardware decoder of a Jetson, through OpenCV.

    Never run on a Jetson. JetPack's own OpenCV has GStreamer, the one of the package index has not.
    """

    damaged, time_s = 0, 0.0

    def __init__(self, config: CameraConfig) -> None:
        self._cv2 = opencv()
        if config.is_device:
            self._capture = self._cv2.VideoCapture(int(config.source))
        else:
            self._capture = self._cv2.VideoCapture(gstreamer_pipeline(config), self._cv2.CAP_GSTREAMER)
        if not self._capture.isOpened():
            self._capture.release()
            raise SourceLost("it cannot be opened")
        rate = self._capture.get(self._cv2.CAP_PROP_FPS)
        self.fps = None if config.live else plausible_rate(rate)
        self._clock = MediaClock(self.fps)

    def advance(self) -> bool:
        has_frame = self._capture.grab()
        if has_frame:
            self.time_s = self._clock.advance(self._capture.get(self._cv2.CAP_PROP_POS_MSEC) / 1000)
        return has_frame

    def shot(self) -> Shot:
        is_decoded, image = self._capture.retrieve()
        return lambda: self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB) if is_decoded else None

    def close(self) -> None:
        self._capture.release()


@cache
def opencv() -> ModuleType:
    """OpenCV without its messages."""
    import cv2

    cv2.utils.logging.setLogLevel(0)
    return cv2


def has_gstreamer() -> bool:
    """Whether OpenCV was built with GStreamer here."""
    cv2 = opencv()
    return cv2.videoio_registry.hasBackend(cv2.CAP_GSTREAMER)


def gstreamer_pipeline(config: CameraConfig) -> str:
    """The GStreamer pipeline of upright frames; of a stream it keeps the newest frame, of a file every one.

    decodebin takes nvv4l2decoder where there is one; nvvidconv copies its frames to ordinary memory.
    """
    upright = "nvvidconv ! video/x-raw,format=BGRx ! videoflip video-direction=auto"
    decoded = f"{upright} ! videoconvert ! video/x-raw,format=BGR ! appsink max-buffers=1 sync=false"
    location = '"' + config.source.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if not config.is_address:
        return f"filesrc location={location} ! decodebin ! {decoded}"
    if config.source.lower().startswith("rtsp"):
        timeout_us = round(config.timeout_s * 1e6)
        source = f"rtspsrc location={location} protocols=tcp latency=0 tcp-timeout={timeout_us}"
    else:
        timeout_s = max(1, round(config.timeout_s))
        source = f"souphttpsrc location={location} automatic-redirect=false is-live=true timeout={timeout_s}"
    return f"{source} ! decodebin ! {decoded} drop=true"


def open_source(config: CameraConfig) -> Source:
    """Open a camera's source before its first frame; raises SourceLost. May take `timeout_s` or longer."""
    note = partial(note_once, config.id)
    if not config.live and not Path(config.source).exists():
        raise SourceLost(f"there is no {config.source}")
    if not config.live and Path(config.source).is_dir():
        return FolderSource(config)
    if config.every_s:
        return StillSource(config.source, config.poll_s, config.timeout_s)
    if config.is_device or config.decode == GSTREAMER:
        return OpenCVSource(config)
    try:
        video = _open_video(config, note)
        return _check_parts(video, config) if video.is_in_parts and config.is_http else video
    except InputError as error:
        if config.is_http and is_no_video(error.__context__):
            return _open_pictures(config, note)
        raise open_failure(error, config.is_address) from None


def _open_pictures(config: CameraConfig, note: Callable[..., object]) -> Source:
    """An address of HTTP that FFmpeg does not read: pictures in parts of one answer, or one in each."""
    try:
        return PartsSource(config.source, config.timeout_s)
    except NoPartsError:
        source = StillSource(config.source, config.poll_s, config.timeout_s)
        note(f"sends single pictures, asked for every {config.poll_s:g} s", "set `every_s`")
        return source


def _check_parts(video: Video, config: CameraConfig) -> Source:
    """MJPEG as FFmpeg reads it, if it takes the first part."""
    try:
        video.read_first()
        return video
    except Exception as error:  # FFmpeg can fail in any way
        video.close()
        if not is_no_video(error):
            raise to_source_lost(error) from None
        return PartsSource(config.source, config.timeout_s)


def _open_video(config: CameraConfig, note: Callable[..., object]) -> Video:
    """A file or stream; FFmpeg follows no redirect, the box itself those to the same host."""
    timeout_s = config.timeout_s if config.is_address else None
    try:
        return Video(config.source, note, timeout_s)
    except InputError as error:
        if refuses_transport(error.__context__):
            video = Video(config.source, note, timeout_s, transport=UDP)
            note("refuses RTSP over TCP (461) and is read over UDP, which may lose frames", "allow TCP in the camera")
            return video
        if not config.is_http or not may_be_redirect(error.__context__):
            raise
        address = CameraAddress(config.source).follow_redirects(config.timeout_s)
        if address == config.source:
            raise
    return Video(address, note, timeout_s)


@lru_cache(MAX_NOTES)
def note_once(camera: str, text: str, hint: str = "") -> None:
    """Note what the reader did to a camera's frames, once, through laps of a loop and reconnections."""
    add_note(f"camera {camera}", text, hint)


def _address_problem(address: str) -> tuple[str, str] | None:
    """What is wrong with a source, if it is an address, and a hint."""
    if "://" not in address:
        return None
    if address.partition("://")[0].lower() not in SCHEMES:
        return "this kind of address is not one of a camera", f"begin with {', '.join(SCHEMES)}"
    return None if _has_valid_host(address) else ("the address has no valid host and port", LOGIN_HINT)


def _has_valid_host(address: str) -> bool:
    try:
        url = urllib.parse.urlsplit(address)
        return url.port != 0 and (url.hostname is not None or url.scheme not in HOST_SCHEMES)
    except ValueError:
        return False


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """A camera's first frame, RGB uint8 (H, W, 3), or why there is none."""

    image: np.ndarray | None = None
    problem: str = NO_ANSWER

    def to_json(self) -> dict[str, Any]:
        """Whether the camera answered, with the size of its frames or the problem."""
        if self.image is None:
            return {"answers": False, "error": self.problem}
        return {"answers": True, "width": self.image.shape[1], "height": self.image.shape[0]}


def probe_cameras(cameras: Iterable[CameraConfig], timeout_s: float | None = None) -> dict[str, ProbeResult]:
    """The first frame of each camera within its own `timeout_s`, or within the given one; all at the same time."""
    cameras = list(cameras)
    calls = [(partial(_probe, camera), camera.timeout_s if timeout_s is None else timeout_s) for camera in cameras]
    return {camera.id: result for camera, result in zip(cameras, call_all(calls, ProbeResult()), strict=True)}


def call_all(calls: Sequence[tuple[Callable[[], Value], float]], default: Value) -> list[Value]:
    """The result of each call within its seconds, else `default`; each runs in a daemon thread of its own.

    The threads of an executor would delay the end of the process while a call hangs.
    """
    results, start = [default] * len(calls), time.monotonic()

    def run(index: int, call: Callable[[], Value]) -> None:
        with contextlib.suppress(Exception):
            results[index] = call()

    threads = [
        threading.Thread(target=run, args=(index, call), name="probe", daemon=True)
        for index, (call, _) in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread, (_, timeout_s) in zip(threads, calls, strict=True):
        thread.join(max(0.0, start + timeout_s - time.monotonic()))
    return list(results)


def _probe(camera: CameraConfig) -> ProbeResult:
    try:
        with contextlib.closing(open_source(camera.seen)) as source:
            while source.advance():
                if (image := decode_shot(source.shot())) is not None:
                    return ProbeResult(image)
    except Exception as error:  # a decoder can fail in any way
        return ProbeResult(problem=str(to_source_lost(error)))
    return ProbeResult(problem=NO_PICTURE)
