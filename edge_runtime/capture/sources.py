"""What a box config says of one camera, and what a query wants of it.

Whether the region that a query looks at lies in a camera's picture.

What every source of frames can do, and how it says that it is lost.

Files, RTSP over TCP, HTTP and USB devices, decoded by FFmpeg through PyAV.

The pictures of a folder, one frame each.

A pipeline for the hardware decoder of a Jetson, through an OpenCV that was built with GStreamer.

Never run: no Jetson was at hand. JetPack's own OpenCV has GStreamer, the one of the package index has not.

Devices and files, decoded by OpenCV: USB cameras by their number, on every system.

Which source a camera gets.

Questions that may take long, asked all at the same time.

Cameras asked for a frame, all at the same time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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


TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class CameraConfig:
    """One camera: `source` is an absolute path, a URL or a device index; `fps` None means the source's own.

    A frame that takes longer than `timeout_s` seconds to come means that the camera is lost. `decoder` is a name of
    `edge_runtime.capture.sources.DECODERS`, or auto.
    """

    id: str
    source: str
    fps: float | None = None
    loop: bool = False
    decoder: str = "auto"
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
        """Whether frames come at the camera's pace, not as fast as they are asked for."""
        return not is_path(self.source)

    @property
    def forever(self) -> bool:
        """Whether a camera that is lost is tried again until the box stops."""
        return self.live or self.loop


@dataclass(frozen=True, slots=True)
class FrameRequest:
    """What a query wants of its camera: frames a second (None: all), and the region x0, y0, x1, y1 in pixels."""

    fps: float | None = None
    roi: tuple[float, float, float, float] | None = None


def region_problem(query: str, wanted: FrameRequest, width: int, height: int) -> str | None:
    """What is wrong with a query's region in frames of so many pixels, if anything."""
    roi = wanted.roi
    if roi is None or (round(roi[0]) < width and round(roi[1]) < height):
        return None
    return f"query '{query}' looks at {list(roi)}, outside frames of {width}x{height} pixels"


Shot = Callable[[], "np.ndarray | None"]
"""Makes the picture of a decoded frame, RGB uint8 (H, W, 3), in any thread, once; None if it does not decode."""


class SourceLost(Exception):
    """A source cannot be opened or gives no more frames; the text may be shown: no address, no password."""


class Source(Protocol):
    """Where a camera's frames come from; used by one thread. `fps` is the source's own rate, None if it has none.

    `damaged` counts what could not be decoded.
    """

    fps: float | None
    damaged: int

    def advance(self) -> bool:
        """Go to the next frame that decodes; False at the end of what has one. Raises SourceLost."""
        ...

    def shot(self) -> Shot:
        """The frame advanced to; turning it into a picture, which costs more, is left to who wants it."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


def decode_shot(shot: Shot) -> np.ndarray | None:
    """The picture, RGB uint8 (H, W, 3); None where it does not decode."""
    try:
        return shot()
    except Exception:  # a decoder can fail in any way
        return None


def failure_reason(error: BaseException) -> str:
    """Why something failed, fit to be shown: libraries write addresses with their passwords into their messages."""
    if isinstance(error, SourceLost):
        return str(error)
    said = getattr(error, "strerror", None)
    return said if isinstance(said, str) and said else type(error).__name__


CONTAINERS = ",".join(("video4linux2", *(name for name in VIDEO_FORMATS if name != "hls")))
"""What holds its own frames. Playlists are not among it: they name files and addresses."""
FILE_PROTOCOLS = "file"
ADDRESS_PROTOCOLS = ",".join(name for name in PROTOCOLS if name != "file")
RTSP_OPTIONS = {"rtsp_transport": "tcp", "probesize": "32"}
"""What its frames are is told before the first: to probe them would take nine, two seconds at five a second."""
READ_SHARE = 0.5
"""A read is given up after this share of the camera's timeout: FFmpeg may wait that long twice for one frame."""


