"""Causes that cannot pass by themselves: each is one line, and the camera is retried slowly."""

from __future__ import annotations

import logging
import time

import pytest

from gemel.edge_runtime.capture.failures import REFUSALS, SourceLost
from gemel.edge_runtime.capture.sources import CameraConfig, open_source
from tests.edge_runtime.capture.faulty_cameras import HttpCamera, RtspCamera
from tests.edge_runtime.capture.picture_server import PictureServer
from tests.edge_runtime.capture.test_camera import play_camera

TIMEOUT_S, SLOW_TIMEOUT_S = 5.0, 2.0


def open_failing(source: str) -> SourceLost:
    with pytest.raises(SourceLost) as error:
        open_source(CameraConfig("c", source, timeout_s=TIMEOUT_S))
    assert "secret" not in str(error.value) and "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_refusal_by_rtsp_or_http_is_named_and_permanent(status):
    with RtspCamera() as camera, PictureServer() as server:
        camera.status, server.status = f"{status} No", status
        for url in (camera.url, server.url):
            lost = open_failing(url)
            assert (str(lost), lost.permanent) == (REFUSALS[status], True)


@pytest.mark.parametrize("status", [429, 453, 500, 503])
def test_answer_that_may_pass_is_not_permanent(status):
    with RtspCamera() as camera:
        camera.status = f"{status} No"
        lost = open_failing(camera.url)
    assert "the server" in str(lost) and "XX" not in str(lost) and not lost.permanent


def test_camera_that_refuses_tcp_and_udp_is_named_and_permanent():
    with RtspCamera() as camera:
        camera.setup_status = "461 Unsupported Transport"
        lost = open_failing(camera.url)
    assert str(lost) == "it gives RTSP neither over TCP nor over UDP (461 Unsupported Transport)" and lost.permanent


def test_camera_slower_than_half_of_its_timeout_is_not_lost():
    with HttpCamera() as camera:
        camera.fps = 1 / (0.7 * SLOW_TIMEOUT_S)
        with play_camera(camera.url, timeout_s=SLOW_TIMEOUT_S) as watched:
            watched.more(3)
            assert watched.camera.to_json()["error"] is None


def test_garbage_and_absence_are_not_permanent():
    with RtspCamera() as camera:
        camera.garbage = True
        lost = open_failing(camera.url)
        assert str(lost) == "it sends no video, or hangs up" and not lost.permanent
        camera.refuse()
        assert not open_failing(camera.url).permanent
    assert not open_failing("rtsp://u:secret@no-such-host.invalid/1").permanent


def test_scheme_without_support_is_permanent():
    lost = open_failing("srt://127.0.0.1:9")
    assert lost.permanent and "scheme" in str(lost)


@pytest.mark.parametrize(
    "source",
    ["rtsp://u:p#w@box/1", "rtsp://u:p/w@box/1", "http://box:99999/1", "rtsp://box:x/1", "http://", "rtsp://[::1/1"],
)
def test_address_without_valid_host_and_port_is_refused(source):
    key, problem, hint = CameraConfig("c", source).problem() or ("", "", "")
    assert (key, problem) == ("source", "the address has no valid host and port") and "%23" in hint


@pytest.mark.parametrize(
    "source", ["udp://@239.0.0.1:5000", "rtsp://u:p%23w@[::1]:554/1?a=b@c", "tcp://:9", "rtp://@:5"]
)
def test_address_of_a_stream_is_taken(source):
    assert CameraConfig("c", source).problem() is None


def test_camera_with_wrong_password_is_retried_slowly_and_logged_once(caplog):
    caplog.set_level(logging.INFO)
    with RtspCamera() as camera:
        camera.silent = True
        with play_camera(camera.url, timeout_s=0.3) as watched:
            watched.until_state("away")
            camera.status = "401 Unauthorized"
            camera.mend()
            row = watched.until(lambda row: row["error"] == REFUSALS[401])
            accepted = camera.accepted
            time.sleep(3)
            assert camera.accepted == accepted and row["state"] == "away"
    lines = [record.getMessage() for record in caplog.records]
    assert sum("is away" in line for line in lines) == 2, "the second cause is news"
    assert f"camera c is away: {REFUSALS[401]}; retrying every 60 s" in lines


def test_camera_that_has_streamed_is_back_soon_after_a_refusal():
    with RtspCamera() as camera, play_camera(camera.url) as watched:
        watched.more()
        camera.status = "404 Not Found"
        camera.cut()
        watched.until(lambda row: row["error"] == REFUSALS[404])
        camera.status = "200 OK"
        watched.more()
