"""Signatures of bundles: Ed25519 (RFC 8032) over the header, which names every tensor by its content.

A signed bundle has the metadata key `gemel.signature`, 128 hex digits. The signed text is the header as our writer
would write it with zeros in their place, so it covers the whole header and every tensor whose name is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from models.bundle.format import CHUNK_BYTES, Header, encode_header
from models.bundle.reader import Bundle, open_bundle
from models.errors import BundleError, InputError
from models.io import open_atomic, read_bounded

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

Key = TypeVar("Key")
SIGNATURE_KEY = "gemel.signature"
MAX_KEY_BYTES = 16 << 10
_NONE = "0" * 128
_MADE_BY = "ssh-keygen -t ed25519 -f box-key"


def sign_bundle(path: str | Path, key: str | Path) -> None:
    """Sign a bundle with a private key by replacing the file; processes that have it open keep the old one.

    An earlier signature is replaced. Raises InputError when the key is none or the file cannot be written,
    BundleError when it is no sound bundle.
    """
    signing, bundle = _private(Path(key)), open_bundle(path)
    signature = signing.sign(_signed_text(bundle.header)).hex()
    head = encode_header(bundle.header.entries.values(), _metadata(bundle.header, signature))
    with open_atomic(path, overwrite=True) as file, memoryview(bundle.mapping) as view:
        file.write(head)
        for start in range(bundle.header.data_start, len(view), CHUNK_BYTES):
            file.write(view[start : start + CHUNK_BYTES])


def is_signed(bundle: Bundle) -> bool:
    """Whether the bundle has a signature, by any key."""
    return SIGNATURE_KEY in bundle.header.metadata


def check_signature(bundle: Bundle, key: str | Path) -> None:
    """Raise BundleError unless the bundle was signed by the owner of this public key; InputError when it is no key.

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
        raise BundleError(bundle.path, fault, "get the bundle from the owner of the key, or sign it again") from None


def _signed_text(header: Header) -> bytes:
    return encode_header(header.entries.values(), _metadata(header, _NONE))


def _metadata(header: Header, signature: str) -> dict[str, str]:
    kept = {key: text for key, text in header.metadata.items() if key != SIGNATURE_KEY}
    return {SIGNATURE_KEY: signature, **kept}


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

    text = read_bounded(path, MAX_KEY_BYTES, f"give the public part of an Ed25519 key; {_MADE_BY} makes both")
    load = serialization.load_ssh_public_key if text.startswith(b"ssh-") else serialization.load_pem_public_key
    return _load_key(path, lambda: load(text), Ed25519PublicKey, "public key")


def _load_key(path: Path, load: Callable[[], Any], kind: type[Key], what: str) -> Key:
    hint = f"give an Ed25519 {what} without a password; {_MADE_BY} makes a pair"
    try:
        key = load()
    except Exception as error:  # the library raises many kinds
        text = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise InputError(path, f"is no {what}: {text}", hint) from None
    if not isinstance(key, kind):
        raise InputError(path, "is no Ed25519 key", hint)
    return key
