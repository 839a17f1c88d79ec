"""A camera that sends one JPEG or PNG for each request: polled over HTTP."""

from __future__ import annotations

import hashlib
import http.client
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from edge_runtime.capture.failures import SourceLost, refusal
from models.pictures import MAX_PICTURE_BYTES, decode_picture
from models.video import Shot, decode_shot, reason_of

PICTURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
"""First bytes of JPEG and PNG."""
OTHERS = {
    b"GIF8": "a GIF", b"RIFF": "a WebP", b"BM": "a BMP", b"#EXTM3U": "a playlist", b"<": "a web page", b"{": "JSON",
}  # fmt: skip
"""First bytes of what else is found behind addresses."""
HINT = "give the address of an RTSP or MJPEG stream, or of a JPEG"
CHUNK_BYTES = 2**16
DIGESTS = {"MD5": "md5", "SHA": "sha1", "SHA-256": "sha256"}
IN_PATH = "%/:=&?~#+!$,;'@()*[]"
"""Characters of an address that are sent as they are."""


class StillSource:
    """Asks for a picture `every_s` after the one before came, for the first at once.

    Raises SourceLost for whatever is no JPEG or PNG of at most MAX_PICTURE_BYTES within `timeout_s`.
    """

    damaged = 0
    fps: float | None = None

    def __init__(self, address: str, every_s: float, timeout_s: float) -> None:
        self._every_s, self._timeout_s = every_s, timeout_s
        url = urllib.parse.urlsplit(address)
        host = url.netloc.rpartition("@")[2]
        self._url = urllib.parse.quote(url._replace(netloc=host, fragment="").geturl(), safe=IN_PATH)
        self._opener = _make_opener(f"{url.scheme}://{host}/", url.username, url.password)
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
        try:
            with self._opener.open(self._url, timeout=self._timeout_s) as response:
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
        except urllib.error.HTTPError as error:
            error.close()
            raise refusal(error.code) from None
        except ValueError:  # of the handlers of logins
            raise SourceLost("it asks for a login that is neither Basic nor Digest", permanent=True) from None
        except (OSError, http.client.HTTPException) as error:
            raise SourceLost(_reason(error)) from None
        if not data.startswith(PICTURES):
            named = (name for start, name in OTHERS.items() if data.lstrip().startswith(start))
            shown = next(named, re.sub(r"[^a-z0-9/.+-]", "", kind)) if data else "nothing"
            raise SourceLost(f"it sends {shown}, neither video nor a JPEG or PNG; {HINT}", permanent=True)
        return bytes(data)


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return "it does not answer in time"
    if isinstance(cause, http.client.HTTPException):
        return "it does not speak HTTP"
    return reason_of(cause) if isinstance(cause, OSError) else str(cause)


class _BasicHandler(urllib.request.HTTPBasicAuthHandler):
    """Sends a password once: cameras lock accounts after a few wrong ones."""

    def http_error_401(self, req: urllib.request.Request, *answer: Any) -> Any:
        return None if req.has_header(self.auth_header) else super().http_error_401(req, *answer)


class _DigestHandler(urllib.request.HTTPDigestAuthHandler):
    """Sends a password once, and knows SHA-256 and names and passwords beyond ASCII."""

    def retry_http_digest_auth(self, req: urllib.request.Request, auth: str) -> Any:
        return None if req.has_header(self.auth_header) else super().retry_http_digest_auth(req, auth)

    def get_algorithm_impls(self, algorithm: str) -> tuple[Callable[[str], str], Callable[[str, str], str]]:
        def digest(text: str) -> str:
            return hashlib.new(DIGESTS[algorithm], text.encode(), usedforsecurity=False).hexdigest()

        if algorithm not in DIGESTS:
            raise ValueError(algorithm)
        return digest, lambda secret, data: digest(f"{secret}:{data}")


def _make_opener(root: str, user: str | None, password: str | None) -> urllib.request.OpenerDirector:
    """HTTP with redirects and, for this server only, with user and password (Basic or Digest)."""
    opener = urllib.request.OpenerDirector()
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(), urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(), urllib.request.HTTPRedirectHandler(),
        urllib.request.UnknownHandler(),
    ]  # fmt: skip
    if user is not None:
        logins = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        logins.add_password(None, root, urllib.parse.unquote(user), urllib.parse.unquote(password or ""))  # type: ignore[arg-type]
        handlers += [_BasicHandler(logins), _DigestHandler(logins)]
    for handler in handlers:
        opener.add_handler(handler)
    return opener
