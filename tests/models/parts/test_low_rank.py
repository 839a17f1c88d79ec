"""Layers as two factors: how they are asked for, how near they come, and that a bundle with them is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.bits import with_ranks
from models.bundle import BundleQuery, Made, open_bundle, verify_bundle, write_bundle
from models.errors import InputError
from models.parts.low_rank import LowRankConv2d, LowRankLinear, factorisable, factorise, factors, largest_rank_of
from models.preprocess import Preprocess
from models.sharing.layers import describe
from models.zoo import build

NAME = "tests.models.parts.test_low_rank:net"
CLASSES = ("car", "none")
RANKS = {"conv": 2, "wide": 3}


class Net(nn.Module):
    """Two convolutions, one of them depthwise, a heavy linear layer and a head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=4, bias=False)
        self.each = nn.Conv2d(4, 4, 1, groups=4, bias=False)
        self.wide = nn.Linear(4 * 16, 24)
        self.head = nn.Linear(24, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(self.each(self.conv(x)).flatten(1)).relu())


def net(num_classes: int) -> nn.Module:
    return Net(num_classes)


def test_a_model_is_built_with_factors_under_the_layers_path() -> None:
    model = build(NAME, CLASSES, {"low_rank": RANKS}, 18)
    state = model.state_dict()
    factors = {"conv.a.weight", "conv.b.weight", "wide.a.weight", "wide.b.weight", "wide.b.bias"}
    assert set(state) == factors | {"each.weight", "head.weight", "head.bias"}
    assert state["wide.a.weight"].shape == (3, 64) and state["wide.b.weight"].shape == (24, 3)
    assert state["conv.a.weight"].shape == (2, 3, 3, 3) and state["conv.b.weight"].shape == (4, 2, 1, 1)
    layers = {path: wide for path, wide, *_ in describe(NAME, 2, 18, "classification", {"low_rank": RANKS}).layers}
    assert layers["wide.a"] == "linear 3x64 float32" and "wide" not in layers


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [({"each": 2}, "no linear layer"), ({"conv": 5}, "rank 5 does not fit"), ({"nowhere": 2}, "no linear layer"),
     ({"wide": 25}, "rank 25 does not fit"),
     ({"wide": 0}, "rank 0 does not fit"), ({"wide": "x"}, "does not fit"), (3, "no mapping")],
)  # fmt: skip
def test_ranks_that_make_no_sense_are_one_line(ranks: object, fault: str) -> None:
    with pytest.raises(InputError, match=f"{NAME}: model_args.low_rank.*{fault}"):
        build(NAME, CLASSES, {"low_rank": ranks}, 18)


def test_layers_whose_weights_are_read_by_others_stay_whole() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16)
    assert factorisable(encoder, "linear1") is None and factorisable(encoder, "self_attn.out_proj") is None
    assert factorisable(nn.Sequential(nn.Linear(2, 2)), "0") is not None


def test_factors_of_full_rank_lose_nothing_and_fewer_lose_the_least_there_is() -> None:
    torch.manual_seed(0)
    weight = torch.randn(12, 20)
    a, b = factors(weight, 12)
    assert torch.allclose(b @ a, weight, atol=1e-5)
    a, b = factors(weight, 5)
    least = torch.linalg.svdvals(weight)[5:].square().sum()
    assert torch.allclose((b @ a - weight).square().sum(), least, rtol=1e-4)


def test_factors_weighted_by_their_inputs_come_nearer_on_such_inputs() -> None:
    torch.manual_seed(0)
    weight, scale = torch.randn(16, 32), torch.logspace(0, 2, 32)
    inputs = torch.randn(500, 32) * scale
    plain, weighted = (
        (inputs @ (b @ a - weight).T).square().mean() for a, b in (factors(weight, 6), factors(weight, 6, scale))
    )
    assert weighted < 0.8 * plain


