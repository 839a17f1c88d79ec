"""A real HTTP server of single pictures and of what else is found behind such addresses, with logins."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from PIL import Image

from tests.edge_runtime.tiny import picture

if TYPE_CHECKING:
    from typing_extensions import Self

REALM, NONCE = "camera", "abc123"
SIZE = (64, 48)


def encode_picture(kind: str = "JPEG", seed: int = 0) -> bytes:
    """A picture as the bytes of a file."""
    out = io.BytesIO()
    Image.fromarray(picture(seed, *SIZE)).save(out, kind)
    return out.getvalue()


class PictureServer(ThreadingHTTPServer):
    """Answers every path with `status`, `kind` and `body`; `moved` sends to another path first.

    With a `login` (user, password) the `scheme` Basic or Digest is demanded. `asked` has the path of every request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.kind, self.body = 200, "image/jpeg", encode_picture()
        self.login: tuple[str, str] | None = None
        self.scheme = "Basic"
        self.moved: str | None = None
        self.length: int | None = None
        self.asked: list[str] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def handle_error(self, *_: Any) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/cgi/snap.jpg?channel=1"


class Handler(BaseHTTPRequestHandler):
    server: PictureServer

    def do_GET(self) -> None:
        server = self.server
        server.asked.append(self.path)
        if server.login is not None and not self._is_welcome(*server.login):
            digest = f', nonce="{NONCE}", qop="auth"' if server.scheme == "Digest" else ""
            self._send(401, {"WWW-Authenticate": f'{server.scheme} realm="{REALM}"{digest}'}, b"")
        elif server.moved is not None and self.path != server.moved:
            self._send(302, {"Location": server.moved}, b"")
        else:
            self._send(server.status, {"Content-Type": server.kind}, server.body, server.length)

    def _is_welcome(self, user: str, password: str) -> bool:
        given = self.headers.get("Authorization", "")
        if self.server.scheme == "Basic":
            return given == "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        keys = dict(re.findall(r'(\w+)="?([^",]*)"?', given))
        first, second = (
            hashlib.md5(text.encode()).hexdigest() for text in (f"{user}:{REALM}:{password}", f"GET:{self.path}")
        )
        rest = ":".join([NONCE, keys.get("nc", ""), keys.get("cnonce", ""), "auth", second])
        return keys.get("response") == hashlib.md5(f"{first}:{rest}".encode()).hexdigest()

    def _send(self, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...
