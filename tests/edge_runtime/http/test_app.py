"""The endpoints of docs/running-a-box.md, over real HTTP, with a fake box."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gemel.edge_runtime.frames.queues import Frame
from gemel.edge_runtime.http.app import HISTORY_ROWS, History, HttpService
from gemel.edge_runtime.http.auth import Access
from gemel.models.errors import InputError
from tests.edge_runtime.http.box import Box, camera, query

TOKEN = "a-token-of-32-characters-or-more"
BEARER: dict[str, Any] = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def box() -> Box:
    return Box()


@contextlib.contextmanager
def serve_box(box: Box, host: str = "127.0.0.1", token: str | None = None) -> Iterator[str]:
    service = HttpService(box, box.metrics, Access(host, 0, token), "box.yaml")
    service.start()
    yield f"127.0.0.1:{service.port}"
    service.stop()


@pytest.fixture
def address(box: Box) -> Iterator[str]:
    with serve_box(box) as address:
        yield address


@pytest.fixture
def closed_address(box: Box) -> Iterator[str]:
    """The address of a box with a token."""
    with serve_box(box, token=TOKEN) as address:
        yield address


def send_request(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of a response."""
    request = urllib.request.Request(f"http://{address}{path}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read(), dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


def test_status_matches_the_box(address: str, box: Box) -> None:
    status, body, headers = send_request(address, "/api/status")
    found = json.loads(body)
    assert status == 200 and found == json.loads(box.status().model_dump_json())
    assert {"run", "bundle", "uptime_s", "budget_bytes", "resident_bytes", "drift"} <= found.keys()
    assert {"id", "state", "fps", "frame_age_s", "reconnects"} <= found["cameras"][0].keys()
    assert {"id", "resident", "fps", "age_p95_ms", "ledger"} <= found["queries"][0].keys()
    assert {"kind", "state", "delivered", "undelivered"} <= found["sinks"][0].keys()
    assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["X-Content-Type-Options"] == "nosniff"


def test_events_are_the_newest_first(address: str, box: Box) -> None:
    status, body, _ = send_request(address, "/api/events")
    found = json.loads(body)["events"]
    assert status == 200 and [one["id"] for one in found] == ["f3a9c1-2", "f3a9c1-1"]
    assert (found[0]["end_time"], found[1]["end_reason"]) == (None, "left")
    status, picture, headers = send_request(address, "/api/events/f3a9c1-2/snapshot.jpg")
    assert (status, headers["Content-Type"], picture[:2]) == (200, "image/jpeg", b"\xff\xd8")
    assert send_request(address, "/api/events/f3a9c1-1/snapshot.jpg")[0] == 404


def test_health_and_readiness(address: str, box: Box) -> None:
    assert send_request(address, "/healthz")[0] == send_request(address, "/readyz")[0] == 200
    box.changes["bundle_fault"] = "box.safetensors was changed in place"
    assert send_request(address, "/healthz")[:2] == (200, b"moving\nbundle: box.safetensors was changed in place\n")
    box.moves, box.lacks = False, ["camera gate never gave a frame"]
    assert send_request(address, "/healthz")[0] == 503
    status, body, _ = send_request(address, "/readyz")
    assert status == 503 and json.loads(body) == {
        "missing": ["camera gate never gave a frame"], "cameras": {"bridge": "streaming", "gate": "streaming"},
    }  # fmt: skip


def test_metrics_are_complete_and_balanced(address: str, box: Box) -> None:
    box.add_result(1000.0)
    box.metrics.run.labels("bridge-cars").observe(0.03)
    box.metrics.load.labels("gate-kind").observe(0.2)
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
        "gemel_bundle_info", "gemel_seconds_total",
    }  # fmt: skip
    for name in ("bridge-cars", "gate-kind"):
        dropped = sum(value for (metric, *labels), value in samples.items()
                      if metric == "gemel_frames_dropped_total" and name in labels)  # fmt: skip
        settled = sum(samples[f"gemel_frames_{kind}", name] for kind in ("processed_total", "failed_total", "pending"))
        assert samples["gemel_frames_received_total", name] == dropped + settled
    assert samples["gemel_camera_up", "gate"] == 0 and ("gemel_camera_frame_age_seconds", "gate") not in samples
    for name, label in (("gemel_result_age_seconds", "bridge-cars"), ("gemel_load_seconds", "gate-kind")):
        assert samples[f"{name}_count", label] == 1
    assert samples["gemel_seconds_total", "decode"] == 12.5
    assert samples["gemel_bundle_info", "0123456789ab", "junction"] == 1
    assert not any(name.endswith("_created") for name in names)


def test_reload_needs_token_and_reports_outcome(closed_address: str, box: Box) -> None:
    assert send_request(closed_address, "/api/status")[0] == 401, "a token that is set is always asked for"
    assert send_request(closed_address, "/api/reload", "POST")[0] == 401
    assert send_request(closed_address, "/api/reload", **BEARER)[0] == 405 and box.reloads == 0
    status, body, _ = send_request(closed_address, "/api/reload", "POST", **BEARER)
    assert status == 200 and json.loads(body) == {"applied": True}
    box.refuses = "box.yaml: bundle: is cut"
    status, body, _ = send_request(closed_address, "/api/reload", "POST", **BEARER)
    assert status == 409 and json.loads(body) == {"applied": False, "reason": box.refuses} and box.reloads == 2


