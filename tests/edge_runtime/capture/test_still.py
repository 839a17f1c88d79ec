"""Cameras that send single pictures by HTTP: polled, bounded, and anything else named in one line."""

from __future__ import annotations

import contextlib
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

from gemel.edge_runtime.capture import still
from gemel.edge_runtime.capture.addresses import _RedirectHandler
from gemel.edge_runtime.capture.failures import SourceLost
from gemel.edge_runtime.capture.sources import CameraConfig, open_source, probe_cameras
from gemel.edge_runtime.capture.still import StillSource
from tests.edge_runtime.capture.faulty_cameras import HttpCamera
from tests.edge_runtime.capture.picture_server import SIZE, PictureServer, encode_picture
from tests.edge_runtime.capture.test_camera import play_camera
from tests.edge_runtime.tiny import picture

TIMEOUT_S = 5.0


@pytest.fixture
def server() -> Iterator[PictureServer]:
    with PictureServer() as server:
        yield server


def probe(source: str, **keys) -> tuple[bool, str]:
    """Whether a camera of this source gives a picture of SIZE, and the problem."""
    found = probe_cameras([CameraConfig("c", source, timeout_s=TIMEOUT_S, **keys)], TIMEOUT_S)["c"]
    return found.image is not None and found.image.shape == (SIZE[1], SIZE[0], 3), found.problem


def login_url(server: PictureServer, user: str, password: str) -> str:
    user, password = (urllib.parse.quote(text, safe="") for text in (user, password))
    return server.url.replace("http://", f"http://{user}:{password}@")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("every_s", [None, 0.2])
def test_still_is_polled_until_the_end(server, kind, every_s):
    server.kind, server.body = f"image/{kind.lower()}", encode_picture(kind, 1)
    with play_camera(server.url, fps=10.0, every_s=every_s) as watched:
        watched.more(2)
        begin, before = time.monotonic(), len(server.asked)
        server.body = encode_picture(kind, 2)
        watched.more(5)
        asked, passed_s = len(server.asked) - before, time.monotonic() - begin
        assert asked <= 1 + passed_s / (every_s or 0.1), "no more often than asked for"
        row = watched.camera.to_json()
        assert (row["state"], row["error"], row["undecodable"]) == ("streaming", None, 0)
    image = watched.frames[-1][1].image
    assert image is not None and np.abs(image.astype(int) - picture(2, *SIZE)).mean() < 10
    assert set(server.asked) == {"/cgi/snap.jpg?channel=1"}


def test_still_slower_than_its_timeout_is_not_lost(server):
    with play_camera(server.url, every_s=1.5, timeout_s=1.0) as watched:
        watched.more(3)
        assert watched.camera.to_json()["reconnects"] == 0
        watched.camera.stop()
        assert watched.camera.join(60.0)


@pytest.mark.parametrize("scheme", ["Basic", "Digest"])
@pytest.mark.parametrize("password", ["plain", "p#s/s?@:%41 ü"])
def test_still_sends_its_login(server, scheme, password):
    server.login, server.scheme = ("me@home", password), scheme
    assert probe(login_url(server, "me@home", password))[0]
    assert probe(login_url(server, "me@home", password), every_s=1.0)[0]
    asked = len(server.asked)
    refused = "user or password is missing or wrong (401)"
    assert probe(login_url(server, "me@home", "wrong"), every_s=1.0) == (False, refused)
    assert len(server.asked) - asked == 2, "a wrong password is sent once: cameras lock accounts"
    assert probe(server.url) == probe(server.url, every_s=1.0) == (False, refused)
    server.scheme = "Bearer"
    assert probe(login_url(server, "me", "x"), every_s=1.0)[1] == "it asks for a login that is neither Basic nor Digest"


def test_still_follows_redirects_to_pictures_only(server):
    server.moved = "/elsewhere"
    assert probe(server.url)[0]
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/x"):
        server.moved = target
        assert not probe(server.url, every_s=1.0)[0]


def multipart(count: int) -> bytes:
    """A stream of pictures that ends."""
    return b"".join(
        b"--b\r\nContent-Type: image/jpeg\r\n\r\n" + encode_picture("JPEG", seed) + b"\r\n" for seed in range(count)
    )


@pytest.mark.parametrize("every_s", [None, 1.0])
@pytest.mark.parametrize("kind", ["image/jpeg", "multipart/x-mixed-replace; boundary=b"])
def test_http_camera_that_redirects_to_another_host_is_refused(server, kind, every_s):
    with PictureServer() as other:
        other.kind = server.kind = kind
        other.body = server.body = multipart(9) if kind.startswith("multipart") else encode_picture()
        server.moved = other.url.replace("127.0.0.1", "localhost")
        problem = "it redirects to another host; give the address there if you trust it"
        assert probe(server.url, every_s=every_s) == (False, problem) and other.asked == []
        server.moved = "/elsewhere"
        if every_s is None or kind == "image/jpeg":
            assert probe(server.url, every_s=every_s)[0]


