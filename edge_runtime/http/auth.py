"""Access to a box over HTTP, decided from the head of a request alone."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from models.errors import InputError
from models.io import read_bounded

COOKIE = "gemel_token"
MIN_TOKEN, MAX_TOKEN = 16, 512
TOKEN = re.compile(rb"[A-Za-z0-9._~+/=-]{%d,%d}" % (MIN_TOKEN, MAX_TOKEN))
"""The syntax of a bearer token (RFC 6750)."""
SAFE_METHODS = frozenset(("GET", "HEAD"))
LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "[::1]"))


@dataclass(frozen=True, slots=True)
class Access:
    """Where a box listens, and its token, if there is one.

    On the loopback any local client may read, by a name of the machine itself, so that no web page elsewhere can.
    Beyond it, and for every change of the box, the token is required.
    """

    host: str
    port: int
    token: str | None = field(default=None, repr=False)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    def check(self, method: str, headers: Mapping[str, str], is_public: bool = False) -> tuple[int, str] | None:
        """The HTTP status and the reason of a refusal; None where the request is allowed.

        `is_public` marks files that say nothing of the box: those of the page, and the form for the token.
        """
        host, origin = headers.get("Host", ""), headers.get("Origin")
        if self.is_local and _without_port(host) not in LOCAL_NAMES:
            return 403, "the Host of this request is not this machine"
        if origin is not None and origin.partition("://")[2].casefold() != host.casefold():
            return 403, "the Origin of this request is another site"
        if is_public or (self.is_local and method in SAFE_METHODS):
            return None
        if self.token is None:
            return 403, "this box has no token: name a token_file in its config"
        token = (_bearer(headers) or _cookie(headers) or "").encode(errors="surrogateescape")
        if not hmac.compare_digest(token, self.token.encode()):
            return 401, "a token is needed"
        return None


def parse_access(bind: str, token_file: Path | None, where: str | Path) -> Access:
    """Access at `HOST:PORT` with the token of a file; InputError naming the config and the key."""
    host, colon, port = bind.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InputError(where, f"'{bind[:80]}' is no address", "give HOST:PORT, such as 127.0.0.1:8080", "http.bind")
    host = host.removeprefix("[").removesuffix("]")
    token = None if token_file is None else _token(token_file)
    if token is None and not is_loopback(host):
        problem = f"{bind} can be reached from other machines, and there is no token"
        raise InputError(where, problem, "name a token_file, or bind to 127.0.0.1", "http.bind")
    return Access(host, int(port), token)


def is_loopback(host: str) -> bool:
    """Whether a name or address is only reachable from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(path: Path) -> str:
    hint = "make one: openssl rand -hex 32"
    token = read_bounded(path, 4096, hint).strip()
    if TOKEN.fullmatch(token) is None:
        problem = f"holds no token: one line of {MIN_TOKEN} to {MAX_TOKEN} letters, digits or -._~+/="
        raise InputError(path, problem, hint, "http.token_file")
    return token.decode()


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).casefold()


def _bearer(headers: Mapping[str, str]) -> str | None:
    kind, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.casefold() == "bearer" else None


def _cookie(headers: Mapping[str, str]) -> str | None:
    found = re.search(rf"(?:^|;)\s*{COOKIE}=([^;]*)", headers.get("Cookie", ""))
    return None if found is None else found[1].strip()
