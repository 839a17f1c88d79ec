"""Sessions of browsers: a cookie that names its end, with a proof by a key that only this process has."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterator, Mapping

SESSION_S = 7 * 86400
"""A dashboard on a wall asks for its token once a week, and after each start of the box."""
COOKIE = "gemel_session"
SECURE_COOKIE = "__Host-gemel_session"
"""Under HTTPS: browsers take a name with this prefix only from this host itself, encrypted, for all its paths."""
MAX_DIGITS = 15


class Sessions:
    """Issues and checks the values of session cookies; `clock` is in seconds and never goes back.

    A value says nothing of the token. It ends after SESSION_S, with the process, and with the token.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)

    def issue_value(self, token: str) -> str:
        """The value of a new session of a client that has shown the token."""
        expires_at = str(int(self._clock()) + SESSION_S)
        return f"{expires_at}.{self._prove(expires_at, token)}"

    def is_valid(self, value: str, token: str) -> bool:
        """Whether this is the value of a session that goes on."""
        expires_at, _, proof = value.partition(".")
        if not (expires_at.isascii() and expires_at.isdigit() and len(expires_at) <= MAX_DIGITS):
            return False
        expected = self._prove(expires_at, token).encode()
        is_proven = hmac.compare_digest(proof.encode(errors="surrogateescape"), expected)
        return is_proven and int(expires_at) > self._clock()

    def has_session(self, headers: Mapping[str, str], token: str, is_https: bool) -> bool:
        """Whether a request brings the cookie of a session that goes on."""
        return any(self.is_valid(value, token) for value in _read_cookies(headers, cookie_name(is_https)))

    def _prove(self, expires_at: str, token: str) -> str:
        return hmac.new(self._key, f"{expires_at} {token}".encode(), hashlib.sha256).hexdigest()


def cookie_name(is_https: bool) -> str:
    """The name of the session cookie."""
    return SECURE_COOKIE if is_https else COOKIE


def _read_cookies(headers: Mapping[str, str], name: str) -> Iterator[str]:
    for pair in headers.get("Cookie", "").split(";"):
        key, _, value = pair.strip().partition("=")
        if key == name:
            yield value.strip()