def test_stream_behind_a_redirect_gets_its_login(server):
    server.login, server.kind, server.body = ("me", "p#s?"), "multipart/x-mixed-replace; boundary=b", multipart(9)
    server.moved = "/elsewhere"
    assert probe(login_url(server, *server.login))[0]
    assert probe(login_url(server, "me", "wrong"))[1] == "user or password is missing or wrong (401)"


def test_redirect_from_https_to_http_is_refused():
    handler, request = _RedirectHandler(), urllib.request.Request("https://10.0.0.7/snap.jpg")
    with pytest.raises(SourceLost, match="from https to an address without encryption"):
        handler.redirect_request(request, None, 302, "", {}, "http://10.0.0.7/snap.jpg")
    assert handler.redirect_request(request, None, 302, "", {}, "https://10.0.0.7:444/snap.jpg") is not None


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        ("image/gif", encode_picture("GIF"), "a GIF"),
        ("image/jpeg", encode_picture("GIF"), "a GIF"),
        ("image/webp", encode_picture("WEBP"), "a WebP"),
        ("image/bmp", encode_picture("BMP"), "a BMP"),
        ("text/html", b"\n<!DOCTYPE html><title>Login</title>" * 9, "a web page"),
        ("application/vnd.apple.mpegurl", b"#EXTM3U\n#EXTINF:4,\nseg.ts\n", "a playlist"),
        ("application/json", b'{"error": 5}', "JSON"),
        ("text/plain; charset=utf-8", b"busy", "text/plain"),
        ("image/jpeg", b"", "nothing"),
    ],
)
@pytest.mark.parametrize("every_s", [None, 1.0])
def test_still_names_what_comes_in_its_place(server, kind, body, named, every_s):
    server.kind, server.body = kind, body
    assert probe(server.url, every_s=every_s) == (
        False,
        f"it sends {named}, neither video nor a JPEG or PNG; {still.HINT}",
    )


def test_still_of_damaged_slow_or_large_answers_is_refused(server, monkeypatch):
    server.body = encode_picture()[:300]
    assert probe(server.url) == probe(server.url, every_s=1.0) == (False, "its picture does not decode")
    server.body = encode_picture()
    server.length = len(server.body) + 10
    assert probe(server.url, every_s=1.0)[0], "cut off behind the picture"
    server.length = None
    monkeypatch.setattr(still, "MAX_PICTURE_BYTES", 1000)
    server.body = encode_picture() + bytes(2000)
    assert "more than" in probe(server.url, every_s=1.0)[1]
    with HttpCamera() as stream:
        assert probe(stream.url, every_s=1.0) == (False, "it sends a stream, no single pictures; leave `every_s` out")
        stream.silent = True
        with pytest.raises(still.SourceLost, match="it does not answer in time"):
            StillSource(stream.url, 1.0, 0.3)
        stream.mend()
        stream.garbage = True
        stream.cut()
        assert probe(stream.url, every_s=1.0)[1] in ("it does not speak HTTP", "Connection reset by peer")


def test_still_dropping_its_bytes_slowly_times_out():
    with HttpCamera() as slow:
        slow._handshake = lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n") is None  # type: ignore[method-assign]
        with pytest.raises(still.SourceLost, match="it does not answer in time"):
            StillSource(slow.url, 1.0, 0.5)


@pytest.mark.parametrize("status", [500, 503])
def test_still_failing_for_a_moment_comes_back(server, status):
    with play_camera(server.url, every_s=0.1) as watched:
        watched.more(2)
        server.status = status
        assert watched.until_state("away")["error"] == f"the server answers {status}"
        server.status = 200
        watched.more(2)
        assert watched.until_state("streaming")["reconnects"] == 1


def test_stream_by_http_is_no_still():
    with HttpCamera() as stream, contextlib.closing(open_source(CameraConfig("c", stream.url))) as source:
        assert not isinstance(source, StillSource) and source.advance()


@pytest.mark.parametrize("source", ["rtsp://box/1", "clip.mp4", "0"])
def test_every_s_is_for_pictures_by_http(source):
    key, problem, _ = CameraConfig("c", source, every_s=1.0).problem() or ("", "", "")
    assert (key, problem) == ("every_s", "only a picture behind http:// or https:// is asked for")
