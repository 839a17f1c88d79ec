"""HTTP exchanges with an update server: each has ONE deadline, for connection, head and body together.

A server that sends a byte now and then ends at the deadline as one that sends nothing. Redirects are answers like any
other, so that a token stays with its server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

from gemel.edge_runtime.sinks.base import client_context
from gemel.edge_runtime.updates.update_files import SizeLimit, check_size
from gemel.models.errors import InputError, message_of

TIMEOUT_S, DOWNLOAD_TIMEOUT_S, STALL_TIMEOUT_S = 30.0, 3600.0, 30.0
"""Of a whole exchange, of a whole download, and between two pieces of a download."""
PIECE_BYTES = 1 << 20
MAX_LENGTH_DIGITS = 15
PARTIAL, NOT_MODIFIED, FIRST_ERROR = 206, 304, 400
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
HINT = "look at the update server"
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with a status of success; `headers` have names in lower case."""

    headers: Mapping[str, str]

    @property
    def length(self) -> int | None:
        """The length that the head announces; some servers say 0 to any HEAD."""
        return parse_length(self.headers.get("content-length")) or None


class UpdateClient:
    """Asks one server. Every failure is an InputError that names the address of the config."""

    def __init__(self, url: str, authorization: str | None, ca: Path | None) -> None:
        self._url, self._authorization = url, authorization
        self._context = client_context(ca) if url.startswith("https:") else None

    def ask_head(self, address: str, word: str | None) -> Reply:
        """What the head of an answer says, within TIMEOUT_S; a server that refuses HEAD, in whatever way, gets a GET
        whose body is not read.

        `word` is the ETag that it gave before: where it is still the same, such a server sends nothing else.
        """
        import aiohttp

        async def read() -> Reply:
            with contextlib.suppress(aiohttp.ServerDisconnectedError):
                async with self._open(address, "HEAD", TIMEOUT_S) as response:
                    if response.status < FIRST_ERROR:
                        return self._read_head(response)
            known = {} if word is None else {"If-None-Match": word}
            async with self._open(address, "GET", TIMEOUT_S, known) as response:
                if word is not None and response.status == NOT_MODIFIED:
                    return Reply({"etag": word})
                return self._read_head(response)

        return self._run(read())

    def _read_head(self, response: Any) -> Reply:
        self._check_status(response.status)
        return Reply({name.lower(): text for name, text in response.headers.items()})

    def download(self, address: str, write: Callable[[bytes], object], limit: SizeLimit) -> int:
        """Pass what is at an address to `write`, at most `limit`, within DOWNLOAD_TIMEOUT_S; returns its bytes."""

        async def read() -> int:
            nbytes = 0
            async with self._open(address, "GET", DOWNLOAD_TIMEOUT_S) as response:
                check_size(self._url, parse_length(response.headers.get("Content-Length")) or 0, limit)
                async for piece in self._pieces(response, limit):
                    nbytes += len(piece)
                    write(piece)
            return nbytes

        return self._run(read())

    def resume(self, address: str, file: BinaryIO, tag: str, limit: SizeLimit) -> int:
        """Append the rest of what is at an address to `file`, or replace it where that has not this ETag any more.

        At most `limit`, within DOWNLOAD_TIMEOUT_S; returns the bytes of the file.
        """

        async def read() -> int:
            begin = file.seek(0, os.SEEK_END)
            more = {"Range": f"bytes={begin}-", "If-Range": tag} if begin else NO_HEADERS
            async with self._open(address, "GET", DOWNLOAD_TIMEOUT_S, more) as response:
                is_rest = response.headers.get("Content-Range", "").startswith(f"bytes {begin}-")
                if response.status != PARTIAL or not is_rest:
                    begin = file.truncate(0)
                async for piece in self._pieces(response, limit, begin):
                    file.write(piece)
            return file.tell()

        return self._run(read())

    def _open(self, address: str, method: str, timeout_s: float, more: Mapping[str, str] = NO_HEADERS) -> _Request:
        headers = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "gemel", **more}
        if self._authorization is not None:
            headers["Authorization"] = self._authorization
        return _Request(address, method, headers, timeout_s, self._context)

    async def _pieces(self, response: Any, limit: SizeLimit, begin: int = 0) -> AsyncIterator[bytes]:
        """The body of an answer, the rest after `begin`; InputError for no success, and beyond the limit."""
        if begin == 0 or response.status != PARTIAL:
            self._check_status(response.status)
        nbytes = begin
        async for piece in response.content.iter_chunked(PIECE_BYTES):
            nbytes += len(piece)
            check_size(self._url, nbytes, limit)
            yield piece

    def _check_status(self, status: int) -> None:
        if not 200 <= status < 300 or status == PARTIAL:
            raise InputError(self._url, f"the update server answers {status}", HINT)

    def _run(self, exchange: Coroutine[Any, Any, Value]) -> Value:
        import aiohttp

        try:
            return asyncio.run(exchange)
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise InputError(self._url, "the update server stalls or hangs up", HINT) from error
        except aiohttp.ClientConnectorError as error:
            reason = error.os_error.strerror or message_of(error)
            raise InputError(self._url, f"the update server cannot be reached: {reason}", HINT) from error
        except aiohttp.ClientPayloadError as error:
            raise InputError(self._url, "the update server stalls or hangs up", HINT) from error
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            raise InputError(self._url, f"the exchange failed: {message_of(error)}", HINT) from error


class _Request:
    """A request as an asynchronous context, which gives its response."""

    def __init__(self, address: str, method: str, headers: Mapping[str, str], timeout_s: float,
                 context: Any) -> None:  # fmt: skip
        self._address, self._method, self._headers = address, method, headers
        self._timeout_s, self._context = timeout_s, context

    async def __aenter__(self) -> Any:
        import aiohttp
        import yarl

        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_read=min(self._timeout_s, STALL_TIMEOUT_S))
        connector = aiohttp.TCPConnector(ssl=True if self._context is None else self._context, limit=1)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )
        try:
            return await self._session.request(
                self._method, yarl.URL(self._address, encoded=True), headers=self._headers,
                allow_redirects=False, proxy=_find_proxy(self._address),
            )  # fmt: skip
        except BaseException:
            await self._session.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()


def parse_length(text: str | None) -> int | None:
    """The value of a Content-Length; None where there is none, or it is no number of a sensible size."""
    is_number = text is not None and text.isascii() and text.isdigit() and len(text) <= MAX_LENGTH_DIGITS
    return int(text) if text is not None and is_number else None


def _find_proxy(address: str) -> str | None:
    """The proxy that the environment names for an address."""
    parts = urllib.parse.urlsplit(address)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return urllib.request.getproxies().get(parts.scheme)
