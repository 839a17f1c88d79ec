"""Servers of updates for tests: files with ETags, and the parts of hawkBit's device API that a box uses."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class UpdateServer(ThreadingHTTPServer):
    """Serves `files` by path; `asked` are the requests, `fault` (cut, stall) makes it misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.posted: list[tuple[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.fault = ""
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def offer_by_hawkbit(self, name: str, bundle: bytes, **wrong: Any) -> None:
        """Deployment `name` of this bundle."""
        base = f"{self.address}/D/controller/v1/box"
        deployment = f"{base}/deploymentBase/{name}"
        self.files["/bundle.safetensors"] = bundle
        links = {"download": {"href": f"{self.address}/bundle.safetensors"}}
        artifact = {"filename": "box.safetensors", "size": len(bundle), "_links": links,
                    "hashes": {"sha256": hashlib.sha256(bundle).hexdigest()}, **wrong}  # fmt: skip
        chunks = [{"part": "bApp", "artifacts": [artifact]}]
        self._set(
            base, {"config": {"polling": {"sleep": "00:05:00"}}, "_links": {"deploymentBase": {"href": deployment}}}
        )
        self._set(deployment, {"id": name, "deployment": {"download": "forced", "chunks": chunks}})

    def _set(self, address: str, value: Any) -> None:
        self.files[address.removeprefix(self.address)] = json.dumps(value).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: UpdateServer

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posted.append((self.path, body))
        self._send(200, b"")

    def _answer(self, with_body: bool) -> None:
        self.server.asked.append((self.command, self.path))
        self.server.tokens.add(self.headers["Authorization"])
        data = self.server.files.get(self.path)
        if data is None:
            self._send(404, b"")
            return
        tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        if self.headers["If-None-Match"] == tag:
            self._send(304, b"", ETag=tag)
            return
        self._send(200, data, with_body, ETag=tag)

    def _send(self, status: int, data: bytes, with_body: bool = True, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if with_body and self.server.fault and len(data) > 1000:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            if self.server.fault == "stall":
                time.sleep(5.0)
            self.close_connection = True
        elif with_body:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...
