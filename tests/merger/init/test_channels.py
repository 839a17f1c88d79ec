"""Channel spaces read from graphs: whole models reordered answer as before, and what is not understood stays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._pytree import tree_leaves

from merger.init.permutation import channels_of, permute_channels
from models.batchnorm import batchnorms_of
from models.zoo import build
from tests.merger.tiny import SIZE, TinyNet

SIDE = 64
ZOO = ("resnet18", "mobilenet_v2", "vgg11_bn", "squeezenet1_0", "googlenet", "cifar_resnet20", "ssd_resnet18")


@pytest.mark.parametrize("name", ZOO)
def test_permuted_model_keeps_its_outputs(name: str) -> None:
    task = "detection" if name.startswith("ssd") else "classification"
    torch.manual_seed(0)
    model = randomize_norms(build(name, ("a", "b"), {}, SIDE, task))
    channels = channels_of(model)
    assert channels is not None
    free = {key for (key, _), layout in channels.uses.items() if any(p.space in channels.widths for p in layout)}
    sizes = {key: tensor.numel() for key, tensor in model.named_parameters()}
    assert sum(sizes.get(key, 0) for key in free) > 0.9 * sum(sizes.values())
    check_outputs(model, shuffle_spaces(channels.widths, 0), torch.randn(2, 3, SIDE, SIDE))


@given(seed=st.integers(0, 2**16), width=st.sampled_from([4, 6]), extra=st.booleans(), chosen=st.data())
@settings(max_examples=25, deadline=None)
def test_permutation_of_any_spaces_keeps_outputs(seed: int, width: int, extra: bool, chosen: st.DataObject) -> None:
    torch.manual_seed(seed)
    model = randomize_norms(TinyNet(3, width, extra))
    channels = channels_of(model)
    assert channels is not None and len(channels.widths) == 3 + extra
    spaces = chosen.draw(st.sets(st.sampled_from(sorted(channels.widths))))
    check_outputs(
        model, {space: shuffle_spaces(channels.widths, seed)[space] for space in spaces}, torch.randn(2, 3, SIZE, SIZE)
    )


class Mixed(nn.Module):
    """Concatenation, a depthwise convolution, squeeze and excitation, a layer used twice, and a flattened map."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 6, 1)
        self.deep = nn.Conv2d(10, 10, 3, padding=1, groups=10)
        self.down, self.up = nn.Conv2d(10, 3, 1), nn.Conv2d(3, 10, 1)
        self.twice = nn.Conv2d(10, 10, 3, padding=1)
        self.hidden, self.head = nn.Linear(10 * 16, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(torch.cat([self.a(x), self.b(x)], 1))
        scale = x.mean((2, 3), keepdim=True)
        x = x * torch.sigmoid(self.up(torch.relu(self.down(scale))))
        x = self.twice(torch.relu(self.twice(x)))
        x = nn.functional.adaptive_avg_pool2d(x, 4)
        return self.head(torch.relu(self.hidden(x.view(x.size(0), -1))))


def test_channels_of_concatenations_products_and_repeats() -> None:
    torch.manual_seed(0)
    model = Mixed().eval()
    channels = channels_of(model)
    assert channels is not None
    (part,) = channels.uses["hidden.weight", 1]
    assert (part.width, part.repeat) == (10, 16)
    assert sorted(channels.widths.values()) == [3, 8]  # the product makes parts of a whole meet a whole
    check_outputs(model, shuffle_spaces(channels.widths, 1), torch.randn(2, 3, 8, 8))


class Strange(nn.Module):
    """Channels are halved by hand; the second layer's are summed with what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 3, 1)
        self.third, self.head = nn.Conv2d(3, 5, 1), nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        half, _ = self.first(x).chunk(2, 1)
        return self.head(self.third(self.second(half) + x))


def test_channels_of_unknown_operations_stay() -> None:
    model = Strange().eval()
    channels = channels_of(model)
    assert channels is not None and list(channels.widths.values()) == [5]
    check_outputs(model, shuffle_spaces(channels.widths, 2), torch.randn(2, 3, 4, 4))


class Deciding(nn.Module):
    """Its way depends on the values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_channels_beside_a_computed_weight_stay() -> None:
    torch.manual_seed(0)
    first, last = weight_norm(nn.Conv2d(3, 4, 1)), nn.Conv2d(6, 2, 1)
    model = randomize_norms(nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 5, 1), nn.ReLU(), nn.Conv2d(5, 6, 1), last))
    channels = channels_of(model)
    assert channels is not None and {key for key, _ in channels.uses if "parametrizations" in key} == set()
    check_outputs(model, shuffle_spaces(channels.widths, 0), torch.randn(2, 3, 8, 8))


def test_channels_without_a_graph_are_none() -> None:
    assert channels_of(nn.Sequential(nn.Conv2d(3, 4, 1), Deciding())) is None


def test_channels_of_a_tensor_under_two_names_are_none() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1))
    model[1].weight = model[0].weight
    assert channels_of(model) is None


def randomize_norms(model: nn.Module) -> nn.Module:
    """The model in eval mode, its norms with statistics of their own, so that a channel out of place shows."""
    with torch.no_grad():
        for norm in batchnorms_of(model):
            assert norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.normal_(std=0.1)
            norm.running_var.uniform_(0.5, 2)
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(std=0.1)
    return model.eval()


def shuffle_spaces(widths, seed: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {space: torch.randperm(width, generator=generator) for space, width in widths.items()}


@torch.no_grad()
def check_outputs(model: nn.Module, orders: dict[int, Tensor], frames: Tensor) -> None:
    channels = channels_of(model)
    assert channels is not None
    before, old = flat_outputs(model, frames), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = permute_channels(old, channels, orders)
    if any((order != torch.arange(len(order))).any() for order in orders.values()):
        assert any(not torch.equal(changed[name], old[name]) for name in old)
    model.load_state_dict(changed)
    after = flat_outputs(model, frames)
    scale = before.abs().max()
    assert scale > 0
    assert torch.allclose(after / scale, before / scale, atol=1e-5)


def flat_outputs(model: nn.Module, frames: Tensor) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in tree_leaves(model(frames)) if isinstance(leaf, Tensor)])
