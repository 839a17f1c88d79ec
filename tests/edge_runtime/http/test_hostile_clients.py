"""Clients without the token, and clients that break off: they take nothing from others and write no log."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemel.edge_runtime.http import app as http_app
from gemel.edge_runtime.http import bodies
from gemel.edge_runtime.http import push as http_push
from gemel.edge_runtime.http.app import HttpService
from gemel.edge_runtime.http.auth import Access, address_group
from gemel.edge_runtime.http.bodies import MAX_UNPROVEN_BYTES
from gemel.edge_runtime.http.connections import ConnectionLimits, Connections
from gemel.edge_runtime.http.failures import LOG_INTERVAL_S, Broken, HttpFailures
from gemel.edge_runtime.http.metrics import Metrics
from tests.edge_runtime.http.box import Box
from tests.edge_runtime.http.push_box import address_of, write_push_box
from tests.edge_runtime.http.test_app import BEARER, TOKEN, send_request, serve_box
from tests.edge_runtime.http.test_connections import connect, is_closed
from tests.edge_runtime.http.test_push import get, picture, send, send_form
from tests.edge_runtime.local_box import LocalBox

LIST = "/v1/vision/custom/list"
FORM = "Host: localhost\r\nContent-Type: multipart/form-data; boundary=XX\r\n"
CHUNKED = f"POST {LIST} HTTP/1.1\r\n{FORM}Transfer-Encoding: chunked\r\n\r\n4\r\n--XX\r\n".encode()
"""A body of unknown length, of which four bytes come."""
SLOW = f"POST {LIST} HTTP/1.1\r\n{FORM}Content-Length: 400\r\n\r\n--XX\r\n".encode()
FEW = ConnectionLimits(active=6, active_of_group=6, health=2)
BURST = 30
TIMEOUT_S = 60.0


@pytest.fixture
def address() -> Iterator[str]:
    """A box with a token."""
    with serve_box(Box(), token=TOKEN) as address:
        yield address


def wait_for(condition: Callable[[], Any]) -> None:
    ends = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def count_broken(address: str, reason: Broken) -> int:
    text = send_request(address, "/metrics", **BEARER)[1].decode()
    line = next(line for line in text.splitlines() if line.startswith(f'gemel_http_broken_total{{reason="{reason}"}}'))
    return round(float(line.rpartition(" ")[2]))


def list_models(address: str, image: bytes | None = None, **headers: str) -> int:
    """The status for a form whose head has these headers, and whose body has no token."""
    body = b'--XX\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n--XX--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=XX"}
    return send(address, LIST, image or body, **kind, **headers)[0]


def test_slow_bodies_without_token_leave_room_for_those_with_it(address: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(connect(address, CHUNKED))
        assert [list_models(address, **BEARER) for _ in range(5)] == [200] * 5
        assert send_form(address, LIST, None)[0] == 200, "its token is read in its turn"


def test_body_without_token_is_read_up_to_its_bound(address: str) -> None:
    assert send_form(address, LIST, bytes(2**20))[0] == 200, "the token comes before the picture"
    late = b'--XX\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n' + bytes(MAX_UNPROVEN_BYTES)
    late += f'\r\n--XX\r\nContent-Disposition: form-data; name="api_key"\r\n\r\n{TOKEN}\r\n--XX--\r\n'.encode()
    status, text, _ = send(address, LIST, late, **{"Content-Type": "multipart/form-data; boundary=XX"})
    assert status == 401 and "within the first 64 KiB" in json.loads(text)["error"]
    assert list_models(address, late, **BEARER) == 200, "in the head it has no such bound"


def test_lines_before_a_form_count_in_its_bound(address: str) -> None:
    assert list_models(address, b"x\r\n" * MAX_UNPROVEN_BYTES) == 401


def test_bodies_without_token_beyond_the_queue_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_UNPROVEN_OF_GROUP", 2)
    with connect(address, SLOW), connect(address, SLOW), connect(address, SLOW) as third:
        assert b" 429 " in third.recv(4096)
        assert list_models(address, **BEARER) == 200


@pytest.mark.parametrize(
    ("authorization", "status"), [("", b" 401 "), (f"Authorization: Bearer {TOKEN}\r\n", b" 100 ")]
)
def test_head_decides_before_a_body_is_asked_for(address: str, authorization: str, status: bytes) -> None:
    head = f"POST /v2/models/x/infer HTTP/1.1\r\nHost: localhost\r\n{authorization}"
    path_of_form = f"POST {LIST} HTTP/1.1\r\n{FORM}{authorization}"
    more = "Expect: 100-continue\r\nContent-Length: 1000\r\n\r\n"
    with connect(address, (head + more).encode()) as client:
        assert status in client.recv(4096).partition(b"\r\n")[0] + b" "
    with connect(address, (path_of_form + more).encode()) as client:
        assert b" 100 " in client.recv(4096), "the form may hold the token"


def test_line_of_a_part_that_is_too_long_is_a_bad_request(address: str) -> None:
    part = b"--XX\r\nX-A: " + b"b" * 10_000_000 + b"\r\n\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=XX"}
    status, text, _ = send(address, LIST, part, **kind, **BEARER)
    assert status == 400 and "the form is damaged" in json.loads(text)["error"] and len(text) < 500


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpService]:
    """A box with few places."""
    monkeypatch.setattr(http_app, "Connections", lambda *given: Connections(*given, limits=FEW))
    box = Box()
    service = HttpService(box, box.metrics, Access("127.0.0.1", 0, TOKEN), "box.yaml")
    service.start()
    yield service
    service.stop()


@contextlib.contextmanager
def stopped_loop(service: HttpService) -> Iterator[None]:
    """The service sees what comes meanwhile all at once."""
    go_on = threading.Event()
    assert service._loop is not None
    service._loop.call_soon_threadsafe(go_on.wait)
    try:
        yield
    finally:
        go_on.set()


def test_burst_of_requests_never_takes_more_than_the_places(few: HttpService) -> None:
    address = f"127.0.0.1:{few.port}"
    with contextlib.ExitStack() as stack:
        clients = []
        with stopped_loop(few):
            for index in range(BURST):
                client = socket.create_connection(
                    ("127.0.0.1", few.port), TIMEOUT_S, source_address=(f"127.0.0.{30 + index % 20}", 0)
                )
                stack.enter_context(client).sendall(SLOW)
                clients.append(client)
        assert send_request(address, "/healthz", **BEARER)[0] == 200
        for client in clients:
            client.settimeout(0.0)
        refused = 0
        for client in clients:
            with contextlib.suppress(BlockingIOError):
                refused += b" 503 " in client.recv(4096)
        assert refused == BURST - FEW.active
        assert count_broken_of(few, Broken.CROWDED) == refused


def count_broken_of(service: HttpService, reason: Broken) -> float:
    return service._app._metrics.http_broken.labels(str(reason))._value.get()


def test_place_of_a_health_check_answers_nothing_else(few: HttpService) -> None:
    address = f"127.0.0.1:{few.port}"
    ask = "GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:

        def is_full() -> bool:  # a client whose request has not begun gives its place to another one
            stack.enter_context(connect(address, SLOW))
            return all(send_request(address, "/metrics", **BEARER)[0] == 503 for _ in range(5))

        wait_for(is_full)
        for _ in range(3 * FEW.health):
            client = stack.enter_context(connect(address, ask.format("/readyz").encode()))
            assert b" 200 " in client.recv(4096)
        client.sendall(ask.format("/metrics").encode())
        assert b" 503 " in client.recv(4096) and is_closed(client)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::9", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::1", "127.0.0.1", False),
    ],
)
def test_addresses_count_as_one_client_by_the_network_of_a_host(one: str, other: str, is_same: bool) -> None:
    assert (address_group(one) == address_group(other)) is is_same


def test_client_behind_a_trusted_proxy_counts_for_itself() -> None:
    import ipaddress

    access = Access("127.0.0.1", 1, TOKEN, trusted_proxies=(ipaddress.ip_network("10.0.0.1"),))
    headers = {"X-Forwarded-For": "1.1.1.1, 2001:db8::7"}
    assert access.group_of(headers, "10.0.0.1") == "2001:db8::/64"
    assert access.group_of(headers, "10.0.0.2") == "10.0.0.2"


def reset(client: socket.socket) -> None:
    """Close so that the other end sees a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def test_clients_that_break_off_are_counted_without_a_traceback(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    reset(connect(address, SLOW))
    wait_for(lambda: count_broken(address, Broken.DISCONNECTED) == 1)
    with_token = SLOW.replace(b"\r\n", f"\r\nAuthorization: Bearer {TOKEN}\r\n".encode(), 1)
    for sent in (with_token, CHUNKED):
        connect(address, sent).close()
    wait_for(lambda: count_broken(address, Broken.DISCONNECTED) == 3)
    with connect(address, CHUNKED.replace(b"\r\n4\r\n", b"\r\nFFFFFFFFFFFFFFFFF\r\n")) as damaged:
        assert b" 400 " in damaged.recv(4096)
    with connect(address, b"no HTTP at all\r\n\r\n") as client:
        answer = client.recv(4096)
        assert b" 400 " in answer and b"erver:" not in answer and is_closed(client)
    assert count_broken(address, Broken.MALFORMED) == 2
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.INFO]


