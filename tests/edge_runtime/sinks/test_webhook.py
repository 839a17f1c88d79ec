"""Webhooks, to a real server that answers, fails, refuses and hangs."""

from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from edge_runtime.sinks.webhook import WebhookConfig
from tests.edge_runtime.sinks.messages import courier, parcel, until

ENDLESS = 299


class Server(ThreadingHTTPServer):
    """Answers with the next of `statuses`, then 204; a status of 0 is no answer until `freed` is set, and of ENDLESS
    one that comes a byte at a time until then.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses: list[int] = []
        self.got: list[dict[str, Any]] = []
        self.users: list[str | None] = []
        self.freed = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?x=1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.server.statuses.pop(0) if self.server.statuses else 204
        if not status:
            self.server.freed.wait(60)
            return
        if status < 300:
            assert self.path == "/hook?x=1"
            self.server.got.append(body)
            self.server.users.append(self.headers["Authorization"])
        self.send_response(status)
        self.send_header("Content-Length", "0" if status != ENDLESS else "1000000")
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has gone
            while status == ENDLESS and not self.server.freed.wait(0.01):
                self.wfile.write(b".")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.freed.set()
        made.shutdown()


def frames(server: Server) -> list[int]:
    return [record["frame"] for record in server.got]


def test_webhook_posts_and_retries(server):
    server.statuses = [204, 500, 429, 503, 200]
    with courier(WebhookConfig(server.url)) as one:
        for number in range(4):
            one.offer(parcel(number))
        until(lambda: one.to_json()["queued"] == 0)
    assert frames(server) == [0, 1, 2, 3] and server.got[0] == parcel(0).record
    assert (one.to_json()["state"], one.to_json()["delivered"]) == ("up", 4) and not one.to_json()["undelivered"]


def test_webhook_gives_up_rejected_results(server):
    server.statuses = [404, 204, *[500] * 8, 204]
    with courier(WebhookConfig(server.url)) as one:
        for number in range(4):
            one.offer(parcel(number))
        until(lambda: one.to_json()["queued"] == 0)
    assert frames(server) == [1, 3]
    assert one.to_json()["undelivered"] == {"refused": 1, "server_error": 1}


def test_webhook_does_not_wait_for_endless_response(server):
    server.statuses = [204, ENDLESS, 204, ENDLESS]
    with courier(WebhookConfig(server.url, timeout_s=0.2)) as one:
        for number in range(5):
            one.offer(parcel(number))
        until(lambda: one.to_json()["delivered"] == 5)
    assert frames(server) == [0, 1, 2, 3, 4]


def test_webhook_delivers_when_server_returns():
    with Server() as first:
        url, address = first.url, first.server_address
    config = WebhookConfig(url)
    assert "does not answer" in (config.check_reachable() or "")
    with courier(config) as one:
        one.offer(parcel(1))
        until(lambda: one.to_json()["state"] == "down")
        assert one.to_json()["trouble"] == "Connection refused"
        Server.allow_reuse_address = True
        later = Server.__new__(Server)
        ThreadingHTTPServer.__init__(later, address, Handler)  # type: ignore[arg-type]
        later.statuses, later.got, later.users, later.freed = [], [], [], threading.Event()
        with later:
            threading.Thread(target=later.serve_forever, args=(0.01,), daemon=True).start()
            until(lambda: frames(later) == [1])
            assert config.check_reachable() is None
            later.shutdown()


def write_certificate(folder: Path) -> Path:
    """A key and a certificate for 127.0.0.1, self-signed, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "webhook")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(plain + made.public_bytes(Encoding.PEM))
    return path


def test_webhook_over_https_requires_a_certificate(server, tmp_path, monkeypatch):
    certificate = write_certificate(tmp_path)
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(certificate)
    server.socket = secured.wrap_socket(server.socket, server_side=True)
    config = WebhookConfig(server.url.replace("http:", "https:"))
    assert "certificate verify failed" in (config.check_reachable() or "")
    with courier(config) as one:
        one.offer(parcel(1))
        until(lambda: one.to_json()["state"] == "down")
        assert server.got == [] and "certificate" in one.to_json()["trouble"]
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert config.check_reachable() is None
    with courier(config) as one:
        one.offer(parcel(2))
        until(lambda: frames(server) == [2])


def test_webhook_snapshot_and_basic_auth(server, caplog):
    url = server.url.replace("http://", "http://me:s3cret%21@")
    config = WebhookConfig(url, snapshot=True)
    assert "s3cret" not in f"{config!r} {config.name}"
    found = {"class": "car", "score": 0.9, "box": [10.0, 20.0, 40.0, 40.0]}
    with courier(config) as one:
        one.offer(parcel(7, image=True, detections=[found]))
        until(lambda: server.got)
    picture = cv2.imdecode(np.frombuffer(base64.b64decode(server.got[0].pop("snapshot")), np.uint8), cv2.IMREAD_COLOR)
    assert picture is not None and picture.shape == (48, 64, 3) and picture[40, 25, 1] > 120 > picture[30, 25, 1]
    assert server.got[0]["detections"] == [found]
    assert server.users == ["Basic " + base64.b64encode(b"me:s3cret!").decode()] and "s3cret" not in caplog.text
