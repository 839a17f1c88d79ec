"""Intermediates computed again: the same gradients and statistics, and fewer bytes kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from merger.core.context import MergeContext
from merger.training.data import RandomStream
from merger.training.distillation import record_inputs
from merger.training.loop import Training
from merger.training.recipe import Flops, Recipe, forward_flops
from merger.training.step_config import recomputed
from models.zoo import build

CPU = torch.device("cpu")


class _InPlace(nn.Module):
    """A sequence in which a cut before an activation would keep what that then changes."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for width in (3, 8, 8, 8, 8):
            parts += [nn.Conv2d(width, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.Hardswish(inplace=True)]
        self.body = nn.Sequential(*parts, nn.Dropout(0.5))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


def _passed(model: nn.Module, images: Tensor, short: bool) -> tuple[list[Tensor | None], dict[str, Tensor], int]:
    """The gradients of a made-up loss, the state after it, and the bytes kept between the two passes."""
    kept: dict[int, int] = {}
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}

    def note(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    stream = RandomStream(3, CPU)
    with saved_tensors_hooks(note, lambda tensor: tensor), stream.drawn(), recomputed(model, short):
        outputs = model(images)
    answers = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
    torch.stack([(one.float() ** 2).mean() for one in answers]).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    return gradients, {name: one.clone() for name, one in model.state_dict().items()}, sum(kept.values())


def _compared(make: Callable[[], nn.Module], size: int, frames: int = 2) -> tuple[int, int]:
    """The bytes kept plainly and shortened, once all gradients and states were found equal bit by bit."""
    images = torch.rand(frames, 3, size, size, generator=torch.Generator().manual_seed(1))
    found = []
    for short in (False, True):
        torch.manual_seed(0)
        found.append(_passed(make().train(), images, short))
    (plain, before, whole), (again, after, less) = found
    for one, other in zip(plain, again, strict=True):
        assert (one is None) == (other is None) and (one is None or other is None or torch.equal(one, other))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "forward" not in {name for part in make().modules() for name in part.__dict__}
    return whole, less


def test_a_sequence_with_changes_in_place_and_dropout_gives_the_same_gradients_from_fewer_bytes() -> None:
    whole, less = _compared(_InPlace, 16)
    assert less < 0.6 * whole


def test_a_residual_network_keeps_little_more_than_what_goes_into_its_blocks() -> None:
    whole, less = _compared(lambda: build("resnet18", 2, input_size=32), 32)
    assert less < 0.6 * whole


CLASSIFIERS = [
    ("resnet50", 64), ("vgg16", 64), ("mobilenet_v2", 64), ("squeezenet1_1", 64), ("densenet121", 64),
    ("googlenet", 96), ("inception_v3", 128), ("efficientnet_b0", 64), ("regnet_y_400mf", 64), ("vit_b_16", 224),
]  # fmt: skip
DETECTORS = [
    ("ssd300_vgg16", 300), ("ssdlite320_mobilenet_v2", 320), ("retinanet_resnet50_fpn", 128),
    ("fcos_resnet50_fpn", 128), ("fasterrcnn_resnet50_fpn", 128), ("yolov3_tiny", 96), ("yolov3", 96),
    ("fastestdet", 96),
]  # fmt: skip
FAMILIES = [(*one, "classification") for one in CLASSIFIERS] + [(*one, "detection") for one in DETECTORS]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "size", "task"), FAMILIES)
def test_every_family_gives_the_same_gradients(name: str, size: int, task: str) -> None:
    whole, less = _compared(lambda: build(name, 2, input_size=size, task=task), size)
    assert less <= whole


def test_what_is_watched_is_seen_once(ctx: MergeContext) -> None:
    model = ctx.models(["q0"])["q0"]
    images = torch.rand(2, 3, 24, 24)
    with recomputed(model), record_inputs(model, ["head"]) as seen:
        outputs = model(images)
    (outputs.sum() + seen[0].sum()).backward()
    assert len(seen) == 1


@pytest.mark.parametrize("teaches", [True, False])
def test_a_training_gives_the_same_and_counts_the_pass_that_it_costs(ctx: MergeContext, teaches: bool) -> None:
    found = []
    for again in (False, True):
        models, flops = ctx.models(["q0", "q1"]), Flops()
        recipe = Recipe(epochs=1, batch=8, node=4, frames_per_epoch=16, features=1.0, recompute=again)
        precisions = {"q0": "fp32", "q1": "fp32"}
        training = Training(models, ctx.train, recipe, flops, ctx.originals if teaches else {}, precisions)
        loss = training.epoch()
        found.append((loss, {query: model.state_dict() for query, model in models.items()}, flops.total))
    (plain, states, cost), (same, again, more) = found
    assert plain == same
    assert all(torch.equal(states[q][name], again[q][name]) for q in states for name in states[q])
    assert more - cost == 16 * sum(forward_flops(ctx.queries[query]) for query in ("q0", "q1"))
