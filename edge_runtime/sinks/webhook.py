"""The sink `webhook`: each result in a POST request of its own."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from edge_runtime.drawing import draw_snapshot
from edge_runtime.sinks.base import (
    INVALID,
    REFUSED,
    SERVER_ERROR,
    DeliveryError,
    ResultMessage,
    Sink,
    SinkConfig,
    SinkKeys,
)

AGAIN = {408, 425, 429}
"""Refusals that do not last."""
MAX_ANSWER_BYTES = 2**16
SCHEMES = {"http": 80, "https": 443}


def _url(text: str) -> str:
    try:
        url = urllib.parse.urlsplit(text)
        sound = url.scheme in SCHEMES and url.hostname and (url.port is None or url.port > 0)
    except ValueError:
        sound = False
    if not sound or not text.isprintable() or not text.isascii() or " " in text:
        raise ValueError("is no http:// or https:// URL")
    return text


class WebhookKeys(SinkKeys):
    """`url` takes a POST with the record as JSON; each step of that may take `timeout_s`. With `snapshot` the record
    has one key more, `snapshot`: a JPEG in base64.
    """

    url: Annotated[str, AfterValidator(_url)]
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    draw_snapshot: bool = False

    def settled(self, root: Path) -> WebhookConfig:
        return WebhookConfig(self.url, self.timeout_s, self.snapshot)


@dataclass(frozen=True, slots=True)
class WebhookConfig(SinkConfig):
    """The keys as they are; a user and a password in the URL go into a header."""

    url: str = field(repr=False)
    timeout_s: float = 5.0
    draw_snapshot: bool = False

    @property
    def kind(self) -> str:
        return "webhook"

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

    def made(self) -> Webhook:
        return Webhook(self)

    @property
    def reach_s(self) -> float:
        return 2 * self.timeout_s

    def reach(self) -> str | None:
        """As far as that can be told without a POST: whether somebody listens, and who it is over HTTPS."""
        sink = Webhook(self)
        try:
            sink.connect()
        except (OSError, ValueError) as error:
            return f"it does not answer: {getattr(error, 'strerror', None) or error}"
        finally:
            sink.close()
        return None


class Webhook(Sink):
    """Posts over one connection for as long as the server keeps it.

    2xx is delivered; 408, 425, 429 and 5xx are tried again; any other status refuses this result for good.
    """

    def __init__(self, config: WebhookConfig) -> None:
        self._config = config
        url = urllib.parse.urlsplit(config.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(*config.address, timeout=config.timeout_s)
        self._target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._headers = {"Content-Type": "application/json", "User-Agent": "gemel"}
        if url.username is not None:
            user = f"{urllib.parse.unquote(url.username)}:{urllib.parse.unquote(url.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"

    def write(self, parcels: Sequence[ResultMessage]) -> None:
        for done, parcel in enumerate(parcels):
            body = self._body(parcel)
            status = self._post(body)
            if status in AGAIN or status >= 500:
                raise DeliveryError(SERVER_ERROR, f"the server answers {status}", done, answered=True)
            if not 200 <= status < 300:
                raise DeliveryError(REFUSED, f"the server answers {status}", done, for_good=True)

    def connect(self) -> None:
        """Connect, and no more."""
        self._connection.connect()

    def close(self) -> None:
        self._connection.close()

    def _post(self, body: bytes) -> int:
        try:
            return self._once(body)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            # A server may end a connection that it kept; a new one tells whether it is there.
            self._connection.close()
            return self._once(body)

    def _once(self, body: bytes) -> int:
        self._connection.request("POST", self._target, body, self._headers)
        with contextlib.closing(self._connection.getresponse()) as answer:
            if not self._is_read(answer):
                self._connection.close()
            return answer.status

    def _is_read(self, answer: http.client.HTTPResponse) -> bool:
        """Whether that was all; for the rest of an answer that is long or slow nobody waits."""
        ends, left = time.monotonic() + self._config.timeout_s, MAX_ANSWER_BYTES
        while left > 0 and time.monotonic() < ends:
            part = answer.read1(left)
            if not part:
                return True
            left -= len(part)
        return False

    def _body(self, parcel: ResultMessage) -> bytes:
        try:
            picture = draw_snapshot(parcel)
            if picture is None:
                return parcel.text().encode()
            document = {**parcel.record, "snapshot": base64.b64encode(picture).decode()}
            return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
        except ValueError as error:
            raise DeliveryError(INVALID, str(error), for_good=True) from error
