"""Servers that offer bundles: a plain file server (deltas beside the file), and Eclipse hawkBit's device API.

Nothing that a server says is trusted: sizes and times are bounded, hosts stay the same, what it calls a version is
known by a digest alone, and the updater checks the signature.
"""

from __future__ import annotations

import hashlib
import os
import urllib.parse
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gemel.edge_runtime.config import BoxConfig, UpdateConfig
from gemel.edge_runtime.sinks.base import client_context
from gemel.edge_runtime.update_exchange import HINT, UpdateClient
from gemel.edge_runtime.update_files import SizeLimit, check_replaceable, check_size
from gemel.edge_runtime.update_history import Deployment
from gemel.edge_runtime.update_reports import UpdateReport
from gemel.models.bundle.delta import apply_update
from gemel.models.bundle.signing import read_public_key
from gemel.models.documents import ParseError, parse_json
from gemel.models.errors import InputError
from gemel.models.io import open_atomic

DELTA_DIGITS = 12
BUNDLE_SUFFIX, PART_SUFFIX = ".safetensors", ".part"
_DEPLOYMENT = TypeAdapter(Deployment)


@dataclass(frozen=True, slots=True)
class Offer:
    """An offered bundle. `tag` is a digest of the server's word for this version, None where it has none.

    `deployment` is its name in reports; `nbytes` and `sha256` are what the server announces.
    """

    tag: str | None = None
    deployment: str | None = None
    address: str = ""
    nbytes: int | None = None
    sha256: str | None = None


class CutDownload(InputError):
    """A download that broke off, and goes on from there at the next try."""


class WrongOffer(InputError):
    """An offer that cannot become right, which the box reports to the server."""

    deployment: str | None = None

    @classmethod
    def of(cls, offer: Offer, where: str | Path, problem: str, hint: str) -> WrongOffer:
        """The error of this offer."""
        error = cls(where, problem, hint)
        error.deployment = offer.deployment
        return error


