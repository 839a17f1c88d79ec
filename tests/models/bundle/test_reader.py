"""Opening a bundle: views of the mapped file, models bound to them, nothing foreign imported."""

from __future__ import annotations

import hashlib
import re
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models import zoo
from models.bundle import open_bundle
from models.errors import BundleError, InputError
from models.preprocess import Cropped, Preprocess
from models.weights import save_weights


def test_tensors_are_views_of_one_mapping_and_shared_by_the_models(sample):
    bundle = open_bundle(sample.path)
    start = bundle.tensor(next(iter(bundle.header.entries))).data_ptr()
    models = {query.id: bundle.build(query.id) for query in bundle.queries}
    for query in bundle.queries:
        state = models[query.id].state_dict()
        for path, name in query.tensors.items():
            begin = bundle.header.entries[name].begin
            assert state[path].data_ptr() == bundle.tensor(name).data_ptr() == start + begin
    pointers = {model.get_parameter("conv.weight").data_ptr() for model in models.values()}
    assert len(pointers) == 1


def test_opening_and_building_warns_of_nothing(sample):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_bundle(sample.path).build("gate")


def test_digest_is_that_of_the_file(sample):
    assert open_bundle(sample.path).digest == hashlib.sha256(sample.path.read_bytes()).hexdigest()


def test_names_in_order_are_a_querys_unique_tensors_as_they_lie(sample):
    bundle = open_bundle(sample.path)
    for query in bundle.queries:
        names = bundle.names_in_order(query.id)
        assert set(names) == set(query.tensors.values())
        begins = [bundle.header.entries[name].begin for name in names]
        assert begins == sorted(begins)
        assert len(set(names)) == len(names)
        assert all(bundle.nbytes(name) == bundle.tensor(name).nbytes for name in names)


def test_a_copy_can_be_trained_and_leaves_the_bundle_alone(sample):
    bundle = open_bundle(sample.path)
    model = bundle.build("gate", copy=True).train()
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= parameter.grad
    again = open_bundle(sample.path).build("gate")
    assert torch.equal(again.get_parameter("fc.bias"), sample.models["gate"].get_parameter("fc.bias"))


def test_a_built_model_asks_for_no_gradients(sample):
    assert not any(parameter.requires_grad for parameter in open_bundle(sample.path).build("north").parameters())


def test_an_unknown_query_is_named_with_those_there_are(sample):
    with pytest.raises(InputError, match="has no query 'west'; it has: north, south, gate"):
        open_bundle(sample.path).build("west")


@pytest.mark.parametrize("name", ["nowhere.safetensors", "."])
def test_what_cannot_be_read_is_bad_input_not_a_bad_bundle(tmp_path, name):
    with pytest.raises(InputError) as caught:
        open_bundle(tmp_path / name)
    assert not isinstance(caught.value, BundleError)


def test_an_empty_file_and_a_foreign_one_are_no_bundles(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not a bundle at all, but longer than ten bytes")
    save_weights(tmp_path / "weights", {"a": torch.zeros(3)})
    for name, fault in (("empty", "truncated"), ("text", "header claims"), ("weights", "it is no bundle")):
        with pytest.raises(BundleError, match=fault):
            open_bundle(tmp_path / name)


def test_tensors_that_do_not_fit_the_architecture_are_refused_when_building(sample, rewrite):
    def rename(manifest, data, types):
        tensors = manifest["queries"][0]["tensors"]
        tensors["conv.kernel"] = tensors.pop("conv.weight")
        for shared in manifest["shared"]:
            if ["north", "conv.weight"] in shared["members"]:
                shared["members"][shared["members"].index(["north", "conv.weight"])] = ["north", "conv.kernel"]
        manifest["shared"] = sorted(manifest["shared"], key=lambda shared: shared["tensor"])

    rewrite(sample.path, rename)
    with pytest.raises(BundleError, match=r"query north: tiny_norm (needs conv\.weight|has no conv\.kernel)"):
        open_bundle(sample.path).build("north")


FACTORY = """
from torch import nn

def build(num_classes, width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.Flatten(), nn.Linear(width, num_classes))
"""


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        (np.zeros((8, 8, 3), np.float32), "is float32 (8, 8, 3); give a decoded frame, uint8 RGB (H, W, 3)"),
        (np.zeros((8, 8), np.uint8), "is uint8 (8, 8); give"),
        (np.zeros((1, 8, 8, 3), np.uint8), "is uint8 (1, 8, 8, 3); give"),
        ("frame.jpg", "is str; give"),
    ],
    ids=["0 to 1", "grey", "a batch", "a path"],
)
def test_what_is_no_decoded_frame_is_refused_instead_of_answered(sample, frame, told):
    prepare: Any = open_bundle(sample.path).build("gate").preprocess
    with pytest.raises(InputError, match=re.escape(f"the frame: {told}")):
        prepare(frame)


def test_a_frame_in_which_nothing_lies_at_the_roi_is_refused():
    with pytest.raises(
        InputError, match=r"has 8 x 6 pixels, in which nothing lies at the query's roi \[20, 0, 30, 6\]"
    ):
        Cropped(Preprocess(16), (20, 0, 30, 6))(np.zeros((6, 8, 3), np.uint8))


def test_a_factory_that_is_not_found_is_told_with_what_to_do_about_it(tmp_path, sample, writer):
    name = "no_such_nets:small"
    record = replace(sample.queries[0], id="foreign", model=name)
    writer(tmp_path / "foreign.safetensors", {"foreign": nn.Linear(300, 2)}, [record])
    with pytest.raises(BundleError, match="cannot be imported: ModuleNotFoundError") as caught:
        open_bundle(tmp_path / "foreign.safetensors", factories=[name], folder=tmp_path).build("foreign")
    assert str(caught.value).endswith(
        f"; check the name; put the module into {tmp_path}, or put its folder on PYTHONPATH"
    )


def test_a_factory_is_imported_only_when_the_local_config_lists_it(tmp_path, sample, writer, monkeypatch):
    (tmp_path / "foreign_architectures.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    name = "foreign_architectures:build"
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6, 2))
    record = replace(sample.queries[0], id="foreign", model=name, model_args={"width": 6})
    writer(tmp_path / "foreign.safetensors", {"foreign": model}, [record])

    with pytest.raises(BundleError, match=f"model '{name}' is not in the zoo; list it under `factories`"):
        open_bundle(tmp_path / "foreign.safetensors").build("foreign")
    assert "foreign_architectures" not in sys.modules
    built = open_bundle(tmp_path / "foreign.safetensors", factories=[name]).build("foreign")
    assert "foreign_architectures" in sys.modules
    assert torch.equal(built.get_parameter("0.weight"), model.get_parameter("0.weight"))
    del sys.modules["foreign_architectures"]


def test_arguments_that_are_lists_of_pairs_come_back(tmp_path, sample, writer):
    anchors = [[10, 14], [23, 27], [37, 58], [81, 82], [135, 169], [344, 300]]
    shape = zoo.build("yolov3_tiny", ("car", "bus"), {"anchors": anchors}, 64, "detection", "meta")
    record = replace(
        sample.queries[0], id="own", task="detection", classes=("car", "bus"), model="yolov3_tiny", input_size=64,
        model_args={"anchors": anchors}, preprocess=Preprocess(64),
    )  # fmt: skip
    writer(tmp_path / "own.safetensors", {"own": shape.to_empty(device="cpu")}, [record])
    assert open_bundle(tmp_path / "own.safetensors").build("own", "meta").anchors == shape.anchors
