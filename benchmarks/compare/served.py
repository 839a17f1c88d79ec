"""A server in a process of its own, and a client of it that needs nothing but the standard library and NumPy."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

START_S = 120
BOUNDARY = "frame-of-a-camera"


def draw_port() -> int:
    """A free port of the loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """A started server on a drawn port, which is PORT of its environment and replaces PORT in its config.

    Waits until `health` answers 200. `close` ends it and what it started.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], health: str, config: Path | None = None
    ) -> None:
        port = draw_port()
        if config is not None:
            config.write_text(config.read_text().replace("PORT", f"127.0.0.1:{port}"))
        environment = {**os.environ, **environment, "PORT": str(port), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        self.pid = self.process.pid
        self.client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        end = time.monotonic() + START_S
        while self._status(health) != 200:
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                assert self.process.stderr is not None
                raise SystemExit(f"{command}: did not start: {self.process.stderr.read()[-2000:].decode()}")
            time.sleep(0.2)

    def _status(self, path: str) -> int:
        try:
            self.client.request("GET", path)
            response = self.client.getresponse()
            response.read()
            return response.status
        except OSError:
            self.client.close()
            return 0

    def _ask(self, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
        self.client.request("POST", path, body, dict(headers))
        response = self.client.getresponse()
        answer = response.read()
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {answer[:300]!r}")
        return json.loads(answer)

    def ask_form(self, path: str, fields: Mapping[str, str], frame: bytes) -> list[np.ndarray]:
        """The arrays of an answer to a form with these fields and a frame."""
        start = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name="
        parts = [f'{start}"{name}"\r\n\r\n{text}\r\n'.encode() for name, text in fields.items()]
        parts += [f'{start}"frame"; filename="frame"\r\n\r\n'.encode(), frame, f"\r\n--{BOUNDARY}--\r\n".encode()]
        headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        outputs = self._ask(path, b"".join(parts), headers)["outputs"]
        return [np.frombuffer(base64.b64decode(data), np.float32).reshape(shape) for data, shape in outputs]

    def ask_kserve(self, query: str, picture: np.ndarray, token: str) -> Any:
        """The answer to a picture uint8 RGB (H, W, 3) by KServe's protocol, its pixels after the JSON."""
        tensor = {"name": "image", "datatype": "UINT8", "shape": picture.shape,
                  "parameters": {"binary_data_size": picture.size}}  # fmt: skip
        head = json.dumps({"inputs": [tensor]}).encode()
        headers = {"Authorization": f"Bearer {token}", "Inference-Header-Content-Length": str(len(head))}
        return self._ask(f"/v2/models/{query}/infer", head + picture.tobytes(), headers)

    def close(self) -> None:
        """End the server and its processes."""
        self.client.close()
        if self.process.poll() is None:
            os.killpg(self.pid, 15)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, 9)
