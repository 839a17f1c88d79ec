"""Sessions of browsers: values with an end, which say nothing of the token."""

from __future__ import annotations

import json
import ssl
import urllib.request
from pathlib import Path

import pytest

from gemel.edge_runtime.http.app import HttpService
from gemel.edge_runtime.http.auth import Access, TlsFiles
from gemel.edge_runtime.http.sessions import COOKIE, SECURE_COOKIE, SESSION_S, Sessions
from tests.browser import page_of
from tests.certificates import write_certificate
from tests.edge_runtime.http.box import Box
from tests.edge_runtime.http.test_app import BEARER, TOKEN, send_request, serve_box

TIMEOUT_MS = 60_000


def test_session_value_ends_and_needs_its_process_and_token() -> None:
    now = [1000.5]
    sessions = Sessions(lambda: now[0])
    value = sessions.issue_value(TOKEN)
    assert sessions.is_valid(value, TOKEN) and TOKEN not in value
    assert not sessions.is_valid(value, "another-token-of-this-box") and not Sessions(lambda: now[0]).is_valid(
        value, TOKEN
    )
    now[0] += SESSION_S - 2
    assert sessions.is_valid(value, TOKEN)
    now[0] += 2
    assert not sessions.is_valid(value, TOKEN)


@pytest.mark.parametrize("change", ["", "x", ".", "0.0", "²." + "0" * 64, "9" * 400 + ".x", "-1.x", "\udcff.\udcff"])
def test_session_value_of_others_is_refused(change: str) -> None:
    assert not Sessions().is_valid(change, TOKEN)


def test_session_value_with_a_later_end_is_refused() -> None:
    sessions = Sessions()
    expires_at, _, proof = sessions.issue_value(TOKEN).partition(".")
    assert not sessions.is_valid(f"{int(expires_at) + 1}.{proof}", TOKEN)


def test_session_cookie_stands_for_the_token_without_being_it() -> None:
    with serve_box(Box(), token=TOKEN) as address:
        assert send_request(address, "/api/session", "POST")[0] == 401
        cookie = send_request(address, "/api/session", "POST", **BEARER)[2]["Set-Cookie"]
        assert TOKEN not in cookie and cookie.startswith(f"{COOKIE}=") and f"Max-Age={SESSION_S}" in cookie
        value = cookie.partition(";")[0]
        assert send_request(address, "/api/status", Cookie=f"other=1; {value}")[0] == 200
        assert send_request(address, "/api/status", Cookie=value[:-1])[0] == 401
        secure = value.replace(COOKIE, SECURE_COOKIE)
        assert send_request(address, "/api/status", Cookie=secure)[0] == 401, "the name of HTTPS, without HTTPS"


def test_session_cookie_under_tls_is_bound_to_the_host(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    box = Box()
    service = HttpService(box, box.metrics, Access("127.0.0.1", 0, TOKEN, tls=TlsFiles(cert, key)), "box.yaml")
    service.start()
    trust = ssl.create_default_context(cafile=str(cert))
    url = f"https://127.0.0.1:{service.port}/api"
    try:
        asked = urllib.request.Request(f"{url}/session", method="POST", headers=BEARER)
        with urllib.request.urlopen(asked, timeout=60, context=trust) as answer:
            cookie = answer.headers["Set-Cookie"]
        assert cookie.startswith(f"{SECURE_COOKIE}=")
        assert {"Secure", "HttpOnly", "Path=/", "SameSite=Strict"} <= set(cookie.split("; ")) and "Domain" not in cookie
        asked = urllib.request.Request(f"{url}/status", headers={"Cookie": cookie.partition(";")[0]})
        with urllib.request.urlopen(asked, timeout=60, context=trust) as answer:
            assert json.load(answer)["workload"] == "junction"
    finally:
        service.stop()


def test_dashboard_asks_for_the_token_again_after_the_session(browser: object) -> None:
    box = Box()
    service = HttpService(box, box.metrics, Access("127.0.0.1", 0, TOKEN), "box.yaml")
    service.start()
    try:
        with page_of(browser) as (page, _):
            page.goto(f"http://127.0.0.1:{service.port}/")
            page.fill("#token", TOKEN)
            page.click("button")
            page.wait_for_selector("text=all well", timeout=TIMEOUT_MS)
            service._app._sessions = Sessions()
            page.evaluate("dispatchEvent(new Event('resize'))")  # draws the curves anew
            page.wait_for_selector("text=This box asks for its token", timeout=TIMEOUT_MS)
    finally:
        service.stop()
