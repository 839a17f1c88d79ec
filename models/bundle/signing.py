"""Signatures of bundles: Ed25519 (RFC 8032) over the header, which names every tensor by its content.

A signed bundle has the metadata keys `gemel.signature`, 128 hex digits, and `gemel.release`: a number that rises with
each release, and a date until which it is meant to serve. The signed text is the header as our writer would write it
with zeros in place of the digits, so it covers the whole header and every tensor whose name is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemel.models.bundle.format import CHUNK_BYTES, Header, encode_header
from gemel.models.bundle.reader import Bundle, open_bundle
from gemel.models.errors import BundleError, InputError
from gemel.models.files.io import open_atomic, read_bounded

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

Key = TypeVar("Key")
SIGNATURE_KEY, RELEASE_KEY = "gemel.signature", "gemel.release"
MAX_SEQUENCE, MAX_TIME = 2**53 - 1, 253_402_300_799
"""The largest integer that every reader of JSON keeps, and the last second of the year 9999."""
DAY_S = 86_400
MAX_KEY_BYTES = 16 << 10
_NONE = "0" * 128
_MADE_BY = "ssh-keygen -t ed25519 -f box-key"


class Release(BaseModel):
    """What the signer says of a bundle: its number, which rises, and until when it may serve (Unix seconds).

    A bundle that says nothing has the number 0, which is above no other.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    sequence: Annotated[int, Field(ge=0, le=MAX_SEQUENCE)] = 0
    valid_until: Annotated[int, Field(ge=0, le=MAX_TIME)] | None = None

    def is_over(self, now: float) -> bool:
        """Whether the end date has passed at a time in Unix seconds."""
        return self.valid_until is not None and now > self.valid_until

    @property
    def end_text(self) -> str:
        """The end date as text."""
        return (
            "none"
            if self.valid_until is None
            else f"{datetime.fromtimestamp(self.valid_until, timezone.utc):%F}"
        )


def sign_bundle(
    path: str | Path, key: str | Path, sequence: int | None = None, valid_until: int | None = None
) -> Release:
    """Sign a bundle with a private key by replacing the file; processes that have it open keep the old one.

    An earlier signature and its release are replaced. Without a `sequence` (1 to MAX_SEQUENCE) the number is the
    present time in seconds, or one more than that of the earlier release, whichever is larger; `valid_until` is in Unix
    seconds. Returns what was signed. Raises InputError when the key is none, a value is out of range or the file cannot
    be written, BundleError when it is no sound bundle.
    """
    signing = _private(Path(key))
    bundle = open_bundle(path)
    if sequence is None:
        sequence = max(int(time.time()), _release(bundle).sequence + 1)
    if not 1 <= sequence <= MAX_SEQUENCE:
        raise InputError(
            path,
            f"a release cannot have the number {sequence}",
            f"give one from 1 to {MAX_SEQUENCE}",
        )
    release = Release(sequence=sequence, valid_until=valid_until)
    metadata = {**bundle.header.metadata, RELEASE_KEY: release.model_dump_json(exclude_none=True)}
    header = Header(bundle.header.entries, metadata, bundle.header.data_start)
    signature = signing.sign(_signed_text(header)).hex()
    head = encode_header(header.entries.values(), _metadata(header, signature))
    with open_atomic(path, overwrite=True) as file, memoryview(bundle.mapping) as view:
        file.write(head)
        for start in range(bundle.header.data_start, len(view), CHUNK_BYTES):
            file.write(view[start : start + CHUNK_BYTES])
    return release


def parse_end_date(text: str) -> int:
    """The last second, in UTC, of a day written as 2027-06-30; InputError for another text or a day that is over."""
    where = "--valid-until"
    hint = "give a day to come, such as 2027-06-30"
    try:
        day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc)
    except ValueError:
        raise InputError(where, f"'{text}' is no date", hint) from None
    end = int(day.timestamp()) + DAY_S - 1
    if end < time.time():
        raise InputError(where, f"{text} is over", hint)
    return end


def is_signed(bundle: Bundle) -> bool:
    """Whether the bundle has a signature, by any key."""
    return SIGNATURE_KEY in bundle.header.metadata


def check_signature(bundle: Bundle, key: str | Path) -> Release:
    """What the owner of this public key has signed; BundleError where he has not, InputError when it is no key.

    It covers the names of the tensors; `verify_bundle` and a box compare these with the contents.
    """
    from cryptography.exceptions import InvalidSignature

    public = read_public_key(Path(key))
    if not is_signed(bundle):
        raise BundleError(bundle.path, "is not signed", "sign it with `gemel bundle sign`")
    try:
        signature = bytes.fromhex(bundle.header.metadata[SIGNATURE_KEY])
        public.verify(signature, _signed_text(bundle.header))
    except (InvalidSignature, ValueError):
        fault = f"its signature is not by the owner of {key}"
        raise BundleError(
            bundle.path, fault, "get the bundle from the owner of the key, or sign it again"
        ) from None
    return _release(bundle)


def _release(bundle: Bundle) -> Release:
    """The release in a header, without a look at the signature."""
    text = bundle.header.metadata.get(RELEASE_KEY)
    if text is None:
        return Release()
    try:
        return Release.model_validate_json(text)
    except ValidationError:
        raise BundleError(
            bundle.path, f"its metadata key {RELEASE_KEY} is no release", "sign it again"
        ) from None


def _signed_text(header: Header) -> bytes:
    return encode_header(header.entries.values(), _metadata(header, _NONE))


def _metadata(header: Header, signature: str) -> dict[str, str]:
    metadata = {key: text for key, text in header.metadata.items() if key != SIGNATURE_KEY}
    return {SIGNATURE_KEY: signature, **metadata}


def _private(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    text = read_bounded(path, MAX_KEY_BYTES, f"make one: {_MADE_BY}")
    is_ssh = b"OPENSSH PRIVATE KEY" in text
    load = serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
    return _load_key(path, lambda: load(text, None), Ed25519PrivateKey, "private key")


def read_public_key(path: Path) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    text = read_bounded(
        path, MAX_KEY_BYTES, f"give the public part of an Ed25519 key; {_MADE_BY} makes both"
    )
    load = (
        serialization.load_ssh_public_key
        if text.startswith(b"ssh-")
        else serialization.load_pem_public_key
    )
    return _load_key(path, lambda: load(text), Ed25519PublicKey, "public key")


def _load_key(path: Path, load: Callable[[], Any], kind: type[Key], noun: str) -> Key:
    hint = f"give an Ed25519 {noun} without a password; {_MADE_BY} makes a pair"
    try:
        key = load()
    except Exception as error:  # the library raises many kinds
        text = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise InputError(path, f"is no {noun}: {text}", hint) from None
    if not isinstance(key, kind):
        raise InputError(path, "is no Ed25519 key", hint)
    return key
