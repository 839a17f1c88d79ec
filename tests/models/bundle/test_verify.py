"""Every kind of damage and every lie is refused, with the reason, before anything is allocated or imported."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemel.models.bundle import list_unchecked, open_bundle, verify_bundle
from gemel.models.bundle.format import encode_header, parse_header
from gemel.models.errors import BundleError

DAMAGED = "the header is damaged, or this is no bundle"
same_file = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


@same_file
@given(data=st.data())
def test_bundle_with_a_flipped_bit_is_refused(sample, data):
    content = bytearray(sample.path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1), "byte")
    content[position] ^= 1 << data.draw(st.integers(0, 7), "bit")
    assert problems_of(sample.path, content)


@same_file
@given(data=st.data())
def test_open_of_a_truncated_bundle_is_refused(sample, data):
    content = sample.path.read_bytes()
    assert problems_of(sample.path, content[: data.draw(st.integers(0, len(content) - 1), "bytes left")])
    with pytest.raises(BundleError):
        open_bundle(sample.path.with_name("damaged.safetensors"))


def test_missing_tensor_is_named_with_its_path(sample, rewrite):
    name = sample.manifest.queries[0].tensors["fc.weight"]
    rewrite(sample.path, lambda manifest, data, types: data.pop(name) and None)
    assert verify_bundle(sample.path) == [f"query north: tensor {name} of fc.weight is missing"]
    with pytest.raises(BundleError, match="is missing"):
        open_bundle(sample.path)


def test_tensor_with_other_content_is_refused(sample, rewrite):
    name = sample.manifest.queries[0].tensors["fc.weight"]
    rewrite(sample.path, lambda manifest, data, types: data.update({name: bytes(len(data[name]))}))
    assert verify_bundle(sample.path) == [f"tensor {name} is damaged: its bytes do not match its name"]


def test_tensors_out_of_load_order_are_refused(sample, rewrite):
    def reverse_and_break(manifest, data, types):
        order = list(data)
        order.append(order.pop(0))
        first = sorted(data, key=lambda name: (order.index(name) % 3, order.index(name)))
        for name in first:
            data[name] = data.pop(name)

    rewrite(sample.path, reverse_and_break)
    assert any("not in load order" in problem for problem in verify_bundle(sample.path))


LIES = {
    "bytes before": (lambda m: m["bytes"].update(before=m["bytes"]["before"] + 1), "`bytes` claims"),
    "ceiling above before": (lambda m: m["bytes"].update(ceiling=1 << 40), "could be saved"),
    "negative bytes": (lambda m: m["bytes"].update(after=-1), "bytes.after"),
    "format": (lambda m: m.update(format=2), "unknown format '2'; this version reads format 3"),
    "no queries": (lambda m: m.update(queries=[]), "queries"),
    "duplicate ids": (lambda m: m["queries"][1].update(id="north"), "'north' occurs twice"),
    "input_size absurd": (lambda m: m["queries"][0].update(input_size=10**9), "input_size"),
    "size of preprocess": (lambda m: m["queries"][0]["preprocess"].update(size=[17, 17]), "preprocess"),
    "deviation zero": (lambda m: m["queries"][0]["preprocess"].update(std=[0, 1, 1]), "preprocess"),
    "roi empty": (lambda m: m["queries"][0].update(roi=[5, 5, 5, 9]), "roi"),
    "classes twice": (lambda m: m["queries"][0].update(classes=["a", "a"]), "classes"),
    "classes do not fit": (lambda m: m["queries"][0].update(classes=["a", "b", "c"]), "fc.weight has shape"),
    "model unknown": (lambda m: m["queries"][0].update(model="tiny_nothing"), "is not in the zoo"),
    "model of another task": (lambda m: m["queries"][0].update(model="ssd300_vgg16"), "queries|query north"),
    "model_args nested": (lambda m: m["queries"][0].update(model_args={"s": [[1, 16, 10**9, 1]]}), "cannot be built"),
    "model_args deep": (lambda m: m["queries"][0].update(model_args={"scales": [[[1]]]}), "cannot be built"),
    "path unknown": (lambda m: m["queries"][2]["tensors"].update({"fc.scale": first(m, 2)}), "has no fc.scale"),
    "path missing": (lambda m: m["queries"][2]["tensors"].pop("fc.bias"), "needs fc.bias"),
    "name not a hash": (lambda m: m["queries"][2]["tensors"].update({"fc.bias": "pad.0"}), "tensors"),
    "shared lacks one": (lambda m: m["shared"].pop(), "`shared` does not list"),
    "shared with others": (lambda m: m["shared"][0]["members"].pop(), "`shared` does not list"),
    "evidence lacks its ratio": (lambda m: m["queries"][0]["evidence"].pop("ratio"), "evidence"),
}


def first(manifest, query: int) -> str:
    """Some tensor name of a query."""
    return next(iter(manifest["queries"][query]["tensors"].values()))


@pytest.mark.parametrize("lie", LIES)
def test_manifest_that_contradicts_the_file_is_refused(sample, rewrite, lie):
    edit, reason = LIES[lie]
    rewrite(sample.path, lambda manifest, data, types: edit(manifest) and None)
    problems = verify_bundle(sample.path)
    assert any(part in problem for problem in problems for part in reason.split("|")), problems


@pytest.mark.parametrize("model", ["os:system", "antigravity:geohash", "this:d"])
def test_user_model_is_named_and_not_imported(sample, rewrite, model):
    rewrite(sample.path, lambda manifest, data, types: manifest["queries"][0].update(model=model))
    module = model.partition(":")[0]
    known = module in sys.modules
    assert verify_bundle(sample.path) == []
    (line,) = list_unchecked(sample.path)
    assert f"query north: the code of '{model}' was not run" in line and f"--factory {model}" in line
    assert (module in sys.modules) == known


def test_user_model_is_checked_when_allowed(sample, rewrite, tmp_path):
    (tmp_path / "verified_net.py").write_text(
        "from torch import nn\n"
        "def net(num_classes):\n"
        "    return nn.Sequential(nn.Conv2d(3, num_classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
    )
    model = "verified_net:net"
    rewrite(sample.path, lambda manifest, data, types: manifest["queries"][0].update(model=model, model_args={}))
    assert verify_bundle(sample.path) == [] and len(list_unchecked(sample.path)) == 1
    problems = verify_bundle(sample.path, [model], tmp_path)
    assert list_unchecked(sample.path, [model]) == []
    assert any(f"query north: {model} needs 0.weight, which the bundle does not have" == one for one in problems)
    name = next(iter(open_bundle(sample.path).queries[0].tensors.values()))
    entry = open_bundle(sample.path).header.entries[name]
    content = bytearray(sample.path.read_bytes())
    content[open_bundle(sample.path).header.data_start + entry.begin] ^= 1
    sample.path.write_bytes(content)
    assert verify_bundle(sample.path) == [f"tensor {name} is damaged: its bytes do not match its name"]


@pytest.mark.parametrize(
    "change",
    [
        *({"shape": shape} for shape in ([1 << 40, 1 << 40], [0, 1 << 60], [-1, 8], [2.0, 8], [True, 16], [1] * 2000)),
        *({"dtype": dtype} for dtype in ("F4", ["F32"])),
        *({"data_offsets": offsets} for offsets in ([0, 1 << 62], [512, 0], [0], [0.0, 64])),
        {"extra": 1},
    ],
    ids=str,
)
def test_header_that_contradicts_itself_is_refused_at_once(sample, change):
    content = sample.path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    document = json.loads(content[8 : 8 + length])
    document[sample.manifest.queries[0].tensors["fc.weight"]] |= change
    started = time.process_time()
    assert problems_of(sample.path, seal(document) + content[8 + length :]) == [DAMAGED]
    assert time.process_time() - started < 5


@pytest.mark.parametrize("shift", [-512, 512, 4], ids=["overlap", "hole", "unaligned"])
def test_header_of_another_layout_is_refused(sample, shift):
    content = sample.path.read_bytes()
    header = parse_header(content)
    first, second, *others = header.entries.values()
    moved = replace(second, begin=second.begin + shift, end=second.end + shift)
    head = encode_header([first, moved, *others], header.metadata)
    assert problems_of(sample.path, head + content[header.data_start :]) == [DAMAGED]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 3}',
        '{"format": 3, "format": 3}',
        '{"format": NaN}',
        "[" * 200_000,
        "9" * 5000,
    ],
)
def test_manifest_that_is_none_is_refused(sample, text):
    content = sample.path.read_bytes()
    header = parse_header(content)
    damaged = encode_header(header.entries.values(), {"gemel.manifest": text}) + content[header.data_start :]
    assert len(problems_of(sample.path, damaged)) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@same_file
@given(data=st.data())
def test_any_manifest_value_is_accepted_or_refused(sample, data):
    content = sample.path.read_bytes()
    header = parse_header(content)
    manifest = json.loads(header.metadata["gemel.manifest"])
    node = manifest
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys), "key")
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans(), "stop here"):
            break
        node = node[key]
    node[key] = data.draw(json_values, "value")
    damaged = encode_header(header.entries.values(), {"gemel.manifest": json.dumps(manifest)})
    problems = problems_of(sample.path, damaged + content[header.data_start :])
    assert all(isinstance(problem, str) and "\n" not in problem for problem in problems)


def problems_of(path: Path, content: bytes | bytearray) -> list[str]:
    """What is wrong with a file of these bytes, written beside the sound one."""
    damaged = path.with_name("damaged.safetensors")
    damaged.write_bytes(content)
    return verify_bundle(damaged)


def seal(document: dict) -> bytes:
    """A header with any content and a valid seal."""
    document["__metadata__"]["gemel.digest"] = "0" * 64
    text = json.dumps(document, separators=(",", ":")).encode()
    head = len(text).to_bytes(8, "little") + text
    return head.replace(b"0" * 64, hashlib.sha256(head).hexdigest().encode(), 1)
