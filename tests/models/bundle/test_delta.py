"""An update makes of the old bundle the new one, byte by byte, or nothing at all."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import pytest
import torch

from models.bundle import Made, open_bundle, verify_bundle, write_bundle
from models.bundle.delta import HEAD, UPDATE_FORMAT, UPDATE_KEY, apply_update, write_update
from models.bundle.format import encode_header, parse_header, place
from models.errors import GemelError


@pytest.fixture
def changed_bundle(sample, tmp_path: Path) -> Path:
    """The sample's bundle with another head for one query."""
    with torch.no_grad():
        sample.models[sample.queries[0].id].fc.weight.add_(1)
    path = tmp_path / "changed.safetensors"
    write_bundle(path, sample.models, sample.queries, Made("junction", "wide", sample.manifest.bytes.ceiling))
    return path


@pytest.fixture
def update(sample, changed_bundle: Path, tmp_path: Path) -> Path:
    path = tmp_path / "update"
    write_update(sample.path, changed_bundle, path)
    return path


def test_old_and_update_make_new_byte_by_byte(sample, changed_bundle: Path, update: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.safetensors"
    told = apply_update(sample.path, update, made)
    assert made.read_bytes() == changed_bundle.read_bytes() and verify_bundle(made) == []
    assert told == {"bytes": made.stat().st_size, "digest": hashlib.sha256(made.read_bytes()).hexdigest()}


def test_an_update_holds_what_is_new_alone(sample, changed_bundle: Path, update: Path) -> None:
    old, new = open_bundle(sample.path).header.entries, open_bundle(changed_bundle).header.entries
    held = {name for name, one in parse_header(update.read_bytes()).entries.items() if not one.is_pad} - {HEAD}
    assert held == {name for name, one in new.items() if not one.is_pad} - old.keys() and len(held) == 1


def test_another_bundle_is_refused(sample, changed_bundle: Path, tmp_path: Path) -> None:
    for model in sample.models.values():
        with torch.no_grad():
            model.conv.weight.add_(1)
    other = tmp_path / "other.safetensors"
    write_bundle(other, sample.models, sample.queries, Made("junction", "wide", 0))
    update = tmp_path / "update"
    write_update(sample.path, changed_bundle, update)
    assert "was not made for" in refusal(other, update, tmp_path)


def test_every_flipped_bit_of_an_update_is_found(sample, update: Path, tmp_path: Path) -> None:
    content = update.read_bytes()
    for position in [*range(0, len(content), 97), len(content) - 1]:
        damaged = bytearray(content)
        damaged[position] ^= 4
        update.write_bytes(damaged)
        if _is_padding(content, position):
            continue
        refusal(sample.path, update, tmp_path)


def test_a_damaged_old_bundle_makes_nothing(sample, changed_bundle: Path, update: Path, tmp_path: Path) -> None:
    held = open_bundle(sample.path)
    kept = next(
        name for name in open_bundle(changed_bundle).header.entries if len(name) == 64 and name in held.header.entries
    )
    content = bytearray(sample.path.read_bytes())
    content[held.header.data_start + held.header.entries[kept].begin] ^= 1
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(content)
    assert "do not make the bundle" in refusal(damaged, update, tmp_path)
    with pytest.raises(GemelError, match="do not match their names"):
        write_update(damaged, changed_bundle, tmp_path / "none")


@pytest.mark.parametrize(
    ("said", "head", "fault"),
    [
        (None, b"", "it is no update"),
        ("[1]", b"", "has no format"),
        ('{"format": true}', b"", "has no format"),
        ('{"format": 2}', b"", "is of format 2"),
        (f'{{"format": {UPDATE_FORMAT}, "old": "a"}}', b"", "no digest `new`"),
        (f'{{"format": {UPDATE_FORMAT}, "old": 1, "new": "a"}}', b"", "no digest `old`"),
        ("good", None, "has no tensor `header`"),
        ("good", b"no zlib", "is damaged"),
        ("good", zlib.compress(b"short"), "does not fit"),
        ("good", zlib.compress(bytes(200_000_000)), "does not fit"),
    ],
)
def test_what_is_no_update_is_one_line(
    sample, tmp_path: Path, said: str | None, head: bytes | None, fault: str
) -> None:
    good = json.dumps({"format": UPDATE_FORMAT, "old": "a", "new": "b"})
    metadata = {} if said is None else {UPDATE_KEY: good if said == "good" else said}
    data = head or b"other"
    entries = place([(HEAD if head is not None else "other", "U8", (len(data),), len(data))])
    update = tmp_path / "update"
    update.write_bytes(encode_header(entries, metadata) + data)
    assert fault in refusal(sample.path, update, tmp_path)


def refusal(old: Path, update: Path, folder: Path) -> str:
    """The one line that says why nothing was made."""
    out, before = folder / "made", {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(GemelError) as caught:
        apply_update(old, update, out)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert str(caught.value).count("\n") == 0
    return str(caught.value)


def _is_padding(content: bytes, position: int) -> bool:
    """Whether what stands there is a gap filler, which counts as nothing."""
    header = parse_header(content)
    return any(one.is_pad and one.begin <= position - header.data_start < one.end for one in header.entries.values())