def test_large_weights_are_decomposed_the_same_each_time_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(0)
    weight = torch.randn(600, 8) @ torch.randn(8, 520)
    state = torch.get_rng_state()
    a, b = factors(weight, 8, seed=3)
    again = factors(weight, 8, seed=3)
    assert torch.equal(a, again[0]) and torch.equal(b, again[1])
    assert torch.equal(state, torch.get_rng_state())
    assert (b @ a - weight).norm() < 1e-3 * weight.norm()


def test_a_factorised_layer_computes_b_a_x_plus_bias() -> None:
    torch.manual_seed(0)
    model = factorise(nn.Sequential(nn.Linear(6, 5)), {"0": 2})
    layer = model[0]  # type: ignore[index]
    assert isinstance(layer, LowRankLinear)
    x = torch.randn(3, 6)
    assert torch.allclose(model(x), x @ (layer.b.weight @ layer.a.weight).T + layer.b.bias, atol=1e-6)


@pytest.mark.parametrize(
    "args",
    [{"stride": 2, "padding": 1}, {"dilation": 2, "bias": False}, {"padding": "same", "padding_mode": "reflect"}],
)
def test_a_convolution_of_full_rank_factors_computes_the_same(args: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 8, 3, **args)
    rank = largest_rank_of(layer.weight.shape)
    made = factorise(nn.Sequential(layer), {"0": rank})[0]  # type: ignore[index]
    assert isinstance(made, LowRankConv2d)
    a, b = factors(layer.weight, rank, torch.logspace(-1, 1, 6))
    state = {"a.weight": a, "b.weight": b} | ({"b.bias": layer.bias} if layer.bias is not None else {})
    made.load_state_dict(state)
    x = torch.randn(2, 6, 11, 9)
    assert torch.allclose(made(x), layer(x), atol=1e-4)


def test_factors_of_a_convolution_weighted_by_their_inputs_come_nearer_on_such_inputs() -> None:
    torch.manual_seed(0)
    layer, scale = nn.Conv2d(8, 24, 3, bias=False), torch.logspace(0, 2, 8)
    inputs = torch.randn(4, 8, 20, 20) * scale.view(-1, 1, 1)
    errors = []
    for a, b in (factors(layer.weight, 6), factors(layer.weight, 6, scale)):
        outputs = nn.functional.conv2d(nn.functional.conv2d(inputs, a), b)
        errors.append((outputs - layer(inputs)).square().mean())
    assert errors[1] < 0.8 * errors[0]


def test_a_bundle_with_factors_counts_the_originals_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models: dict[str, Any] = {"a": factorise(Net(2), RANKS), "b": factorise(Net(2), RANKS)}
    models["b"].wide.a = models["a"].wide.a
    path = tmp_path / "b.gemel"
    manifest = write_bundle(path, models, [_record(query, NAME, RANKS) for query in models], Made("w", "wide", 0))
    plain = sum(tensor.nbytes for tensor in Net(2).state_dict().values())
    assert manifest.bytes.before == 2 * plain
    assert verify_bundle(path, [NAME]) == []
    bundle = open_bundle(path, [NAME])
    x = torch.rand(2, 3, 18, 18)
    for query, model in models.items():
        assert torch.equal(bundle.build(query)(x), model.eval()(x))
    assert any(("a", "wide.a.weight") in one.members for one in manifest.shared)


def test_arguments_lose_their_ranks_again() -> None:
    assert with_ranks({"width": 2}, RANKS) == {"width": 2, "low_rank": RANKS}
    assert with_ranks({"width": 2, "low_rank": RANKS}, {}) == {"width": 2}


def _record(query: str, model: str, ranks: dict[str, int]) -> BundleQuery:
    return BundleQuery(
        id=query, camera="c", task="classification", classes=CLASSES, model=model, model_args={"low_rank": dict(ranks)},
        input_size=18, preprocess=Preprocess(18), fps=5.0, sla_ms=100.0, accuracy_target=0.95,
    )  # fmt: skip
