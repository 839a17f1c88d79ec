"""A client of a box's port for Frigate's detector `zmq`, in that detector's protocol."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.edge_runtime.local_box import LocalBox

TIMEOUT_MS = 60_000


def endpoint_of(box: LocalBox) -> str:
    """The address of a box's port."""
    port = box.service._detector_port
    assert port is not None
    return port.endpoint


class Client:
    """A REQ socket as Frigate's detector has it."""

    def __init__(self, endpoint: str) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self._socket.connect(endpoint)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def ask(self, header: Any, *parts: bytes) -> bytes:
        """The one part of the answer."""
        self.send(header, *parts)
        (answer,) = self._socket.recv_multipart()
        return answer

    def send(self, header: Any, *parts: bytes) -> None:
        """Send and read nothing."""
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        self._socket.send_multipart([text, *parts])

    def open(self, name: str) -> dict[str, Any]:
        """Ask for a model."""
        return json.loads(self.ask({"model_request": True, "model_name": name}))

    def detect(self, pixels: np.ndarray) -> np.ndarray:
        """The boxes of a tensor; fails where the answer is an error."""
        header = {"shape": list(pixels.shape), "dtype": pixels.dtype.name, "model_type": "yologeneric"}
        answer = self.ask(header, pixels.tobytes())
        assert len(answer) == 480, answer
        return np.frombuffer(answer, np.float32).reshape(20, 6)
