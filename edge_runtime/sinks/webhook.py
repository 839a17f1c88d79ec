"""The sink `webhook`: each result is one POST request."""

from __future__ import annotations

import base64
import http.client
import urllib.parse
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from edge_runtime.drawing import draw_message
from edge_runtime.sinks.base import DeliveryError, ResultMessage, Sink, SinkConfig, Undelivered

RETRIED_STATUSES = {408, 425, 429}
MAX_RESPONSE_BYTES = 2**16
SCHEMES = {"http": 80, "https": 443}


def _check_url(text: str) -> str:
    try:
        url = urllib.parse.urlsplit(text)
        is_valid = url.scheme in SCHEMES and url.hostname and (url.port is None or url.port > 0)
    except ValueError:
        is_valid = False
    if not is_valid or not text.isprintable() or not text.isascii() or " " in text:
        raise ValueError("is no http:// or https:// URL")
    return text


class WebhookConfig(SinkConfig):
    """`url` takes a POST with the record as JSON; each step of that may take `timeout_s`. With `snapshot` the record
    has one key more, `snapshot`: a JPEG in base64. User and password of the URL go into a header.
    """

    kind: Literal["webhook"] = "webhook"
    url: Annotated[str, AfterValidator(_check_url), Field(repr=False)]
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    snapshot: bool = False

    @property
    def wants_images(self) -> bool:
        return self.snapshot

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        url = urllib.parse.urlsplit(self.url)
        return url.hostname or "", url.port or SCHEMES[url.scheme]

    @property
    def name(self) -> str:
        return "webhook {}:{}".format(*self.address)

    def build(self) -> Webhook:
        return Webhook(self)


class Webhook(Sink):
    """Posts over one connection while the server keeps it open.

    2xx is delivered; 408, 425, 429 and 5xx are retried; any other status rejects the result for good.
    """

    def __init__(self, config: WebhookConfig) -> None:
        url = urllib.parse.urlsplit(config.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(*config.address, timeout=config.timeout_s)
        self._target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._headers = {"Content-Type": "application/json", "User-Agent": "gemel"}
        if url.username is not None:
            user = f"{urllib.parse.unquote(url.username)}:{urllib.parse.unquote(url.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"

    def write(self, messages: Sequence[ResultMessage]) -> None:
        for message in messages:
            picture = draw_message(message)
            more = {} if picture is None else {"snapshot": base64.b64encode(picture).decode()}
            status = self._post(message.to_text(**more).encode())
            if status in RETRIED_STATUSES or status >= 500:
                raise DeliveryError(Undelivered.SERVER_ERROR, f"the server answers {status}", answered=True)
            if not 200 <= status < 300:
                raise DeliveryError(Undelivered.REFUSED, f"the server answers {status}", permanent=True)

    def connect(self) -> None:
        """Connect, over HTTPS with the server's certificate."""
        self._connection.connect()

    def close(self) -> None:
        self._connection.close()

    def _post(self, body: bytes) -> int:
        try:
            return self._post_once(body)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            self.close()  # a server may end a connection that was kept open
            return self._post_once(body)

    def _post_once(self, body: bytes) -> int:
        self._connection.request("POST", self._target, body, self._headers)
        with self._connection.getresponse() as response:
            if response.length is None or response.length <= MAX_RESPONSE_BYTES:
                response.read(MAX_RESPONSE_BYTES)
            if not response.isclosed():
                self.close()
            return response.status