def test_camera_frame_is_annotated_jpeg(address: str, box: Box) -> None:
    path = "/api/cameras/bridge/frame.jpg"
    assert send_request(address, path)[0] == send_request(address, path.replace("bridge", "nowhere"))[0] == 404
    box.add_frame("bridge-cars", 7, 1000.0)
    plain = send_request(address, path)[1]
    box.add_result(1000.0)
    status, drawn, headers = send_request(address, path)
    assert status == 200 and headers["Content-Type"] == "image/jpeg" and drawn[:2] == plain[:2] == b"\xff\xd8"
    assert drawn != plain
    box.add_frame("bridge-cars", 90, 1010.0)
    assert send_request(address, path)[1] == plain, "an old result is not drawn"
    box.observer.hold_result("bridge-cars", Frame(91, 1009.0, 1009.0))
    assert send_request(address, path)[1] == drawn, "a result that holds is drawn"
    box.observer.zones = {"bridge": (("lane", ((0.1, 0.5), (0.9, 0.5), (0.5, 0.9))),)}
    assert send_request(address, path)[1] not in (plain, drawn)
    assert send_request(address, f"{path}?plain=1")[1] == plain


def test_session_needs_token_and_sets_httponly_cookie(closed_address: str) -> None:
    assert send_request(closed_address, "/api/session", "POST")[0] == 401
    assert send_request(closed_address, "/api/session", "POST", Origin="http://evil.example", **BEARER)[0] == 403
    status, _, headers = send_request(closed_address, "/api/session", "POST", **BEARER)
    cookie = headers["Set-Cookie"]
    assert status == 204 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert send_request(closed_address, "/api/session", "POST", Cookie=cookie.partition(";")[0])[0] == 204


@pytest.mark.parametrize("path", ["/page/../app.py", "/page/%2e%2e/app.py", "/page/", "/api", "//", "/%00"])
def test_unknown_paths_are_404(address: str, path: str) -> None:
    assert send_request(address, path)[0] in (403, 404)


def test_failure_is_500_without_details(address: str, box: Box) -> None:
    box.changes["sinks"] = "rtsp://user:secret@10.0.0.5"
    status, body, _ = send_request(address, "/api/status")
    assert status == 500 and b"secret" not in body and b"Traceback" not in body
    box.changes.pop("sinks")
    assert send_request(address, "/api/status")[0] == 200


def test_openapi_describes_every_path(closed_address: str) -> None:
    document = json.loads(send_request(closed_address, "/openapi.json", **BEARER)[1])
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            status = send_request(closed_address, path.format(id="bridge", version="1"), method.upper(), **BEARER)[0]
            assert status < 500 and str(status) in operation["responses"]
            assert operation["security"] == ([{"token": []}] if method == "post" else [{}, {"token": []}])
    text = json.dumps(document)
    assert {"Status", "QueryStatus", "Readiness", "ReloadOutcome"} <= document["components"]["schemas"].keys()
    assert "#/$defs" not in text and '"#/components/schemas/Status"' in text


def test_watch_sends_status_and_new_snapshots(address: str, box: Box) -> None:
    box.add_frame("bridge-cars", 1, time.time())

    async def read_socket() -> tuple[dict, list[int]]:
        frames, status = [], {}
        async with aiohttp.ClientSession() as session, session.ws_connect(f"http://{address}/api/watch") as socket:
            while len(frames) < 2:
                message = await socket.receive(timeout=60)
                if message.type is aiohttp.WSMsgType.TEXT:
                    status = json.loads(message.data)
                    continue
                length = int.from_bytes(message.data[:4], "big")
                head = json.loads(message.data[4 : 4 + length])
                frames.append(head["frame"])
                assert message.data[4 + length : 6 + length] == b"\xff\xd8"
                box.add_frame("bridge-cars", head["frame"] + 1, time.time())
        return status, frames

    status, frames = asyncio.run(read_socket())
    assert status["workload"] == "junction" and frames == [1, 2]


def test_address_beyond_loopback_needs_token(box: Box) -> None:
    with serve_box(box, "0.0.0.0", TOKEN) as address:
        status, body, _ = send_request(address, "/")
        assert status == 401 and b"asks for its token" in body and b"junction" not in body
        for path in ("/api/status", "/metrics", "/openapi.json", "/api/watch"):
            assert send_request(address, path)[0] == 401
        assert send_request(address, "/page/login.js")[0] == 200
        assert send_request(address, "/api/status", **BEARER)[0] == 200


