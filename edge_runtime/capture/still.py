"""A camera that sends one JPEG or PNG for each request: polled over HTTP."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path

from gemel.edge_runtime.capture.addresses import CameraAddress
from gemel.edge_runtime.capture.failures import SourceLost
from gemel.models.files.pictures import MAX_PICTURE_BYTES, decode_picture
from gemel.models.files.video import Shot, decode_shot

PICTURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
"""First bytes of JPEG and PNG."""
OTHERS = {
    b"GIF8": "a GIF", b"RIFF": "a WebP", b"BM": "a BMP", b"#EXTM3U": "a playlist", b"<": "a web page", b"{": "JSON",
}  # fmt: skip
"""First bytes of what else is found behind addresses."""
HINT = "give the address of an RTSP or MJPEG stream, or of a JPEG"
CHUNK_BYTES = 2**16


class StillSource:
    """Asks for a picture `every_s` after the one before came, for the first at once.

    Raises SourceLost for whatever is no JPEG or PNG of at most MAX_PICTURE_BYTES within `timeout_s`.
    """

    damaged = 0
    fps: float | None = None

    def __init__(self, address: str, every_s: float, timeout_s: float) -> None:
        self._every_s, self._timeout_s = every_s, timeout_s
        self._address = CameraAddress(address)
        self._start = self._came_at = time.monotonic()
        self._next: bytes | None = self._ask()
        if decode_shot(partial(decode_picture, self._next, Path())) is None:
            raise SourceLost("its picture does not decode")
        self._data = b""

    @property
    def time_s(self) -> float:
        return self._came_at - self._start

    @property
    def pause_s(self) -> float:
        return 0.0 if self._next is not None else max(0.0, self._came_at + self._every_s - time.monotonic())

    def advance(self) -> bool:
        self._data, self._next = self._next or self._ask(), None
        self._came_at = time.monotonic()
        return True

    def shot(self) -> Shot:
        return partial(decode_picture, self._data, Path())

    def close(self) -> None: ...

    def _ask(self) -> bytes:
        """The bytes of a picture."""
        deadline = time.monotonic() + self._timeout_s
        with self._address.open(self._timeout_s) as response:
            kind = response.headers.get_content_type()
            if kind.startswith("multipart/"):
                raise SourceLost("it sends a stream, no single pictures; leave `every_s` out", permanent=True)
            data = bytearray()
            while chunk := response.read1(CHUNK_BYTES):
                data += chunk
                if len(data) > MAX_PICTURE_BYTES:
                    raise SourceLost(f"it sends more than {MAX_PICTURE_BYTES >> 20} MiB", permanent=True)
                if time.monotonic() > deadline:
                    raise TimeoutError
        if not data.startswith(PICTURES):
            named = (name for start, name in OTHERS.items() if data.lstrip().startswith(start))
            shown = next(named, re.sub(r"[^a-z0-9/.+-]", "", kind)) if data else "nothing"
            raise SourceLost(f"it sends {shown}, neither video nor a JPEG or PNG; {HINT}", permanent=True)
        return bytes(data)
