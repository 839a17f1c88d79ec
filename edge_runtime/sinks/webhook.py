"""The sink `webhook`: each result is one POST request."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import logging
import math
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from gemel.edge_runtime.frames.drawing import draw_message
from gemel.edge_runtime.sinks.base import (
    DeliveryError,
    ResultMessage,
    Sink,
    SinkConfig,
    Undelivered,
    check_authorities,
    client_context,
)

if TYPE_CHECKING:
    from typing_extensions import Self

MESSAGE_FAULTS = {400, 406, 411, 413, 414, 415, 422, 431}
"""Statuses that reject this result: it is not sent again."""
PICTURE_FAULTS = {413, 415, 422}
"""Those that a picture may be the cause of: the result is sent again without."""
UNAUTHORIZED = {401, 403, 407, 511}
BUSY = {408, 425, 429, 502, 503, 504}
"""Statuses that no result can be the cause of: it is sent again until it is taken."""
MAX_WAIT_S = 300.0
"""Of what a server asks for by Retry-After."""
FRAMING = {"content-length", "transfer-encoding", "connection", "expect"}
"""Headers that say where a request ends."""
SIGNATURE_HEADER = "X-Hub-Signature-256"
MAX_RESPONSE_BYTES = 2**16
log = logging.getLogger("gemel.run")
SCHEMES = {"http": 80, "https": 443}


def _check_header(name: str) -> str:
    if name.lower() in FRAMING:
        raise ValueError("is sent by itself, as the body demands: leave it out")
    return name


_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}$"), AfterValidator(_check_header)]
_HeaderText = Annotated[str, Field(pattern=r"^[ -~]{0,4000}$")]


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
    """Each result is a POST of JSON to a URL.

    `url` takes a POST with the record as JSON; each step of that may take `timeout_s`. With `snapshot` the record
    has one key more, `snapshot`: a JPEG in base64. User and password of the URL go into a header.

    `headers` are sent too. `ca` names the authorities that HTTPS trusts in place of the system's. With a `secret` the
    header X-Hub-Signature-256 holds `sha256=` and the HMAC-SHA256 of the body in hex.
    """

    kind: Literal["webhook"] = "webhook"
    url: Annotated[str, AfterValidator(_check_url), Field(repr=False)]
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    snapshot: bool = False
    headers: Annotated[dict[_HeaderName, _HeaderText], Field(max_length=32)] = Field(default_factory=dict, repr=False)
    ca: Path | None = None
    secret: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(default=None, repr=False)

    @model_validator(mode="after")
    def _check_ca(self) -> Self:
        check_authorities(self.ca, self.url)
        return self

    def resolve(self, root: Path, box: str | None) -> Self:
        return self.model_copy(update={"ca": None if self.ca is None else root / self.ca})

    def check(self) -> None:
        if self.ca is not None:
            client_context(self.ca)

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

    2xx is delivered. A status that names a fault of the result rejects it; 500 and the like, which one result may
    cause, are retried a limited number of times; all others are retried until the server takes the result. Where a
    result is taken without its picture and not with it, pictures of that size are left out from then on.
    """

    def __init__(self, config: WebhookConfig) -> None:
        url = urllib.parse.urlsplit(config.url)
        self._name, self._max_picture = config.name, math.inf
        self._secret = config.secret
        if url.scheme == "https":
            context = client_context(config.ca)
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                *config.address, timeout=config.timeout_s, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(*config.address, timeout=config.timeout_s)
        self._target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._headers = {"Content-Type": "application/json", "User-Agent": "gemel"}
        if url.username is not None:
            user = f"{urllib.parse.unquote(url.username)}:{urllib.parse.unquote(url.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        self._headers |= config.headers

    def write(self, messages: Sequence[ResultMessage]) -> None:
        for message in messages:
            picture = draw_message(message)
            record = body = message.to_text().encode()
            if picture is not None and len(picture) < self._max_picture:
                body = record[:-1] + b',"snapshot":"' + base64.b64encode(picture) + b'"}'
            status, wait_s = self._post(body)
            if status in PICTURE_FAULTS and picture is not None and body is not record:
                refusal = status
                status, wait_s = self._post(record)
                if 200 <= status < 300:
                    if self._max_picture == math.inf:
                        text = "the server answers %d to pictures of %d bytes; they are left out, results go on"
                        log.warning(f"sink %s: {text}", self._name, refusal, len(picture))
                    self._max_picture = len(picture)
            if not 200 <= status < 300:
                raise status_error(status, wait_s)

    def connect(self) -> None:
        """Connect, over HTTPS with the server's certificate."""
        self._connection.connect()

    def close(self) -> None:
        self._connection.close()

    def _post(self, body: bytes) -> tuple[int, float]:
        try:
            return self._post_once(body)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            self.close()  # a server may end a connection that was kept open
            return self._post_once(body)

    def _post_once(self, body: bytes) -> tuple[int, float]:
        """The status, and for how long the server asks to be left alone."""
        signature = {}
        if self._secret is not None:
            digest = hmac.new(self._secret.encode(), body, hashlib.sha256).hexdigest()
            signature[SIGNATURE_HEADER] = f"sha256={digest}"
        self._connection.request("POST", self._target, body, {**self._headers, **signature})
        with self._connection.getresponse() as response:
            if response.length is None or response.length <= MAX_RESPONSE_BYTES:
                response.read(MAX_RESPONSE_BYTES)
            if not response.isclosed():
                self.close()
            return response.status, _wait_s(response.headers.get("Retry-After", ""))


def status_error(status: int, wait_s: float = 0.0) -> DeliveryError:
    """The failure behind a status that is no success."""
    text = f"the server answers {status}"
    if status in MESSAGE_FAULTS:
        return DeliveryError(Undelivered.REFUSED, text, permanent=True)
    if status in UNAUTHORIZED:
        return DeliveryError(Undelivered.UNAUTHORIZED, text, keeps_open=True, wait_s=wait_s)
    if status in BUSY:
        reason = Undelivered.THROTTLED if status in (425, 429) else Undelivered.SERVER_ERROR
        return DeliveryError(reason, text, keeps_open=True, wait_s=wait_s)
    if status >= 500:
        return DeliveryError(Undelivered.SERVER_ERROR, text, answered=True, wait_s=wait_s)
    return DeliveryError(Undelivered.NOT_FOUND, text, keeps_open=True, wait_s=wait_s)


def _wait_s(header: str) -> float:
    return min(MAX_WAIT_S, float(header)) if header.isascii() and header.isdigit() else 0.0
