"""The endpoints as DESIGN.md names them, over real HTTP, with a box made of values."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge_runtime.http import app as serving
from edge_runtime.http.app import HttpService
from edge_runtime.http.auth import Access
from edge_runtime.http.metrics import Metrics
from models.errors import InputError
from tests.edge_runtime.http.box import Box, camera, detection, scene

TOKEN = "a-token-of-32-characters-or-more"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def box() -> Box:
    return Box()


@pytest.fixture
def measures() -> Metrics:
    return Metrics(["bridge-cars", "gate-kind"])


@pytest.fixture
def address(box: Box, measures: Metrics) -> Iterator[str]:
    service = HttpService(box, measures, Access("127.0.0.1", 0, TOKEN), "box.yaml")
    service.start()
    yield f"127.0.0.1:{service.port}"
    service.stop()


def send_request(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of an answer."""
    request = urllib.request.Request(f"http://{address}{path}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


def test_status_matches_the_box(address: str, box: Box) -> None:
    status, body, headers = send_request(address, "/api/status")
    told = json.loads(body)
    assert status == 200 and told == json.loads(box.status().model_dump_json())
    assert {
        "run",
        "bundle",
        "uptime_s",
        "budget_bytes",
        "resident_bytes",
        "cameras",
        "queries",
        "sinks",
        "drift",
    } <= told.keys()
    assert {"id", "state", "fps", "frame_age_s", "reconnects"} <= told["cameras"][0].keys()
    assert {"id", "resident", "fps", "age_p95_ms", "ledger"} <= told["queries"][0].keys()
    assert {"kind", "state", "delivered", "undelivered"} <= told["sinks"][0].keys()
    assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["X-Content-Type-Options"] == "nosniff"


def test_health_and_readiness(address: str, box: Box) -> None:
    assert send_request(address, "/healthz")[0] == send_request(address, "/readyz")[0] == 200
    box.moves, box.lacks = False, ["camera gate never gave a frame"]
    assert send_request(address, "/healthz")[0] == 503
    status, body, _ = send_request(address, "/readyz")
    assert status == 503 and json.loads(body) == {"missing": ["camera gate never gave a frame"]}


def test_metrics_are_complete_and_balanced(address: str, box: Box, measures: Metrics) -> None:
    measures.observe_age("bridge-cars", 0.06)
    measures.observe_run("bridge-cars", 0.03)
    measures.observe_load("gate-kind", 0.2)
    box.changes["cameras"] = [camera("bridge"), camera("gate", state="away", up=False, frame_age_s=None, reconnects=3)]
    status, body, headers = send_request(address, "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    names = {name for name, *_ in samples}
    assert names >= {
        "gemel_frames_received_total", "gemel_frames_processed_total", "gemel_frames_late_total",
        "gemel_frames_dropped_total", "gemel_frames_failed_total", "gemel_frames_pending",
        "gemel_result_age_seconds_bucket", "gemel_run_seconds_bucket", "gemel_load_seconds_bucket",
        "gemel_budget_bytes", "gemel_resident_bytes", "gemel_bytes_moved_total", "gemel_loads_total",
        "gemel_query_resident", "gemel_camera_up", "gemel_camera_reconnects_total", "gemel_camera_frame_age_seconds",
        "gemel_sink_delivered_total", "gemel_sink_undelivered_total", "gemel_reloads_total", "gemel_drift_ratio",
        "gemel_bundle_info",
    }  # fmt: skip
    for name in ("bridge-cars", "gate-kind"):
        settled = ("processed_total", "failed_total", "pending")
        dropped = sum(value for (metric, *labels), value in samples.items()
                      if metric == "gemel_frames_dropped_total" and name in labels)  # fmt: skip
        assert samples["gemel_frames_received_total", name] == dropped + sum(
            samples[f"gemel_frames_{one}", name] for one in settled
        )
    assert samples["gemel_camera_up", "gate"] == 0 and ("gemel_camera_frame_age_seconds", "gate") not in samples
    assert (
        samples["gemel_result_age_seconds_count", "bridge-cars"]
        == samples["gemel_load_seconds_count", "gate-kind"]
        == 1
    )
    assert samples["gemel_bundle_info", "0123456789ab", "junction"] == 1
    assert not any(name.endswith("_created") for name in names)


def test_reload_needs_token_and_reports_outcome(address: str, box: Box) -> None:
    assert (
        send_request(address, "/api/reload", "POST")[0] == 401
        and send_request(address, "/api/reload", **BEARER)[0] == 405
    )
    assert box.reloads == 0
    status, body, _ = send_request(address, "/api/reload", "POST", **BEARER)
    assert status == 200 and json.loads(body) == {"applied": True}
    box.refuses = "box.yaml: bundle: is cut"
    status, body, _ = send_request(address, "/api/reload", "POST", **BEARER)
    assert status == 409 and json.loads(body) == {"applied": False, "reason": box.refuses} and box.reloads == 2
    described = json.loads(send_request(address, "/openapi.json")[1])["paths"]["/api/reload"]["post"]
    assert {"200", "409"} <= described["responses"].keys() and described["security"] == [{"token": []}]


def test_health_reports_changed_bundle(address: str, box: Box) -> None:
    box.changes["bundle_fault"] = "box.safetensors was changed in place"
    assert send_request(address, "/healthz")[:2] == (200, b"moving\nbundle: box.safetensors was changed in place\n")


def test_camera_frame_is_annotated_jpeg(address: str, box: Box) -> None:
    assert send_request(address, "/api/cameras/bridge/frame.jpg")[0] == 404
    assert send_request(address, "/api/cameras/nowhere/frame.jpg")[0] == 404
    box.snapshots.add_frame("bridge", 7, 1000.0, scene())
    plain = send_request(address, "/api/cameras/bridge/frame.jpg")[1]
    box.snapshots.add_result(detection(1000.0))
    status, drawn, headers = send_request(address, "/api/cameras/bridge/frame.jpg")
    assert status == 200 and headers["Content-Type"] == "image/jpeg" and drawn[:2] == plain[:2] == b"\xff\xd8"
    assert drawn != plain
    box.snapshots.add_frame("bridge", 90, 1010.0, scene())
    assert send_request(address, "/api/cameras/bridge/frame.jpg")[1] == plain  # what is long past is not drawn


def test_post_needs_token(address: str) -> None:
    assert send_request(address, "/api/session", "POST")[0] == 401
    assert send_request(address, "/api/session", "POST", Origin="http://evil.example", **BEARER)[0] == 403
    assert send_request(address, "/api/session", **BEARER)[0] == 405


def test_session_sets_httponly_cookie(address: str) -> None:
    status, _, headers = send_request(address, "/api/session", "POST", **BEARER)
    cookie = headers["Set-Cookie"]
    assert status == 204 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert send_request(address, "/api/session", "POST", Cookie=cookie.partition(";")[0])[0] == 204


@pytest.mark.parametrize(
    "path", ["/page/../service.py", "/page/%2e%2e/service.py", "/page/", "/api", "//", "/%00"]
)
def test_unknown_paths_are_404(address: str, path: str) -> None:
    assert send_request(address, path)[0] in (403, 404)


def test_failure_is_500_without_details(address: str, box: Box) -> None:
    box.changes["sinks"] = "rtsp://user:secret@10.0.0.5"
    status, body, _ = send_request(address, "/api/status")
    assert status == 500 and b"secret" not in body and b"Traceback" not in body
    box.changes.pop("sinks")
    assert send_request(address, "/api/status")[0] == 200


def test_openapi_lists_every_path(address: str) -> None:
    document = json.loads(send_request(address, "/openapi.json")[1])
    for path, methods in document["paths"].items():
        for method in methods:
            assert send_request(address, path.format(id="bridge"), method.upper(), **BEARER)[0] in (200, 204, 404)


def test_watch_sends_status_and_new_snapshots(address: str, box: Box) -> None:
    box.snapshots.add_frame("bridge", 1, time.time(), scene())

    async def watch_socket() -> tuple[dict, list[int]]:
        frames, told = [], {}
        async with aiohttp.ClientSession() as session, session.ws_connect(f"http://{address}/api/watch") as socket:
            while len(frames) < 2:
                message = await socket.receive(timeout=60)
                if message.type is aiohttp.WSMsgType.TEXT:
                    told = json.loads(message.data)
                    continue
                length = int.from_bytes(message.data[:4], "big")
                head = json.loads(message.data[4 : 4 + length])
                frames.append(head["frame"])
                assert message.data[4 + length : 6 + length] == b"\xff\xd8"
                box.snapshots.add_frame("bridge", head["frame"] + 1, time.time(), scene())
        return told, frames

    told, frames = asyncio.run(watch_socket())
    assert told["workload"] == "junction" and frames == [1, 2]


def test_beyond_loopback_asks_for_token(box: Box, measures: Metrics) -> None:
    service = HttpService(box, measures, Access("0.0.0.0", 0, TOKEN), "box.yaml")
    service.start()
    try:
        address = f"127.0.0.1:{service.port}"
        status, body, _ = send_request(address, "/")
        assert status == 401 and b"asks for its token" in body and b"junction" not in body
        for path in ("/api/status", "/metrics", "/healthz", "/openapi.json", "/api/watch"):
            assert send_request(address, path)[0] == 401
        assert send_request(address, "/page/login.js")[0] == 200
        assert send_request(address, "/api/status", **BEARER)[0] == 200
    finally:
        service.stop()


def test_connections_are_limited(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as opened:
        for _ in range(3):
            kept = opened.enter_context(socket.create_connection((host, int(port)), timeout=60.0))
            kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in kept.recv(4096)
        with pytest.raises(OSError):
            send_request(address, "/healthz")
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            assert send_request(address, "/healthz")[0] == 200
            return
    raise AssertionError("those who left still count")


def test_used_address_is_one_line(address: str, box: Box, measures: Metrics) -> None:
    taken = HttpService(box, measures, Access("127.0.0.1", int(address.rpartition(":")[2])), "box.yaml")
    with pytest.raises(InputError, match=r"box\.yaml: http\.bind: 127\.0\.0\.1:\d+ is not available: .*in use"):
        taken.start()
