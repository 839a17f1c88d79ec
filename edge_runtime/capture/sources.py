"""Where a camera's frames come from: files, folders, addresses and devices, each behind the same small interface."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from models.errors import InputError
from models.io import is_path
from models.pictures import MAX_PIXELS, list_pictures, read_picture
from models.video import MAX_FPS, MIN_FPS, PROTOCOLS, SCHEMES, VIDEO_FORMATS, Video, opencv

if TYPE_CHECKING:
    import av
    import numpy as np

Value = TypeVar("Value")
Shot = Callable[[], "np.ndarray | None"]
"""Converts a decoded frame to RGB uint8 (H, W, 3), in any thread, once; None if it does not decode."""

TIMEOUT_S = 5.0
AUTO, PYAV, OPENCV, GSTREAMER = "auto", "pyav", "opencv", "gstreamer"
DECODERS = (AUTO, PYAV, OPENCV, GSTREAMER)
NO_ANSWER, NO_PICTURE = "no frame came in time", "it has no frame that can be decoded"


@dataclass(frozen=True, slots=True)
class CameraConfig:
    """One camera: `source` is an absolute path, a URL or a device index; `fps` None means the source's own.

    A camera is lost when a frame takes longer than `timeout_s`. `decoder` is one of DECODERS.
    """

    id: str
    source: str
    fps: float | None = None
    loop: bool = False
    decoder: str = AUTO
    timeout_s: float = TIMEOUT_S

    @property
    def is_address(self) -> bool:
        """Whether the source is a URL."""
        return "://" in self.source

    @property
    def is_device(self) -> bool:
        """Whether the source is the index of a device of this machine."""
        return self.live and not self.is_address

    @property
    def live(self) -> bool:
        """Whether frames come at the camera's pace, not as fast as they are read."""
        return not is_path(self.source)

    @property
    def forever(self) -> bool:
        """Whether a lost camera is retried until the box stops."""
        return self.live or self.loop

    def problem(self) -> tuple[str, str, str] | None:
        """What can never work, whatever the camera does: the key, the problem and a hint; None if nothing."""
        scheme = self.source.partition("://")[0].lower()
        if self.is_address and scheme not in SCHEMES:
            return "source", "this kind of address is not one of a camera", f"begin with {', '.join(SCHEMES)}"
        if self.decoder not in DECODERS:
            return "decoder", f"unknown decoder '{self.decoder}'", f"use {', '.join(DECODERS)}"
        if self.decoder == OPENCV and self.is_address:
            return "decoder", "opencv opens files and devices, no addresses", "use pyav"
        if self.decoder == GSTREAMER and self.is_device:
            return "decoder", "gstreamer opens files and addresses, no devices", "use opencv"
        if self.decoder == GSTREAMER and not has_gstreamer():
            return "decoder", "OpenCV was built without GStreamer here", "use pyav, or the OpenCV that JetPack brings"
        return None


@dataclass(frozen=True, slots=True)
class FrameRequest:
    """What a query takes of its camera: frames a second (None: all), and the region x0, y0, x1, y1 in pixels."""

    fps: float | None = None
    roi: tuple[float, float, float, float] | None = None

    def region_problem(self, query: str, width: int, height: int) -> str | None:
        """What is wrong with the query's region in frames of this size, if anything."""
        if self.roi is None or (round(self.roi[0]) < width and round(self.roi[1]) < height):
            return None
        return f"query '{query}' looks at {list(self.roi)}, outside frames of {width}x{height} pixels"


class SourceLost(Exception):
    """A source cannot be opened or gives no more frames; the text holds no address and no password."""


class Source(Protocol):
    """A source of frames; used by one thread. `fps` is its own rate, None if it has none.

    `damaged` counts frames that did not decode.
    """

    fps: float | None
    damaged: int

    def advance(self) -> bool:
        """Go to the next frame that decodes; False at the end of a file or stream. Raises SourceLost."""
        ...

    def shot(self) -> Shot:
        """The frame advanced to; the expensive conversion to RGB is left to the caller."""
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...


