"""Servers that offer bundles: a plain file server (ETag, deltas beside the file), and Eclipse hawkBit's device API.

Nothing that a server says is trusted: sizes are bounded, hosts stay the same, and the updater checks the signature.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.config import UpdateConfig
from edge_runtime.sinks.base import client_context
from models.bundle.delta import apply_update
from models.bundle.signing import read_public_key
from models.errors import InputError, size_text
from models.io import ParseError, describe_problem, open_atomic, parse_json

TIMEOUT_S, DOWNLOAD_TIMEOUT_S = 30.0, 3600.0
MAX_BUNDLE_BYTES, MAX_REPLY_BYTES = 16 * 2**30, 1 << 20
PIECE_BYTES = 1 << 20
DELTA_DIGITS = 12
HINT = "look at the update server"


@dataclass(frozen=True, slots=True)
class Offer:
    """An offered bundle: its `name` at the server, a `tag` by which it is known again, and the server's word on it."""

    name: str
    tag: str | None = None
    address: str = ""
    size: int | None = None
    sha256: str | None = None


class _Refuse(urllib.request.HTTPRedirectHandler):
    """Redirects are errors: a token stays with its server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class UpdateSource(ABC):
    """Finds, downloads and reports on offers; every failure is an InputError that names the server."""

    scheme = "Bearer"

    def __init__(self, config: UpdateConfig) -> None:
        self._config = config
        self._host = urllib.parse.urlsplit(config.url).netloc
        context = client_context(config.ca) if config.url.startswith("https:") else None
        handlers = [] if context is None else [urllib.request.HTTPSHandler(context=context)]
        self._opener = urllib.request.build_opener(_Refuse, *handlers)

    @abstractmethod
    def find(self, tag: str | None) -> Offer | None:
        """What is offered, unless it is known by this tag."""

    @abstractmethod
    def download(self, offer: Offer, into: Path, current: Path, digest: str) -> None:
        """Write the offered bundle to a file; `current` with this SHA-256 is the one that serves."""

    def report(self, offer: Offer, is_good: bool, text: str) -> None:  # noqa: B027 (a file server takes none)
        """Say what has become of an offer."""

    def _open(self, address: str, method: str = "GET", body: Any = None, **headers: str) -> Any:
        """The response; HTTPError for a status that is no success."""
        if urllib.parse.urlsplit(address).netloc != self._host or not address.startswith(("http://", "https://")):
            raise InputError(self._config.url, f"it names another server: {address[:100]}", HINT)
        if self._config.token is not None:
            headers["Authorization"] = f"{self.scheme} {self._config.token}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(address, data, headers, method=method)
        return self._opener.open(request, timeout=TIMEOUT_S)

    def _fetch(self, address: str, into: Path) -> str:
        """Write what is at an address to a file; its SHA-256."""
        digest, nbytes, ends = hashlib.sha256(), 0, time.monotonic() + DOWNLOAD_TIMEOUT_S
        with self._describe(), self._open(address) as response, open_atomic(into, overwrite=True) as file:
            length = response.headers.get("Content-Length")
            while piece := self._read(response):
                nbytes += len(piece)
                if nbytes > MAX_BUNDLE_BYTES or time.monotonic() > ends:
                    problem = f"sends more than {size_text(MAX_BUNDLE_BYTES)}, or takes more than an hour"
                    raise InputError(self._config.url, problem, HINT)
                digest.update(piece)
                file.write(piece)
            if length is not None and length.isdigit() and nbytes != int(length):
                raise InputError(self._config.url, f"sends {nbytes} of {length} bytes", HINT)
        return digest.hexdigest()

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read1(PIECE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise InputError(self._config.url, "the update server stalls or hangs up", HINT) from error

    @contextlib.contextmanager
    def _describe(self) -> Any:
        try:
            yield
        except urllib.error.HTTPError as error:
            raise InputError(self._config.url, f"the update server answers {error.code}", HINT) from error
        except (urllib.error.URLError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or type(error).__name__
            raise InputError(self._config.url, f"the update server cannot be reached: {reason}", HINT) from error
        except (TimeoutError, ConnectionError) as error:
            raise InputError(self._config.url, "the update server stalls or hangs up", HINT) from error


class FileServer(UpdateSource):
    """The bundle is at the URL; `URL.from-DIGITS` beside it is an update of the bundle with these first digits."""

    def find(self, tag: str | None) -> Offer | None:
        known = {} if tag is None else {"If-None-Match": tag}
        with self._describe():
            try:
                with self._open(self._config.url, "HEAD", **known) as response:
                    found = response.headers.get("ETag") or response.headers.get("Last-Modified")
            except urllib.error.HTTPError as error:
                if error.code == 304:
                    return None
                raise
        if found is not None and found == tag:
            return None
        return Offer(self._config.url, found, self._config.url)

    def download(self, offer: Offer, into: Path, current: Path, digest: str) -> None:
        into.unlink(missing_ok=True)
        if not self._apply_delta(offer, into, current, digest):
            self._fetch(offer.address, into)

    def _apply_delta(self, offer: Offer, into: Path, current: Path, digest: str) -> bool:
        """Whether the server has an update of the present bundle, which is applied."""
        delta = into.with_suffix(".delta")
        try:
            self._fetch(f"{offer.address}.from-{digest[:DELTA_DIGITS]}", delta)
            apply_update(current, delta, into)
        except InputError:
            return False
        finally:
            with describe_problem(delta):
                delta.unlink(missing_ok=True)
        return True


class HawkBit(UpdateSource):
    """A controller of Eclipse hawkBit (Direct Device Integration API): the URL is .../TENANT/controller/v1/NAME."""

    scheme = "TargetToken"

    def find(self, tag: str | None) -> Offer | None:
        try:
            return self._find(tag)
        except (AttributeError, TypeError) as error:
            raise InputError(self._config.url, "the answer of the update server has another form", HINT) from error

    def _find(self, tag: str | None) -> Offer | None:
        links = self._get(self._config.url).get("_links", {})
        if (href := _href(links, "cancelAction")) is not None:
            self._confirm_cancel(href)
        href = _href(links, "deploymentBase")
        if href is None:
            return None
        base = self._get(href)
        name = str(base.get("id", ""))
        if not name or name == tag:
            return None
        artifacts = [
            one for chunk in base.get("deployment", {}).get("chunks", []) for one in chunk.get("artifacts", [])
        ]
        for one in artifacts:
            if str(one.get("filename", "")).endswith(".safetensors"):
                address = _href(one.get("_links", {}), "download") or _href(one.get("_links", {}), "download-http")
                sha256, size = one.get("hashes", {}).get("sha256"), one.get("size")
                if address is not None and isinstance(sha256, str) and isinstance(size, int):
                    return Offer(name, name, address, size, sha256)
        offer = Offer(name, name)
        self.report(offer, False, "the deployment has no bundle (.safetensors) with its SHA-256")
        raise InputError(self._config.url, f"deployment {name[:40]} has no bundle with its SHA-256", HINT)

    def download(self, offer: Offer, into: Path, current: Path, digest: str) -> None:
        if offer.sha256 == digest:  # nothing to load
            with describe_problem(into):
                into.write_bytes(current.read_bytes())
            return
        found = self._fetch(offer.address, into)
        if found != offer.sha256 or into.stat().st_size != offer.size:
            self.report(offer, False, "the file is another than the announced one")
            raise InputError(self._config.url, "sends another file than it announces", HINT)

    def report(self, offer: Offer, is_good: bool, text: str) -> None:
        result = {"execution": "closed", "result": {"finished": "success" if is_good else "failure"}, "details": [text]}
        address = f"{self._config.url}/deploymentBase/{urllib.parse.quote(offer.name, safe='')}/feedback"
        with self._describe(), self._open(address, "POST", {"id": offer.name, "status": result}):
            pass

    def _confirm_cancel(self, href: str) -> None:
        number = str(self._get(href).get("id", ""))
        address = f"{self._config.url}/cancelAction/{urllib.parse.quote(number, safe='')}/feedback"
        status = {"execution": "closed", "result": {"finished": "success"}, "details": []}
        with self._describe(), self._open(address, "POST", {"id": number, "status": status}):
            pass

    def _get(self, address: str) -> dict[str, Any]:
        with self._describe(), self._open(address, Accept="application/hal+json") as response:
            data = response.read(MAX_REPLY_BYTES + 1)
        try:
            found = parse_json(data[:MAX_REPLY_BYTES], foreign=True)
        except ParseError as error:
            raise InputError(self._config.url, f"the update server answers no JSON: {error}", HINT) from error
        if not isinstance(found, dict) or len(data) > MAX_REPLY_BYTES:
            raise InputError(self._config.url, "the update server answers no JSON object", HINT)
        return found


def _href(links: Any, name: str) -> str | None:
    found = links.get(name) if isinstance(links, dict) else None
    href = found.get("href") if isinstance(found, dict) else None
    return href if isinstance(href, str) else None


def check_updates(config: UpdateConfig) -> None:
    """Raise InputError where a file that an update needs is none."""
    read_public_key(config.public_key)
    if config.ca is not None:
        client_context(config.ca)


def make_source(config: UpdateConfig) -> UpdateSource:
    """The source of a config."""
    return HawkBit(config) if config.kind == "hawkbit" else FileServer(config)
