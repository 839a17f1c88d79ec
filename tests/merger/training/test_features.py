"""Distillation of what goes into the heads, without a change to any architecture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merger.core.context import MergeContext
from merger.training.distillation import feature_loss, record_inputs, watched_layers
from merger.training.recipe import Recipe
from models.workload import Workload
from models.zoo import build
from tests.merger.tiny import SIZE


def test_the_inputs_of_a_classifiers_head_are_watched(workload: Workload) -> None:
    ctx = MergeContext(workload)
    model, query = ctx.originals["q0"], ctx.queries["q0"]
    paths = watched_layers(query, model)
    with record_inputs(model, paths) as seen:
        model(torch.rand(2, 3, SIZE, SIZE))
    assert paths == ["head"] and [tuple(x.shape) for x in seen] == [(2, 64 * (SIZE // 8) ** 2)]
    model(torch.rand(2, 3, SIZE, SIZE))
    assert len(seen) == 1


def test_the_head_convolutions_of_a_detector_are_watched(workload: Workload) -> None:
    from dataclasses import replace

    query = replace(workload.queries[0], task="detection", model="ssd_resnet18", model_args={}, input_size=96)
    model = build(query.model, query.classes, {}, query.input_size, query.task).train()
    paths = watched_layers(query, model)
    with record_inputs(model, paths) as seen:
        model(torch.rand(2, 3, 96, 96))
    assert len(paths) == len(seen) > 1 and all(x.ndim == 4 and len(x) == 2 for x in seen)


def test_a_detector_whose_head_serves_all_maps_is_seen_on_each_of_them(workload: Workload) -> None:
    from dataclasses import replace

    query = replace(
        workload.queries[0], task="detection", model="fasterrcnn_mobilenet_v3_large_320_fpn", model_args={},
        input_size=64,
    )  # fmt: skip
    model = build(query.model, query.classes, {}, query.input_size, query.task).eval()
    with record_inputs(model, watched_layers(query, model)) as seen, torch.no_grad():
        model(torch.rand(1, 3, 64, 64))
    assert len(seen) == 3 and len({tuple(x.shape[2:]) for x in seen}) > 1


def test_the_loss_counts_in_deviations_of_the_original() -> None:
    wanted = torch.randn(8, 5)
    off = torch.full_like(wanted, 0.5)
    loss = feature_loss([wanted + off], [wanted])
    assert torch.isclose(loss, 0.25 / wanted.var(correction=0))
    assert torch.isclose(feature_loss([10 * (wanted + off)], [10 * wanted]), loss, rtol=1e-4)
    assert torch.isclose(feature_loss([wanted + off, wanted], [wanted, wanted]), loss / 2)


def test_features_of_other_shapes_and_dead_ones_do_no_harm() -> None:
    seen = torch.randn(4, 3, requires_grad=True)
    assert feature_loss([seen], [torch.randn(5, 3)]) == 0
    assert torch.isfinite(feature_loss([seen], [torch.zeros(4, 3)]))


def test_training_on_features_brings_them_nearer(workload: Workload) -> None:
    ctx = MergeContext(workload)
    images = ctx._few("q0")

    def distance(model: nn.Module) -> float:
        seen = []
        for one in (model, ctx.originals["q0"]):
            with record_inputs(one, ["head"]) as inputs, torch.no_grad():
                one.eval()(images)
            seen.append(inputs)
        return float(feature_loss(*seen))

    found = {}
    for weight in (0.0, 1.0):
        models = ctx.models(["q0"])
        with torch.no_grad():
            models["q0"].get_parameter("last.0.weight").mul_(0.5).add_(0.05)
        before = distance(models["q0"])
        training = ctx.training(models, Recipe(rate=2e-3, epochs=6, features=weight))
        while training.epochs < 6:
            training.epoch()
        found[weight] = distance(models["q0"])
        assert weight == 0 or found[weight] < before / 2
    assert found[1.0] < found[0.0]


def test_a_weight_below_zero_is_refused() -> None:
    with pytest.raises(Exception, match="features: -1 makes no sense"):
        Recipe(features=-1)
