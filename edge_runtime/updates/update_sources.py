"""A file server that offers bundles, with deltas beside the file.

Nothing that a server says is trusted: sizes and times are bounded, hosts stay the same, what it calls a version is
known by a digest alone, and the updater checks the signature.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from gemel.edge_runtime.life.config import BoxConfig, UpdateConfig
from gemel.edge_runtime.sinks.base import client_context
from gemel.edge_runtime.updates.update_exchange import HINT, UpdateClient
from gemel.edge_runtime.updates.update_files import SizeLimit, check_replaceable, check_size
from gemel.models.bundle.delta import apply_update
from gemel.models.bundle.signing import read_public_key
from gemel.models.errors import InputError
from gemel.models.files.io import open_atomic

DELTA_DIGITS = 12
PART_SUFFIX = ".part"


@dataclass(frozen=True, slots=True)
class Offer:
    """An offered bundle. `tag` is a digest of the server's word for this version, None where it has none.

    `nbytes` is what the server announces.
    """

    tag: str | None
    nbytes: int | None


class CutDownload(InputError):
    """A download that broke off, and goes on from there at the next try."""


def tag_digest(text: str) -> str:
    """What is kept of a server's word."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


class FileServer:
    """The bundle is at the URL; `URL.from-DIGITS` beside it is an update of the bundle with these first digits.

    Every failure is an InputError that names the server.
    """

    def __init__(self, config: UpdateConfig) -> None:
        self._url = config.url
        authorization = None if config.token is None else f"Bearer {config.token}"
        self._client = UpdateClient(config.url, authorization, config.ca)
        self._etag: str | None = None

    def find(self) -> Offer:
        """What is offered, known already or not."""
        reply = self._client.ask_head(self._url, self._etag)
        self._etag = reply.headers.get("etag")
        word = self._etag or reply.headers.get("last-modified")
        return Offer(None if word is None else tag_digest(word), reply.length)

    def download(self, offer: Offer, into: Path, current: Path, digest: str, limit: SizeLimit) -> None:
        """Write the offered bundle to a file; `current` with this SHA-256 is the one that serves."""
        into.unlink(missing_ok=True)
        if self._apply_delta(into, current, digest, limit):
            return
        nbytes = self._resume(offer, into, limit)
        if offer.nbytes is not None and nbytes != offer.nbytes:
            raise InputError(self._url, f"sends {nbytes} bytes and announces {offer.nbytes}", HINT)

    def _resume(self, offer: Offer, into: Path, limit: SizeLimit) -> int:
        """Download what is missing of an offer with a strong ETag, else all of it; its bytes."""
        tag = self._etag or ""
        if not tag.startswith('"') or offer.tag is None:
            return self._fetch(self._url, into, limit)
        part = into.with_name(f"{offer.tag[:DELTA_DIGITS]}{PART_SUFFIX}")
        for path in into.parent.glob(f"*{PART_SUFFIX}"):
            if path != part:
                path.unlink()
        before = part.stat().st_size if part.exists() else 0
        try:
            with open(part, "ab") as file:
                nbytes = self._client.resume(self._url, file, tag, limit)
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

    def _fetch(self, address: str, into: Path, limit: SizeLimit) -> int:
        """Write what is at an address to a file; its bytes."""
        with open_atomic(into, overwrite=True) as file:
            return self._client.download(address, file.write, limit)

    def _apply_delta(self, into: Path, current: Path, digest: str, limit: SizeLimit) -> bool:
        """Whether the server has an update of the present bundle, which is applied."""
        delta = into.with_suffix(".delta")
        try:
            self._fetch(f"{self._url}.from-{digest[:DELTA_DIGITS]}", delta, limit)
            apply_update(current, delta, into)
            check_size(self._url, into.stat().st_size, limit)
        except InputError:
            into.unlink(missing_ok=True)
            return False
        finally:
            delta.unlink(missing_ok=True)
        return True


def check_updates(config: UpdateConfig) -> None:
    """Raise InputError where a file that an update needs is none."""
    read_public_key(config.public_key)
    if config.ca is not None:
        client_context(config.ca)


def check_update_folder(config: BoxConfig) -> None:
    """Raise InputError where the box pulls updates and its bundle's folder cannot be written."""
    if config.updates is not None:
        check_replaceable(config.configured_bundle or config.bundle)
