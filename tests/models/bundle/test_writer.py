"""Writing a bundle: what lies where, and that nothing half-written is ever left."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from models.bundle import Made, check_output, open_bundle, verify_bundle, write_bundle
from models.bundle import writer as bundle_writer
from models.bundle.format import parse_header
from models.bundle.writer import load_order
from models.errors import InputError
from models.io import open_atomic


def test_round_trip_is_bit_equal(sample):
    bundle = open_bundle(sample.path)
    for query_id, model in sample.models.items():
        built = bundle.build(query_id)
        assert not built.training
        assert list(built.state_dict()) == list(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert torch.equal(built.state_dict()[name], tensor), (query_id, name)
        frames = torch.randn(2, 3, 16, 16)
        assert torch.equal(built(frames), model(frames))


def test_manifest_read_equals_manifest_written(sample):
    bundle = open_bundle(sample.path)
    assert bundle.manifest == sample.manifest
    assert [query.id for query in bundle.queries] == ["north", "south", "gate"]
    south = bundle.query("south")
    assert (south.roi, south.min_score, south.priority, south.threshold) == ((0, 8, 64, 64), 0.25, 3, None)
    assert bundle.query("gate").threshold == 0.4


def test_equal_tensors_are_stored_once(sample, tmp_path, writer):
    names = {query.id: query.tensors for query in sample.manifest.queries}
    assert names["north"]["conv.weight"] == names["south"]["conv.weight"] == names["gate"]["conv.weight"]
    twin = {"north": sample.models["north"], "twin": sample.models["north"]}
    records = [sample.queries[0], replace(sample.queries[0], id="twin")]
    manifest = writer(tmp_path / "twins.safetensors", twin, records)
    own = [tensor.nbytes for tensor in sample.models["north"].state_dict().values()]
    assert manifest.bytes.before == 2 * sum(own) and manifest.bytes.after <= sum(own)
    assert len(manifest.shared) == len(set(manifest.queries[0].tensors.values()))


def test_tensors_that_only_begin_alike_are_kept_apart(tmp_path, tied, writer):
    models, queries = tied()
    with torch.no_grad():
        models["south"].fc.weight.copy_(models["north"].fc.weight)
        models["south"].fc.weight[-1, -1] += 1
    manifest = writer(tmp_path / "b.safetensors", models, queries)
    names = {query.id: query.tensors for query in manifest.queries}
    assert names["north"]["fc.weight"] != names["south"]["fc.weight"]
    assert verify_bundle(tmp_path / "b.safetensors") == []


def test_equal_bytes_of_another_shape_or_dtype_are_another_tensor(tmp_path, tied, writer):
    models, queries = tied()
    with torch.no_grad():
        models["north"].norm.bias.zero_()
        models["south"].norm.running_mean.zero_()
    manifest = writer(tmp_path / "b.safetensors", models, queries)
    names = {query.id: query.tensors for query in manifest.queries}
    assert names["north"]["norm.bias"] == names["south"]["norm.running_mean"]
    assert names["north"]["norm.num_batches_tracked"] != names["north"]["norm.bias"]


def test_names_are_hashes_of_dtype_shape_and_bytes(sample):
    weight = sample.models["north"].conv.weight.detach().numpy()
    expected = hashlib.sha256(b"F32[8,3,3,3]" + weight.tobytes()).hexdigest()
    assert sample.manifest.queries[0].tensors["conv.weight"] == expected
    counter = sample.models["north"].norm.num_batches_tracked.numpy()
    expected = hashlib.sha256(b"I64[]" + counter.tobytes()).hexdigest()
    assert sample.manifest.queries[0].tensors["norm.num_batches_tracked"] == expected


def test_tensors_start_at_multiples_of_512_bytes_of_the_file(sample):
    header = parse_header(sample.path.read_bytes())
    assert header.data_start % 512 == 0
    assert all(entry.begin % 512 == 0 for entry in header.entries.values() if not entry.is_pad)
    assert any(entry.is_pad for entry in header.entries.values())


def test_sharing_sets_lie_together_then_each_query_layer_by_layer(sample):
    paths = {}
    for query in sample.manifest.queries:
        for path, name in query.tensors.items():
            paths.setdefault(name, []).append(f"{query.id}:{path}")
    order = [paths[name] for name in open_bundle(sample.path).header.entries if name in paths]
    users = [frozenset(path.split(":")[0] for path in where) for where in order]
    assert users[0] == {"north", "south", "gate"}
    runs = [who for index, who in enumerate(users) if index == 0 or users[index - 1] != who]
    assert len(runs) == len(set(runs))
    assert [len(who) for who in runs] == sorted((len(who) for who in runs), reverse=True)
    gate = [path for where in order for path in where if users[order.index(where)] == {"gate"}]
    assert gate == ["gate:conv.bias", "gate:fc.weight", "gate:fc.bias"]
    assert tuple(name for name in open_bundle(sample.path).header.entries if name in paths) == load_order(
        sample.manifest.queries
    )


def test_bytes_are_those_of_unique_tensors(sample):
    unique: dict[str, int] = {}
    before = 0
    for query_id, model in sample.models.items():
        query = next(query for query in sample.manifest.queries if query.id == query_id)
        sizes = {name: model.state_dict()[path].nbytes for path, name in query.tensors.items()}
        unique |= sizes
        before += sum(sizes[name] for name in query.tensors.values())
    assert sample.manifest.bytes.before == before
    assert sample.manifest.bytes.after == sum(unique.values())
    assert sample.manifest.bytes.ceiling == 700


def test_the_safetensors_library_opens_it(sample):
    with safe_open(sample.path, "pt") as file:
        assert "gemel.manifest" in file.metadata()
        gate = next(query for query in sample.manifest.queries if query.id == "gate")
        for path, name in gate.tensors.items():
            assert torch.equal(file.get_tensor(name), sample.models["gate"].state_dict()[path])


def test_a_tensor_in_another_memory_layout_is_stored_row_major(tmp_path, tied, writer):
    models, queries = tied()
    plain = writer(tmp_path / "plain.safetensors", models, queries)
    for model in models.values():
        model.to(memory_format=torch.channels_last)
    assert writer(tmp_path / "channels_last.safetensors", models, queries) == plain


def test_an_existing_output_is_refused_and_left_alone(sample):
    before = sample.path.read_bytes()
    with pytest.raises(InputError, match=r"exists already; move it away"):
        check_output(sample.path)
    with pytest.raises(InputError, match="exists already"):
        write_again(sample)
    assert sample.path.read_bytes() == before
    write_again(sample, overwrite=True)
    assert verify_bundle(sample.path) == []


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("nowhere/b.safetensors", "there is no directory"),
        ("taken", "is a directory"),
        ("/proc/b.safetensors", "cannot be written"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused(tmp_path, sample, place, fault):
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match=fault):
        write_again(sample, tmp_path / place)


def test_a_dangling_link_counts_as_existing(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists already"):
        check_output(tmp_path / "link")


def test_an_interruption_while_writing_leaves_nothing(tmp_path, tied, writer, monkeypatch):
    models, queries = tied()
    interrupt_the_third_write(monkeypatch, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        writer(tmp_path / "b.safetensors", models, queries)
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_while_overwriting_leaves_the_old_bundle(sample, monkeypatch):
    before = sample.path.read_bytes()
    interrupt_the_third_write(monkeypatch, sample.path.parent)
    with pytest.raises(KeyboardInterrupt):
        write_again(sample, overwrite=True)
    assert sample.path.read_bytes() == before
    assert list(sample.path.parent.iterdir()) == [sample.path]


def test_a_file_that_takes_the_name_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "b.safetensors"
    with pytest.raises(InputError, match="created by another process"), open_atomic(path) as file:
        file.write(b"ours")
        path.write_text("theirs")
    assert path.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_nothing_and_says_so(tmp_path, tied, writer):
    models, queries = tied()
    with (
        file_size_limit(8192),
        pytest.raises(InputError, match=r"b\.safetensors: cannot be written: File too large; raise the file size"),
    ):
        writer(tmp_path / "b.safetensors", models, queries)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_space_is_named_as_such(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(InputError, match="cannot be written: No space left on device; free some space"),
        open_atomic(tmp_path / "b.safetensors") as file,
    ):
        file.write(b"bytes")
    assert list(tmp_path.iterdir()) == []


def test_models_and_queries_must_be_the_same(sample, tmp_path, writer):
    with pytest.raises(ValueError, match="differ"):
        writer(tmp_path / "b.safetensors", sample.models, sample.queries[:2])


def test_a_ceiling_above_the_originals_bytes_is_refused(sample, tmp_path, writer):
    with pytest.raises(ValueError, match="cannot be saved"):
        writer(tmp_path / "b.safetensors", sample.models, sample.queries, ceiling_bytes=1 << 20)


def write_again(sample, path: Path | None = None, **others):
    """Write the sample's models once more, by default where they are."""
    return write_bundle(path or sample.path, sample.models, sample.queries, Made("yard", "wide", 0), **others)


def interrupt_the_third_write(monkeypatch, folder: Path) -> None:
    """Send this process the signal of Ctrl-C when the third tensor is about to be written."""
    raw_bytes, writes = bundle_writer.raw_bytes, itertools.count(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it

    def interrupted(tensor):
        if any(folder.glob(".*.tmp")) and next(writes) == 3:
            signal.raise_signal(signal.SIGINT)
        return raw_bytes(tensor)

    monkeypatch.setattr(bundle_writer, "raw_bytes", interrupted)


@contextlib.contextmanager
def file_size_limit(limit: int):
    """The operating system refuses to let a file of this process grow beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
