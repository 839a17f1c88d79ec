"""Servers of updates for tests: files with ETags."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class UpdateServer(ThreadingHTTPServer):
    """Serves `files` by path, with `tags` in place of its own ETags; `asked` are the requests, `statuses` the answers.

    `head_status` answers HEAD where it knows GET alone. `fault` makes it misbehave. Of a bundle: `cut` and `stall`
    after half of it, `endless` without a length, `long` with more than it announces. Of `slow` kinds of requests it
    drips the head, a byte each `drip_s`.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.redirects: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.statuses: list[int] = []
        self.tokens: set[str | None] = set()
        self.fault, self.slow, self.drip_s = "", set[str](), 0.02
        self.sent_bytes = self.head_status = 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what some tests are about."""

    def downloads(self, path: str = "/box.safetensors") -> int:
        """The number of requests for a whole file."""
        return self.asked.count(("GET", path))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: UpdateServer

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _drip_head(self) -> None:
        """Never come to the end of the head, where this kind of request is slow."""
        with contextlib.suppress(OSError):
            if self.command in self.server.slow:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            while self.command in self.server.slow:
                self.wfile.write(b"a")
                time.sleep(self.server.drip_s)

    def _answer(self, with_body: bool) -> None:
        self.server.asked.append((self.command, self.path))
        self.server.tokens.add(self.headers["Authorization"])
        self._drip_head()
        if self.command == "HEAD" and self.server.head_status:
            self._send(self.server.head_status, b"", False)
            return
        if self.path in self.server.redirects:
            self._send(302, b"", Location=self.server.redirects[self.path])
            return
        data = self.server.files.get(self.path)
        if data is None:
            self._send(404, b"")
            return
        tag = self.server.tags.get(self.path, f'"{hashlib.sha256(data).hexdigest()[:16]}"')
        if self.headers["If-None-Match"] == tag:
            self._send(304, b"", False, ETag=tag)
            return
        begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        if begin and self.headers["If-Range"] == tag:
            self._send(206, data[begin:], with_body, ETag=tag, **{"Content-Range": f"bytes {begin}-/{len(data)}"})
            return
        self._send(200, data, with_body, ETag=tag)

    def _send(self, status: int, data: bytes, with_body: bool = True, **headers: str) -> None:
        fault = self.server.fault if len(data) > 1000 else ""
        self.server.statuses.append(status)
        self.send_response(status)
        if fault != "endless" and not (fault == "long" and with_body):
            self.send_header("Content-Length", str(len(data)))
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        self.close_connection = bool(fault)
        if not with_body:
            return
        if fault in ("cut", "stall"):
            self.wfile.write(data[: len(data) // 2])
            if fault == "stall":
                time.sleep(5.0)
        elif fault == "endless":
            self._send_endlessly()
        else:
            self.wfile.write(data + bytes(1) if fault == "long" else data)

    def _send_endlessly(self) -> None:
        with contextlib.suppress(OSError):
            while self.server.sent_bytes < 1 << 30:
                self.server.sent_bytes += self.wfile.write(bytes(1 << 16))

    def log_message(self, *_: Any) -> None: ...
