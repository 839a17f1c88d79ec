"""Models of the zoo have as many parameters as were published for them."""

from __future__ import annotations

import pytest
import torchvision

from gemel.models import zoo
from gemel.models.zoo.registry import ENTRIES

FROZEN_NORMS = {
    "fasterrcnn_resnet50_fpn", "fasterrcnn_mobilenet_v3_large_fpn", "fasterrcnn_mobilenet_v3_large_320_fpn",
    "keypointrcnn_resnet50_fpn",
}  # fmt: skip
"""torchvision leaves the frozen norms of these backbones out of its counts; here they are parameters."""
AUXILIARY_HEADS = {
    "inception_v3", "deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "deeplabv3_resnet101", "fcn_resnet50",
    "fcn_resnet101",
}  # fmt: skip
"""torchvision counts their auxiliary heads, which the zoo leaves out."""
MILLIONS = {
    # He et al. 2016, table 6.
    "cifar_resnet20": "0.27", "cifar_resnet32": "0.46", "cifar_resnet44": "0.66", "cifar_resnet56": "0.85",
}  # fmt: skip


def count_parameters(name: str) -> int:
    entry = ENTRIES[name]
    model = zoo.build(name, entry.width, {}, entry.input_size, entry.task, device="meta")
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", sorted(name for name in zoo.names() if ENTRIES[name].published))
def test_torchvision_model_has_the_recorded_parameters(name: str) -> None:
    published = ENTRIES[name].published
    assert published is not None
    recorded = next(iter(torchvision.models.get_model_weights(published))).meta["num_params"]
    count = count_parameters(name)
    if name in FROZEN_NORMS:
        assert recorded < count < 1.02 * recorded
    elif name in AUXILIARY_HEADS:
        assert 0.8 * recorded < count < recorded
    else:
        assert count == recorded


@pytest.mark.parametrize("name", MILLIONS)
def test_model_of_other_authors_has_the_published_parameters(name: str) -> None:
    count = count_parameters(name)
    assert f"{count / 1e6:.2f}" == MILLIONS[name]
