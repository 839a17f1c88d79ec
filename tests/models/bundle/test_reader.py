"""Opening a bundle: views of the mapped file, models bound to them, nothing foreign imported."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.bundle import open_bundle
from models.errors import BundleError, InputError
from models.weights import save_weights


def test_models_share_views_of_one_mapping(sample):
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


def test_names_in_order_follow_the_file(sample):
    bundle = open_bundle(sample.path)
    for query in bundle.queries:
        names = bundle.names_in_order(query.id)
        assert set(names) == set(query.tensors.values())
        begins = [bundle.header.entries[name].begin for name in names]
        assert begins == sorted(begins)
        assert len(set(names)) == len(names)
        assert all(bundle.nbytes(name) == bundle.tensor(name).nbytes for name in names)


def test_build_of_an_unknown_query_names_the_known(sample):
    with pytest.raises(InputError, match="has no query 'west'; it has: north, south, gate"):
        open_bundle(sample.path).build("west")


def test_open_of_another_file_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not a bundle at all, but longer than ten bytes")
    save_weights(tmp_path / "weights", {"a": torch.zeros(3)})
    for name, fault in (("empty", "truncated"), ("text", "header claims"), ("weights", "this is no bundle")):
        with pytest.raises(BundleError, match=fault):
            open_bundle(tmp_path / name)


def test_build_with_unfitting_tensors_is_refused(sample, rewrite):
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
    ("frame", "problem"),
    [
        (np.zeros((8, 8, 3), np.float32), "is float32 (8, 8, 3); give a decoded frame, uint8 RGB (H, W, 3)"),
        (np.zeros((8, 8), np.uint8), "is uint8 (8, 8); give"),
        (np.zeros((1, 8, 8, 3), np.uint8), "is uint8 (1, 8, 8, 3); give"),
        ("frame.jpg", "is str; give"),
    ],
    ids=["0 to 1", "grey", "a batch", "a path"],
)
def test_preprocess_of_an_undecoded_frame_is_refused(sample, frame, problem):
    prepare: Any = open_bundle(sample.path).build("gate").preprocess
    with pytest.raises(InputError, match=re.escape(f"the frame: {problem}")):
        prepare(frame)


def test_build_imports_a_factory_only_if_listed(tmp_path, sample, writer, monkeypatch):
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
