"""Norm statistics: measured anew, and given back where they were folded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from models.batchnorm import has_folded_norms, recalibrate_batchnorm, unfold_batchnorm

torch.set_num_threads(1)


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
    )


def batches(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 12, 12, generator=generator) * 2 + 3 for _ in range(count)]


def test_calibration_measures_what_each_norm_meets():
    model = network().eval()
    recalibrate_batchnorm(model, batches())
    first = model[1]
    met = torch.cat([model[0](batch) for batch in batches()])
    torch.testing.assert_close(first.running_mean, met.mean(dim=(0, 2, 3)), atol=1e-4, rtol=1e-4)
    each = torch.stack([model[0](batch).var(dim=(0, 2, 3)) for batch in batches()])
    torch.testing.assert_close(first.running_var, each.mean(dim=0), atol=1e-4, rtol=1e-4)


def test_a_batch_counts_as_often_as_it_has_frames():
    model = network().eval()
    data = batches(2)
    uneven = [data[0], data[1][:2]]
    recalibrate_batchnorm(model, uneven)
    first = model[1]
    met = torch.cat([model[0](batch) for batch in uneven])
    torch.testing.assert_close(first.running_mean, met.mean(dim=(0, 2, 3)), atol=1e-4, rtol=1e-4)
    each = torch.stack([model[0](batch).var(dim=(0, 2, 3)) for batch in uneven])
    expected = (each * torch.tensor([8.0, 2.0])[:, None]).sum(0) / 10
    torch.testing.assert_close(first.running_var, expected, atol=1e-4, rtol=1e-4)


def test_calibration_leaves_norms_at_rest_alone():
    model = network()
    resting = model[1].requires_grad_(False)
    before = {norm: norm.running_mean.clone() for norm in (resting, model[5])}
    recalibrate_batchnorm(model, batches())
    assert torch.equal(resting.running_mean, before[resting])
    assert not torch.equal(model[5].running_mean, before[model[5]])


def test_unfolding_keeps_the_function_and_carries_it_into_train_mode():
    model = network().eval()
    with torch.no_grad():
        model[1].bias.copy_(torch.randn(6))
        model[5].weight.copy_(torch.rand(4) + 0.5)
    data = torch.cat(batches())
    before = model(data)
    model[3].p = 0.0
    as_it_trained = (model.train()(data) - before).abs().mean()
    model = model.eval()
    for norm in (model[1], model[5]):
        norm.reset_running_stats()
    assert has_folded_norms(model)
    unfold_batchnorm(model, [data])
    torch.testing.assert_close(model(data), before, atol=1e-4, rtol=1e-4)
    assert not has_folded_norms(model)
    assert (model.train()(data) - before).abs().mean() < 1e-3 < as_it_trained


def test_a_model_that_trained_has_no_folded_norms():
    model = network()
    assert has_folded_norms(model)
    model.train()(batches(1)[0])
    assert not has_folded_norms(model)
    assert not has_folded_norms(nn.Linear(2, 2))
