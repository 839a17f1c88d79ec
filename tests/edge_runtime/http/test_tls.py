"""HTTPS of a box: its certificate, changed files, files that do not fit, and certificates that run out."""

from __future__ import annotations

import json
import os
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gemel.edge_runtime.http import tls
from gemel.edge_runtime.http.app import HttpService
from gemel.edge_runtime.http.auth import Access, TlsFiles
from gemel.edge_runtime.http.tls import Certificate, check_certificate
from gemel.models.errors import InputError
from tests.certificates import write_certificate
from tests.edge_runtime.http.box import Box
from tests.edge_runtime.http.test_connections import connect

DAY_S = 86400.0


def ask(port: int, cert: Path, path: str = "/api/status") -> Any:
    trust = ssl.create_default_context(cafile=str(cert))
    with urllib.request.urlopen(f"https://127.0.0.1:{port}{path}", timeout=60, context=trust) as answer:
        return answer.read()


def test_box_serves_https_and_takes_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "POLL_INTERVAL_S", 0.0)
    cert, key = write_certificate(tmp_path)
    box = Box()
    service = HttpService(box, box.metrics, Access("127.0.0.1", 0, tls=TlsFiles(cert, key)), "box.yaml")
    service.start()
    try:
        with connect(f"127.0.0.1:{service.port}"), connect(f"127.0.0.1:{service.port}", b"GET / HTTP/1.1\r\n\r\n"):
            status = json.loads(ask(service.port, cert))
        assert status["tls"]["expires_at"] > 0 and status["tls"]["warning"] is None
        assert b"gemel_tls_expiry_timestamp_seconds" in ask(service.port, cert, "/metrics")
        old = cert.rename(tmp_path / "old.pem")
        write_certificate(tmp_path, number=2)
        certificate = service._app.certificate
        assert certificate is not None
        certificate.poll()
        ask(service.port, cert)
        with pytest.raises(OSError):
            ask(service.port, old)
    finally:
        service.stop()


def test_certificate_keeps_the_old_files_where_new_ones_do_not_fit(tmp_path: Path) -> None:
    now = [1000.0]
    cert, key = write_certificate(tmp_path)
    certificate = Certificate(TlsFiles(cert, key), lambda: now[0])
    before, _ = certificate.context, write_certificate(tmp_path, "other")
    os.replace(tmp_path / "other.key", key)
    now[0] += tls.POLL_INTERVAL_S
    certificate.poll()
    assert certificate.context is before and "does not belong to the certificate" in str(certificate.warning)
    os.replace(tmp_path / "other.pem", cert)
    now[0] += tls.POLL_INTERVAL_S
    certificate.poll()
    assert certificate.context is not before and certificate.problem is None


def test_certificate_that_runs_out_is_named_daily(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import time

    now = [time.time()]
    certificate = Certificate(TlsFiles(*write_certificate(tmp_path, days=20)), lambda: now[0])
    assert certificate.warning is None and not caplog.records
    now[0] += 7 * DAY_S
    for _ in range(10):
        certificate.poll()
        now[0] += DAY_S / 5
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "box.pem runs out in 13.0 days" in lines[0]
    now[0] += 20 * DAY_S
    certificate.poll()
    assert "has run out" in caplog.records[-1].getMessage()


def test_check_refuses_a_certificate_that_has_run_out(tmp_path: Path) -> None:
    check_certificate(TlsFiles(*write_certificate(tmp_path)))
    with pytest.raises(InputError, match=r"http\.tls\.cert: has run out 2 days ago; renew it"):
        check_certificate(TlsFiles(*write_certificate(tmp_path, days=-2)))


@pytest.mark.parametrize(
    ("cert", "key", "problem"),
    [
        (None, b"x", r"http\.tls\.cert: cannot be read"),
        (b"none", b"x", r"http\.tls\.cert: is no PEM file"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "own", "holds no certificate"),
        ("own", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", r"http\.tls\.key: cannot be used"),
        ("own", "other", r"http\.tls\.key: does not belong to the certificate"),
    ],
)
def test_files_that_do_not_fit_are_refused(cert: Any, key: Any, problem: str, tmp_path: Path) -> None:
    own, other = write_certificate(tmp_path, "own"), write_certificate(tmp_path, "other")
    paths = [tmp_path / "given.pem", tmp_path / "given.key"]
    for place, (given, path) in enumerate(zip((cert, key), paths, strict=True)):
        if given is not None:
            data = {"own": own[place].read_bytes(), "other": other[place].read_bytes()}
            path.write_bytes(data[given] if isinstance(given, str) else given)
    with pytest.raises(InputError, match=problem):
        Certificate(TlsFiles(paths[0], paths[1]))
