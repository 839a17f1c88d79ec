"""The one reader of video, of files and streams, through PyAV: upright RGB frames with the file's own times.

Training, evaluation and the box read the same pixels of a file at the same times. Formats are on an allow-list: none
names other files, as playlists do.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemel.models.errors import InputError
from gemel.models.files.io import is_path, open_regular
from gemel.models.files.pictures import MAX_PIXELS
from gemel.models.files.rgb import RgbConverter, display_matrix

if TYPE_CHECKING:
    import av
    import numpy as np

Shot = Callable[[], "np.ndarray | None"]
"""Converts a decoded frame to RGB uint8 (H, W, 3), in any thread, once; None if it does not decode."""

SCHEMES = ("rtsp", "rtsps", "rtmp", "rtmps", "http", "https", "udp", "tcp", "rtp", "srt")
VIDEO_FORMATS = (
    *(
        "mov",
        "matroska",
        "avi",
        "mpegts",
        "mpeg",
        "mpegvideo",
        "m4v",
        "flv",
        "live_flv",
        "asf",
        "ogg",
        "ivf",
        "obu",
    ),
    *("h264", "hevc", "mjpeg", "mpjpeg", "dhav", "dv", "mxf", "yuv4mpegpipe", "rtsp", "rtp"),
)
"""Formats that FFmpeg may open: all hold their own frames."""
UNTIMED = ("mpjpeg", "mjpeg")
"""Formats without times: FFmpeg gives their frames 25 a second, however many come."""
MILLISECOND = Fraction(1, 1000)
PROTOCOLS = (
    *SCHEMES,
    "tls",
    "crypto",
    "httpproxy",
    "rtmpt",
    "rtmpe",
    "rtmpte",
    "rtmpts",
    "ffrtmphttp",
)
"""Protocols that FFmpeg may use for an address; for a path it may open that file only."""
ADDRESS_OPTIONS = {
    "protocol_whitelist": ",".join(PROTOCOLS),
    "analyzeduration": "200000",
    "fpsprobesize": "0",
}
HTTP_OPTIONS = {"max_redirects": "0"}
"""A redirect may lead anywhere: the one who opens an address follows it."""
OPENING_SHARE = 2.0
"""Of a stream's timeout, how long its opening may take: FFmpeg reads a frame or two to learn what it is."""
NO_VIDEOS = (".json", ".jsonl", ".xml", ".txt", ".yaml", ".yml", ".csv", ".jpg", ".jpeg", ".png")
ZIP, ARCHIVES = b"PK\x03\x04", (".tar", ".tar.gz", ".tgz", ".7z", ".rar")
TCP, UDP = "tcp", "udp"
RTSP_OPTIONS = {"probesize": "32"}
"""RTSP describes its frames before the first: probing them would take nine, two seconds at five a second."""
MIN_FPS, MAX_FPS, DEFAULT_FPS = 0.01, 1000.0, 25.0
"""Plausible frames a second of a video, and the rate of one that has neither a rate nor times."""
MIN_STEP_S, MAX_FALL_S, MAX_JUMP_S = 0.001, 1.0, 60.0
"""Between two frames: the least step; a fall or a rise beyond which the timestamps begin anew, as in joined files."""
MIN_GAP_S, GAP_INTERVALS = 0.5, 8
"""A gap of so many seconds, and mean intervals between frames, is noted."""
LOSS_HINT = "copy or record the file again"
TICK_SLACK = 1e-6
"""A frame's due time is a multiple of 1/fps, which floats miss by a hair."""
_IMPORTING = threading.Lock()
"""Cameras start together: of PyAV, whose modules import each other, others would see half while one imports it."""
HDR_TRANSFERS = {16: "PQ", 18: "HLG"}
"""AVColorTransferCharacteristic of frames whose brightness exceeds an ordinary screen's."""


class RateGate:
    """Passes at most `fps` frames a second of media time: the first frame of each period; None means all."""

    def __init__(self, fps: float | None) -> None:
        self._fps = fps
        self._tick = -1

    def passes(self, media_s: float) -> bool:
        """Whether the frame at this time of the stream passes; times must not fall."""
        if self._fps is None:
            return True
        tick = math.floor(media_s * self._fps + TICK_SLACK)
        is_due = tick > self._tick
        self._tick = max(tick, self._tick)
        return is_due