def test_health_is_told_without_a_token_and_without_details(box: Box) -> None:
    box.changes["bundle_fault"] = "box.safetensors was changed in place"
    with serve_box(box, "0.0.0.0", TOKEN) as address:
        assert send_request(address, "/healthz")[:2] == (200, b"moving\n")
        assert send_request(address, "/readyz")[:2] == (200, b"ready\n")
        assert send_request(address, "/v2/health/ready")[0] == send_request(address, "/v2/health/live")[0] == 200
        assert b"changed in place" in send_request(address, "/healthz", **BEARER)[1]
        box.moves, box.lacks = False, ["camera gate never gave a frame"]
        assert send_request(address, "/healthz")[:2] == (503, b"stuck\n")
        assert send_request(address, "/readyz")[:2] == (503, b"not ready\n")
        assert b"camera gate" in send_request(address, "/readyz", **BEARER)[1]
        assert send_request(address, "/healthz", "POST")[0] == 401


def test_queries_and_cameras_are_switched_with_the_token(box: Box) -> None:
    def send(address: str, path: str, body: bytes, **headers: str) -> int:
        request = urllib.request.Request(f"http://{address}{path}", body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    with serve_box(box, token=TOKEN) as address:
        assert send(address, "/api/queries/bridge-cars", b'{"on": false}') == 401
        assert send(address, "/api/queries/bridge-cars", b'{"on": false}', **BEARER) == 200
        assert send(address, "/api/cameras/bridge", b'{"fps": 2}', **BEARER) == 200
        assert send(address, "/api/queries/gone", b'{"on": true}', **BEARER) == 404
        for body in (b"", b"{", b"{}", b'{"on": 1}', b'{"on": null}', b'{"fps": -1}', b'{"speed": 5}', b"x" * 10_000):
            assert send(address, "/api/queries/bridge-cars", body, **BEARER) in (400, 413)
        assert send(address, "/api/cameras/bridge", b'{"min_score": 0.5}', **BEARER) == 400
    assert box.orders == [("query", "bridge-cars", b'{"on": false}'), ("camera", "bridge", b'{"fps": 2}')]


def test_rollback_answers_like_a_reload(box: Box) -> None:
    with serve_box(box, token=TOKEN) as address:
        assert send_request(address, "/api/rollback", "POST")[0] == 401
        assert send_request(address, "/api/rollback", "POST", **BEARER)[:2] == (200, b'{"applied": true}')
        box.refuses = "there is none"
        status, body, _ = send_request(address, "/api/rollback", "POST", **BEARER)
    assert status == 409 and json.loads(body) == {"applied": False, "reason": "updates: there is none"}


def test_files_of_an_event_are_sent_in_whole_and_in_parts(box: Box, tmp_path: Path) -> None:
    box.files["f3a9c1-1.mp4"] = tmp_path / "a.mp4"
    box.files["f3a9c1-1.mp4"].write_bytes(bytes(range(100)))
    with serve_box(box) as address:
        status, body, headers = send_request(address, "/api/events/f3a9c1-1/clip.mp4")
        assert (status, body, headers["Content-Type"]) == (200, bytes(range(100)), "video/mp4")
        assert send_request(address, "/api/events/f3a9c1-1/clip.mp4", Range="bytes=10-19")[:2] == (
            206,
            bytes(range(10, 20)),
        )
        assert send_request(address, "/api/events/f3a9c1-2/clip.mp4")[0] == 404
        assert send_request(address, "/api/events/f3a9c1-1/full.jpg")[0] == 404


def test_address_in_use_is_tried_again(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        service = HttpService(box, box.metrics, Access("127.0.0.1", port), "box.yaml")
        service.start()
        assert "is not available" in caplog.text and "in use" in caplog.text
    try:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                assert send_request(f"127.0.0.1:{port}", "/healthz")[0] == 200
                return
            time.sleep(0.05)
        raise AssertionError("it does not serve once the address is free")
    finally:
        service.stop()


def test_address_that_can_never_be_used_is_one_line(box: Box) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may use any port")
    with pytest.raises(InputError, match=r"box\.yaml: http\.bind: 127\.0\.0\.1:1 is not available"):
        HttpService(box, box.metrics, Access("127.0.0.1", 1), "box.yaml").start()


def test_history_keeps_one_hour_of_worst_ages() -> None:
    history, ages = History(), (None, 20.5, 10.0)
    queries = [query(f"q{index}", "bridge", age_p95_ms=age) for index, age in enumerate(ages)]
    for index in range(HISTORY_ROWS + 1):
        history.add(float(index), Box(resident_bytes=index, queries=queries[:1]).status())
    history.add(1e4 + 0.04, Box(resident_bytes=7, queries=queries).status())
    columns = history.to_json()
    assert len(columns["at"]) == HISTORY_ROWS and columns["at"][0] == 2.0 and columns["at"][-1] == 1e4
    assert columns["resident_bytes"][-2:] == [HISTORY_ROWS, 7] and columns["workspace_bytes"][-1] == 9_000_000
    assert columns["age_p95_ms"][-2:] == [None, 20.5] and columns["dropped"][-2:] == [9, 27]