class FFmpegSource:
    """A video file, an address or a device; SourceLost when it cannot be opened or a stream is lost.

    Every frame is decoded, in the thread that calls, for later ones build on it; only one that is asked for becomes a
    picture.
    """

    def __init__(self, config: CameraConfig) -> None:
        import av
        import av.logging

        self._packets: Any = None
        av.logging.set_level(None)  # its messages name addresses with their passwords
        self.damaged = 0
        self._live = config.live
        try:
            self._container: Any = av.open(
                _name(config),
                format="v4l2" if config.is_device else None,
                options=_options(config),
                timeout=(config.timeout_s, READ_SHARE * config.timeout_s),
            )
        except Exception as error:
            raise SourceLost(_refusal(config, error)) from None
        try:
            self._begin(av)
        except BaseException:
            self.close()
            raise

    def _begin(self, av: Any) -> None:
        if not self._container.streams.video:
            raise SourceLost("it has no video in it")
        stream = self._container.streams.video[0]
        stream.codec_context.thread_count = 1
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        self.fps = rate if MIN_FPS <= rate <= MAX_FPS and not self._live else None
        self._packets = self._container.demux(stream)
        self._decoded: deque[av.VideoFrame] = deque()
        self._frame: av.VideoFrame | None = None
        self._reformatter = av.video.reformatter.VideoReformatter()

    def advance(self) -> bool:
        while not self._decoded:
            packet = self._next_packet()
            if packet is None:
                return False
            self._decode(packet)
        self._frame = self._decoded.popleft()
        return True

    def shot(self) -> Shot:
        assert self._frame is not None
        return partial(_picture, self._reformatter, self._frame)

    def close(self) -> None:
        if self._packets is not None:
            self._packets.close()  # dropped on the way it never frees its packet (PyAV 18.1)
        self._container.close()

    def _next_packet(self) -> av.Packet | None:
        """The next packet; None at the end of a file. A stream that is lost may end without an error."""
        try:
            packet = next(self._packets, None)
        except Exception as error:
            raise SourceLost(_loss(error)) from None
        if packet is None and self._live:
            raise SourceLost("the stream ended")
        return packet

    def _decode(self, packet: av.Packet) -> None:
        """Frames that build on ones that are lost show what never was: they count as damaged, as what does not decode.

        Those before the first whole one of a stream that was joined anywhere are expected and do not.
        """
        joining = self._live and self._frame is None
        try:
            frames = packet.decode()
        except Exception:
            self.damaged += not joining
            return
        sound = [frame for frame in frames if not frame.is_corrupt]
        self.damaged += 0 if joining else len(frames) - len(sound)
        self._decoded.extend(sound)


def _picture(reformatter: Any, frame: av.VideoFrame) -> np.ndarray:
    return reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()


def _name(config: CameraConfig) -> str:
    if config.is_device:
        if not sys.platform.startswith("linux"):
            raise SourceLost("devices are opened by `decoder: opencv` on this system")
        return f"/dev/video{config.source}"
    if not config.is_address and not Path(config.source).is_file():
        raise SourceLost(f"there is no {config.source}")
    return config.source


def _options(config: CameraConfig) -> dict[str, str]:
    """What FFmpeg may open, and how."""
    options = {"format_whitelist": CONTAINERS, "max_pixels": str(MAX_PIXELS)}
    if config.is_address:
        options |= {"protocol_whitelist": ADDRESS_PROTOCOLS, "analyzeduration": "200000", "fpsprobesize": "0"}
        return options | (RTSP_OPTIONS if config.source.lower().startswith("rtsp") else {})
    return options if config.is_device else options | {"protocol_whitelist": FILE_PROTOCOLS}


def _refusal(config: CameraConfig, error: Exception) -> str:
    """Why it cannot be opened."""
    if isinstance(error, SourceLost):
        return str(error)
    return f"it cannot be opened: {_loss(error)}"


def _loss(error: Exception) -> str:
    """FFmpeg calls its time-out an immediate exit, which nobody asked for."""
    reason = failure_reason(error)
    return "it does not answer in time" if reason.startswith("Immediate exit") else reason


class FolderSource:
    """The .jpg and .png files of a folder in the order of their names; SourceLost if there are none."""

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

    def close(self) -> None:
        self._path = None


DECODED = (
    "nvvidconv ! video/x-raw,format=BGRx ! videoconvert ! video/x-raw,format=BGR ! appsink max-buffers=1 sync=false"
)
"""decodebin takes nvv4l2decoder where there is one; nvvidconv brings its frames into ordinary memory."""


class GStreamerSource:
    """An address or a video file; SourceLost when it cannot be opened or a stream gives no more frames."""

    damaged = 0
    fps: float | None = None

    def __init__(self, config: CameraConfig) -> None:
        if not config.live and not Path(config.source).is_file():
            raise SourceLost(f"there is no {config.source}")
        self._live, self._cv2 = config.live, opencv()
        self._capture = self._cv2.VideoCapture(pipeline(config), self._cv2.CAP_GSTREAMER)
        if not self._capture.isOpened():
            self._capture.release()
            raise SourceLost("it cannot be opened")
        rate = self._capture.get(self._cv2.CAP_PROP_FPS)
        self.fps = rate if MIN_FPS <= rate <= MAX_FPS and not self._live else None

    def advance(self) -> bool:
        if self._capture.grab():
            return True
        if self._live:
            raise SourceLost("it gives no frames")
        return False

    def shot(self) -> Shot:
        decoded, image = self._capture.retrieve()
        return partial(self._rgb, image) if decoded else lambda: None

    def close(self) -> None:
        self._capture.release()

    def _rgb(self, image: Any) -> Any:
        return self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB)


def has_gstreamer() -> bool:
    """Whether OpenCV was built with GStreamer here."""
    cv2 = opencv()
    return cv2.videoio_registry.hasBackend(cv2.CAP_GSTREAMER)


def pipeline(config: CameraConfig) -> str:
    """What GStreamer is told; of a stream the newest frame is kept, of a file every one."""
    named = '"' + config.source.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if not config.is_address:
        return f"filesrc location={named} ! decodebin ! {DECODED}"
    if config.source.lower().startswith("rtsp"):
        timeout_us = round(config.timeout_s * 1e6)
        begin = f"rtspsrc location={named} protocols=tcp latency=0 tcp-timeout={timeout_us}"
    else:
        begin = f"souphttpsrc location={named} is-live=true timeout={max(1, round(config.timeout_s))}"
    return f"{begin} ! decodebin ! {DECODED} drop=true"


