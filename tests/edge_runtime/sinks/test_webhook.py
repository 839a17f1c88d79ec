"""Webhooks, to a real server that answers, fails, refuses and hangs."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from gemel.edge_runtime.backoff import BackOff
from gemel.edge_runtime.frames import drawing
from gemel.edge_runtime.sinks.base import Undelivered
from gemel.edge_runtime.sinks.jsonl import JsonLinesConfig
from gemel.edge_runtime.sinks.webhook import WebhookConfig, status_error
from gemel.edge_runtime.sinks.worker import Outbox
from gemel.models.errors import InputError
from tests.edge_runtime.sinks.messages import make_message, running_worker, until

LARGE = 299


class Server(ThreadingHTTPServer):
    """Answers with the next of `statuses`, then 204; LARGE announces a body that never comes."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, Handler)
        self.statuses: list[int] = []
        self.got: list[dict[str, Any]] = []
        self.users: list[str | None] = []
        self.heads: list[dict[str, str]] = []
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?x=1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(data)
        status = self.server.statuses.pop(0) if self.server.statuses else 204
        if status < 300:
            assert self.path == "/hook?x=1"
            self.server.users.append(self.headers["Authorization"])
            self.server.heads.append(dict(self.headers))
            self.server.bodies.append(data)
            self.server.got.append(body)  # last, since tests wait for it
        self.send_response(status)
        self.send_header("Content-Length", "0" if status != LARGE else "1000000")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def serving(*address: Any) -> Iterator[Server]:
    with Server(*address) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def frames(server: Server) -> list[int]:
    return [record["frame"] for record in server.got]


def test_webhook_posts_and_retries(server):
    server.statuses = [204, 500, 429, 503, 200]
    with running_worker(WebhookConfig(url=server.url)) as worker:
        for number in range(4):
            worker.offer(make_message(number))
        until(lambda: worker.to_json()["queued"] == 0)
    assert frames(server) == [0, 1, 2, 3] and server.got[0] == make_message(0).record
    row = worker.to_json()
    assert (row["state"], row["delivered"], row["undelivered"]) == ("up", 4, {})


def test_webhook_gives_up_rejected_results(server):
    server.statuses = [422, 204, *[500] * 8, 204]
    with running_worker(WebhookConfig(url=server.url)) as worker:
        for number in range(4):
            worker.offer(make_message(number))
        until(lambda: worker.to_json()["queued"] == 0)
    assert frames(server) == [1, 3]
    assert worker.to_json()["undelivered"] == {"refused": 1, "server_error": 1}


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "unauthorized"), (404, "not_found"), (503, "server_error"), (429, "throttled")]
)
def test_webhook_loses_nothing_to_a_fault_of_the_server(server, status, reason):
    server.statuses = [status] * 12
    with running_worker(WebhookConfig(url=server.url)) as worker:
        for number in range(5):
            worker.offer(make_message(number))
        until(lambda: worker.to_json()["queued"] == 0)
    assert frames(server) == [0, 1, 2, 3, 4] and worker.to_json()["undelivered"] == {}
    assert status_error(status).reason == reason and not status_error(status).permanent


def test_webhook_counts_what_overflows_by_the_reason_of_the_failure(server):
    server.statuses = [401] * 1000
    with running_worker(WebhookConfig(url=server.url), items=3) as worker:
        worker.offer(make_message(0))
        until(lambda: worker.to_json()["state"] == "down")
        for number in range(1, 8):
            worker.offer(make_message(number))
        until(lambda: worker.to_json()["undelivered"].get("unauthorized", 0) >= 4)


def test_webhook_waits_as_long_as_the_server_asks():
    outbox = Outbox(back_off=BackOff(0.25, 10.0), chance=lambda: 0.0)
    outbox.offer(make_message(0))
    outbox.take(1)
    outbox.fail(Undelivered.THROTTLED, 100.0, wait_s=30.0)
    assert outbox.pause_s(100.0) == 30.0


def test_webhook_signs_and_sends_headers_and_trusts_its_own_authority(server, tmp_path):
    certificate = write_certificate(tmp_path)
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(certificate)
    server.socket = secured.wrap_socket(server.socket, server_side=True)
    keys = {"url": server.url.replace("http:", "https:"), "ca": "public.pem", "secret": "s3cret"}
    config = WebhookConfig(headers={"X-Api-Key": "k3y"}, **keys).resolve(tmp_path, None)
    config.check()
    assert "s3cret" not in repr(config) and "k3y" not in repr(config)
    with running_worker(config) as worker:
        worker.offer(make_message(1))
        until(lambda: frames(server) == [1])
    expected = hmac.new(b"s3cret", server.bodies[0], hashlib.sha256).hexdigest()
    assert server.heads[0]["X-Hub-Signature-256"] == f"sha256={expected}" and server.heads[0]["X-Api-Key"] == "k3y"
    (tmp_path / "public.pem").write_text("nothing")
    with pytest.raises(InputError, match="holds no certificate of an authority"):
        config.check()


