"""Connections of the HTTP service, bounded so that idle and slow clients never keep others from an answer.

A client is accepted as a plain socket and costs a descriptor and nothing else until the head of its first request
(with TLS: its first byte) has come; the oldest of those that wait make room for new ones. Then it gets a place, which
counts from that moment, and aiohttp serves it. A connection without a request in progress is closed after a while, or
as soon as others need its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from gemel.edge_runtime.http.auth import address_group
from gemel.edge_runtime.http.failures import Broken, HttpFailures

PEEK_INTERVAL_S = 0.1
"""Interval at which the head of a request that comes in pieces is looked at again."""
LINGER_S = 1.0
"""Time for the remainder of a body whose request was answered before, so that its client reads the answer."""
HEALTH_PATHS = frozenset(("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"))
HEALTH_HEADS = tuple(f"{method} {path} ".encode() for method in ("GET", "HEAD") for path in HEALTH_PATHS)
CROWDED = "too many connections open\n"
REFUSAL = (
    "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Type: text/plain\r\n"
    f"Content-Length: {len(CROWDED)}\r\nConnection: close\r\n\r\n{CROWDED}"
).encode()
MALFORMED = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 12\r\nConnection: close\r\n\r\n"
    b"bad request\n"
)

silent = logging.getLogger("gemel.run.http")
"""aiohttp would log a traceback for malformed requests, which anybody can send."""
silent.setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of open connections, in all and of one group of addresses; trusted proxies have no bound of their own.

    In all 256 descriptors: a process may have 1,024 by default, and the box needs them for its cameras and files.
    """

    waiting: int = 128
    """Connections whose first request has not come."""
    waiting_of_group: int = 32
    active: int = 112
    active_of_group: int = 64
    health: int = 16
    """Further connections that ask HEALTH_PATHS only, while the others have a request in progress."""
    head_s: float = 5.0
    """Time for the head of the first request, and for a TLS handshake."""
    idle_s: float = 30.0
    """Time without a request in progress."""
    body_s: float = 10.0
    """Time for the body of a request."""
    head_bytes: int = 16384


class NoPlace(Exception):
    """A connection that was let in for health checks asks something else."""


