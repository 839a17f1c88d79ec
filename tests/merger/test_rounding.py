"""Codes of int4 weights that keep what layers answer on the frames that were seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gemel.merger.rounding import choose_codes, is_plain, measure_moments, round_weights
from gemel.models.bits import max_code
from gemel.models.quantization import pack


def smooth_frames(count: int, seed: int) -> Tensor:
    """Frames whose neighbouring pixels and channels are alike, as those of a camera."""
    draws = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 4, 4, generator=draws)
    return nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear") + coarse.mean((1, 2, 3), keepdim=True)


def small_net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.Conv2d(16, 32, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 8),
    ).eval()  # fmt: skip


@torch.no_grad()
def test_rounded_network_answers_nearer_to_its_own_than_with_the_nearest_codes() -> None:
    keys = ["0.weight", "2.weight", "3.weight", "7.weight"]
    whole, nearest, rounded = small_net(), small_net(), small_net()
    for key in keys:
        nearest.get_parameter(key).copy_(pack(nearest.get_parameter(key), "int4").wide())
    codes = round_weights(rounded, keys, smooth_frames(32, 0))
    assert codes.keys() == {"0.weight", "3.weight", "7.weight"} and not is_plain(rounded[2])
    rounded[2].weight.copy_(nearest[2].weight)
    unseen = smooth_frames(64, 1)
    errors = [float((net(unseen) - whole(unseen)).square().mean()) for net in (nearest, rounded)]
    assert errors[1] < 0.6 * errors[0]
    for key, own in codes.items():
        assert own.abs().max() <= max_code("int4")
        assert torch.equal(rounded.get_parameter(key), pack(whole.get_parameter(key), "int4", own).wide())


def test_codes_of_inputs_that_tell_nothing_are_the_nearest() -> None:
    weight = small_net()[7].weight
    nearest = pack(weight, "int4").tensor
    for moments in (torch.zeros(128, 128), torch.eye(128)):
        assert torch.equal(pack(weight, "int4", choose_codes(weight, moments)).tensor, nearest)


def test_moments_of_a_convolution_are_those_of_its_inputs() -> None:
    layer = small_net()[0]
    frames = smooth_frames(2, 0)
    rows = nn.functional.unfold(frames, 3, 1, 1, 2).transpose(1, 2).reshape(-1, 27)
    torch.testing.assert_close(measure_moments(layer, frames), rows.T @ rows)


def test_only_layers_that_sum_over_all_inputs_are_rounded_so() -> None:
    assert is_plain(nn.Conv2d(4, 8, 3, 1, 1)) and is_plain(nn.Linear(64, 8))
    others = [nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(4, 8, 3, padding="same"), nn.Linear(5000, 2), nn.LayerNorm(8)]
    assert not any(map(is_plain, [*others, nn.Conv2d(4, 8, 3, 1, 1, padding_mode="reflect")]))


def test_inputs_that_are_not_finite_leave_the_nearest_codes() -> None:
    frames = smooth_frames(2, 0)
    frames[1, 0, 0, 0] = torch.inf
    assert round_weights(small_net(), ["0.weight", "7.weight"], frames) == {}
