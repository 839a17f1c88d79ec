"""A multipart form of DeepStack's clients, read field by field within a bound that its reader can raise."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import (
    BadContentDispositionHeader,
    BadContentDispositionParam,
    BodyPartReader,
    MultipartReader,
    StreamReader,
    web,
)
from aiohttp.http_exceptions import HttpProcessingError

from gemel.edge_runtime.http.bodies import MAX_UNPROVEN_BYTES, PushError, too_large

MAX_FIELDS, MAX_FIELD_BYTES = 16, 4096
CHUNK_BYTES = 2**16
PIECES = 16
"""Of a bound, in which a small body is read."""
KEY_FIELD = "api_key"
PICTURE_FIELDS = ("image", "image1")

# aiohttp warns of damaged headers with their text, which anybody could send to fill the log.
warnings.filterwarnings("ignore", category=BadContentDispositionHeader)
warnings.filterwarnings("ignore", category=BadContentDispositionParam)


@dataclass(frozen=True)
class Form:
    """A multipart form: the picture and the other fields."""

    picture: bytes
    fields: Mapping[str, str]

    @property
    def min_confidence(self) -> float:
        """The lowest confidence of a prediction; PushError where it is no number from 0 to 1."""
        text = self.fields.get("min_confidence", "0")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1:
            raise PushError(400, f"min_confidence '{text[:40]}' is no number from 0 to 1")
        return value


class _BoundedContent:
    """The bytes of a body with the interface that aiohttp's reader of forms needs; PushError beyond `max_bytes`."""

    def __init__(self, content: StreamReader, max_bytes: int, error: PushError) -> None:
        self._content = content
        self.nbytes, self.max_bytes, self.error = 0, max_bytes, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def read(self, size: int = -1) -> bytes:
        remaining = self.max_bytes - self.nbytes
        if remaining <= 0 and not self._content.at_eof():
            raise self.error
        # The reader looks ahead by two reads for the end of a field: pieces leave the bound to later fields.
        piece = max(1, min(CHUNK_BYTES, self.max_bytes // PIECES, remaining))
        return self._count(await self._content.read(piece if size < 0 else min(size, piece)))

    async def readline(self, **bounds: Any) -> bytes:
        return self._count(await self._content.readline(**bounds))

    def unread_data(self, data: bytes) -> None:
        self.nbytes -= len(data)
        self._content.unread_data(data)

    def _count(self, data: bytes) -> bytes:
        self.nbytes += len(data)
        if self.nbytes > self.max_bytes:
            raise self.error
        return data


class FormReader:
    """Reads the fields of a form in their order; PushError where it is damaged, or has too many or too large ones."""

    def __init__(self, request: web.Request) -> None:
        too_late = PushError(
            401,
            f"a token is needed: send it as Authorization: Bearer, or as {KEY_FIELD} "
            f"within the first {MAX_UNPROVEN_BYTES // 1024} KiB, before the picture",
        )
        self._content = _BoundedContent(request.content, MAX_UNPROVEN_BYTES, too_late)
        self._picture, self._fields = b"", dict[str, str]()
        self._parts: MultipartReader | None = None
        self._headers = request.headers

    @property
    def nbytes(self) -> int:
        """Bytes that were read so far."""
        return self._content.nbytes

    def raise_bound(self, max_bytes: int) -> None:
        """Allow that many bytes in all."""
        self._content.max_bytes, self._content.error = max_bytes, too_large(max_bytes)

    async def read_until(self, field: str) -> str:
        """The text of this field, "" where the form has none; what comes behind it is not read."""
        while field not in self._fields:
            if not await self._read_part():
                return ""
        return self._fields[field]

    async def read_form(self) -> Form:
        """The whole form."""
        while await self._read_part():
            pass
        return Form(self._picture, self._fields)

    async def _read_part(self) -> bool:
        """Read the next field; False at the end."""
        try:
            if self._parts is None:
                self._parts = MultipartReader(self._headers, cast(StreamReader, self._content))
            part = await self._parts.next()
            if part is None:
                return False
            await self._keep_part(part)
        except (ValueError, AssertionError, LookupError, HttpProcessingError) as error:
            raise PushError(400, f"the form is damaged: {_describe(error)}") from error
        return True

    async def _keep_part(self, part: MultipartReader | BodyPartReader) -> None:
        if not isinstance(part, BodyPartReader) or len(self._fields) >= MAX_FIELDS:
            raise PushError(400, "the form has nested or too many fields")
        is_picture = part.name in PICTURE_FIELDS
        data = bytearray()
        while chunk := await part.read_chunk(CHUNK_BYTES):
            data += chunk
            if not is_picture and len(data) > MAX_FIELD_BYTES:
                raise PushError(400, f"the field {str(part.name)[:40]} is too long")
        if is_picture:
            self._picture = bytes(data)
        else:
            self._fields[str(part.name)] = data.decode(errors="replace").strip()


def _describe(error: Exception) -> str:
    """One short line: an error of a header holds the whole of it."""
    text = error.message if isinstance(error, HttpProcessingError) else str(error)
    return " ".join(text.split())[:200]
