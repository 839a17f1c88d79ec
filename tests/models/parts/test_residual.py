"""Residuals: what they compute, that they start at nothing, and where they are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models.parts.residual import attach, residual_bytes, residual_layers


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(4, 6, (3, 5), padding=2, dilation=2),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 6, 3, padding="same"),
        nn.Conv2d(4, 6, 1),
    ],
    ids=str,
)
def test_a_convolution_with_residual_is_the_one_with_weight_plus_b_a(layer):
    plain = copy.deepcopy(layer)
    attached = attach(layer, rank=3)
    nn.init.normal_(attached.residual_b)
    correction = torch.einsum("or,rikl->oikl", attached.residual_b[:, :, 0, 0], attached.residual_a)
    with torch.no_grad():
        plain.weight += correction
    frames = torch.randn(2, 4, 12, 12)
    torch.testing.assert_close(attached(frames), plain(frames), atol=1e-4, rtol=1e-4)


def test_a_linear_layer_with_residual_is_the_one_with_weight_plus_b_a():
    attached = attach(nn.Linear(7, 5), rank=2)
    nn.init.normal_(attached.residual_b)
    x = torch.randn(3, 7)
    expected = F.linear(x, attached.weight + attached.residual_b @ attached.residual_a, attached.bias)
    torch.testing.assert_close(attached(x), expected)


def test_a_new_residual_changes_nothing_and_is_the_same_for_the_same_seed():
    layer = nn.Conv2d(3, 8, 3)
    frames = torch.randn(1, 3, 8, 8)
    before = layer(frames)
    first = attach(layer, 2, seed=5)
    assert torch.equal(first(frames), before)
    assert torch.equal(attach(nn.Conv2d(3, 8, 3), 2, seed=5).residual_a, first.residual_a)
    assert not torch.equal(attach(nn.Conv2d(3, 8, 3), 2, seed=6).residual_a, first.residual_a)


def test_the_plain_parameters_keep_their_names_and_stay_tied():
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
    second.weight = first.weight
    attach(first, 2)
    assert list(first.state_dict()) == ["weight", "bias", "residual_a", "residual_b"]
    assert first.weight is second.weight
    assert isinstance(first, nn.Conv2d)
    assert type(second) is nn.Conv2d


def test_training_moves_the_residual_of_a_frozen_weight():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))
    attached = attach(model[0], 2)
    attached.weight.requires_grad_(False)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = attached.weight.clone()
    for _ in range(2):
        optimiser.zero_grad()
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimiser.step()
    assert attached.residual_b.abs().sum() > 0
    assert torch.equal(attached.weight, before)


def test_on_the_meta_device_tensors_are_assigned_later():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3))
    attach(model[0], 2)
    assert model[0].residual_a.is_meta
    trained = nn.Sequential(nn.Conv2d(3, 8, 3))
    attach(trained[0], 2)
    model.load_state_dict(trained.state_dict(), assign=True)
    frames = torch.randn(1, 3, 8, 8)
    assert torch.equal(model(frames), trained(frames))


def test_a_copy_keeps_its_residual():
    attached = attach(nn.Linear(4, 4), 1)
    twin = copy.deepcopy(attached)
    nn.init.ones_(twin.residual_b)
    assert not torch.equal(twin(torch.ones(4)), attached(torch.ones(4)))


def test_layers_and_bytes_of_residuals_are_counted():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(4, 5))
    attach(model[0], 2)
    assert list(residual_layers(model)) == ["0"]
    assert residual_bytes(model) == 4 * (2 * 3 * 3 * 3 + 8 * 2)


@pytest.mark.parametrize(
    ("layer", "rank", "reason"),
    [
        (nn.Conv2d(8, 8, 3, groups=8), 1, "8 groups"),
        (nn.Conv2d(3, 8, 1), 4, "rank 4 does not fit"),
        (nn.Linear(4, 4), 0, "rank 0 does not fit"),
        (nn.BatchNorm2d(4), 1, "only Conv2d and Linear"),
        (attach(nn.Linear(4, 4), 1), 1, "has a residual already"),
    ],
)
def test_what_cannot_carry_a_residual_is_refused_unchanged(layer, rank, reason):
    before = list(layer.state_dict())
    with pytest.raises(ValueError, match=reason):
        attach(layer, rank)
    assert list(layer.state_dict()) == before
