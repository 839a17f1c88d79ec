"""The recipes of docs/running-a-box.md for nginx and Caddy, run with these servers in front of a box."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver

from gemel.edge_runtime.http.app import HttpService
from gemel.edge_runtime.http.auth import Access
from tests.certificates import BOX_NAME, write_certificate
from tests.edge_runtime.http.box import Box
from tests.edge_runtime.http.test_app import BEARER, TOKEN

PAGE = Path(__file__).resolve().parents[3] / "docs" / "running-a-box.md"
TIMEOUT_S = 60.0
NGINX_MAIN = "worker_processes 1;\nerror_log stderr;\npid {folder}/nginx.pid;\nevents {{}}\nhttp {{\naccess_log off;\n"
NGINX_BARE = """server {{ listen {port} ssl; server_name box.example.org;
ssl_certificate {cert}; ssl_certificate_key {key}; location / {{ proxy_pass http://127.0.0.1:{box}; {more} }} }}"""
NGINX_RECIPES = {
    "alone": "",
    "host": "proxy_set_header Host $host;",
    "http-host": "proxy_set_header Host $http_host;",
    "forwarded": "proxy_set_header Host $host; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; "
    "proxy_set_header X-Real-IP $remote_addr; proxy_set_header X-Forwarded-Host $host;",
}


def recipe_of(kind: str) -> str:
    """The recipe of the docs."""
    found = re.search(rf"```{kind}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None, f"docs/running-a-box.md has no recipe for {kind}"
    return found[1]


class Names(AbstractResolver):
    """Every name is this machine."""

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[Any]:
        return [{"hostname": host, "host": "127.0.0.1", "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}]

    async def close(self) -> None: ...


class Proxied:
    """A box behind a proxy, asked over HTTPS at `port`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.address = f"https://{BOX_NAME}:{port}"
        self._trust = ssl.create_default_context(cafile=str(folder / "box.pem"))

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=Names(), ssl=self._trust))

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, str, Any]:
        """Status, body and headers."""

        url = self.address + path

        async def request() -> tuple[int, str, Any]:
            async with self._session() as session, session.request(method, url, data=body, headers=headers) as answer:
                return answer.status, await answer.text(), answer.headers

        return asyncio.run(request())

    def watch(self, **headers: str) -> dict[str, Any]:
        """The first status that the dashboard's socket sends."""

        url = f"{self.address}/api/watch"

        async def read() -> dict[str, Any]:
            async with self._session() as session, session.ws_connect(url, headers=headers) as opened:
                return json.loads((await opened.receive(timeout=TIMEOUT_S)).data)

        return asyncio.run(read())


@contextlib.contextmanager
def serve(folder: Path, command: Callable[[int, int], list[str]], **access: Any) -> Iterator[Proxied]:
    """A box behind the server that `command` starts, which gets its port and the box's."""
    box, given = Box(), {"token": TOKEN, **access}
    service = HttpService(box, box.metrics, Access("127.0.0.1", 0, **given), "box.yaml")
    service.start()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(command(port, service.port), cwd=folder, env={"HOME": str(folder), "PATH": "/usr/bin"})
    try:
        ends = time.monotonic() + TIMEOUT_S
        while True:
            assert process.poll() is None and time.monotonic() < ends, "the proxy does not start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield Proxied(folder, port)
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
        service.stop()


def nginx(folder: Path, server: str) -> Callable[[int, int], list[str]]:
    """The command that runs this `server` block."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    write_certificate(folder)

    def command(port: int, box: int) -> list[str]:
        text = server.replace("443", str(port)).replace("8080", str(box)).replace("/etc/ssl", str(folder))
        (folder / "nginx.conf").write_text(NGINX_MAIN.format(folder=folder) + text + "\n}\n")
        return [program, "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"]

    return command


def caddy(folder: Path, site: str) -> Callable[[int, int], list[str]]:
    """The command that serves this site."""
    program = shutil.which("caddy")
    if program is None:
        pytest.skip("caddy is not installed")
    write_certificate(folder)

    def command(port: int, box: int) -> list[str]:
        text = site.replace(BOX_NAME, f"https://{BOX_NAME}:{port}").replace("8080", str(box))
        options = "{\nadmin off\nauto_https off\n}\n"
        (folder / "Caddyfile").write_text(options + text.replace("/etc/ssl", str(folder)))
        return [program, "run", "--config", "Caddyfile", "--adapter", "caddyfile"]

    return command


@pytest.mark.parametrize(("kind", "command"), [("nginx", nginx), ("caddy", caddy)])
def test_documented_proxy_serves_the_dashboard_with_the_token(kind: str, command: Any, tmp_path: Path) -> None:
    with serve(tmp_path, command(tmp_path, recipe_of(kind)), names=(BOX_NAME,)) as box:
        for path in ("/api/status", "/metrics", "/api/cameras/bridge/frame.jpg"):
            assert box.ask(path)[0] == 401
        assert "asks for its token" in box.ask("/")[1] and box.ask("/api/status", **BEARER)[0] == 200
        own: dict[str, Any] = {"Origin": box.address.rpartition(":")[0]}
        status, _, headers = box.ask("/api/session", "POST", **BEARER, **own)
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert status == 204 and box.watch(Cookie=cookie, **own)["workload"] == "junction"
        assert box.ask("/api/session", "POST", **BEARER, Origin="https://evil.example")[0] == 403
        assert box.ask("/v1/vision/detection", "POST", bytes(2**21), **BEARER)[0] == 415, "a large picture is passed on"


@pytest.mark.parametrize("recipe", NGINX_RECIPES)
def test_usual_nginx_recipe_asks_for_the_token(recipe: str, tmp_path: Path) -> None:
    server = NGINX_BARE.format(
        port=443, box=8080, cert="/etc/ssl/box.pem", key="/etc/ssl/box.key", more=NGINX_RECIPES[recipe]
    )
    with serve(tmp_path, nginx(tmp_path, server)) as box:
        assert box.ask("/api/status")[0] == box.ask("/metrics")[0] == 401
        assert box.ask("/api/status", **BEARER)[0] == 200


def test_box_without_token_refuses_what_comes_through_a_proxy(tmp_path: Path) -> None:
    with serve(tmp_path, caddy(tmp_path, recipe_of("caddy")), token=None) as box:
        assert box.ask("/api/status")[0] == 403


def test_trusted_proxy_makes_the_cookie_secure(tmp_path: Path) -> None:
    trusted = (ipaddress.ip_network("127.0.0.1"),)
    with serve(tmp_path, caddy(tmp_path, recipe_of("caddy")), trusted_proxies=trusted) as box:
        assert "Secure" in box.ask("/api/session", "POST", **BEARER)[2]["Set-Cookie"]
