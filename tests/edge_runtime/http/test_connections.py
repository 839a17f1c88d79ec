"""Idle, slow and many connections, over real sockets: health is always answered, and memory is bounded."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemel.edge_runtime.http import app as http_app
from gemel.edge_runtime.http.connections import ConnectionLimits, Connections
from tests.edge_runtime.http.box import Box
from tests.edge_runtime.http.test_app import send_request, serve_box

SMALL = ConnectionLimits(waiting=8, waiting_of_group=4, active=6, active_of_group=3, head_s=1.0, idle_s=0.5, body_s=0.3)
MANY = 5000
MAX_MORE_BYTES = 30 * 2**20
TIMEOUT_S = 60.0


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A box with few connections."""
    monkeypatch.setattr(http_app, "Connections", lambda *given: Connections(*given, limits=SMALL))
    with serve_box(Box()) as address:
        yield address


def connect(address: str, sent: bytes = b"") -> socket.socket:
    host, _, port = address.rpartition(":")
    client = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    client.sendall(sent)
    return client


def is_closed(client: socket.socket) -> bool:
    """Wait for the other end to close; the answer before that is dropped."""
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


def test_silent_connections_leave_room_for_health(address: str) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(address)) for _ in range(20)]
        for path in ("/healthz", "/metrics", "/"):
            assert send_request(address, path)[0] == 200
        assert all(is_closed(client) for client in silent), "the head of a request has a time"


def test_head_in_pieces_is_answered_and_endless_head_is_not(address: str) -> None:
    with connect(address, b"GET /healthz HT") as slow, connect(address, b"GET / HTTP/1.1\r\nX: ") as endless:
        time.sleep(0.12)
        slow.sendall(b"TP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in slow.recv(4096)
        ends = time.monotonic() + TIMEOUT_S
        with contextlib.suppress(OSError):
            while time.monotonic() < ends:
                endless.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() < ends


def test_idle_connections_give_way_and_end(address: str) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(6):
            clients.append(stack.enter_context(connect(address, request)))
            assert b" 200 " in clients[-1].recv(4096)
        assert send_request(address, "/metrics")[0] == 200
        assert all(is_closed(client) for client in clients)


def test_body_that_does_not_come_ends_the_connection(address: str) -> None:
    head = b"POST /api/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(address, head)) for _ in range(4)]
        assert send_request(address, "/healthz")[0] == 200
        assert all(is_closed(client) for client in clients)


def test_health_is_answered_while_all_others_are_busy(address: str) -> None:
    head = "GET /api/watch HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    watch = (head + "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n").encode()
    with contextlib.ExitStack() as stack:
        for _ in range(SMALL.active_of_group):
            assert b" 101 " in stack.enter_context(connect(address, watch)).recv(4096)
        assert send_request(address, "/healthz")[0] == 200
        status, body, headers = send_request(address, "/metrics")
        assert status == 503 and b"too many connections" in body and headers["Retry-After"]


def test_thousands_of_idle_connections_keep_health_and_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MANY + 1000:
        pytest.skip(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (MANY + 1000, hard))
    clients: list[socket.socket] = []
    try:
        with serve_box(Box()) as address:
            host, _, port = address.rpartition(":")
            before, slowest = _private_bytes(), 0.0
            for index in range(MANY):
                client = socket.socket()
                clients.append(client)
                client.setblocking(False)
                client.connect_ex((host, int(port)))
                if index % 500 == 499:
                    began = time.monotonic()
                    assert send_request(address, "/healthz")[0] == 200
                    slowest = max(slowest, time.monotonic() - began)
            more = _private_bytes() - before
    finally:
        for client in clients:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(f"{MANY} connections: health within {1000 * slowest:.0f} ms, {more / 2**20:.1f} MiB more")
    assert more < MAX_MORE_BYTES


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
