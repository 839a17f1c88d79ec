"""Norms that keep no statistics, matched with the outputs of an original, and the mean of weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gemel.merger.init.average import average_weights
from gemel.merger.init.norms import fixed_norms, match_norm_outputs
from gemel.models.graph.unfold import ChannelAffine
from gemel.models.sharing.plan import SharingPlan

IMAGES = torch.rand(16, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def network(affine: bool) -> nn.Sequential:
    torch.manual_seed(0)
    norms = [ChannelAffine(width) if affine else nn.BatchNorm2d(width) for width in (8, 6)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), norms[0], nn.ReLU(), nn.Conv2d(8, 6, 3, bias=False), norms[1], nn.ReLU()
    ).eval()


def norm_outputs(model: nn.Sequential) -> list[torch.Tensor]:
    """The outputs of the norms, one after the other."""
    found: list[torch.Tensor] = []
    handles = [model.get_submodule(name).register_forward_hook(lambda *a: found.append(a[2])) for name in ("1", "4")]
    model(IMAGES)
    for handle in handles:
        handle.remove()
    return found


@torch.no_grad()
@pytest.mark.parametrize("affine", [True, False])
def test_matched_norms_have_the_statistics_of_the_original(affine):
    original, model = network(affine), network(affine)
    for weight in (model.get_parameter("0.weight"), model.get_parameter("3.weight")):
        weight.add_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    norms = fixed_norms(model, eval_norms=True)
    assert norms
    match_norm_outputs(model, original, norms, IMAGES)
    for found, wanted in zip(norm_outputs(model), norm_outputs(original), strict=True):
        assert not torch.allclose(found, wanted, atol=1e-3)
        for one, other in zip(torch.std_mean(found, (0, 2, 3)), torch.std_mean(wanted, (0, 2, 3)), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_matching_unchanged_weights_keeps_the_answers():
    original = network(True)
    model = copy.deepcopy(original)
    for one in (model, original):
        one.get_parameter("3.weight")[0] = 0.0  # a channel without deviation has no scale to find
    match_norm_outputs(model, original, fixed_norms(model, eval_norms=False), IMAGES)
    torch.testing.assert_close(model(IMAGES), original(IMAGES), atol=1e-5, rtol=1e-5)


def test_fixed_norms_leave_out_recalibrated_and_frozen_ones():
    assert fixed_norms(network(False), eval_norms=False) == {}
    assert set(fixed_norms(network(False), eval_norms=True)) == set(fixed_norms(network(True), False)) == {"1", "4"}
    assert fixed_norms(network(True).requires_grad_(False), eval_norms=True) == {}


def test_average_weights_are_the_mean_of_each_set():
    states = {"a": {"x.weight": torch.tensor([1.0, 3.0]), "y.weight": torch.ones(1)}, "b": {"z.weight": torch.zeros(2)}}
    found = average_weights(SharingPlan(((("a", "x"), ("b", "z")),)), states)
    assert found["a"]["x.weight"] is found["b"]["z.weight"]
    assert found["a"]["x.weight"].tolist() == [0.5, 1.5]
    assert found["a"]["y.weight"] is states["a"]["y.weight"] and states["a"]["x.weight"].tolist() == [1.0, 3.0]
