"""Connections of the HTTP service, bounded so that idle and slow clients never keep others from an answer.

A client is accepted as a plain socket and costs a descriptor and nothing else until the head of its first request
(with TLS: its first byte) has come; the oldest of those that wait make room for new ones. Then aiohttp serves it. A
connection without a request in progress is closed after a while, or as soon as others need its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

PEEK_INTERVAL_S = 0.1
"""Interval at which the head of a request that comes in pieces is looked at again."""
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 26\r\nContent-Type: text/plain\r\n"
    b"Connection: close\r\n\r\ntoo many connections open\n"
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of open connections, in all and of one address; trusted proxies have no bound of their own.

    In all 256 descriptors: a process may have 1,024 by default, and the box needs them for its cameras and files.
    """

    waiting: int = 128
    """Connections whose first request has not come."""
    waiting_of_address: int = 32
    active: int = 112
    active_of_address: int = 64
    health: int = 16
    """Further connections for `/healthz` while all others have a request in progress."""
    head_s: float = 5.0
    """Time for the head of the first request, and for a TLS handshake."""
    idle_s: float = 30.0
    """Time without a request in progress."""
    body_s: float = 10.0
    """Time for the body of a request."""
    head_bytes: int = 16384


@dataclass(eq=False)
class _Waiting:
    """A client whose first request has not come."""

    client: socket.socket
    address: str
    until: float


@dataclass(eq=False)
class _Active:
    """A connection that aiohttp serves; `idle_since` is None while a request is in progress.

    `has_begun` is unset during a TLS handshake.
    """

    handler: RequestHandler
    address: str
    idle_since: float | None
    has_begun: bool = False


class Connections:
    """Accepts clients of these listening sockets and hands them to aiohttp; all calls in the loop's thread.

    `is_proxy` tells whether an address is that of a trusted proxy, `tls` gives the context in force.
    """

    def __init__(
        self,
        server: web.Server,
        is_proxy: Callable[[str], bool],
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._server, self._is_proxy, self._tls = server, is_proxy, tls
        self._limits = limits or ConnectionLimits()
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._waiting: list[_Waiting] = []
        self._active: dict[RequestHandler, _Active] = {}
        self._handing_over: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def listen(self, sockets: list[socket.socket]) -> None:
        """Accept clients from now on."""
        for one in sockets:
            self._listening.append(one)
            self._loop.add_reader(one.fileno(), self._accept, one)
        if self._sweep is None:
            self._sweep_idle()

    def close(self) -> None:
        """Accept no more and drop those that wait."""
        if self._sweep is not None:
            self._sweep.cancel()
        for one in self._listening:
            self._loop.remove_reader(one.fileno())
            one.close()
        for one in list(self._waiting):
            self._drop(one)
        for task in self._handing_over:
            task.cancel()

    @contextlib.contextmanager
    def request(self, request: web.BaseRequest) -> Iterator[None]:
        """Mark the connection of a request as in use; a body that does not come in time ends the connection."""
        active = self._active.get(request.protocol)
        if active is None:
            yield
            return
        active.idle_since, active.has_begun = None, True
        late = self._loop.call_later(self._limits.body_s, _abort_without_body, request)
        try:
            yield
        finally:
            late.cancel()
            active.idle_since = self._loop.time()

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
                self._drop(self._waiting[0])
                continue
            client.setblocking(False)
            self._admit(client, str(address[0]))

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _admit(self, client: socket.socket, address: str) -> None:
        of_address = [one for one in self._waiting if one.address == address]
        if len(of_address) >= self._limits.waiting_of_address and not self._is_proxy(address):
            self._drop(of_address[0])
        elif len(self._waiting) >= self._limits.waiting:
            self._drop(self._waiting[0])
        one = _Waiting(client, address, self._loop.time() + self._limits.head_s)
        self._waiting.append(one)
        self._watch(one)

    def _watch(self, one: _Waiting) -> None:
        if one.client.fileno() >= 0:
            self._loop.add_reader(one.client.fileno(), self._peek, one)

    def _peek(self, one: _Waiting) -> None:
        self._loop.remove_reader(one.client.fileno())
        try:
            head = one.client.recv(self._limits.head_bytes, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._watch(one)
            return
        except OSError:
            head = b""
        if not head:
            self._drop(one)
        elif self._tls() is not None or b"\r\n\r\n" in head or len(head) >= self._limits.head_bytes:
            self._promote(one, head)
        else:  # the rest of a head that comes in pieces
            self._loop.call_later(PEEK_INTERVAL_S, self._watch, one)

    def _promote(self, one: _Waiting, head: bytes) -> None:
        self._waiting.remove(one)
        is_health = head.startswith((b"GET /healthz ", b"HEAD /healthz "))
        if not self._make_place(one.address, is_health):
            with contextlib.suppress(OSError):
                one.client.recv(self._limits.head_bytes)  # what is left unread would reset the connection
                one.client.send(b"" if self._tls() is not None else REFUSAL)
            one.client.close()
            return
        task = self._loop.create_task(self._serve(one))
        self._handing_over.add(task)
        task.add_done_callback(self._handing_over.discard)

    def _make_place(self, address: str, is_health: bool) -> bool:
        """Whether one more connection of this address may be served; idle ones are closed for it."""
        self._forget_closed()
        limits, active = self._limits, list(self._active.values())
        of_address = [one for one in active if one.address == address]
        if len(of_address) >= limits.active_of_address and not self._is_proxy(address):
            return self._close_oldest_idle(of_address) or (is_health and len(active) < limits.active + limits.health)
        if len(active) >= limits.active:
            return self._close_oldest_idle(active) or (is_health and len(active) < limits.active + limits.health)
        return True

    def _close_oldest_idle(self, among: list[_Active]) -> bool:
        idle = [one for one in among if one.idle_since is not None]
        if not idle:
            return False
        self._close(min(idle, key=lambda one: one.idle_since or 0.0))
        return True

    async def _serve(self, one: _Waiting) -> None:
        def build() -> RequestHandler:
            handler = self._server()
            self._active[handler] = _Active(handler, one.address, self._loop.time())
            return handler

        tls = self._tls()
        timeout_s = None if tls is None else self._limits.head_s
        try:
            await self._loop.connect_accepted_socket(build, one.client, ssl=tls, ssl_handshake_timeout=timeout_s)
        except (OSError, asyncio.CancelledError):  # the client is gone, or speaks no TLS
            one.client.close()

    def _close(self, one: _Active) -> None:
        self._active.pop(one.handler, None)
        transport = one.handler.transport
        if transport is not None:
            transport.abort()

    def _drop(self, one: _Waiting) -> None:
        self._waiting.remove(one)
        if one.client.fileno() >= 0:
            self._loop.remove_reader(one.client.fileno())
            one.client.close()

    def _forget_closed(self) -> None:
        """Forget connections that have ended."""
        open_handlers, now = set(self._server.connections), self._loop.time()
        for one in list(self._active.values()):
            if one.handler in open_handlers:
                one.has_begun = True
            elif one.has_begun or now - (one.idle_since or now) > self._limits.head_s:
                del self._active[one.handler]

    def _sweep_idle(self) -> None:
        now = self._loop.time()
        self._forget_closed()
        for one in [one for one in self._waiting if now >= one.until]:
            self._drop(one)
        for one in list(self._active.values()):
            if one.idle_since is not None and now - one.idle_since >= self._limits.idle_s:
                self._close(one)
        self._sweep = self._loop.call_later(1.0, self._sweep_idle)


def _abort_without_body(request: web.BaseRequest) -> None:
    if not request.content.is_eof() and request.transport is not None:
        request.transport.abort()


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
