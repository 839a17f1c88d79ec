"""A signature fits one header and one key."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as kinds
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.bundle.format import encode_header
from gemel.models.bundle.signing import (
    RELEASE_KEY,
    SIGNATURE_KEY,
    Release,
    check_signature,
    is_signed,
    parse_end_date,
    sign_bundle,
)
from gemel.models.errors import BundleError, InputError

PEM = (kinds.Encoding.PEM, kinds.PrivateFormat.PKCS8, kinds.Encoding.PEM, kinds.PublicFormat.SubjectPublicKeyInfo)
SSH = (kinds.Encoding.PEM, kinds.PrivateFormat.OpenSSH, kinds.Encoding.OpenSSH, kinds.PublicFormat.OpenSSH)


def keys(folder: Path, name: str = "key", form: tuple = PEM) -> tuple[Path, Path]:
    """A new private key and its public one, as files."""
    private, public, made = folder / name, folder / f"{name}.pub", Ed25519PrivateKey.generate()
    private.write_bytes(made.private_bytes(form[0], form[1], kinds.NoEncryption()))
    public.write_bytes(made.public_key().public_bytes(form[2], form[3]))
    return private, public


@pytest.mark.parametrize("form", [PEM, SSH], ids=["PEM", "OpenSSH"])
def test_signature_fits_the_public_key(sample, tmp_path: Path, form: tuple) -> None:
    private, public = keys(tmp_path, form=form)
    tensors = open_bundle(sample.path).header.entries
    sign_bundle(sample.path, private)
    signed = open_bundle(sample.path)
    check_signature(signed, public)
    assert is_signed(signed) and verify_bundle(sample.path) == [] and signed.header.entries == tensors


def test_signature_by_another_key_is_refused(sample, tmp_path: Path) -> None:
    sign_bundle(sample.path, keys(tmp_path, "theirs")[0])
    with pytest.raises(BundleError, match="not by the owner"):
        check_signature(open_bundle(sample.path), keys(tmp_path, "ours")[1])


@pytest.mark.parametrize("change", ["manifest", "signature", "name", "short"])
def test_signature_of_a_changed_header_is_refused(sample, tmp_path: Path, change: str) -> None:
    """The changed header has a valid seal."""
    private, public = keys(tmp_path)
    sign_bundle(sample.path, private)
    bundle = open_bundle(sample.path)
    metadata, entries = dict(bundle.header.metadata), list(bundle.header.entries.values())
    if change == "manifest":
        metadata["gemel.manifest"] = metadata["gemel.manifest"].replace(
            '"accuracy_target":0.9', '"accuracy_target":0.8'
        )
        assert metadata != bundle.header.metadata
    elif change == "name":
        metadata["more"] = "x"
    else:
        metadata[SIGNATURE_KEY] = metadata[SIGNATURE_KEY][::-1] if change == "signature" else "no hex"
    data = sample.path.read_bytes()[bundle.header.data_start :]
    sample.path.write_bytes(encode_header(entries, metadata) + data)
    with pytest.raises(BundleError, match="not by the owner"):
        check_signature(open_bundle(sample.path), public)


def test_invalid_key_is_refused_in_one_line(sample, tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    rsa = generate_private_key(65537, 2048)
    (tmp_path / "rsa").write_bytes(rsa.private_bytes(*PEM[:2], kinds.NoEncryption()))
    (tmp_path / "rsa.pub").write_bytes(rsa.public_key().public_bytes(*PEM[2:]))
    locked = Ed25519PrivateKey.generate().private_bytes(*PEM[:2], kinds.BestAvailableEncryption(b"secret"))
    (tmp_path / "locked").write_bytes(locked)
    (tmp_path / "garbage").write_bytes(b"ssh-\x00\xff")
    before = sample.path.read_bytes()
    for key, fault in {
        public: "no private key", tmp_path / "rsa": "no Ed25519 key", tmp_path / "locked": "without a password",
        tmp_path / "garbage": "no private key", tmp_path / "none": "cannot be read", tmp_path: "Is a directory",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=fault) as caught:
            sign_bundle(sample.path, key)
        assert str(caught.value).startswith(f"{key}: ") and "\n" not in str(caught.value)
    assert sample.path.read_bytes() == before
    sign_bundle(sample.path, private)
    for key, fault in {
        private: "no public key", tmp_path / "rsa.pub": "no Ed25519 key", tmp_path / "garbage": "no public key",
        Path("/dev/zero"): "no regular file",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=fault):
            check_signature(open_bundle(sample.path), key)


def test_release_rises_with_each_signature_and_is_as_asked(sample, tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    begun = int(time.time())
    first, second = (sign_bundle(sample.path, private).sequence for _ in range(2))
    assert begun <= first < second
    far = sign_bundle(sample.path, private, 10**12).sequence
    assert sign_bundle(sample.path, private).sequence == far + 1, "also where the clock is behind"
    asked = sign_bundle(sample.path, private, 7, 2_000_000_000)
    assert asked == check_signature(open_bundle(sample.path), public) == Release(sequence=7, valid_until=2_000_000_000)
    assert asked.end_text == "2033-05-18" and asked.is_over(2_000_000_001) and not asked.is_over(2_000_000_000)
    assert sign_bundle(sample.path, private).valid_until is None and verify_bundle(sample.path) == []


@pytest.mark.parametrize("text", ['{"sequence":9}', '{"sequence":8,"valid_until":1}', "", None])
def test_release_that_was_changed_is_refused(sample, tmp_path: Path, text: str | None) -> None:
    """The changed header has a valid seal."""
    private, public = keys(tmp_path)
    sign_bundle(sample.path, private, 8)
    header = open_bundle(sample.path).header
    metadata = {key: value for key, value in header.metadata.items() if key != RELEASE_KEY}
    if text is not None:
        metadata[RELEASE_KEY] = text
    data = sample.path.read_bytes()[header.data_start :]
    sample.path.write_bytes(encode_header(header.entries.values(), metadata) + data)
    with pytest.raises(BundleError, match="not by the owner"):
        check_signature(open_bundle(sample.path), public)


@pytest.mark.parametrize("sequence", [0, -1, 2**53])
def test_sign_with_a_number_out_of_range_changes_nothing(sample, tmp_path: Path, sequence: int) -> None:
    before = sample.path.read_bytes()
    with pytest.raises(InputError, match="cannot have the number"):
        sign_bundle(sample.path, keys(tmp_path)[0], sequence)
    assert sample.path.read_bytes() == before


@pytest.mark.parametrize("text", ["2020-01-01", "tomorrow", "2027-13-01", "", "20270630"])
def test_end_date_that_is_none_or_over_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--valid-until"):
        parse_end_date(text)


def test_end_date_is_the_last_second_of_the_day() -> None:
    assert parse_end_date("2099-12-31") == 4_102_444_799
