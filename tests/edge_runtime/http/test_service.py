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
from tests.edge_runtime.http.box import Box, account, camera, detection, query, scene

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


def asked(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of an answer."""
    request = urllib.request.Request(f"http://{address}{path}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


def test_the_status_is_what_the_box_says(address: str, box: Box) -> None:
    status, body, headers = asked(address, "/api/status")
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


def test_healthy_while_the_box_moves_and_ready_when_nothing_is_missing(address: str, box: Box) -> None:
    assert asked(address, "/healthz")[0] == asked(address, "/readyz")[0] == 200
    box.moves, box.lacks = False, ["camera gate never gave a frame"]
    assert asked(address, "/healthz")[0] == 503
    status, body, _ = asked(address, "/readyz")
    assert status == 503 and json.loads(body) == {"missing": ["camera gate never gave a frame"]}


def test_metrics_are_those_of_the_design_and_add_up(address: str, box: Box, measures: Metrics) -> None:
    measures.finished("bridge-cars", 0.06)
    measures.ran("bridge-cars", 0.03)
    measures.loaded("gate-kind", 0.2)
    box.changes["cameras"] = [camera("bridge"), camera("gate", state="away", up=False, frame_age_s=None, reconnects=3)]
    status, body, headers = asked(address, "/metrics")
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


def test_a_reload_needs_the_token_and_says_what_came_of_it(address: str, box: Box) -> None:
    assert asked(address, "/api/reload", "POST")[0] == 401 and asked(address, "/api/reload", **BEARER)[0] == 405
    assert box.reloads == 0
    status, body, _ = asked(address, "/api/reload", "POST", **BEARER)
    assert status == 200 and json.loads(body) == {"applied": True}
    box.refuses = "box.yaml: bundle: is cut"
    status, body, _ = asked(address, "/api/reload", "POST", **BEARER)
    assert status == 409 and json.loads(body) == {"applied": False, "reason": box.refuses} and box.reloads == 2
    described = json.loads(asked(address, "/openapi.json")[1])["paths"]["/api/reload"]["post"]
    assert {"200", "409"} <= described["responses"].keys() and described["security"] == [{"token": []}]


def test_a_bundle_that_was_changed_in_place_is_told_by_health(address: str, box: Box) -> None:
    box.changes["bundle_fault"] = "box.safetensors was changed in place"
    assert asked(address, "/healthz")[:2] == (200, b"moving\nbundle: box.safetensors was changed in place\n")


def test_a_cameras_frame_is_a_jpeg_with_its_results_drawn(address: str, box: Box) -> None:
    assert asked(address, "/api/cameras/bridge/frame.jpg")[0] == 404
    assert asked(address, "/api/cameras/nowhere/frame.jpg")[0] == 404
    box.gallery.saw("bridge", 7, 1000.0, scene())
    plain = asked(address, "/api/cameras/bridge/frame.jpg")[1]
    box.gallery.answered(detection(1000.0))
    status, drawn, headers = asked(address, "/api/cameras/bridge/frame.jpg")
    assert status == 200 and headers["Content-Type"] == "image/jpeg" and drawn[:2] == plain[:2] == b"\xff\xd8"
    assert drawn != plain
    box.gallery.saw("bridge", 90, 1010.0, scene())
    assert asked(address, "/api/cameras/bridge/frame.jpg")[1] == plain  # what is long past is not drawn


def test_what_changes_something_needs_the_token(address: str) -> None:
    assert asked(address, "/api/session", "POST")[0] == 401
    assert asked(address, "/api/session", "POST", Origin="http://evil.example", **BEARER)[0] == 403
    assert asked(address, "/api/session", **BEARER)[0] == 405


def test_a_token_becomes_a_cookie_that_scripts_cannot_read(address: str) -> None:
    status, _, headers = asked(address, "/api/session", "POST", **BEARER)
    cookie = headers["Set-Cookie"]
    assert status == 204 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert asked(address, "/api/session", "POST", Cookie=cookie.partition(";")[0])[0] == 204


@pytest.mark.parametrize(
    "path", ["/page/../service.py", "/page/%2e%2e/service.py", "/page/uplot.LICENSE", "/api", "//", "/%00"]
)
def test_nothing_else_is_there(address: str, path: str) -> None:
    assert asked(address, path)[0] in (403, 404)


def test_a_box_that_fails_to_answer_is_a_500_without_its_secrets(address: str, box: Box) -> None:
    box.changes["sinks"] = "rtsp://user:secret@10.0.0.5"
    status, body, _ = asked(address, "/api/status")
    assert status == 500 and b"secret" not in body and b"Traceback" not in body
    box.changes.pop("sinks")
    assert asked(address, "/api/status")[0] == 200


def test_the_openapi_document_names_every_path(address: str) -> None:
    document = json.loads(asked(address, "/openapi.json")[1])
    for path, methods in document["paths"].items():
        for method in methods:
            assert asked(address, path.format(id="bridge"), method.upper(), **BEARER)[0] in (200, 204, 404)


def test_a_dashboard_gets_the_status_and_each_new_picture_once(address: str, box: Box) -> None:
    box.gallery.saw("bridge", 1, time.time(), scene())

    async def watched() -> tuple[dict, list[int]]:
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
                box.gallery.saw("bridge", head["frame"] + 1, time.time(), scene())
        return told, frames

    told, frames = asyncio.run(watched())
    assert told["workload"] == "junction" and frames == [1, 2]


def test_beyond_the_loopback_a_stranger_is_asked_for_the_token(box: Box, measures: Metrics) -> None:
    service = HttpService(box, measures, Access("0.0.0.0", 0, TOKEN), "box.yaml")
    service.start()
    try:
        address = f"127.0.0.1:{service.port}"
        status, body, _ = asked(address, "/")
        assert status == 401 and b"asks for its token" in body and b"junction" not in body
        for path in ("/api/status", "/metrics", "/healthz", "/openapi.json", "/api/watch"):
            assert asked(address, path)[0] == 401
        assert asked(address, "/page/login.js")[0] == 200
        assert asked(address, "/api/status", **BEARER)[0] == 200
    finally:
        service.stop()


def test_whoever_opens_connections_without_end_is_turned_away(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as opened:
        for _ in range(3):
            kept = opened.enter_context(socket.create_connection((host, int(port)), timeout=60.0))
            kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in kept.recv(4096)
        with pytest.raises(OSError):
            asked(address, "/healthz")
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            assert asked(address, "/healthz")[0] == 200
            return
    raise AssertionError("those who left still count")


def test_what_is_no_http_leaves_nothing_in_the_log(address: str, caplog: pytest.LogCaptureFixture) -> None:
    host, _, port = address.rpartition(":")
    for sent in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=60.0) as one:
            one.sendall(sent + b"\r\n\r\n")
            assert b" 400 " in one.recv(4096)
    assert asked(address, "/healthz")[0] == 200 and not caplog.records


def test_an_address_that_is_taken_is_one_line(address: str, box: Box, measures: Metrics) -> None:
    taken = HttpService(box, measures, Access("127.0.0.1", int(address.rpartition(":")[2])), "box.yaml")
    with pytest.raises(InputError, match=r"box\.yaml: http\.bind: 127\.0\.0\.1:\d+ cannot be had: .*in use"):
        taken.start()


def test_an_account_that_a_test_made_adds_up() -> None:
    one = query("a", "b", ledger=account(50)).ledger
    assert one.received == one.processed + one.failed + one.pending + sum(one.dropped.values())
