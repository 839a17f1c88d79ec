"""BatchNorm statistics: recalibrated, and restored where they were folded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gemel.models.batchnorm import has_folded_norms, recalibrate_batchnorm, unfold_batchnorm

torch.set_num_threads(1)


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
    )


def batches(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 12, 12, generator=generator) * 2 + 3 for _ in range(count)]


def test_recalibration_sets_the_statistics_of_each_norms_inputs():
    model = network().eval()
    recalibrate_batchnorm(model, batches())
    first = model[1]
    inputs = torch.cat([model[0](batch) for batch in batches()])
    torch.testing.assert_close(first.running_mean, inputs.mean(dim=(0, 2, 3)), atol=1e-4, rtol=1e-4)
    each = torch.stack([model[0](batch).var(dim=(0, 2, 3)) for batch in batches()])
    torch.testing.assert_close(first.running_var, each.mean(dim=0), atol=1e-4, rtol=1e-4)


def test_recalibration_weights_a_batch_by_its_frames():
    model = network().eval()
    data = batches(2)
    uneven = [data[0], data[1][:2]]
    recalibrate_batchnorm(model, uneven)
    first = model[1]
    inputs = torch.cat([model[0](batch) for batch in uneven])
    torch.testing.assert_close(first.running_mean, inputs.mean(dim=(0, 2, 3)), atol=1e-4, rtol=1e-4)
    each = torch.stack([model[0](batch).var(dim=(0, 2, 3)) for batch in uneven])
    expected = (each * torch.tensor([8.0, 2.0])[:, None]).sum(0) / 10
    torch.testing.assert_close(first.running_var, expected, atol=1e-4, rtol=1e-4)


def test_recalibration_does_not_change_frozen_norms():
    model = network()
    frozen = model[1].requires_grad_(False)
    before = {norm: norm.running_mean.clone() for norm in (frozen, model[5])}
    recalibrate_batchnorm(model, batches())
    assert torch.equal(frozen.running_mean, before[frozen])
    assert not torch.equal(model[5].running_mean, before[model[5]])


def test_unfolding_keeps_the_function_in_eval_and_in_train_mode():
    model = network().eval()
    with torch.no_grad():
        model[1].bias.copy_(torch.randn(6))
        model[5].weight.copy_(torch.rand(4) + 0.5)
    data = torch.cat(batches())
    before = model(data)
    model[3].p = 0.0
    before_unfolding = (model.train()(data) - before).abs().mean()
    model = model.eval()
    for norm in (model[1], model[5]):
        norm.reset_running_stats()
    assert has_folded_norms(model)
    unfold_batchnorm(model, [data])
    torch.testing.assert_close(model(data), before, atol=1e-4, rtol=1e-4)
    assert not has_folded_norms(model)
    assert (model.train()(data) - before).abs().mean() < 1e-3 < before_unfolding


def test_trained_model_has_no_folded_norms():
    model = network()
    assert has_folded_norms(model)
    model.train()(batches(1)[0])
    assert not has_folded_norms(model)
    assert not has_folded_norms(nn.Linear(2, 2))
