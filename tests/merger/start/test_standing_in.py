"""Standing in: a shallower network is found within a deeper one, and answers as it should when it is cut out of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v2, resnet18, resnet34, resnet50

from merger.start.standing_in import _spread, standing_in


@pytest.mark.parametrize(
    ("count", "among", "first", "places"),
    [
        (3, 9, True, [0, 4, 8]), (5, 9, True, [0, 2, 4, 6, 8]), (7, 9, True, [0, 1, 3, 4, 5, 7, 8]),
        (2, 8, False, [3, 7]), (1, 3, True, [0]), (1, 3, False, [2]), (3, 3, False, [0, 1, 2]), (4, 2, True, [0, 1]),
    ],
)  # fmt: skip
def test_blocks_spread_evenly(count: int, among: int, first: bool, places: list[int]) -> None:
    pairs = _spread(count, among, first)
    assert [index for index, _ in pairs] == list(range(min(count, among)))
    assert [other for _, other in pairs] == places


def test_every_count_of_blocks_meets_as_many_others_in_order() -> None:
    for among in range(1, 20):
        for count in range(1, among + 1):
            for first in (True, False):
                places = [other for _, other in _spread(count, among, first)]
                assert len(set(places)) == count and places == sorted(places) and 0 <= places[0] <= places[-1] < among


def test_a_shallower_network_stands_whole_in_a_deeper_one() -> None:
    with torch.device("meta"):
        small, large = resnet18(), resnet34()
    pairs = standing_in(small, large)
    with_tensors = {name.rpartition(".")[0] for name in small.state_dict()}
    assert pairs.keys() == with_tensors and len(set(pairs.values())) == len(pairs)
    assert pairs["layer3.1.conv2"] == "layer3.5.conv2" and pairs["layer3.1.bn2"] == "layer3.5.bn2"
    assert all(pairs[path] == path for path in ("conv1", "bn1", "fc", "layer2.0.downsample.0"))


def test_the_deeper_one_takes_what_there_is() -> None:
    with torch.device("meta"):
        small, large = resnet18(), resnet34()
    pairs = standing_in(large, small)
    assert set(pairs.values()) == {name.rpartition(".")[0] for name in small.state_dict()}


def test_a_trunk_is_found_within_another_model() -> None:
    with torch.device("meta"):
        small, large = resnet18(), nn.ModuleDict({"backbone": nn.ModuleDict({"body": resnet18()}), "head": resnet34()})
    pairs = standing_in(small, large["backbone"])
    assert pairs["layer1.0.conv1"] == "body.layer1.0.conv1"
    assert standing_in(large["backbone"], small)["body.layer1.0.conv1"] == "layer1.0.conv1"


@pytest.mark.parametrize(("taker", "giver"), [(mobilenet_v2, resnet18), (resnet50, resnet18), (resnet18, resnet50)])
def test_other_families_have_little_in_common(taker: Callable[[], nn.Module], giver: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model, other = taker(), giver()
    met = sum(t.numel() for path in standing_in(model, other) for t in model.get_submodule(path).parameters())
    assert met < 0.25 * sum(parameter.numel() for parameter in model.parameters())


class Residual(nn.Module):
    """Blocks that add nothing but the first and the last of a sequence."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 4) -> (N, 4)."""
        for block in self.blocks:
            x = x + block(x)
        return x


def test_what_is_cut_out_answers_as_the_whole_where_the_others_add_nothing() -> None:
    torch.manual_seed(0)
    small, large = Residual(3), Residual(9)
    for place in set(range(9)) - {0, 4, 8}:
        for parameter in large.blocks[place].parameters():
            nn.init.zeros_(parameter)
    given = large.state_dict()
    pairs = standing_in(small, large)
    there = {key: key.rpartition(".") for key in small.state_dict()}
    small.load_state_dict({key: given[f"{pairs[path]}.{name}"] for key, (path, _, name) in there.items()})
    x = torch.randn(5, 4)
    assert torch.allclose(small(x), large(x))
