"""The zoo's classifiers: any class count and input size, torchvision's networks, one line for what they cannot take."""

from __future__ import annotations

import warnings

import pytest
import torch
import torchvision
from torch import Tensor, nn

from models import zoo
from models.errors import InputError
from models.preprocess import Preprocess
from models.zoo.registry import ENTRIES
from models.zoo.user_models import check_answer
from tests.exhaustive import one_in

SMALL = {"inception_v3": 80, "cifar_resnet20": 32}
CLASSES = ["car", "bus", "none"]


def ours(name: str, input_size: int, device: str = "cpu", classes: int = 3) -> nn.Module:
    """A zoo model for some classes."""
    return zoo.build(name, classes, {}, input_size, device=device)


def theirs(name: str, **keys) -> nn.Module:
    """torchvision's own model of that name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The default weight initialization")
        return torchvision.models.get_model(name, weights=None, num_classes=3, **keys)


@pytest.mark.parametrize("name", one_in(4, zoo.names("classification")))
def test_every_classifier_answers_with_one_logit_for_each_class(name: str) -> None:
    entry = ENTRIES[name]
    check_answer(name, ours(name, entry.input_size, "meta"), entry.input_size, "classification", 3)
    smaller = SMALL.get(name, 64)
    check_answer(name, ours(name, smaller, "meta"), smaller, "classification", 3)


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "inception_v3", "vit_b_16", "squeezenet1_1"])
def test_answers_in_train_mode_are_plain_logits(name: str) -> None:
    model, size = ours(name, SMALL.get(name, 64)).train(), SMALL.get(name, 64)
    answer = model(torch.rand(2, 3, size, size))
    assert isinstance(answer, Tensor) and answer.shape == (2, 3)


@pytest.mark.parametrize("name", ["regnet_y_400mf", "regnet_y_8gf"])
def test_a_network_built_here_from_published_numbers_is_torchvisions(name: str) -> None:
    mine, reference = ours(name, 64).eval(), theirs(name).eval()
    mine.load_state_dict(reference.state_dict())
    x = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(mine(x), reference(x))


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_the_zoos_scaling_stands_for_transform_input(name: str) -> None:
    """torchvision's published weights of these two see -1..1, made inside the network from ImageNet's scaling."""
    torch.manual_seed(0)
    mine, reference = ours(name, 80).eval(), theirs(name, transform_input=True, init_weights=True).eval()
    wanted = mine.state_dict()
    mine.load_state_dict({key: value for key, value in reference.state_dict().items() if key in wanted})
    frames = torch.randint(0, 256, (2, 3, 80, 80), dtype=torch.uint8)
    with torch.inference_mode():
        expected = reference(Preprocess(80).normalise(frames))
        found = mine(zoo.preprocess_of(name, 80).normalise(frames))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "size"), [("inception_v3", 299), ("efficientnet_b3", 300), ("resnet50", 224)])
def test_the_registry_knows_the_published_input_size(name: str, size: int) -> None:
    assert ENTRIES[name].input_size == size
    assert ENTRIES[name].published == name


@pytest.mark.parametrize(("name", "size"), [("alexnet", 32), ("inception_v3", 64), ("vgg16", 16), ("densenet121", 16)])
def test_an_input_too_small_is_one_line_that_names_the_published_size(name: str, size: int) -> None:
    with pytest.raises(InputError) as caught:
        check_answer(name, ours(name, size, "meta"), size, "classification", 3)
    message = str(caught.value)
    assert message.startswith(f"{name}: input_size: cannot take frames of {size}x{size} (RuntimeError: ")
    assert message.endswith(f"; choose another input_size; it was made for {ENTRIES[name].input_size}")
    assert "\n" not in message


def test_a_size_that_is_no_multiple_of_the_patches_is_one_line() -> None:
    with pytest.raises(InputError, match=r"vit_b_16: input_size: .*100 is no multiple of 16.*; 96 is") as caught:
        ours("vit_b_16", 100, "meta")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "args"), [("resnet18", {"depth": 5}), ("googlenet", {"aux_logits": True})])
def test_model_args_that_do_not_fit_are_one_line(name: str, args: dict) -> None:
    with pytest.raises(InputError, match=f"{name}: model_args: cannot be built: .*{next(iter(args))}"):
        zoo.build(name, CLASSES, args, 64, device="meta")


def test_model_args_reach_the_network() -> None:
    model = zoo.build("mobilenet_v2", CLASSES, {"width_mult": 0.5}, 64, device="meta")
    assert model.get_parameter("features.0.0.weight").shape[0] == 16


@pytest.mark.parametrize(
    ("given", "nearest"), [("resnet-50", "resnet50"), ("VGG16_BN", "vgg16_bn"), ("efficientnet_b1", "efficientnet_b0")]
)
def test_an_unknown_name_suggests_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"did you mean .*{nearest}.* or give package.module:factory"):
        zoo.check_name(given, "classification", "w.yaml")