class MediaClock:
    """Seconds since the first frame: by the frames' own times where they rise, else by the mean rate.

    `restarts` counts how often the timestamps began anew: they fell, or rose by more than MAX_JUMP_S to beyond
    `longest_s`, the length that a file says.
    """

    def __init__(self, fps: float | None, longest_s: float = 0.0) -> None:
        self._longest_s = longest_s
        self.time_s = -1 / (fps or DEFAULT_FPS)
        self.restarts = -1
        self._interval_s = -self.time_s
        self._offset_s = math.nan

    def advance(self, own_s: float | None) -> float:
        """The time of the next frame, whose timestamp is this; None if it has none."""
        due_s = self.time_s + self._interval_s
        time_s = due_s if own_s is None else own_s + self._offset_s
        # The timestamps began anew: go on as if the next frame had come on time.
        if not self.time_s - MAX_FALL_S <= time_s <= max(due_s + MAX_JUMP_S, self._longest_s):
            self._offset_s = due_s - (own_s or 0.0)
            time_s = due_s
            self.restarts = self.restarts + 1
        self.time_s = max(time_s, self.time_s + MIN_STEP_S)
        return self.time_s


class Video:
    """An open video file or stream. Every frame is decoded, in the calling thread, since later ones build on it.

    With `keys_only` those alone that build on no other: about one in some seconds, at a fraction of the time.
    `transport` is that of RTSP's frames.

    `fps` is a file's mean rate, None if it is not plausible; `time_s` is the time of the frame advanced to, in seconds
    since the first; `damaged` counts the frames that did not decode. `note` gets what the reader chose, converted or
    left out, and a remedy, each once.
    Raises InputError, without passwords, for what cannot be opened or has frames of more than MAX_PIXELS.
    """

    def __init__(
        self,
        source: str,
        note: Callable[..., object],
        timeout_s: float | None = None,
        keys_only: bool = False,
        transport: str = TCP,
    ) -> None:
        with _IMPORTING:
            import av
            import av.filter
            import av.logging

        av.logging.set_level(None)  # its messages name addresses with their passwords
        self._is_file = is_path(source)
        self._where = without_secret(source)
        self._note = note
        self._noted: set[str] = set()
        self._is_partial = keys_only
        self._convert = RgbConverter()
        options = self._options(source, transport)
        opening_s = None if timeout_s is None else OPENING_SHARE * timeout_s
        try:
            self._container: Any = av.open(source, options=options, timeout=(opening_s, timeout_s))
        except Exception as error:
            raise self._error(
                f"cannot be opened: {reason_of(error)}", "give a video that decodes"
            ) from None
        try:
            self._stream = self._choose_stream()
        except InputError:
            self._container.close()
            raise
        self._format = self._container.format.name
        has_times = self._container.duration is not None
        rate = float((self._stream.average_rate if has_times else self._stream.guessed_rate) or 0)
        self.fps = plausible_rate(rate) if self._is_file else None
        self.time_s = 0.0
        self.damaged = 0
        self._decoded = 0
        self._holes: list[float] = []  # seconds at which packets are missing, or files are joined
        longest_s = (self._container.duration or 0) / 1e6 if self._is_file else 0.0
        self._clock = MediaClock(self.fps, longest_s)
        self._longest_gap = (0.0, 0.0)
        self._tap: Callable[[Any], object] | None = None
        self._decode_packet: Callable[[Any], Sequence[av.VideoFrame]] = lambda packet: (
            packet.decode()
        )
        self._packets: Any = self._container.demux(self._stream)
        if not self._is_file and self._format in UNTIMED:
            self._packets = _stamp_packets(self._packets)
        self._frames = self._decode()
        self._frame: av.VideoFrame | None = None
        self._has_first: bool | None = None
        self._own_s: float | None = None  # its timestamp
        self._matrix: tuple[int, ...] | None = None

    def advance(self) -> bool:
        """Go to the next frame that decodes; False at the end. Raises FFmpeg's errors of a stream, as they are."""
        # It was read when the video was opened.
        if self._has_first is not None:
            has_first = self._has_first
            self._has_first = None
            return has_first
        self._frame = next(self._frames, None)
        if self._frame is None:
            return False
        if self._format == "avi":  # it has times of decoding only
            self._frame.pts = self._frame.dts
        self._own_s = self._frame.time
        time_s = self._clock.advance(self._own_s)
        self._longest_gap = max(self._longest_gap, (time_s - self.time_s, self.time_s))
        self.time_s = time_s
        self._decoded = self._decoded + 1
        self._note_frame(self._frame)
        return True

    def read_first(self) -> None:
        """Read the first frame now, in which FFmpeg finds what it does not take; errors as those of `advance`."""
        self._has_first = self.advance()

    @property
    def is_in_parts(self) -> bool:
        """Whether it is MJPEG in parts of one answer of HTTP."""
        return self._format == "mpjpeg"

    def shot(self) -> Shot:
        """The frame advanced to; the expensive conversion to RGB is left to the caller."""
        assert self._frame is not None
        return partial(self._convert, self._frame, self._matrix)

    def watch_packets(self, begin: Callable[[Any], object], add: Callable[[Any], object]) -> None:
        """Call `begin` with PyAV's stream now, and `add` with each packet before it is decoded."""
        begin(self._stream)
        self._tap = add

    def decode_with(
        self, begin: Callable[[Any], Callable[[Any], Sequence[av.VideoFrame]]], is_partial: bool
    ) -> None:
        """Let what `begin` makes of PyAV's stream decode each packet; `is_partial` where it may leave frames out."""
        self._decode_packet = begin(self._stream)
        self._is_partial |= is_partial

    def close(self) -> None:
        """Close the file or connection."""
        self._packets.close()  # PyAV 18.1 leaks the packet of a generator that is dropped
        self._container.close()

    def _options(self, source: str, transport: str) -> dict[str, str]:
        options = {"format_whitelist": ",".join(VIDEO_FORMATS), "max_pixels": str(MAX_PIXELS)}
        # Of files nothing but this one is opened, whatever they name.
        if self._is_file:
            with open_regular(
                Path(source), "give an existing video, or a folder of frames"
            ) as file:
                if file.read(len(ZIP)) == ZIP or source.lower().endswith(ARCHIVES):
                    raise self._error("is an archive, no video", "unpack it, and give the folder")
                if source.lower().endswith(NO_VIDEOS):
                    raise self._error(
                        "is no video", "give the folder that holds it with its pictures and labels"
                    )
                return options | {"protocol_whitelist": "file"}
        if (scheme := source.partition("://")[0].lower()) not in SCHEMES:
            raise self._error(
                "is no address of a stream", f"begin with {', '.join(SCHEMES)}, or give a path"
            )
        if scheme.startswith("http"):
            return options | ADDRESS_OPTIONS | HTTP_OPTIONS
        return (
            options
            | ADDRESS_OPTIONS
            | (RTSP_OPTIONS | {"rtsp_transport": transport} if scheme.startswith("rtsp") else {})
        )

    def _choose_stream(self) -> Any:
        """The largest video stream; the picture of a cover is none."""
        from av.stream import Disposition

        still = Disposition.attached_pic | Disposition.timed_thumbnails | Disposition.still_image
        streams = [
            stream
            for stream in self._container.streams.video
            if stream.codec_context and not stream.disposition & still
        ]
        if not streams:
            raise self._error("has no video in it that can be decoded", "give a video that decodes")
        best = max(streams, key=lambda stream: stream.width * stream.height)
        size = f"{best.width} x {best.height} pixels"
        if best.width * best.height > MAX_PIXELS:
            raise self._error(
                f"has frames of {size}, more than {MAX_PIXELS:,}", "make them smaller"
            )
        if len(streams) > 1:
            text = f"has {len(streams)} videos; the largest is read: stream {best.index}, {size}"
            self._note_once(text, "extract another with `ffmpeg -map 0:N -c copy`")
        if self._is_partial:
            best.codec_context.skip_frame = "NONKEY"
        best.codec_context.thread_count = 1  # damaged frames differ by the number of threads
        best.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
        if best.codec_context.name == "mjpeg":  # it passes the pictures off as whole otherwise
            best.codec_context.options |= {"err_detect": "explode"}
        return best

    def _decode(self) -> Iterator[av.VideoFrame]:
        """Whole frames; corrupt ones before the first of a stream are normal, others count as damaged."""
        from av.error import FFmpegError

        is_joining = not self._is_file
        try:
            for packet in self._packets:
                if self._tap and packet.size:
                    self._tap(packet)
                if packet.is_corrupt:
                    self._holes.append(self.time_s)
                try:
                    frames = self._decode_packet(packet)
                except FFmpegError:
                    self.damaged += not is_joining
                    continue
                whole = [frame for frame in frames if not frame.is_corrupt]
                self.damaged += 0 if is_joining else len(frames) - len(whole)
                is_joining = is_joining and not whole
                yield from whole
        except FFmpegError as error:
            if not self._is_file:
                raise
            self._note_once(
                f"cannot be read behind {self.time_s:.1f} s: {reason_of(error)}", LOSS_HINT
            )
        if self._is_file and not self._is_partial:
            self._note_losses()

    def _note_frame(self, frame: av.VideoFrame) -> None:
        if frame.interlaced_frame:
            self._note_once(
                "is interlaced: what moves is combed", "deinterlace it with `ffmpeg -vf bwdif`"
            )
        if transfer := HDR_TRANSFERS.get(frame.color_trc):
            text = f"is HDR ({transfer}), read without tone mapping: its colours are paler than on a screen"
            self._note_once(text, "convert it to SDR if the model was trained on SDR")
        elif (bits := frame.format.components[0].bits) > 8:
            self._note_once(f"has {bits} bits a colour, of which 8 are kept")
        # Asked of every frame, this would keep the pictures of those that no query takes.
        if frame.key_frame or self._decoded == 1:
            self._matrix = display_matrix(frame)
            if self._matrix and min(self._matrix[0], self._matrix[4]) <= 0:
                self._note_once("is turned upright by its display matrix")

    def _note_losses(self) -> None:
        # Elsewhere a packet may be half a frame or none, and an index has gaps.
        if self._format.startswith("mov"):
            listed = sum(not entry.is_discard for entry in self._stream.index_entries)
            self.damaged = max(self.damaged, listed - self._decoded)
        if self.damaged:
            self._note_once(
                f"{self.damaged} of {self._decoded + self.damaged} frames could not be decoded",
                LOSS_HINT,
            )
        # Where files were joined packets are missing as well, without a loss.
        if len(self._holes) > max(0, self._clock.restarts):
            text = f"lacks data, first at {self._holes[0]:.1f} s: frames are lost there"
            self._note_once(text, LOSS_HINT)
        if self._clock.restarts > 0:
            self._note_once("has timestamps that begin anew; it is played without a gap there")
        end = (
            (self._container.duration or 0) / 1e6 - max(self.time_s, self._own_s or 0.0),
            self.time_s,
        )
        gap_s, at_s = max(self._longest_gap, end)
        if gap_s > max(MIN_GAP_S, GAP_INTERVALS * self.time_s / max(1, self._decoded)):
            text = f"has no frames between {at_s:.1f} s and {at_s + gap_s:.1f} s"
            self._note_once(text, f"if the camera did not pause, {LOSS_HINT}")

    def _note_once(self, text: str, hint: str = "") -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(text, hint)

    def _error(self, problem: str, hint: str) -> InputError:
        return InputError(self._where, problem, hint)


