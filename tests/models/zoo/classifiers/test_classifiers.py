"""The zoo's classifiers: any class count and input size, torchvision's networks, refusals."""

from __future__ import annotations

import warnings

import pytest
import torch
import torchvision
from torch import nn

from gemel.models import zoo
from gemel.models.errors import InputError
from gemel.models.preprocess import Preprocess
from gemel.models.tensors import normalise_frames
from gemel.models.zoo.registry import ENTRIES
from gemel.models.zoo.user_models import check_answer
from tests.parameters import one_in

SMALL = {"inception_v3": 80, "cifar_resnet20": 32}


def ours(name: str, input_size: int, device: str = "cpu", classes: int = 3) -> nn.Module:
    """A zoo model for some classes."""
    return zoo.build(name, classes, {}, input_size, device=device)


def theirs(name: str, **keys) -> nn.Module:
    """torchvision's own model of that name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The default weight initialization")
        return torchvision.models.get_model(name, weights=None, num_classes=3, **keys)


@pytest.mark.parametrize("name", one_in(4, zoo.names("classification")))
def test_classifier_answers_one_logit_a_class(name: str) -> None:
    entry = ENTRIES[name]
    check_answer(name, ours(name, entry.input_size, "meta"), entry.input_size, "classification", 3)
    smaller = SMALL.get(name, 64)
    check_answer(name, ours(name, smaller, "meta"), smaller, "classification", 3)


@pytest.mark.parametrize("name", ["regnet_y_400mf", "regnet_y_8gf"])
def test_regnet_is_torchvisions(name: str) -> None:
    mine, reference = ours(name, 64).eval(), theirs(name).eval()
    mine.load_state_dict(reference.state_dict())
    x = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(mine(x), reference(x))


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_scaling_replaces_transform_input(name: str) -> None:
    """torchvision's published weights of these two see -1..1, made inside the network from ImageNet's scaling."""
    torch.manual_seed(0)
    mine, reference = ours(name, 80).eval(), theirs(name, transform_input=True, init_weights=True).eval()
    wanted = mine.state_dict()
    mine.load_state_dict({key: value for key, value in reference.state_dict().items() if key in wanted})
    frames = torch.randint(0, 256, (2, 3, 80, 80), dtype=torch.uint8)
    with torch.inference_mode():
        expected = reference(normalise_frames(Preprocess((80, 80)), frames))
        found = mine(normalise_frames(zoo.zoo_preprocess(name, 80), frames))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "size"), [("inception_v3", 299), ("efficientnet_b3", 300), ("resnet50", 224)])
def test_entry_has_the_published_input_size(name: str, size: int) -> None:
    assert ENTRIES[name].input_size == size
    assert ENTRIES[name].published == name


def test_vit_of_an_invalid_input_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"vit_b_16: input_size: .*100 is no multiple of 16.*; 96 is") as caught:
        ours("vit_b_16", 100, "meta")
    assert "\n" not in str(caught.value)
