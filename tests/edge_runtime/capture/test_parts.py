"""MJPEG over HTTP whose parts say what cameras write, or nothing: what begins as a picture does is played."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

import pytest

from gemel.edge_runtime.capture.failures import SourceLost
from gemel.edge_runtime.capture.parts import NoPartsError, PartsSource
from gemel.edge_runtime.capture.sources import CameraConfig, FrameRequest, open_source
from tests.edge_runtime.capture.faulty_cameras import HttpCamera
from tests.edge_runtime.capture.picture_server import SIZE, PictureServer, encode_picture
from tests.edge_runtime.capture.test_camera import play_camera

HEADS = {
    "image/jpg": "Content-Type: image/jpg\r\nContent-Length: {}\r\n",
    "an option": "Content-Type: image/jpeg; charset=binary\r\nContent-Length: {}\r\n",
    "no type": "Content-Length: {}\r\n",
    "no head": "",
    "neither length nor type": "X-Timestamp: 1.5\r\n",
    "capitals": "CONTENT-TYPE: IMAGE/PJPEG\r\nCONTENT-LENGTH:{}\r\n",
    "octets": "Content-Type: application/octet-stream\r\n",
    "a length that is too short": "Content-Length: 100\r\n",
    "the same with a type": "Content-Type: image/jpeg\r\nContent-Length: 100\r\n",
    "a text before it": "X: text\r\nContent-Length: 5\r\n\r\nhello\r\n--frame\r\nContent-Length: {}\r\n",
}
DAMAGED = b"\xff\xd8\xff" + bytes(100)


class PartsCamera(HttpCamera):
    """Pictures in parts with this head, at the rate of the camera."""

    head, kind = "", "JPEG"

    def _frames(self) -> Iterator[bytes]:
        for index in range(10**6):
            data = encode_picture(self.kind, index % 5) if self.kind else DAMAGED
            yield f"{self.head.format(len(data))}\r\n".encode() + data + b"\r\n--frame\r\n"


@pytest.mark.parametrize("head", HEADS)
def test_parts_of_any_head_are_played(head: str) -> None:
    with PartsCamera() as camera:
        camera.head = HEADS[head]
        with play_camera(camera.url) as watched:
            watched.more(5)
            row = watched.camera.to_json()
            assert (row["state"], row["error"], row["undecodable"]) == ("streaming", None, 0)


def test_parts_of_png_are_played() -> None:
    with PartsCamera() as camera:
        camera.kind, camera.head = "PNG", "Content-Type: image/png\r\n"
        source = open_source(CameraConfig("c", camera.url, timeout_s=5.0))
        assert source.advance() and source.shot()().shape == (SIZE[1], SIZE[0], 3)  # type: ignore[union-attr]
        source.close()


def test_parts_without_pictures_end_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemel.edge_runtime.capture.parts.MAX_PICTURE_BYTES", 1000)
    with PictureServer() as server:
        server.kind, server.body = "multipart/x-mixed-replace; boundary=b", b"--b\r\n\r\nnothing" * 1000
        with pytest.raises(SourceLost, match="hold no JPEG or PNG"):
            list(islice(iter(PartsSource(server.url, 5.0).advance, False), 3))


def test_parts_that_stop_are_lost_within_their_timeout() -> None:
    with PictureServer() as server:
        server.kind = "multipart/x-mixed-replace; boundary=b"
        server.body = b"--b\r\n\r\n" + encode_picture("JPEG", 1)[:200]
        source, begin = PartsSource(server.url, 0.5), time.monotonic()
        assert not source.advance() and time.monotonic() - begin < 5.0


def test_answer_that_is_not_in_parts_is_told_apart() -> None:
    with PictureServer() as server, pytest.raises(NoPartsError):
        PartsSource(server.url, 5.0)


def test_the_rate_of_a_camera_without_times_is_that_at_which_its_frames_come() -> None:
    with PartsCamera() as camera:
        camera.head, camera.fps = "Content-Type: image/jpeg\r\nContent-Length: {}\r\n", 5
        with play_camera(camera.url, {"q": FrameRequest(2.5)}, timeout_s=5.0) as watched:
            watched.more(12)
            times = [frame.captured_at for _, frame in watched.frames[4:]]
            assert (times[-1] - times[0]) / (len(times) - 1) < 0.8, (
                "five come in a second, two and a half are asked for"
            )


def test_pictures_that_never_decode_are_a_camera_that_is_away() -> None:
    with PartsCamera() as camera:
        camera.kind, camera.fps = "", 20
        with play_camera(camera.url) as watched:
            row = watched.until_state("away")
            assert row["error"] == "it has no frame that can be decoded" and row["undecodable"] > 1


def test_parts_that_do_not_end_are_named() -> None:
    with PartsCamera() as camera:
        camera.head, camera.fps = "Content-Length: 9999999\r\n", 20
        source = open_source(CameraConfig("c", camera.url, timeout_s=0.5))
        with pytest.raises(SourceLost, match="length or boundary is wrong"):
            source.advance()
        source.close()
