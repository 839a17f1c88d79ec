"""Writing a bundle: its layout, and no partial files."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gemel.models.bundle import Made, check_output, open_bundle, verify_bundle, write_bundle
from gemel.models.bundle import writer as bundle_writer
from gemel.models.bundle.writer import check_writable, load_order
from gemel.models.errors import InputError


def test_build_gives_the_models_bit_by_bit(sample):
    bundle = open_bundle(sample.path)
    for query_id, model in sample.models.items():
        built = bundle.build(query_id)
        assert not built.training
        assert list(built.state_dict()) == list(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert torch.equal(built.state_dict()[name], tensor), (query_id, name)
        frames = torch.randn(2, 3, 16, 16)
        assert torch.equal(built(frames), model(frames))


def test_write_stores_equal_tensors_once(sample, tmp_path, writer):
    names = {query.id: query.tensors for query in sample.manifest.queries}
    assert names["north"]["conv.weight"] == names["south"]["conv.weight"] == names["gate"]["conv.weight"]
    twin = {"north": sample.models["north"], "twin": sample.models["north"]}
    records = [sample.queries[0], replace(sample.queries[0], id="twin")]
    manifest = writer(tmp_path / "twins.safetensors", twin, records)
    own = [tensor.nbytes for tensor in sample.models["north"].state_dict().values()]
    assert manifest.bytes.before == 2 * sum(own) and manifest.bytes.after <= sum(own)
    assert len(manifest.shared) == len(set(manifest.queries[0].tensors.values()))


def test_tensor_names_are_hashes_of_dtype_shape_and_bytes(sample):
    weight = sample.models["north"].conv.weight.detach().numpy()
    expected = hashlib.sha256(b"F32[8,3,3,3]" + weight.tobytes()).hexdigest()
    assert sample.manifest.queries[0].tensors["conv.weight"] == expected
    counter = sample.models["north"].norm.num_batches_tracked.numpy()
    expected = hashlib.sha256(b"I64[]" + counter.tobytes()).hexdigest()
    assert sample.manifest.queries[0].tensors["norm.num_batches_tracked"] == expected


def test_load_order_is_sharing_sets_then_private_tensors(sample):
    places = {name: f"{query.id}:{path}" for query in sample.manifest.queries for path, name in query.tensors.items()}
    order = [places[name] for name in load_order(sample.manifest.queries)]
    assert [entry.name for entry in open_bundle(sample.path).header.tensors] == list(
        load_order(sample.manifest.queries)
    )
    assert order[0] == "gate:conv.weight" and order[1] == "south:norm.running_var"
    assert order[-3:] == ["gate:conv.bias", "gate:fc.weight", "gate:fc.bias"]


def test_write_to_an_existing_file_is_refused(sample):
    before = sample.path.read_bytes()
    with pytest.raises(InputError, match=r"exists already; move it away"):
        check_output(sample.path)
    with pytest.raises(InputError, match="exists already"):
        write_again(sample)
    assert sample.path.read_bytes() == before
    write_again(sample, overwrite=True)
    assert verify_bundle(sample.path) == []


def test_write_interrupted_leaves_the_old_bundle(sample, monkeypatch):
    before, calls = sample.path.read_bytes(), itertools.count(1)
    raw_bytes = bundle_writer.raw_bytes

    def interrupt(tensor):
        if any(sample.path.parent.glob(".*.tmp")) and next(calls) == 3:
            raise KeyboardInterrupt
        return raw_bytes(tensor)

    monkeypatch.setattr(bundle_writer, "raw_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_again(sample, overwrite=True)
    assert sample.path.read_bytes() == before
    assert list(sample.path.parent.iterdir()) == [sample.path]


def write_again(sample, path: Path | None = None, **others):
    """Write the sample's models once more, by default to the same path."""
    return write_bundle(path or sample.path, sample.models, sample.queries, Made("yard", "top-down", 0), **others)


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.zeros(2, dtype=torch.complex64)], ids=["empty", "complex"])
def test_tensors_are_proved_to_be_writable_beforehand(sample, tmp_path, tensor):
    model = sample.models["north"]
    model.register_buffer("odd", tensor)
    if tensor.numel():
        with pytest.raises(InputError, match="has the dtype complex64, which no bundle holds"):
            check_writable(tmp_path / "workload.yaml", {"north": model}, sample.queries[:1])
    else:
        check_writable(tmp_path / "workload.yaml", {"north": model}, sample.queries[:1])
        write_bundle(tmp_path / "odd", {"north": model}, sample.queries[:1], Made("box", "none", 0))
        assert (
            open_bundle(tmp_path / "odd").tensor(open_bundle(tmp_path / "odd").query("north").tensors["odd"]).numel()
            == 0
        )
