"""Requests to cameras by HTTP: their logins, and redirects within one host."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from gemel.edge_runtime.capture.failures import SourceLost, refusal
from gemel.models.files.video import reason_of

DIGESTS = {"MD5": "md5", "SHA": "sha1", "SHA-256": "sha256"}
IN_PATH = "%/:=&?~#+!$,;'@()*[]"
"""Characters of an address that are sent as they are."""


class CameraAddress:
    """An address with user and password, which are sent to its own host only."""

    def __init__(self, address: str) -> None:
        url = urllib.parse.urlsplit(address)
        self._login, _, host = url.netloc.rpartition("@")
        self._url = urllib.parse.quote(url._replace(netloc=host, fragment="").geturl(), safe=IN_PATH)
        self._opener = _make_opener(f"{url.scheme}://{host}/", url.username, url.password)

    @contextlib.contextmanager
    def open(self, timeout_s: float) -> Iterator[Any]:
        """The response; SourceLost, in one line without secrets, for whatever fails until it is closed."""
        try:
            with self._opener.open(self._url, timeout=timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            error.close()
            raise refusal(error.code) from None
        except ValueError:  # of the handlers of logins
            raise SourceLost("it asks for a login that is neither Basic nor Digest", permanent=True) from None
        except (OSError, http.client.HTTPException) as error:
            raise SourceLost(describe_error(error)) from None

    def follow_redirects(self, timeout_s: float) -> str:
        """The address that answers in the end, with the login; SourceLost for a redirect elsewhere."""
        with self.open(timeout_s) as response:
            url = urllib.parse.urlsplit(response.url)
        return url._replace(netloc=f"{self._login}@{url.netloc}" if self._login else url.netloc).geturl()


def describe_error(error: Exception) -> str:
    """Why an exchange failed, without secrets."""
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


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Stays with the host of the config: what a camera names otherwise may be any machine of the box's network."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if new.hostname != old.hostname:
            raise SourceLost("it redirects to another host; give the address there if you trust it", permanent=True)
        if old.scheme == "https" and new.scheme != "https":
            raise SourceLost("it redirects from https to an address without encryption", permanent=True)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _make_opener(root: str, user: str | None, password: str | None) -> urllib.request.OpenerDirector:
    """HTTP with redirects to the same host and, for this server only, with user and password (Basic or Digest)."""
    opener = urllib.request.OpenerDirector()
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(), urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(), _RedirectHandler(),
        urllib.request.UnknownHandler(),
    ]  # fmt: skip
    if user is not None:
        logins = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        logins.add_password(None, root, urllib.parse.unquote(user), urllib.parse.unquote(password or ""))  # type: ignore[arg-type]
        handlers += [_BasicHandler(logins), _DigestHandler(logins)]
    for handler in handlers:
        opener.add_handler(handler)
    return opener
