"""Access to a box over HTTP, decided from the head of a request and the address that it comes from."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemel.models.errors import InputError
from gemel.models.files.io import read_bounded

MIN_TOKEN, MAX_TOKEN = 16, 512
TOKEN = re.compile(rb"[A-Za-z0-9._~+/=-]{%d,%d}" % (MIN_TOKEN, MAX_TOKEN))
"""The syntax of a bearer token (RFC 6750)."""
SAFE_METHODS = frozenset(("GET", "HEAD"))
LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "[::1]"))
FORWARDING_HEADERS = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP")
"""Headers that proxies add: a request with one of them does not come from this machine."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a certificate (with its chain) and of its key, PEM."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Access:
    """Where a box listens, its token, if there is one, the other `names` it is reached by, and its proxies.

    A token is always required where there is one. Without it the box listens on the loopback alone, and local clients
    may read by a name of the machine itself, so that no web page elsewhere can, and not through a proxy.
    """

    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()
    trusted_proxies: tuple[Network, ...] = ()
    tls: TlsFiles | None = None
    ready: str = "any"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    def is_proxy(self, address: str | None) -> bool:
        """Whether this address is that of a trusted proxy."""
        try:
            given = ipaddress.ip_address(address or "")
        except ValueError:
            return False
        mapped = getattr(given, "ipv4_mapped", None) or given
        return any(mapped in network for network in self.trusted_proxies)

    def group_of(self, headers: Mapping[str, str], address: str | None) -> str:
        """The group of addresses that a request counts in; what a trusted proxy passes on counts by its client."""
        forwarded = headers.get("X-Forwarded-For", "") if self.is_proxy(address) else ""
        return address_group(forwarded.rpartition(",")[2].strip() or address or "")

    def is_https(self, headers: Mapping[str, str], address: str | None) -> bool:
        """Whether the client uses HTTPS, to the box or to its proxy."""
        forwarded = headers.get("X-Forwarded-Proto", "") if self.is_proxy(address) else ""
        return self.tls is not None or forwarded.strip().casefold() == "https"

    def check(
        self,
        method: str,
        headers: Mapping[str, str],
        is_public: bool = False,
        address: str | None = None,
        has_session: bool = False,
    ) -> tuple[int, str] | None:
        """The HTTP status and the reason of a refusal; None where the request from `address` is allowed.

        `is_public` marks files that say nothing of the box: those of the page, and the form for the token.
        `has_session`: the request has the cookie of a session, which stands for the token.
        """
        host, origin = headers.get("Host", ""), headers.get("Origin")
        if self.token is None and _without_port(host) not in LOCAL_NAMES:
            return 403, "the Host of this request is not this machine"
        if self.token is None and any(name in headers for name in FORWARDING_HEADERS):
            return 403, "this request comes through a proxy: name a token_file in the config of the box"
        if self.names and not self._is_known(_without_port(self._host_of(headers, address))):
            return 403, "the Host of this request is none of http.names"
        if origin is not None and not self._is_own(origin.partition("://")[2].casefold(), headers, address):
            return 403, "the Origin of this request is another site"
        if is_public or (self.token is None and method in SAFE_METHODS):
            return None
        if self.token is None:
            return 403, "this box has no token: name a token_file in its config"
        if not has_session and not self.has_token(headers):
            return 401, "a token is needed"
        return None

    def has_token(self, headers: Mapping[str, str]) -> bool:
        """Whether a request brings the token in its head."""
        return self.is_token(_bearer(headers) or "")

    def is_token(self, text: str) -> bool:
        """Whether this is the token."""
        given = text.encode(errors="surrogateescape")
        return self.token is not None and hmac.compare_digest(given, self.token.encode())

    def _is_known(self, host: str) -> bool:
        """Whether this is one of the box's names, or an address, which no site elsewhere can pass off as its own."""
        return host in {*LOCAL_NAMES, *self.names, self.host} or _is_address(host)

    def _host_of(self, headers: Mapping[str, str], address: str | None) -> str:
        """The host that the client asked for."""
        forwarded = headers.get("X-Forwarded-Host", "") if self.is_proxy(address) else ""
        return forwarded.rpartition(",")[2].strip() or headers.get("Host", "")

    def _is_own(self, origin: str, headers: Mapping[str, str], address: str | None) -> bool:
        own = (headers.get("Host", ""), self._host_of(headers, address))
        return origin in {host.casefold() for host in own} or _without_port(origin) in self.names


def parse_access(
    bind: str,
    token_file: Path | None,
    where: str | Path,
    names: Sequence[str] = (),
    trusted_proxies: Sequence[str] = (),
    tls: TlsFiles | None = None,
    ready: str = "any",
) -> Access:
    """Access at `HOST:PORT` with the token of a file; InputError naming the config and the key."""
    host, colon, port = bind.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InputError(where, f"'{bind[:80]}' is no address", "give HOST:PORT, such as 127.0.0.1:8080", "http.bind")
    host = host.removeprefix("[").removesuffix("]")
    token = None if token_file is None else _token(token_file)
    if token is None and not is_loopback(host):
        problem = f"{bind} can be reached from other machines, and there is no token"
        raise InputError(where, problem, "name a token_file, or bind to 127.0.0.1", "http.bind")
    if token is None and (names or trusted_proxies):
        problem = "a box behind a proxy can be reached from other machines, and there is no token"
        raise InputError(where, problem, "name a token_file", "http.names" if names else "http.trusted_proxies")
    proxies = tuple(_network(text, where, f"http.trusted_proxies[{at}]") for at, text in enumerate(trusted_proxies))
    return Access(host, int(port), token, tuple(name.casefold() for name in names), proxies, tls, ready)


def is_loopback(host: str) -> bool:
    """Whether a name or address is only reachable from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_group(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 of an IPv6 address, as a host has many of these."""
    try:
        given = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(given, ipaddress.IPv4Address):
        return str(given)
    if given.ipv4_mapped is not None:
        return str(given.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(given) >> 64 << 64, 64)))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _network(text: str, where: str | Path, key: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        problem = f"'{text[:80]}' is no address or network"
        raise InputError(where, problem, "give one such as 127.0.0.1 or 10.0.0.0/8", key) from error


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
