"""Arguments of zoo models, class lists and input sizes that mean harm: refused before anything is allocated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from models import zoo
from models.errors import InputError
from models.zoo.registry import ARGUMENTS, ENTRIES
from tests.hostile.asking import A, D, ask
from tests.hostile.harness import refused

BAD: tuple[Any, ...] = (
    math.inf, -math.inf, math.nan, -1, -0.5, 1e9, 1e308, 10**19, "1", "x", [], [[]], {}, {"a": [1]}, [1e9], [-1],
    [math.nan] * 3, [[1, 16, 10**9, 1]], [1.0] * 1000, [[[[[1]]]]], ["a", "b"], [[0.5, -1.0]] * 6, None,
)  # fmt: skip
TAKES = {
    "mobilenet_v2": ("width_mult", "round_nearest", "dropout"),
    "mobilenet_v3_small": ("width_mult", "reduced_tail", "dilated", "dropout"),
    "resnet18": ("groups", "width_per_group", "zero_init_residual", "replace_stride_with_dilation"),
    "densenet121": ("bn_size", "drop_rate", "memory_efficient"),
    "vgg11": ("dropout", "init_weights"),
    "googlenet": ("dropout", "transform_input"),
    "efficientnet_b0": ("stochastic_depth_prob",),
    "convnext_tiny": ("layer_scale", "stochastic_depth_prob"),
    "vit_b_16": ("representation_size", "attention_dropout"),
    "swin_t": ("mlp_ratio", "attention_dropout"),
    "regnet_y_400mf": ("stem_width",),
    "ssdlite320_mobilenet_v2": ("scales", "aspect_ratios"),
    "yolov3_tiny": ("anchors",),
    "retinanet_resnet50_fpn": ("anchor_scale",),
    "fasterrcnn_resnet50_c5": ("dilated", "anchor_scale"),
}
LEGAL = {"aspect_ratios": ([],), "reduced_tail": (), "mlp_ratio": (), "representation_size": ()}
"""What of BAD is none."""
CASES = [
    (model, name, value)
    for model, names in TAKES.items()
    for name in names
    for value in BAD
    if value not in LEGAL.get(name, ())
]


def _query(model: str, **changes: Any) -> dict[str, Any]:
    entry = ENTRIES[model]
    size = {"input_size": entry.input_size, "model": model, "task": entry.task, "weights": None}
    return {**(A if entry.task == "classification" else D), **size, **changes}


def test_every_argument_that_has_bounds_is_tried() -> None:
    assert {name for names in TAKES.values() for name in names} == set(ARGUMENTS)


@pytest.mark.parametrize(("model", "name", "value"), CASES)
def test_an_argument_that_is_none_is_named(model: str, name: str, value: Any) -> None:
    entry = ENTRIES[model]
    with pytest.raises(InputError, match=f"^{model}: model_args: cannot be built: ") as error:
        zoo.build(model, ["car", "bus"], {name: value}, entry.input_size, entry.task)
    assert name in str(error.value) and len(str(error.value)) < 900


@pytest.mark.parametrize("model", sorted(zoo.OWN))
def test_an_argument_that_nobody_knows_is_named(model: str) -> None:
    for name in ("depth", "weights", "num_classes", "norm_layer", "block", "progress", "x" * 10_000, "\n", ""):
        with pytest.raises(InputError, match=f"^{model}: model_args: cannot be built: "):
            zoo.build(model, ["car", "bus"], {name: 1}, ENTRIES[model].input_size, ENTRIES[model].task)


@pytest.mark.parametrize(
    ("model", "args"),
    [("mobilenet_v2", {"width_mult": 16, "groups": 2}),
     ("mobilenet_v2", {"inverted_residual_setting": [[16, 1024, 1024, 1]] * 16}),
     ("resnet152", {"width_per_group": 1024, "groups": 64}),
     ("resnet18", {"width_mult": 1.0}), ("swin_t", {"embed_dim": 10**9})],
)  # fmt: skip
def test_together_they_are_one_line_of_a_workload(house: Path, model: str, args: dict[str, Any]) -> None:
    refused(["inspect", ask(house, _query(model, model_args=args))], house, "one.yaml", "model_args (a)", model)


@pytest.mark.parametrize(
    "text",
    [".inf", "-.nan", "1e9", "[1, 2]", "{a: {b: 1}}", "'1'", "true", "~", "9" * 99, "2001-01-01", "!!binary aGVsbG8="],
)
def test_values_as_yaml_writes_them(house: Path, text: str) -> None:
    path = house / ask(house, _query("mobilenet_v2", model_args={"width_mult": 777}))
    path.write_text(path.read_text().replace("777", text))
    refused(["inspect", path.name], house, "one.yaml", "model_args (a)", "width_mult")


@pytest.mark.parametrize("args", [[], "x", 1, None, {"1": 1}, {"low_rank": 3}, {"low_rank": {"linear": -1}},
                                  {"low_rank": {"linear": 10**18}}, {"low_rank": {"linear": "x"}},
                                  {"low_rank": {"": 1}}, {"low_rank": {".": 1}}, {"low_rank": {"a" * 900: 1}},
                                  {"low_rank": {"layer1": 1}}, {"low_rank": [["linear", 1]]}])  # fmt: skip
def test_arguments_that_are_no_mapping_and_ranks_that_are_none(house: Path, args: Any) -> None:
    path = house / ask(house, {**A, "weights": None}, model_args=args if args is not None else "null")
    refused(["inspect", path.name], house, "one.yaml", "model_args")


@pytest.mark.parametrize("size", [0, -1, 15, 4097, 10**9, 10**30, 32.5, "x", True, None, [], math.inf, math.nan])
def test_input_sizes(house: Path, size: Any) -> None:
    refused(["inspect", ask(house, {**A, "input_size": size})], house, "one.yaml", "input_size")


@pytest.mark.parametrize("model", ["vit_b_16", "yolov3_tiny", "fastestdet"])
def test_input_sizes_that_an_architecture_does_not_take(house: Path, model: str) -> None:
    refused(["inspect", ask(house, _query(model, input_size=100))], house, "one.yaml", "input_size", model)


CLASSES: dict[str, Any] = {
    "none": [],
    "one": ["x"],
    "twice": ["x", "y", "x"],
    "1e6": [str(index) for index in range(10**6)],
    "40,000": [str(index) for index in range(40_000)],
    "numbers": [1, 2],
    "nothings": [None, None],
    "lists": [["x"], ["y"]],
    "empty": ["", "x"],
    "a word": "xy",
    "a mapping": {"x": 1},
    "a number": 3,
}


@pytest.mark.parametrize("classes", CLASSES.values(), ids=CLASSES)
def test_class_lists(house: Path, classes: Any) -> None:
    model = {"model": "vgg11", "input_size": 224} if len(str(classes)) > 1000 else {}
    changed = {**A, **model, "classes": classes, "weights": None}
    if model and len(classes) < 50_000:
        changed["model_args"] = {"dropout": 2}  # vgg11 may well have so many; what is wrong is told all the same
    refused(["inspect", ask(house, changed)], house, "one.yaml")


@pytest.mark.parametrize("label", ["../../../etc", "/etc", "a/b", "..", ".", "x" * 300])
def test_a_class_that_leads_out_of_its_folder(house: Path, label: str) -> None:
    seen = refused(["train", ask(house, {**A, "classes": ["empty", label], "weights": "new.safetensors"})], house)
    assert "class" in seen or "name too long" in seen


def test_what_is_within_the_bounds_is_built() -> None:
    for model, args in {
        "mobilenet_v2": {"width_mult": 0.5, "round_nearest": 4, "dropout": 0.1},
        "resnet18": {"zero_init_residual": True},
        "ssdlite320_mobilenet_v2": {"scales": [0.15, 0.45], "aspect_ratios": []},
        "vit_b_16": {"representation_size": 64, "dropout": 0},
        "retinanet_resnet50_fpn": {"anchor_scale": 2},
    }.items():
        entry = ENTRIES[model]
        assert zoo.build(model, ["car", "bus"], args, entry.input_size, entry.task, device="meta")
