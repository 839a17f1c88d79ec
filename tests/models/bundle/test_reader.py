"""Opening a bundle: views of the mapped file, models bound to them, nothing foreign imported."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gemel.models import zoo
from gemel.models.bundle import open_bundle
from gemel.models.bundle.format import is_open_as, open_file
from gemel.models.bundle.model_spec import load_model_spec, model_spec
from gemel.models.errors import BundleError, InputError
from gemel.models.files.weights import save_weights


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


def test_build_of_an_unknown_query_names_the_known(sample):
    with pytest.raises(InputError, match="has no query 'west'; it has: north, south, gate"):
        open_bundle(sample.path).build("west")


def test_open_of_another_file_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not a bundle at all, but longer than ten bytes")
    save_weights(tmp_path / "weights", {"a": torch.zeros(3)})
    for name, fault in (("empty", "truncated"), ("text", "its header would have"), ("weights", "this is no bundle")):
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


@pytest.mark.parametrize("frame", [np.zeros((8, 8, 3), np.float32), np.zeros((8, 8), np.uint8), 5], ids=type)
def test_preprocess_of_an_undecoded_frame_is_refused(sample, frame):
    prepare: Any = open_bundle(sample.path).build("gate").preprocess
    with pytest.raises(InputError, match=r"the frame: is .*; give a decoded frame, uint8 RGB \(H, W, 3\)"):
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


def test_read_of_a_proven_file_fails_after_a_change(tmp_path):
    path = tmp_path / "b"
    path.write_bytes(b"0123456789")
    file = open_file(path, "")
    file.proven = file.opened_as
    room = bytearray(4)
    file.read(3, memoryview(room))
    assert room == b"3456" and is_open_as(file)
    with path.open("r+b") as other:
        other.write(b"zz")
    os.utime(path, ns=(0, file.opened_as.mtime_ns + 1))
    with pytest.raises(OSError, match="changed in place"):
        file.read(3, memoryview(room))
    file.proven = None
    file.read(0, memoryview(room))
    assert room == b"zz23" and not is_open_as(file)
    os.truncate(path, 2)
    with pytest.raises(OSError, match="has become shorter"):
        file.read(0, memoryview(room))


def test_read_of_a_replaced_file_gives_the_old_bytes(tmp_path):
    path = tmp_path / "b"
    path.write_bytes(b"0123456789")
    file = open_file(path, "")
    file.proven = file.opened_as
    (tmp_path / "other").write_bytes(b"zzzzzzzzzz")
    os.replace(tmp_path / "other", path)
    room = bytearray(4)
    file.read(0, memoryview(room))
    assert room == b"0123" and not is_open_as(file)
    descriptor = file.descriptor
    del file
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_zoo_spec_depends_on_all_arguments():
    def spec(model, **others):
        keys = {"model_args": {}, "input_size": 64, "task": "detection", "classes": ("a", "b"), **others}
        query = SimpleNamespace(model=model, **keys)
        built = zoo.build(model, query.classes, query.model_args, query.input_size, query.task, "meta")
        found = load_model_spec(query, lambda: built)  # type: ignore[arg-type]
        assert found == model_spec(built)
        return found

    first = spec("ssd_resnet18")
    for others in ({"classes": ("a", "b", "c")}, {"model_args": {"aspect_ratios": []}}):
        assert spec("ssd_resnet18", **others) != first
    vit = {"task": "classification"}
    assert spec("vit_b_16", **vit) != spec("vit_b_16", **vit, input_size=96)


def test_model_spec_of_tied_tensors_names_the_first():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert model_spec(model).same == {"1.weight": "0.weight"}