def test_failures_are_logged_in_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    failures = HttpFailures(Metrics([]), lambda: now[0])
    for _ in range(1000):
        failures.note_broken(Broken.DISCONNECTED)
        failures.note_status(401)
        failures.note_status(200)
        failures.log_counts()
        now[0] += LOG_INTERVAL_S / 512
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and lines[1].endswith("disconnected 512, status 401 512"), lines
    now[0] += LOG_INTERVAL_S
    failures.log_counts()
    now[0] += LOG_INTERVAL_S
    failures.log_counts()
    assert len(caplog.records) == 3


def test_damaged_header_of_a_part_leaves_no_warning() -> None:
    code = (
        "import warnings, aiohttp, gemel.edge_runtime.http.forms\n"
        "warnings.warn(aiohttp.BadContentDispositionHeader('sent by anybody'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == ""


@pytest.mark.parametrize("path", ["/", "/healthz", "/nowhere", "/page/login.js", "/v2/models/x", "/%00"])
@pytest.mark.parametrize("headers", [BEARER, {}, {"Host": "evil.example"}])
def test_answer_names_no_server(address: str, path: str, headers: dict[str, str]) -> None:
    assert "Server" not in send_request(address, path, **headers)[2]


def test_parsing_leaves_the_threads_that_draw_frames_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are parsed for long fill a pool of their own; those whose clients left are not parsed at all."""
    go_on, begun = threading.Event(), []

    def parse_slowly(*given: Any) -> Any:
        begun.append(given)
        go_on.wait(TIMEOUT_S)
        raise ValueError("slow")

    monkeypatch.setattr(http_push, "parse_infer", parse_slowly)
    with LocalBox(write_push_box(tmp_path)) as box, contextlib.ExitStack() as stack:
        address = address_of(box)
        assert send_form(address, "/v1/vision/custom/kind", picture())[0] == 200
        box.until(lambda: get(address, "/api/cameras/door/frame.jpg")[0] == 200)
        head = f"POST /v2/models/kind/infer HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        clients = [connect(address, f"{head}Content-Length: 2\r\n\r\n{{}}".encode()) for _ in range(24)]
        try:
            box.until(lambda: len(begun) == http_push.PARSERS)
            assert get(address, "/api/cameras/door/frame.jpg")[0] == 200
            for client in clients:
                client.close()
            box.until(lambda: count_broken(address, Broken.DISCONNECTED) == len(clients))
        finally:
            go_on.set()
        stack.callback(go_on.set)
        assert send(address, "/v2/models/kind/infer", b"{}", **BEARER)[0] == 400
        assert len(begun) == http_push.PARSERS + 1