def test_webhook_ignores_a_large_response(server):
    server.statuses = [204, LARGE, 204, LARGE]
    with running_worker(WebhookConfig(url=server.url)) as worker:
        for number in range(5):
            worker.offer(make_message(number))
        until(lambda: worker.to_json()["delivered"] == 5)
    assert frames(server) == [0, 1, 2, 3, 4]


def test_webhook_delivers_when_server_returns():
    with Server() as closed:
        config, address = WebhookConfig(url=closed.url), closed.server_address
    assert "does not answer" in (config.check_reachable() or "")
    with running_worker(config) as worker:
        worker.offer(make_message(1))
        until(lambda: worker.to_json()["state"] == "down")
        assert worker.to_json()["trouble"] == "Connection refused"
        with serving(address) as server:
            until(lambda: frames(server) == [1])
            assert config.check_reachable() is None


def write_certificate(folder: Path) -> Path:
    """A key and a self-signed certificate for 127.0.0.1, in one file."""
    path = folder / "certificate.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=webhook -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", *options.split(), "-keyout", str(path), "-out", str(folder / "public.pem")]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + (folder / "public.pem").read_text())
    return path


def test_webhook_over_https_requires_a_certificate(server, tmp_path, monkeypatch):
    certificate = write_certificate(tmp_path)
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(certificate)
    server.socket = secured.wrap_socket(server.socket, server_side=True)
    config = WebhookConfig(url=server.url.replace("http:", "https:"))
    assert "certificate verify failed" in (config.check_reachable() or "")
    with running_worker(config) as worker:
        worker.offer(make_message(1))
        until(lambda: worker.to_json()["state"] == "down")
        assert server.got == [] and "certificate" in worker.to_json()["trouble"]
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert config.check_reachable() is None
    with running_worker(config) as worker:
        worker.offer(make_message(2))
        until(lambda: frames(server) == [2])


def test_sinks_share_one_picture_and_one_line_of_json(server, tmp_path, monkeypatch):
    made, dumps, message = [], json.dumps, make_message(1, image=True)
    monkeypatch.setattr(drawing, "draw_results", lambda *_: made.append("jpeg") or b"picture")
    monkeypatch.setattr(json, "dumps", lambda value, **keys: made.append("json") or dumps(value, **keys))
    webhook = WebhookConfig(url=server.url, snapshot=True)
    with (
        running_worker(webhook) as first,
        running_worker(webhook) as second,
        running_worker(JsonLinesConfig(path=tmp_path / "r.jsonl")) as third,
    ):
        for worker in (first, second, third):
            worker.offer(message)
        until(lambda: len(server.got) == 2 and (tmp_path / "r.jsonl").exists())
    line = json.loads((tmp_path / "r.jsonl").read_text())
    assert sorted(made) == ["jpeg", "json"]
    assert server.got == [{**line, "snapshot": base64.b64encode(b"picture").decode()}] * 2


def test_webhook_snapshot_and_basic_auth(server, caplog):
    url = server.url.replace("http://", "http://me:s3cret%21@")
    config = WebhookConfig(url=url, snapshot=True)
    assert "s3cret" not in f"{config!r} {config.name}"
    found = {"class": "car", "score": 0.9, "box": [10.0, 20.0, 40.0, 40.0]}
    with running_worker(config) as worker:
        worker.offer(make_message(7, image=True, detections=[found]))
        until(lambda: server.got)
    picture = cv2.imdecode(np.frombuffer(base64.b64decode(server.got[0].pop("snapshot")), np.uint8), cv2.IMREAD_COLOR)
    assert picture is not None and picture.shape == (48, 64, 3) and picture[40, 25, 1] > 120 > picture[30, 25, 1]
    assert server.got[0]["detections"] == [found]
    assert server.users == ["Basic " + base64.b64encode(b"me:s3cret!").decode()] and "s3cret" not in caplog.text


@pytest.mark.parametrize("status", [413, 415, 422])
def test_results_go_on_where_their_pictures_are_refused(server, caplog, status):
    server.statuses = [status]
    with running_worker(WebhookConfig(url=server.url, snapshot=True)) as worker:
        for number in range(3):
            worker.offer(make_message(number, image=True))
        until(lambda: worker.to_json()["queued"] == 0)
    assert frames(server) == [0, 1, 2] and "snapshot" not in server.got[0]
    lines = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert len(lines) == 1 and f"answers {status} to pictures of " in lines[0]


@pytest.mark.parametrize("name", ["Content-Length", "transfer-encoding", "Connection"])
def test_headers_that_say_where_a_request_ends_are_refused(name):
    with pytest.raises(ValueError, match="is sent by itself"):
        WebhookConfig(url="http://127.0.0.1/x", headers={name: "5"})