class FolderSource:
    """The .jpg and .png files of a folder by name; SourceLost if there are none."""

    fps: float | None = None
    damaged = 0

    def __init__(self, folder: Path) -> None:
        found = list_pictures(folder)
        if not found:
            raise SourceLost(f"the folder {folder} has no .jpg or .png files")
        self._paths: Iterator[Path] = iter(found)
        self._path: Path | None = None

    def advance(self) -> bool:
        self._path = next(self._paths, None)
        return self._path is not None

    def shot(self) -> Shot:
        assert self._path is not None
        return partial(read_picture, self._path)

    def close(self) -> None: ...


class OpenCVSource:
    """A device or a video file, decoded by OpenCV: USB cameras by their number, on every system."""

    damaged = 0

    def __init__(self, config: CameraConfig) -> None:
        try:
            self._video = Video(config.source)
        except InputError as error:
            raise SourceLost(error.problem) from None
        self.fps = None if config.live else self._video.fps

    def advance(self) -> bool:
        return self._video.advance()

    def shot(self) -> Shot:
        image = self._video.image()
        return lambda: image

    def close(self) -> None:
        self._video.close()


class GStreamerSource:
    """An address or a video file through a GStreamer pipeline of OpenCV, for the hardware decoder of a Jetson.

    Never run on a Jetson. JetPack's own OpenCV has GStreamer, the one of the package index has not.
    """

    damaged = 0
    fps: float | None = None

    def __init__(self, config: CameraConfig) -> None:
        if not config.live and not Path(config.source).is_file():
            raise SourceLost(f"there is no {config.source}")
        self._cv2 = opencv()
        self._capture = self._cv2.VideoCapture(gstreamer_pipeline(config), self._cv2.CAP_GSTREAMER)
        if not self._capture.isOpened():
            self._capture.release()
            raise SourceLost("it cannot be opened")
        self.fps = _plausible_rate(self._capture.get(self._cv2.CAP_PROP_FPS), config.live)

    def advance(self) -> bool:
        return self._capture.grab()

    def shot(self) -> Shot:
        is_decoded, image = self._capture.retrieve()
        return lambda: self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB) if is_decoded else None

    def close(self) -> None:
        self._capture.release()


def has_gstreamer() -> bool:
    """Whether OpenCV was built with GStreamer here."""
    cv2 = opencv()
    return cv2.videoio_registry.hasBackend(cv2.CAP_GSTREAMER)


def gstreamer_pipeline(config: CameraConfig) -> str:
    """The GStreamer pipeline; of a stream it keeps the newest frame, of a file every one.

    decodebin takes nvv4l2decoder where there is one; nvvidconv copies its frames to ordinary memory.
    """
    decoded = (
        "nvvidconv ! video/x-raw,format=BGRx ! videoconvert ! video/x-raw,format=BGR ! appsink max-buffers=1 sync=false"
    )
    location = '"' + config.source.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if not config.is_address:
        return f"filesrc location={location} ! decodebin ! {decoded}"
    if config.source.lower().startswith("rtsp"):
        timeout_us = round(config.timeout_s * 1e6)
        source = f"rtspsrc location={location} protocols=tcp latency=0 tcp-timeout={timeout_us}"
    else:
        source = f"souphttpsrc location={location} is-live=true timeout={max(1, round(config.timeout_s))}"
    return f"{source} ! decodebin ! {decoded} drop=true"


CONTAINERS = ",".join(("video4linux2", *(name for name in VIDEO_FORMATS if name != "hls")))
"""Formats that hold their own frames. Playlists are left out: they name files and addresses."""
ADDRESS_PROTOCOLS = ",".join(name for name in PROTOCOLS if name != "file")
RTSP_OPTIONS = {"rtsp_transport": "tcp", "probesize": "32"}
"""RTSP describes its frames before the first: probing them would take nine, two seconds at five a second."""
READ_TIMEOUT_SHARE = 0.5
"""Share of the camera's timeout after which a read is aborted: FFmpeg may wait that long twice for one frame."""