def tag_digest(text: str) -> str:
    """What is kept of a server's word."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


class UpdateSource(ABC):
    """Finds, downloads and reports on offers; every failure is an InputError that names the server."""

    scheme = "Bearer"

    def __init__(self, config: UpdateConfig) -> None:
        self._url = config.url
        authorization = None if config.token is None else f"{self.scheme} {config.token}"
        self._client = UpdateClient(config.url, authorization, config.ca)

    @abstractmethod
    def find(self) -> Offer | None:
        """What is offered, known already or not."""

    @abstractmethod
    def download(self, offer: Offer, into: Path, current: Path, digest: str, limit: SizeLimit) -> None:
        """Write the offered bundle to a file; `current` with this SHA-256 is the one that serves."""

    def report(self, report: UpdateReport) -> None:  # noqa: B027 (a file server takes none)
        """Say what has become of an offer."""

    def _fetch(self, address: str, into: Path, limit: SizeLimit) -> tuple[int, str]:
        """Write what is at an address to a file; its bytes and its SHA-256."""
        digest = hashlib.sha256()
        with open_atomic(into, overwrite=True) as file:

            def write(piece: bytes) -> None:
                digest.update(piece)
                file.write(piece)

            nbytes = self._client.download(address, write, limit)
        return nbytes, digest.hexdigest()


class FileServer(UpdateSource):
    """The bundle is at the URL; `URL.from-DIGITS` beside it is an update of the bundle with these first digits."""

    _etag: str | None = None

    def find(self) -> Offer | None:
        reply = self._client.ask_head(self._url, self._etag)
        self._etag = reply.headers.get("etag")
        word = self._etag or reply.headers.get("last-modified")
        return Offer(None if word is None else tag_digest(word), None, self._url, reply.length)

    def download(self, offer: Offer, into: Path, current: Path, digest: str, limit: SizeLimit) -> None:
        into.unlink(missing_ok=True)
        if self._apply_delta(offer, into, current, digest, limit):
            return
        nbytes = self._resume(offer, into, limit)
        if offer.nbytes is not None and nbytes != offer.nbytes:
            raise InputError(self._url, f"sends {nbytes} bytes and announces {offer.nbytes}", HINT)

    def _resume(self, offer: Offer, into: Path, limit: SizeLimit) -> int:
        """Download what is missing of an offer with a strong ETag, else all of it; its bytes."""
        tag = self._etag or ""
        if not tag.startswith('"') or offer.tag is None:
            return self._fetch(offer.address, into, limit)[0]
        part = into.with_name(f"{offer.tag[:DELTA_DIGITS]}{PART_SUFFIX}")
        for path in into.parent.glob(f"*{PART_SUFFIX}"):
            if path != part:
                path.unlink()
        before = part.stat().st_size if part.exists() else 0
        try:
            with open(part, "ab") as file:
                nbytes = self._client.resume(offer.address, file, tag, limit)
                os.fsync(file.fileno())
        except InputError as error:
            nbytes = part.stat().st_size
            if offer.nbytes is None or nbytes >= offer.nbytes:
                part.unlink()
            elif nbytes > before:
                raise CutDownload(error.where, error.problem, error.hint) from error
            raise
        os.replace(part, into)
        return nbytes

    def _apply_delta(self, offer: Offer, into: Path, current: Path, digest: str, limit: SizeLimit) -> bool:
        """Whether the server has an update of the present bundle, which is applied."""
        delta = into.with_suffix(".delta")
        try:
            self._fetch(f"{offer.address}.from-{digest[:DELTA_DIGITS]}", delta, limit)
            apply_update(current, delta, into)
            check_size(self._url, into.stat().st_size, limit)
        except InputError:
            into.unlink(missing_ok=True)
            return False
        finally:
            delta.unlink(missing_ok=True)
        return True


class HawkBit(UpdateSource):
    """A controller of Eclipse hawkBit (Direct Device Integration API): the URL is .../TENANT/controller/v1/NAME."""

    scheme = "TargetToken"

    def find(self) -> Offer | None:
        try:
            return self._find()
        except (AttributeError, TypeError) as error:
            raise InputError(self._url, "the answer of the update server has another form", HINT) from error

    def _find(self) -> Offer | None:
        links = self._get(self._url).get("_links", {})
        if (href := _href(links, "cancelAction")) is not None:
            self._confirm_cancel(href)
        href = _href(links, "deploymentBase")
        if href is None:
            return None
        base = self._get(href)
        name = _deployment_name(base.get("id"))
        if name is None:
            raise InputError(self._url, "the deployment has no id of letters and digits", HINT)
        offer = Offer(tag_digest(name), name)
        artifacts = [
            artifact
            for chunk in base.get("deployment", {}).get("chunks", [])
            for artifact in chunk.get("artifacts", [])
        ]
        for artifact in artifacts:
            if str(artifact.get("filename", "")).endswith(BUNDLE_SUFFIX):
                address = self._find_address(artifact.get("_links", {}))
                sha256, nbytes = artifact.get("hashes", {}).get("sha256"), artifact.get("size")
                if address is not None and isinstance(sha256, str) and type(nbytes) is int and nbytes >= 0:
                    return Offer(offer.tag, name, address, nbytes, sha256)
        raise WrongOffer.of(offer, self._url, f"deployment {name} has no bundle with its SHA-256", HINT)

    def _find_address(self, links: Any) -> str | None:
        """The artifact's address; one without encryption only where the config has none either."""
        plain = _href(links, "download-http") if self._url.startswith("http://") else None
        return _href(links, "download") or plain

    def download(self, offer: Offer, into: Path, current: Path, digest: str, limit: SizeLimit) -> None:
        if offer.sha256 == digest:  # nothing to load
            with open(current, "rb") as data, open_atomic(into, overwrite=True) as file:
                while piece := data.read(1 << 20):
                    file.write(piece)
            return
        check_size(self._url, offer.nbytes or 0, limit)
        announced = SizeLimit(min(limit.nbytes, offer.nbytes or 0), "the server announces")
        nbytes, sha256 = self._fetch(offer.address, into, announced)
        if sha256 != offer.sha256 or nbytes != offer.nbytes:
            raise WrongOffer.of(offer, self._url, "sends another file than it announces", HINT)

    def report(self, report: UpdateReport) -> None:
        finished = "success" if report.is_good else "failure"
        status = {"execution": "closed", "result": {"finished": finished}, "details": [report.text]}
        self._give_feedback("deploymentBase", report.deployment, status)

    def _confirm_cancel(self, href: str) -> None:
        number = _deployment_name(self._get(href).get("id"))
        if number is not None:
            self._give_feedback(
                "cancelAction", number, {"execution": "closed", "result": {"finished": "success"}, "details": []}
            )

    def _give_feedback(self, kind: str, name: str, status: dict[str, Any]) -> None:
        address = f"{self._url}/{kind}/{urllib.parse.quote(name, safe='')}/feedback"
        self._client.ask(address, "POST", {"id": name, "status": status})

    def _get(self, address: str) -> dict[str, Any]:
        reply = self._client.ask(address, accept="application/hal+json")
        try:
            answer = parse_json(reply.body, foreign=True)
        except ParseError as error:
            raise InputError(self._url, f"the update server answers no JSON: {error}", HINT) from error
        if not isinstance(answer, dict):
            raise InputError(self._url, "the update server answers no JSON object", HINT)
        return answer


def _href(links: Any, name: str) -> str | None:
    link = links.get(name) if isinstance(links, dict) else None
    href = link.get("href") if isinstance(link, dict) else None
    return href if isinstance(href, str) else None


def _deployment_name(given: Any) -> str | None:
    try:
        return _DEPLOYMENT.validate_python(str(given)) if isinstance(given, str | int) else None
    except ValidationError:
        return None


def check_updates(config: UpdateConfig) -> None:
    """Raise InputError where a file that an update needs is none."""
    read_public_key(config.public_key)
    if config.ca is not None:
        client_context(config.ca)


def check_update_folder(config: BoxConfig) -> None:
    """Raise InputError where the box pulls updates and its bundle's folder cannot be written."""
    if config.updates is not None:
        check_replaceable(config.configured_bundle or config.bundle)


def make_source(config: UpdateConfig) -> UpdateSource:
    """The source of a config."""
    return HawkBit(config) if config.kind == "hawkbit" else FileServer(config)