class OpenCVSource:
    """A device or a video file; SourceLost when it cannot be opened, or a device gives no more frames."""

    damaged = 0

    def __init__(self, config: CameraConfig) -> None:
        self._live = config.live
        try:
            self._video = Video(config.source)
        except InputError as error:
            raise SourceLost(error.problem) from None
        self.fps = None if config.live else self._video.fps

    def advance(self) -> bool:
        if self._video.advance():
            return True
        if self._live:
            raise SourceLost("it gives no frames")
        return False

    def shot(self) -> Shot:
        image = self._video.image()
        return lambda: image

    def close(self) -> None:
        self._video.close()


AUTO, PYAV, OPENCV, GSTREAMER = "auto", "pyav", "opencv", "gstreamer"
DECODERS = (AUTO, PYAV, OPENCV, GSTREAMER)


def open_source(config: CameraConfig) -> Source:
    """Open a camera's source before its first frame; raises SourceLost. It may take long: `timeout_s` or more."""
    if not config.live and Path(config.source).is_dir():
        return FolderSource(Path(config.source))
    match config.decoder:
        case "gstreamer":
            return GStreamerSource(config)
        case "opencv":
            return OpenCVSource(config)
        case "auto" if config.is_device:
            return OpenCVSource(config)
        case _:
            return FFmpegSource(config)


def camera_problem(config: CameraConfig) -> tuple[str, str, str] | None:
    """What can never work, whatever the camera does: the key, the fault and its remedy; None if nothing."""
    scheme = config.source.partition("://")[0].lower()
    if config.is_address and scheme not in SCHEMES:
        return "source", "this kind of address is not one of a camera", f"begin with {', '.join(SCHEMES)}"
    if config.decoder not in DECODERS:
        return "decoder", f"unknown decoder '{config.decoder}'", f"use {', '.join(DECODERS)}"
    if config.decoder == OPENCV and config.is_address:
        return "decoder", "opencv opens files and devices, no addresses", "use pyav"
    if config.decoder == GSTREAMER and config.is_device:
        return "decoder", "gstreamer opens files and addresses, no devices", "use opencv"
    if config.decoder == GSTREAMER and not has_gstreamer():
        return "decoder", "OpenCV was built without GStreamer here", "use pyav, or the OpenCV that JetPack brings"
    return None


Answer = TypeVar("Answer")


def at_once(questions: Iterable[tuple[Callable[[], Answer], float]], otherwise: Answer) -> list[Answer]:
    """What each answers within its seconds, each asked in a thread of its own; `otherwise` where one has not by then.

    A question that hangs is left behind, and holds up nobody, the end of the process included. One that raises has not
    answered.
    """
    started = time.monotonic()
    asked = []
    for question, patience_s in questions:
        answers: list[Answer] = []
        thread = threading.Thread(target=_ask, args=(question, answers), name="asking", daemon=True)
        thread.start()
        asked.append((answers, thread, patience_s))
    found = []
    for answers, thread, patience_s in asked:
        thread.join(max(0.0, started + patience_s - time.monotonic()))
        found.append(answers[0] if answers else otherwise)
    return found


def _ask(question: Callable[[], Answer], answers: list[Answer]) -> None:
    with contextlib.suppress(Exception):
        answers.append(question())


NO_ANSWER = "no frame came in time"


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """A camera's first frame, RGB uint8 (H, W, 3), or why there is none."""

    image: np.ndarray | None = None
    fault: str = NO_ANSWER

    def to_json(self) -> dict[str, Any]:
        """Whether it answered, with the size of its frames, or what is wrong."""
        if self.image is None:
            return {"answers": False, "error": self.fault}
        return {"answers": True, "width": self.image.shape[1], "height": self.image.shape[0]}


def probe_cameras(cameras: Iterable[CameraConfig], most_s: float | None = None) -> dict[str, ProbeResult]:
    """What each camera answers within its `timeout_s`, or within `most_s` seconds."""
    asked = list(cameras)
    questions = [(partial(_ask_asking, camera), camera.timeout_s if most_s is None else most_s) for camera in asked]
    answers = at_once(questions, ProbeResult())
    return {camera.id: answer for camera, answer in zip(asked, answers, strict=True)}


def _ask_asking(camera: CameraConfig) -> ProbeResult:
    try:
        return ProbeResult(first_frame(camera))
    except Exception as error:  # a decoder can fail in any way
        return ProbeResult(fault=failure_reason(error))


def first_frame(camera: CameraConfig) -> np.ndarray:
    """The first frame that decodes, RGB uint8 (H, W, 3); SourceLost if there is none."""
    source = open_source(camera)
    try:
        while source.advance():
            image = decode_shot(source.shot())
            if image is not None:
                return image
    finally:
        source.close()
    raise SourceLost("it has no frame that can be decoded")
