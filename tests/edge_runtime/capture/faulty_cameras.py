"""Network cameras that fail on request: H.264 over RTSP (interleaved in TCP), and JPEG pictures over HTTP."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import av
import cv2
import numpy as np

from tests.edge_runtime.tiny import picture

if TYPE_CHECKING:
    from typing_extensions import Self

CLOCK_HZ, PAYLOAD_TYPE, MAX_PAYLOAD = 90_000, 96, 1400
FRAMES, KEYFRAME_EVERY = 20, 5
BYTES_A_FLIP = 100
TIMEOUT_S = 10.0
SINGLE_UNIT_TYPES, FU_A = 31, 28
SDP = "\r\n".join([
    "v=0", "o=- 0 0 IN IP4 127.0.0.1", "s=live", "t=0 0", f"m=video 0 RTP/AVP {PAYLOAD_TYPE}",
    f"a=rtpmap:{PAYLOAD_TYPE} H264/{CLOCK_HZ}", f"a=fmtp:{PAYLOAD_TYPE} packetization-mode=1", "a=control:track0", "",
])  # fmt: skip
RESPONSES = {
    "OPTIONS": ["Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN", "", ""],
    "SETUP": ["Transport: RTP/AVP/TCP;unicast;interleaved=0-1", "Session: 1", "", ""],
    "DESCRIBE": ["Content-Type: application/sdp", f"Content-Length: {len(SDP)}", "", SDP],
}


class FaultyCamera:
    """A camera at a port of its own, which it keeps; every connection has a thread.

    `muted`: connections stay without data. `silent`: a new connection gets no response. `garbage`: random bytes
    instead of all else. `flipping`: bits of frames are flipped. `tear` cuts connections within a frame. `size` of the
    frames may change at any time. `accepted` counts connections.
    """

    def __init__(self, fps: float = 25.0, size: tuple[int, int] = (64, 48)) -> None:
        self.fps, self.size = fps, size
        self.muted = self.silent = self.garbage = self.flipping = False
        self.accepted = self.port = self._torn = 0
        self._random = random.Random(0)
        self._over = threading.Event()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.refuse()
        for thread in self._threads:
            self.cut()
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a camera leaves no thread behind"

    def listen(self) -> None:
        """Accept connections."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._start(self._accept, self._listener)

    def refuse(self) -> None:
        """Cut every connection and refuse new ones."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.cut()

    def cut(self) -> None:
        """Cut every connection; new ones are served."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def tear(self) -> None:
        """Cut every connection within its next frame; new ones are served."""
        self._torn = self.accepted

    def mend(self) -> None:
        """Serve as if nothing had happened."""
        self.muted = self.silent = self.garbage = False
        self.cut()
        if self._listener is None:
            self.listen()

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self.accepted += 1
                self._connections.add(connection)
                self._start(self._serve, connection, self.accepted)

    def _serve(self, connection: socket.socket, number: int) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):
                if self.silent:
                    self._over.wait()
                elif self.garbage:
                    connection.sendall(os.urandom(4096))
                elif self._handshake(connection):
                    self._stream(connection, number)
        finally:
            self._connections.discard(connection)
            connection.close()

    def _stream(self, connection: socket.socket, number: int) -> None:
        for data in self._frames():
            if self._over.wait(1 / self.fps):
                return
            if number <= self._torn:
                connection.sendall(data[: len(data) // 2])
                return
            if self.garbage:
                connection.sendall(os.urandom(2000))
            elif not self.muted:
                connection.sendall(data)

    def _flip(self, data: bytes) -> bytes:
        """Part of a frame, with flipped bits while `flipping`."""
        flipped = bytearray(data)
        for _ in range(1 + len(flipped) // BYTES_A_FLIP if self.flipping else 0):
            flipped[self._random.randrange(len(flipped))] ^= 1 << self._random.randrange(8)
        return bytes(flipped)

    @property
    def url(self) -> str:
        """Its address, with a password."""
        raise NotImplementedError

    def _handshake(self, connection: socket.socket) -> bool:
        """Answer the requests before the first frame; whether frames shall follow."""
        raise NotImplementedError

    def _frames(self) -> Iterator[bytes]:
        """Frames as they are sent, for ever."""
        raise NotImplementedError


class RtspCamera(FaultyCamera):
    """H.264 over RTSP (RFC 2326), interleaved in its connection and packed by RFC 6184.

    A connection joins somewhere between two keyframes. DESCRIBE is answered with `status`, SETUP with `setup_status`.
    """

    status = setup_status = "200 OK"

    @property
    def url(self) -> str:
        return f"rtsp://user:secret@127.0.0.1:{self.port}/live"

    def _handshake(self, connection: socket.socket) -> bool:
        with connection.makefile("rb") as requests:
            # iterated, not read by readline: that returns empty lines for ever once the connection has ended
            while lines := [line.decode().strip() for line in takewhile(b"\r\n".__ne__, requests)]:
                sequence = next(line for line in lines if line.lower().startswith("cseq"))
                method = lines[0].split()[0]
                status = {"DESCRIBE": self.status, "SETUP": self.setup_status}.get(method, "200 OK")
                response = [f"RTSP/1.0 {status}", sequence, *RESPONSES.get(method, ["Session: 1", "", ""])]
                connection.sendall("\r\n".join(response).encode())
                if method == "PLAY":
                    return True
        return False

    def film(self) -> list[list[bytes]]:
        """The NAL units of each frame of what it shows again and again, in its present size."""
        return encode_clip(self.size)

    def _frames(self) -> Iterator[bytes]:
        sequence, index = 0, 2
        while True:
            size = self.size
            film = self.film()
            for units in film[index % len(film) :]:
                if self.size != size:
                    break
                stamp, data = round(index * CLOCK_HZ / self.fps), b""
                for payload, is_last in _payloads(units):
                    kind = PAYLOAD_TYPE | (0x80 if is_last else 0)
                    header = struct.pack(">BBHII", 0x80, kind, sequence & 0xFFFF, stamp & 0xFFFFFFFF, 7)
                    data += struct.pack(">cBH", b"$", 0, len(header) + len(payload)) + header + self._flip(payload)
                    sequence += 1
                index += 1
                yield data


class HttpCamera(FaultyCamera):
    """JPEG pictures one after the other, as multipart/x-mixed-replace."""

    @property
    def url(self) -> str:
        return f"http://user:secret@127.0.0.1:{self.port}/video?token=secret"

    def _handshake(self, connection: socket.socket) -> bool:
        with connection.makefile("rb") as request:
            for _ in takewhile(b"\r\n".__ne__, request):
                pass
        kind = "multipart/x-mixed-replace;boundary=frame"
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n--frame\r\n".encode())
        return True

    def _frames(self) -> Iterator[bytes]:
        index = 0
        while True:
            data = self._flip(cv2.imencode(".jpg", picture(index % FRAMES, *self.size))[1].tobytes())
            index += 1
            head = f"Content-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
            yield head.encode() + data + b"\r\n--frame\r\n"


@cache
def encode_clip(size: tuple[int, int]) -> list[list[bytes]]:
    """The NAL units (H.264) of each frame of a short clip; the first is a keyframe."""
    return encode_pictures([picture(seed, *size) for seed in range(FRAMES)])


def encode_pictures(pictures: Sequence[np.ndarray]) -> list[list[bytes]]:
    """The NAL units (H.264) of each picture, RGB uint8 (H, W, 3)."""
    context = av.CodecContext.create("libx264", "w")
    context.height, context.width = pictures[0].shape[:2]
    context.pix_fmt = "yuv420p"
    context.time_base, context.gop_size, context.thread_count = Fraction(1, 25), KEYFRAME_EVERY, 1
    context.options = {"preset": "ultrafast", "tune": "zerolatency", "x264-params": "slice-max-size=0"}
    frames = [av.VideoFrame.from_ndarray(one, format="rgb24") for one in pictures]
    for index, frame in enumerate(frames):
        frame.pts = index
    packets = [packet for frame in [*frames, None] for packet in context.encode(frame)]
    return [
        [unit for unit in bytes(packet).replace(b"\0\0\0\1", b"\0\0\1").split(b"\0\0\1") if unit] for packet in packets
    ]


def _payloads(units: list[bytes]) -> Iterator[tuple[bytes, bool]]:
    """RTP payloads of one frame, and whether it is the last; large units are cut into fragments (FU-A)."""
    for number, unit in enumerate(units):
        is_last = number == len(units) - 1
        if len(unit) <= MAX_PAYLOAD:
            yield unit, is_last
            continue
        kind, data = unit[0], unit[1:]
        for start in range(0, len(data), MAX_PAYLOAD):
            is_end = start + MAX_PAYLOAD >= len(data)
            mark = (kind & SINGLE_UNIT_TYPES) | (0x80 if start == 0 else 0) | (0x40 if is_end else 0)
            yield bytes([(kind & 0xE0) | FU_A, mark]) + data[start : start + MAX_PAYLOAD], is_last and is_end