class BoxProtocol(RequestHandler):
    """aiohttp's server of one connection, whose errors have neither traceback nor the server's name."""

    def __init__(self, server: web.Server, failures: HttpFailures, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(server, loop=loop, access_log=None, logger=silent, lingering_time=LINGER_S)  # type: ignore[arg-type]
        self._failures = failures

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP, and close: aiohttp would send its name, and log."""
        self._failures.note_broken(Broken.MALFORMED)
        if self.transport is not None:
            self.transport.write(MALFORMED)  # type: ignore[attr-defined]
        self.force_close()
        return web.Response(status=status)


@dataclass(eq=False)
class _Waiting:
    """A client whose first request has not come."""

    client: socket.socket
    address: str
    group: str
    until: float


@dataclass(eq=False)
class _Place:
    """A connection that aiohttp serves, or will; `idle_since` is None while it opens and during a request.

    `is_reserve`: it has one of the places for health checks.
    """

    address: str
    group: str
    is_reserve: bool
    handler: RequestHandler | None = None
    is_open: bool = False
    idle_since: float | None = None


class Connections:
    """Accepts clients of these listening sockets and hands them to aiohttp; all calls in the loop's thread.

    `is_proxy` tells whether an address is that of a trusted proxy, `tls` gives the context in force.
    """

    def __init__(
        self,
        server: web.Server,
        is_proxy: Callable[[str], bool],
        tls: Callable[[], ssl.SSLContext | None],
        failures: HttpFailures,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._server, self._is_proxy, self._tls, self._failures = server, is_proxy, tls, failures
        self._limits = limits or ConnectionLimits()
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._waiting: list[_Waiting] = []
        self._places: list[_Place] = []
        self._handing_over: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def listen(self, sockets: list[socket.socket]) -> None:
        """Accept clients from now on."""
        for listening in sockets:
            self._listening.append(listening)
            self._loop.add_reader(listening.fileno(), self._accept, listening)
        if self._sweep is None:
            self._sweep_idle()

    def close(self) -> None:
        """Accept no more and drop those that wait."""
        if self._sweep is not None:
            self._sweep.cancel()
        for listening in self._listening:
            self._loop.remove_reader(listening.fileno())
            listening.close()
        for waiting in list(self._waiting):
            self._drop(waiting)
        for task in self._handing_over:
            task.cancel()

    @contextlib.contextmanager
    def request(self, request: web.BaseRequest) -> Iterator[None]:
        """Mark the connection of a request as in use; a body that does not come in time ends the connection.

        Raises NoPlace where it was let in for health checks, asks something else, and there is no place for that.
        """
        place = next((place for place in self._places if place.handler is request.protocol), None)
        if place is None:
            yield
            return
        place.is_open, place.idle_since = True, None
        late = self._loop.call_later(self._limits.body_s, self._abort_without_body, request)
        try:
            if place.is_reserve and request.path not in HEALTH_PATHS:
                self._leave_reserve(place)
            yield
        finally:
            late.cancel()
            place.idle_since = self._loop.time()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(self._limits.waiting):
            try:
                client, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left
                if not self._waiting:
                    self._loop.remove_reader(listening.fileno())
                    self._loop.call_later(PEEK_INTERVAL_S, self._resume, listening)
                    return
                self._drop(self._waiting[0], Broken.CROWDED)
                continue
            client.setblocking(False)
            self._admit(client, str(address[0]))

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _admit(self, client: socket.socket, address: str) -> None:
        group = address_group(address)
        of_group = [waiting for waiting in self._waiting if waiting.group == group]
        if len(of_group) >= self._limits.waiting_of_group and not self._is_proxy(address):
            self._drop(of_group[0], Broken.CROWDED)
        elif len(self._waiting) >= self._limits.waiting:
            self._drop(self._waiting[0], Broken.CROWDED)
        waiting = _Waiting(client, address, group, self._loop.time() + self._limits.head_s)
        self._waiting.append(waiting)
        self._watch(waiting)

    def _watch(self, waiting: _Waiting) -> None:
        if waiting.client.fileno() >= 0:
            self._loop.add_reader(waiting.client.fileno(), self._peek, waiting)

    def _peek(self, waiting: _Waiting) -> None:
        self._loop.remove_reader(waiting.client.fileno())
        try:
            head = waiting.client.recv(self._limits.head_bytes, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._watch(waiting)
            return
        except OSError:
            head = b""
        if not head:
            self._drop(waiting)
        elif self._tls() is not None or b"\r\n\r\n" in head or len(head) >= self._limits.head_bytes:
            self._promote(waiting, head)
        else:  # the rest of a head that comes in pieces
            self._loop.call_later(PEEK_INTERVAL_S, self._watch, waiting)

    def _promote(self, waiting: _Waiting, head: bytes) -> None:
        """Hand a client over to aiohttp, or refuse it; its place counts from now on."""
        self._waiting.remove(waiting)
        self._forget_closed()
        place = _Place(waiting.address, waiting.group, is_reserve=False)
        # Behind TLS the box sees the path after the handshake only.
        may_be_health = self._tls() is not None or head.startswith(HEALTH_HEADS)
        if not self._has_room(place):
            if not (may_be_health and self._has_reserve()):
                self._refuse(waiting)
                return
            place.is_reserve = True
        self._places.append(place)
        task = self._loop.create_task(self._serve(waiting.client, place))
        self._handing_over.add(task)
        task.add_done_callback(self._handing_over.discard)

    def _refuse(self, waiting: _Waiting) -> None:
        self._failures.note_broken(Broken.CROWDED)
        with contextlib.suppress(OSError):
            waiting.client.recv(self._limits.head_bytes)  # what is left unread would reset the connection
            waiting.client.send(b"" if self._tls() is not None else REFUSAL)
        waiting.client.close()

    def _has_room(self, place: _Place) -> bool:
        """Whether one more ordinary connection like this may be served; an idle one is closed for it."""
        ordinary = [other for other in self._places if not other.is_reserve]
        of_group = [other for other in ordinary if other.group == place.group]
        if len(of_group) >= self._limits.active_of_group and not self._is_proxy(place.address):
            return self._close_oldest_idle(of_group)
        if len(ordinary) >= self._limits.active:
            return self._close_oldest_idle(ordinary)
        return True

    def _has_reserve(self) -> bool:
        """Whether one more connection may be served for a health check; an idle one is closed for it."""
        reserve = [place for place in self._places if place.is_reserve]
        return len(reserve) < self._limits.health or self._close_oldest_idle(reserve)

    def _leave_reserve(self, place: _Place) -> None:
        if not self._has_room(place):
            self._failures.note_broken(Broken.CROWDED)
            raise NoPlace
        place.is_reserve = False

    def _close_oldest_idle(self, places: list[_Place]) -> bool:
        idle = [place for place in places if place.idle_since is not None]
        if not idle:
            return False
        self._close(min(idle, key=lambda place: place.idle_since or 0.0))
        return True

    async def _serve(self, client: socket.socket, place: _Place) -> None:
        def build() -> RequestHandler:
            place.handler = BoxProtocol(self._server, self._failures, self._loop)
            return place.handler

        tls = self._tls()
        timeout_s = None if tls is None else self._limits.head_s
        try:
            await self._loop.connect_accepted_socket(build, client, ssl=tls, ssl_handshake_timeout=timeout_s)
        except (OSError, asyncio.CancelledError) as error:  # the client is gone, or speaks no TLS
            if isinstance(error, OSError):
                self._failures.note_broken(_handshake_failure(error))
            client.close()
            self._forget(place)
            return
        if not place.is_open:
            place.is_open, place.idle_since = True, self._loop.time()

    def _close(self, place: _Place) -> None:
        self._forget(place)
        transport = None if place.handler is None else place.handler.transport
        if transport is not None:
            transport.abort()

    def _forget(self, place: _Place) -> None:
        if place in self._places:
            self._places.remove(place)

    def _drop(self, waiting: _Waiting, reason: Broken | None = None) -> None:
        """Close the connection of a client whose request has not come."""
        if reason is not None:
            self._failures.note_broken(reason)
        self._waiting.remove(waiting)
        if waiting.client.fileno() >= 0:
            self._loop.remove_reader(waiting.client.fileno())
            waiting.client.close()

    def _forget_closed(self) -> None:
        """Forget connections that have ended."""
        open_handlers = set(self._server.connections)
        self._places = [place for place in self._places if not place.is_open or place.handler in open_handlers]

    def _sweep_idle(self) -> None:
        now = self._loop.time()
        self._forget_closed()
        for waiting in [waiting for waiting in self._waiting if now >= waiting.until]:
            self._drop(waiting, Broken.SLOW)
        for place in list(self._places):
            if place.idle_since is not None and now - place.idle_since >= self._limits.idle_s:
                self._close(place)
        self._failures.log_counts()
        self._sweep = self._loop.call_later(1.0, self._sweep_idle)

    def _abort_without_body(self, request: web.BaseRequest) -> None:
        if not request.content.is_eof() and request.transport is not None:
            self._failures.note_broken(Broken.SLOW)
            request.transport.abort()


def _handshake_failure(error: OSError) -> Broken:
    if isinstance(error, ssl.SSLError):
        return Broken.MALFORMED
    return Broken.SLOW if isinstance(error, ConnectionAbortedError) else Broken.DISCONNECTED


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Listening sockets at all addresses of a host; OSError where one is not available. Port 0 takes a free one."""
    opened: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            opened.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            port = opened[0].getsockname()[1] if len(opened) > 1 else port
            one.bind((address[0], port, *address[2:]))
            one.setblocking(False)
            one.listen(1024)
    except OSError:
        for one in opened:
            one.close()
        raise
    return opened