class FFmpegSource:
    """A video file, an address (RTSP over TCP, HTTP) or a device, decoded by FFmpeg through PyAV.

    Every frame is decoded, in the calling thread, since later ones build on it; only wanted ones are converted to RGB.
    """

    def __init__(self, config: CameraConfig) -> None:
        import av
        import av.logging
        import av.video.reformatter

        av.logging.set_level(None)  # its messages name addresses with their passwords
        self.damaged, self._live = 0, config.live
        self._reformatter = av.video.reformatter.VideoReformatter()
        name = _ffmpeg_name(config)
        try:
            self._container: Any = av.open(
                name,
                format="v4l2" if config.is_device else None,
                options=_ffmpeg_options(config),
                timeout=(config.timeout_s, READ_TIMEOUT_SHARE * config.timeout_s),
            )
        except Exception as error:
            raise SourceLost(f"it cannot be opened: {_ffmpeg_reason(error)}") from None
        if not self._container.streams.video:
            self._container.close()
            raise SourceLost("it has no video in it")
        stream = self._container.streams.video[0]
        stream.codec_context.thread_count = 1
        self.fps = _plausible_rate(float(stream.average_rate or stream.guessed_rate or 0), self._live)
        self._packets: Any = self._container.demux(stream)
        self._frames = self._decode()
        self._frame: av.VideoFrame | None = None

    def advance(self) -> bool:
        try:
            self._frame = next(self._frames, None)
        except Exception as error:
            raise SourceLost(_ffmpeg_reason(error)) from None
        return self._frame is not None

    def shot(self) -> Shot:
        assert self._frame is not None
        frame = self._frame
        return lambda: self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()

    def close(self) -> None:
        self._packets.close()  # PyAV 18.1 leaks the packet of a generator that is dropped
        self._container.close()

    def _decode(self) -> Iterator[av.VideoFrame]:
        """Whole frames; corrupt ones before the first of a stream are normal, others count as damaged."""
        is_joining = self._live
        for packet in self._packets:
            try:
                frames = packet.decode()
            except Exception:
                self.damaged += not is_joining
                continue
            whole = [frame for frame in frames if not frame.is_corrupt]
            self.damaged += 0 if is_joining else len(frames) - len(whole)
            is_joining = is_joining and not whole
            yield from whole


def _plausible_rate(rate: float, live: bool) -> float | None:
    return rate if MIN_FPS <= rate <= MAX_FPS and not live else None


def _ffmpeg_name(config: CameraConfig) -> str:
    if config.is_device:
        if not sys.platform.startswith("linux"):
            raise SourceLost("devices are opened by `decoder: opencv` on this system")
        return f"/dev/video{config.source}"
    if not config.is_address and not Path(config.source).is_file():
        raise SourceLost(f"there is no {config.source}")
    return config.source


def _ffmpeg_options(config: CameraConfig) -> dict[str, str]:
    """Which formats and protocols FFmpeg may open, and how."""
    options = {"format_whitelist": CONTAINERS, "max_pixels": str(MAX_PIXELS)}
    if config.is_address:
        options |= {"protocol_whitelist": ADDRESS_PROTOCOLS, "analyzeduration": "200000", "fpsprobesize": "0"}
        return options | (RTSP_OPTIONS if config.source.lower().startswith("rtsp") else {})
    return options if config.is_device else options | {"protocol_whitelist": "file"}


def _ffmpeg_reason(error: Exception) -> str:
    reason = failure_reason(error)
    return "it does not answer in time" if reason.startswith("Immediate exit") else reason


def failure_reason(error: BaseException) -> str:
    """Why a source failed, without secrets: libraries write addresses with their passwords into their messages."""
    if isinstance(error, SourceLost):
        return str(error)
    text = getattr(error, "strerror", None)
    return text if isinstance(text, str) and text else type(error).__name__


def decode_shot(shot: Shot) -> np.ndarray | None:
    """The frame, RGB uint8 (H, W, 3); None where it does not decode."""
    try:
        return shot()
    except Exception:  # a decoder can fail in any way
        return None


def open_source(config: CameraConfig) -> Source:
    """Open a camera's source before its first frame; raises SourceLost. May take `timeout_s` or longer."""
    if not config.live and Path(config.source).is_dir():
        return FolderSource(Path(config.source))
    if config.decoder == GSTREAMER:
        return GStreamerSource(config)
    if config.decoder == OPENCV or (config.decoder == AUTO and config.is_device):
        return OpenCVSource(config)
    return FFmpegSource(config)


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
        with contextlib.closing(open_source(camera)) as source:
            while source.advance():
                if (image := decode_shot(source.shot())) is not None:
                    return ProbeResult(image)
    except Exception as error:  # a decoder can fail in any way
        return ProbeResult(problem=failure_reason(error))
    return ProbeResult(problem=NO_PICTURE)
