"""The CIFAR ResNets: sizes, and shortcuts without parameters."""

from __future__ import annotations

import pytest
import torch

from models import zoo
from models.zoo.classifiers import BasicBlock

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PUBLISHED_PARAMETERS = {20: 269_722, 32: 464_154, 44: 658_586, 56: 853_018}
"""He et al. 2016, table 6, say 0.27, 0.46, 0.66 and 0.85 million; the exact numbers are the authors' of the weights."""


@pytest.mark.parametrize("depth", PUBLISHED_PARAMETERS)
def test_depth_and_parameters_are_the_published_ones(depth):
    model = zoo.build(f"cifar_resnet{depth}", CLASSES, input_size=32, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED_PARAMETERS[depth]
    weights = [tensor for tensor in model.parameters() if tensor.ndim >= 2]
    assert len(weights) == depth
    assert model(torch.zeros(2, 3, 32, 32, device="meta")).shape == (2, 10)


def test_a_shortcut_takes_every_second_cell_and_puts_it_between_empty_channels():
    block = BasicBlock(4, 8, stride=2).eval()
    with torch.no_grad():
        block.bn2.weight.zero_()
        x = torch.rand(1, 4, 6, 6)
        y = block(x)
    assert torch.equal(y[:, 2:6], x[:, :, ::2, ::2])
    assert not y[:, :2].any() and not y[:, 6:].any()
