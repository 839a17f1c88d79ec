"""Access by the address where the box listens, the token, the Host and the Origin."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemel.edge_runtime.http.auth import Access, parse_access
from gemel.models.errors import InputError

TOKEN = "a-token-of-32-characters-or-more"
LOCAL, LOCAL_WITH = Access("127.0.0.1", 8080), Access("127.0.0.1", 8080, TOKEN)
OPEN = Access("0.0.0.0", 8080, TOKEN)
NAMED = Access("127.0.0.1", 8080, TOKEN, names=("box.example.org",))
BEARER = {"Authorization": f"Bearer {TOKEN}"}
LOCAL_HOST = {"Host": "127.0.0.1:8080"}
OTHER_HOST = {"Host": "box.lan:8080"}


@pytest.mark.parametrize(
    ("access", "method", "headers", "status"),
    [
        (LOCAL, "GET", LOCAL_HOST, None),
        (LOCAL, "GET", {"Host": "localhost:8080"}, None),
        (LOCAL, "GET", {"Host": "[::1]:8080"}, None),
        (LOCAL, "GET", {"Host": "evil.example:8080"}, 403),  # another site's name that leads here
        (LOCAL, "GET", {}, 403),
        (LOCAL, "GET", {**LOCAL_HOST, "Origin": "http://evil.example"}, 403),
        (LOCAL, "GET", {**LOCAL_HOST, "Origin": "http://127.0.0.1:8080"}, None),
        (LOCAL, "GET", {**LOCAL_HOST, "Origin": "null"}, 403),
        (LOCAL, "POST", LOCAL_HOST, 403),  # no token, so nothing can be changed
        (LOCAL_WITH, "POST", LOCAL_HOST, 401),
        (LOCAL_WITH, "POST", {**LOCAL_HOST, **BEARER}, None),
        (LOCAL_WITH, "POST", {**LOCAL_HOST, **BEARER, "Origin": "http://evil.example"}, 403),
        (LOCAL_WITH, "POST", {**LOCAL_HOST, "Authorization": "Bearer wrong"}, 401),
        (LOCAL_WITH, "POST", {**LOCAL_HOST, "Authorization": f"Basic {TOKEN}"}, 401),
        (LOCAL_WITH, "POST", {**LOCAL_HOST, "Cookie": f"gemel_token={TOKEN}"}, 401),  # a session is no token
        (LOCAL_WITH, "DELETE", LOCAL_HOST, 401),
        (LOCAL_WITH, "GET", LOCAL_HOST, 401),
        (LOCAL_WITH, "GET", {**LOCAL_HOST, **BEARER}, None),
        (LOCAL_WITH, "GET", OTHER_HOST, 401),  # a proxy that passes the Host on
        (LOCAL_WITH, "GET", {**OTHER_HOST, **BEARER}, None),
        (LOCAL, "GET", {**LOCAL_HOST, "X-Forwarded-For": "203.0.113.9"}, 403),  # a proxy, and no token
        (LOCAL, "GET", {**LOCAL_HOST, "Forwarded": "for=203.0.113.9"}, 403),
        (NAMED, "GET", {"Host": "box.example.org", **BEARER}, None),
        (NAMED, "GET", {"Host": "10.0.0.5:8080", **BEARER}, None),
        (NAMED, "GET", {"Host": "evil.example", **BEARER}, 403),
        (NAMED, "POST", {**LOCAL_HOST, **BEARER, "Origin": "https://box.example.org"}, None),
        (NAMED, "POST", {**LOCAL_HOST, **BEARER, "Origin": "https://evil.example"}, 403),
        (OPEN, "GET", OTHER_HOST, 401),
        (OPEN, "HEAD", OTHER_HOST, 401),
        (OPEN, "GET", {**OTHER_HOST, **BEARER}, None),
        (OPEN, "GET", {**OTHER_HOST, "Authorization": f"bearer {TOKEN}"}, None),
        (OPEN, "GET", {**OTHER_HOST, "Cookie": f"gemel_session={TOKEN}"}, 401),
        (OPEN, "GET", {**OTHER_HOST, "Authorization": "Bearer \udcff"}, 401),
        (OPEN, "POST", {**OTHER_HOST, **BEARER, "Origin": "http://box.lan:8080"}, None),
        (OPEN, "POST", {**OTHER_HOST, **BEARER, "Origin": "https://box.lan:8081"}, 403),
    ],
)
def test_access_check(access: Access, method: str, headers: dict[str, str], status: int | None) -> None:
    refusal = access.check(method, headers)
    assert (refusal and refusal[0]) == status


def test_access_page_files_are_public() -> None:
    assert OPEN.check("GET", OTHER_HOST, is_public=True) is None
    assert LOCAL.check("GET", {"Host": "evil.example"}, is_public=True) is not None


@pytest.mark.parametrize("bind", ["127.0.0.1:8080", "localhost:0", "[::1]:80", "127.9.9.9:1"])
def test_access_loopback_needs_no_token(bind: str) -> None:
    access = parse_access(bind, None, "box.yaml")
    assert access.host == bind.rpartition(":")[0].strip("[]") and access.is_local


@pytest.mark.parametrize("bind", ["0.0.0.0:80", "[::]:80", "10.0.0.5:80", "localhost.evil.example:80"])
def test_access_beyond_loopback_needs_token(bind: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"box\.yaml: http\.bind: .* there is no token; name a token_file"):
        parse_access(bind, None, "box.yaml")
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert parse_access(bind, tmp_path / "token", "box.yaml").token == TOKEN


@pytest.mark.parametrize("bind", ["", "8080", ":8080", "host:x", "host:-1", "host:65536", "host:８０"])
def test_access_refuses_bad_address(bind: str) -> None:
    with pytest.raises(InputError, match="is no address; give HOST:PORT"):
        parse_access(bind, None, "box.yaml")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 513, b"two lines of token\nand more", b"\xff" * 32])
def test_access_refuses_bad_token_without_showing_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(InputError, match=r"token: http\.token_file: holds no token"):
        parse_access("127.0.0.1:1", tmp_path / "token", "box.yaml")


def test_access_believes_trusted_proxies_only() -> None:
    headers = {**LOCAL_HOST, **BEARER, "Origin": "https://cam.lan", "X-Forwarded-Host": "cam.lan"}
    access = parse_access("127.0.0.1:1", None, "box.yaml")
    assert access.check("GET", headers, address="10.1.2.3") is not None
    proxied = replace(LOCAL_WITH, trusted_proxies=(ipaddress.ip_network("10.0.0.0/8"),))
    https = {"X-Forwarded-Proto": "https"}
    assert proxied.check("POST", headers, address="10.1.2.3") is None and proxied.is_https(https, "::ffff:10.1.2.3")
    assert proxied.check("POST", headers, address="11.1.2.3") is not None and not proxied.is_https(https, "11.1.2.3")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"names": ["box.lan"]}, r"http\.names: .* there is no token"),
        ({"trusted_proxies": ["10.0.0.1"]}, r"http\.trusted_proxies: .* there is no token"),
        ({"trusted_proxies": ["nowhere"], "token": True}, r"trusted_proxies\[0\]: 'nowhere' is no address"),
        ({"trusted_proxies": ["10.0.0.1/8"], "token": True}, r"trusted_proxies\[0\]: '10.0.0.1/8' is no address"),
    ],
)
def test_access_behind_a_proxy_needs_a_token(keys: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    token_file = tmp_path / "token" if keys.pop("token", False) else None
    with pytest.raises(InputError, match=problem):
        parse_access("127.0.0.1:1", token_file, "box.yaml", **keys)
