"""Files, RTSP over TCP, HTTP and USB devices, decoded by FFmpeg through PyAV."""

from __future__ import annotations

import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.capture.settings import CameraConfig
from edge_runtime.capture.sources.base import Shot, SourceLost, reason_of
from models.pictures import MAX_PIXELS
from models.video import FASTEST, PROTOCOLS, SLOWEST, VIDEO_FORMATS

if TYPE_CHECKING:
    import av
    import numpy as np

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
        self.fps = rate if SLOWEST <= rate <= FASTEST and not self._live else None
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
    reason = reason_of(error)
    return "it does not answer in time" if reason.startswith("Immediate exit") else reason
