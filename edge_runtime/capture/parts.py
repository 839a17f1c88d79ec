"""A camera that sends pictures in the parts of one answer (MJPEG over HTTP), whatever its parts say of themselves.

FFmpeg takes parts of the type `image/jpeg` alone; browsers play what begins as a JPEG does.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import time
from functools import partial
from pathlib import Path

from gemel.edge_runtime.capture.addresses import CameraAddress, describe_error
from gemel.edge_runtime.capture.failures import SourceLost
from gemel.edge_runtime.capture.still import CHUNK_BYTES, PICTURES
from gemel.models.files.pictures import MAX_PICTURE_BYTES, decode_picture
from gemel.models.files.video import Shot

LENGTH = re.compile(rb"(?im)^content-length:[ \t]*([0-9]{1,9})[ \t]*\r?$")

BREAK_BYTES = 4
"""Of a break of lines and the two dashes of a boundary."""


class NoPartsError(Exception):
    """An answer that is not in parts."""


class PartsSource:
    """The pictures of an answer in parts, as they come; SourceLost where none is whole within `timeout_s`.

    NoPartsError for any other answer.
    """

    damaged = 0
    fps: float | None = None

    def __init__(self, address: str, timeout_s: float) -> None:
        self._timeout_s, self._data, self._picture = timeout_s, bytearray(), b""
        with contextlib.ExitStack() as stack:
            self._response = stack.enter_context(CameraAddress(address).open(timeout_s))
            if self._response.headers.get_content_maintype() != "multipart":
                raise NoPartsError
            boundary = self._response.headers.get_param("boundary") or ""
            self._end = b"--" + str(boundary).lstrip("-").encode()
            self._stack = stack.pop_all()
        self._start, self.time_s = time.monotonic(), 0.0

    def advance(self) -> bool:
        deadline = time.monotonic() + self._timeout_s
        picture = self._take_picture()
        while picture is None:
            if len(self._data) > 2 * MAX_PICTURE_BYTES:
                raise SourceLost("the parts of its answer hold no JPEG or PNG", permanent=True)
            try:
                chunk = self._response.read1(CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise SourceLost(describe_error(error)) from None
            if not chunk:
                return False
            if time.monotonic() > deadline:
                raise SourceLost("no part of its answer ends in time: their length or boundary is wrong")
            self._data += chunk
            picture = self._take_picture()
        self._picture, self.time_s = picture, time.monotonic() - self._start
        return True

    def _take_picture(self) -> bytes | None:
        """The first picture, if it is whole: as long as its part says, where that ends at a boundary, or up to one."""
        starts = [place for mark in PICTURES if (place := self._data.find(mark)) >= 0]
        if not starts:
            return None
        start = min(starts)
        lengths = LENGTH.findall(self._data, 0, start)  # parts before it, of text, may have their own
        end = start + int(lengths[-1]) if lengths else -1
        if end <= start or self._data[end : end + BREAK_BYTES].strip()[:2] not in (b"", b"-", b"--"):
            end = self._data.find(self._end, start)
        if end < start or end > len(self._data):
            return None
        picture = bytes(self._data[start:end])
        del self._data[:end]
        return picture

    def shot(self) -> Shot:
        return partial(decode_picture, self._picture, Path())

    def close(self) -> None:
        self._stack.close()
