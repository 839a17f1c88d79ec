"""Packed tensors: stored once for all queries that share them; every contradiction about them is refused."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import nn

from gemel.models.bundle import Bundle, open_bundle, verify_bundle
from gemel.models.bundle.format import Entry, code_of, raw_bytes
from gemel.models.bundle.verify import is_finite
from gemel.models.errors import BundleError
from gemel.models.quantization import PackedWeight, pack

SCALE, KEY = "conv.weight.scale", "conv.weight"


def packed_of(models: dict[str, nn.Module]) -> dict[str, dict[str, PackedWeight]]:
    """The shared convolution as int8, the depthwise one as float16."""
    shared = pack(models["north"].get_parameter(KEY), "int8")
    depthwise = pack(models["north"].get_parameter("depthwise.weight"), "fp16")
    return {
        "north": {KEY: shared, "depthwise.weight": depthwise},
        "south": {KEY: shared, "depthwise.weight": depthwise},
        "gate": {KEY: shared},
    }


@pytest.fixture
def small(tmp_path, make_tied, writer) -> Bundle:
    """The sample with packed tensors."""
    models, queries = make_tied()
    writer(tmp_path / "n.safetensors", models, queries, packed=packed_of(models))
    return open_bundle(tmp_path / "n.safetensors")


def test_packed_bundle_is_sound(small):
    assert verify_bundle(small.path) == []
    assert small.query("north").stored[KEY].dtype == "int8"
    assert small.query("north").stored["depthwise.weight"].dtype == "fp16"


def test_bundle_stores_a_shared_packed_tensor_and_its_scale_once(small):
    names = {query.places()[KEY] for query in small.queries}
    scales = {query.places()[SCALE] for query in small.queries}
    assert len(names) == len(scales) == 1
    shared = {one.tensor: one.members for one in small.manifest.shared}
    everyone = [query.id for query in small.queries]
    assert shared[names.pop()] == tuple((query, KEY) for query in everyone)
    assert shared[scales.pop()] == tuple((query, SCALE) for query in everyone)


def test_build_unpacks_packed_tensors(small, make_tied):
    models, _ = make_tied()
    expected = packed_of(models)
    for query in small.queries:
        built = small.build(query.id)
        for key, one in expected[query.id].items():
            assert torch.equal(built.state_dict()[key], one.wide())
        with torch.no_grad():
            for key, one in expected[query.id].items():
                models[query.id].get_parameter(key).copy_(one.wide())
        frames = torch.randn(2, 3, 16, 16)
        assert torch.equal(built(frames), models[query.id](frames))


@pytest.fixture
def int4_bundle(tmp_path, make_tied, writer) -> Bundle:
    """The sample with the shared convolution as int4."""
    models, queries = make_tied()
    one = pack(models["north"].get_parameter(KEY), "int4")
    writer(tmp_path / "f.safetensors", models, queries, packed={query.id: {KEY: one} for query in queries})
    return open_bundle(tmp_path / "f.safetensors")


def test_bundle_stores_two_int4_codes_in_a_byte(int4_bundle, make_tied):
    models, _ = make_tied()
    places = int4_bundle.query("north").places()
    assert verify_bundle(int4_bundle.path) == []
    assert (
        int4_bundle.nbytes(places[KEY]) == 8 * 14 and int4_bundle.nbytes(places[SCALE]) == 8 * 4
    )  # 27 weights of 4 bits a row
    assert {query.places()[KEY] for query in int4_bundle.queries} == {places[KEY]}
    assert int4_bundle.query("north").stored[KEY].shape == (8, 3, 3, 3)
    expected = pack(models["north"].get_parameter(KEY), "int4").wide()
    built = [int4_bundle.build(query.id) for query in int4_bundle.queries]
    assert all(torch.equal(model.get_parameter(KEY), expected) for model in built)
    assert len({model.get_parameter(KEY).data_ptr() for model in built}) == 1
    states = [model.state_dict().items() for model in models.values()]
    before = sum(tensor.nbytes for state in states for _, tensor in state)
    assert int4_bundle.manifest.bytes.before == before


def stored_of(manifest, query=0):
    return manifest["queries"][query]["stored"]


LIES = {
    "unknown dtype": (lambda m: stored_of(m)[KEY].update(dtype="int5"), "queries[0].stored.conv.weight.dtype"),
    "no dtype": (lambda m: stored_of(m)[KEY].pop("dtype"), "queries[0].stored.conv.weight.dtype"),
    "scale is no name": (lambda m: stored_of(m)[KEY].update(scale="fast"), "queries[0].stored.conv.weight.scale"),
    "scale is gone": (lambda m: stored_of(m)[KEY].update(scale=None), "conv.weight, stored as int8, names no scale"),
    "scale is missing": (lambda m: stored_of(m)[KEY].update(scale="0" * 64), "of conv.weight.scale is missing"),
    "scale of another": (
        lambda m: stored_of(m)[KEY].update(scale=m["queries"][0]["tensors"]["fc.weight"]), "has a scale F32 (2, 8)",
    ),
    "scale for fp16": (
        lambda m: stored_of(m)["depthwise.weight"].update(scale=stored_of(m)[KEY]["scale"]), "which fp16 has not",
    ),
    "path of nothing": (
        lambda m: stored_of(m).update({"conv.kernel": stored_of(m).pop("depthwise.weight")}),
        "`stored` names conv.kernel, which is not in",
    ),
    "a wide tensor": (lambda m: stored_of(m).update({"fc.weight": {"dtype": "fp16", "scale": None}}), "of dtype F32"),
    "int8 called fp16": (lambda m: stored_of(m)[KEY].update(dtype="fp16", scale=None), "of dtype I8"),
    "not listed as packed": (lambda m: stored_of(m).pop("depthwise.weight"), "dtype torch.float16|F16"),
    "bits for bytes": (lambda m: stored_of(m)[KEY].update(dtype="int4"), "stored as int4, names no shape"),
    "other bits for bytes": (
        lambda m: stored_of(m)[KEY].update(dtype="int4", shape=[8, 3, 3, 3]),
        "stored as int4, has a tensor of dtype I8",
    ),
    "a shape for bytes": (lambda m: stored_of(m)[KEY].update(shape=[8, 27]), "names a shape, which only int4 has"),
    "stored as a list": (lambda m: m["queries"][0].update(stored=[]), "queries[0].stored"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_bundle_with_contradicting_packed_tensors_is_refused(small, rewrite, lie):
    edit, reason = LIES[lie]
    rewrite(small.path, lambda manifest, data, types: edit(manifest) and None)
    problems = verify_bundle(small.path)
    assert any(part in problem for problem in problems for part in reason.split("|")), problems
    assert all("\n" not in problem for problem in problems)
    with pytest.raises(BundleError):
        open_bundle(small.path).build("north")


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0, math.inf, 3e38])
def test_open_with_an_invalid_scale_is_refused(small, rewrite, value):
    name = small.query("north").places()[SCALE]

    def spoil(manifest, data, types):
        data[name] = struct.pack("<f", value) + data[name][4:]

    rewrite(small.path, spoil)
    reason = "query north: the scale of conv.weight is not above zero and finite in every channel"
    assert reason in verify_bundle(small.path)
    with pytest.raises(BundleError, match="is not above zero and finite"):
        open_bundle(small.path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_finite_unless_nan_or_infinite(dtype):
    def check(values):
        data = raw_bytes(values)
        return is_finite(Entry("0" * 64, code_of(dtype), tuple(values.shape), 0, len(data)), data)

    limits = torch.finfo(dtype)
    assert check(torch.tensor([limits.max, limits.min, limits.tiny, -0.0], dtype=dtype))
    for value in (math.nan, math.inf, -math.inf):
        assert not check(torch.cat([torch.zeros(3 << 20, dtype=dtype), torch.tensor([value], dtype=dtype)]))
