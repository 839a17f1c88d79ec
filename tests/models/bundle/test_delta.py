"""An update makes of the old bundle the new one, byte by byte, or nothing at all."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import pytest
import torch

from gemel.models.bundle import Made, open_bundle, verify_bundle, write_bundle
from gemel.models.bundle.delta import HEAD, UPDATE_FORMAT, UPDATE_KEY, apply_update, write_update
from gemel.models.bundle.format import encode_header, parse_header, place
from gemel.models.errors import GemelError


@pytest.fixture
def changed_bundle(sample, tmp_path: Path) -> Path:
    """The sample's bundle with another head for one query."""
    with torch.no_grad():
        sample.models["north"].fc.weight.add_(1)
    path = tmp_path / "changed.safetensors"
    write_bundle(path, sample.models, sample.queries, Made("junction", "top-down", sample.manifest.bytes.ceiling))
    return path


@pytest.fixture
def update(sample, changed_bundle: Path, tmp_path: Path) -> Path:
    write_update(sample.path, changed_bundle, tmp_path / "update")
    return tmp_path / "update"


def test_update_of_the_old_bundle_is_the_new_one(sample, changed_bundle: Path, update: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.safetensors"
    result = apply_update(sample.path, update, made)
    assert made.read_bytes() == changed_bundle.read_bytes() and verify_bundle(made) == []
    assert result == {"bytes": made.stat().st_size, "digest": hashlib.sha256(made.read_bytes()).hexdigest()}
    old, new = ({one.name for one in open_bundle(path).header.tensors} for path in (sample.path, changed_bundle))
    assert {one.name for one in parse_header(update.read_bytes()).tensors} - {HEAD} == new - old
    assert len(new - old) == 1


def test_update_of_another_bundle_is_refused(sample, update: Path, tmp_path: Path) -> None:
    for model in sample.models.values():
        with torch.no_grad():
            model.conv.weight.add_(1)
    other = tmp_path / "other.safetensors"
    write_bundle(other, sample.models, sample.queries, Made("junction", "top-down", 0))
    assert "was not made for" in refusal(other, update, tmp_path)


def test_update_with_a_flipped_bit_is_refused(sample, update: Path, tmp_path: Path) -> None:
    content = update.read_bytes()
    header = parse_header(content)
    pads = [range(*(header.data_start + at for at in (one.begin, one.end)))
            for one in header.entries.values() if one.is_pad]  # fmt: skip
    for position in [*range(0, len(content), 97), len(content) - 1]:
        damaged = bytearray(content)
        damaged[position] ^= 4
        update.write_bytes(damaged)
        if not any(position in pad for pad in pads):
            refusal(sample.path, update, tmp_path)


def test_update_of_a_damaged_bundle_is_refused(sample, changed_bundle: Path, update: Path, tmp_path: Path) -> None:
    header = open_bundle(sample.path).header
    kept = next(one.name for one in open_bundle(changed_bundle).header.tensors if one.name in header.entries)
    content = bytearray(sample.path.read_bytes())
    content[header.data_start + header.entries[kept].begin] ^= 1
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(content)
    assert "do not make the bundle" in refusal(damaged, update, tmp_path)
    with pytest.raises(GemelError, match="do not match their names"):
        write_update(damaged, changed_bundle, tmp_path / "none")


@pytest.mark.parametrize(
    ("info", "head", "problem"),
    [
        (None, b"", "it is no update"),
        ("[1]", b"", "gemel.update"),
        ('{"format": 2}', b"", "gemel.update: format"),
        (f'{{"format": {UPDATE_FORMAT}, "old": 1, "new": "a"}}', b"", "gemel.update: old"),
        ("good", b"", "is missing or damaged"),
        ("good", b"no zlib", "is damaged"),
        ("good", zlib.compress(b"short"), "is missing or damaged"),
        ("good", zlib.compress(bytes(200_000_000)), "is missing or damaged"),
    ],
)
def test_update_that_is_none_is_refused(sample, tmp_path: Path, info: str | None, head: bytes, problem: str) -> None:
    good = json.dumps({"format": UPDATE_FORMAT, "old": "a" * 64, "new": "b" * 64})
    metadata = {} if info is None else {UPDATE_KEY: good if info == "good" else info}
    data = head or b"other"
    entries = place([(HEAD if head else "other", "U8", (len(data),))])
    update = tmp_path / "update"
    update.write_bytes(encode_header(entries, metadata) + data)
    assert problem in refusal(sample.path, update, tmp_path)


def refusal(old: Path, update: Path, folder: Path) -> str:
    """The error of applying an update, after which no file has changed."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(GemelError) as caught:
        apply_update(old, update, folder / "made")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert str(caught.value).count("\n") == 0
    return str(caught.value)