def _stamp_packets(packets: Iterator[Any]) -> Iterator[Any]:
    """Packets with the times at which they come, in milliseconds since the first."""
    start = time.monotonic()
    last = -1
    with contextlib.closing(packets):  # type: ignore[type-var]
        for packet in packets:
            last = max(last + 1, round(1000 * (time.monotonic() - start)))
            packet.time_base = MILLISECOND
            packet.pts = last
            packet.dts = last
            yield packet


def plausible_rate(rate: float) -> float | None:
    """Frames a second, None where that cannot be."""
    return rate if MIN_FPS <= rate <= MAX_FPS else None


def decode_shot(shot: Shot) -> np.ndarray | None:
    """The frame, RGB uint8 (H, W, 3); None where it does not decode."""
    try:
        return shot()
    except Exception:  # a decoder can fail in any way
        return None


def reason_of(error: BaseException) -> str:
    """Why FFmpeg failed, without secrets: its messages name addresses with their passwords."""
    text = getattr(error, "strerror", None)
    text = text if isinstance(text, str) and text else type(error).__name__
    return "it does not answer in time" if text.startswith("Immediate exit") else text


def without_secret(source: str) -> str:
    """An address without user and password; a path unchanged."""
    scheme, separator, address = source.partition("://")
    authority, slash, path = address.partition("/")
    return (
        f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}" if separator else source
    )
