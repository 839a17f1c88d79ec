"""The training loop: shared parameters once, work counted, divergence seen."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import merger.training.loop as loop
from merger.core.context import MergeContext
from merger.training.loop import MIN_MOMENTUM, Diverged, Training
from merger.training.recipe import Flops, Recipe, forward_flops
from models.batchnorm import batchnorms_of
from models.sharing.groups import groups
from models.sharing.plan import SharingPlan, tie


def test_a_shared_parameter_stands_once_in_the_optimiser(ctx: MergeContext) -> None:
    plan = SharingPlan.of(groups(ctx.layers))
    models = ctx.models(ctx.queries)
    apart = sum(len(list(model.parameters())) for model in models.values())
    tie(models, plan)
    training = ctx.training(models, Recipe())
    listed = [id(p) for group in training.optimiser.param_groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == apart - sum(len(members) - 1 for members in plan.shared)


def test_tied_layers_stay_equal_and_private_ones_part(ctx: MergeContext) -> None:
    plan = SharingPlan.of(groups(ctx.layers))
    models = ctx.tied(plan, ["q0", "q2"])
    ctx.training(models, Recipe(rate=1e-3, epochs=1)).epoch()
    first, third = models["q0"].state_dict(), models["q2"].state_dict()
    assert torch.equal(first["body.0.weight"], third["body.0.weight"])
    assert not torch.equal(first["body.0.weight"], ctx.originals["q0"].state_dict()["body.0.weight"])
    assert not torch.equal(first["body.1.weight"], third["body.1.weight"])
    assert not torch.equal(first["head.weight"], third["head.weight"])


def test_private_weights_move_slowly_where_others_are_shared_and_at_full_rate_alone(ctx: MergeContext) -> None:
    plan = SharingPlan.of(groups(ctx.layers))
    together, alone = ctx.tied(plan, ["q0", "q2"]), ctx.models(["q0"])
    for models in (together, alone):
        start = {name: p.detach().clone() for name, p in models["q0"].named_parameters()}
        ctx.training(models, Recipe(rate=1e-3, epochs=1, private=0.0, weight_decay=0.0)).epoch()
        moved = {name: not torch.equal(start[name], p) for name, p in models["q0"].named_parameters()}
        assert moved["body.0.weight"] and moved["body.1.weight"] and moved["head.bias"]
        assert moved["head.weight"] == (models is alone)


def test_dropout_rests_under_a_teacher_and_not_in_the_training_of_an_original(ctx: MergeContext) -> None:
    model = ctx.models(["q0"])["q0"]
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)  # type: ignore[arg-type]
    for teachers, rests in (({"q0": ctx.originals["q0"]}, True), ({}, False)):
        training = Training({"q0": model}, ctx.train, Recipe(epochs=1, frames_per_epoch=16), Flops(), teachers)
        training.epoch()
        assert model.training and model.head[0].training != rests


def test_averages_of_norms_are_of_more_batches_as_the_rate_falls_and_nobody_is_left_with_that(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = ctx.models(["q0"])["q0"], list[float]()
    norm = batchnorms_of(model)[0]
    usual = norm.momentum
    assert usual is not None
    monkeypatch.setattr(Training, "_learn_all", lambda _self: seen.append(norm.momentum))  # type: ignore[arg-type]
    for teachers in ({"q0": ctx.originals["q0"]}, {}):
        training = Training({"q0": model}, ctx.train, Recipe(epochs=2, frames_per_epoch=320), Flops(), teachers)
        training.epoch()
        training.epoch()
        assert norm.momentum == usual
    taught, original = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert max(taught) == usual and taught[-1] == MIN_MOMENTUM * usual
    assert taught[-len(taught) // 2 :] == sorted(taught[-len(taught) // 2 :], reverse=True)
    assert set(original) == {usual}, "an original's are measured when it is trained"


def test_originals_are_left_as_they_are(ctx: MergeContext) -> None:
    before = {name: t.clone() for name, t in ctx.originals["q0"].state_dict().items()}
    models = ctx.tied(SharingPlan.of(groups(ctx.layers)), ctx.queries)
    ctx.training(models, Recipe(rate=1e-3, epochs=1)).epoch()
    assert all(torch.equal(before[name], t) for name, t in ctx.originals["q0"].state_dict().items())


def test_work_counts_forward_backward_and_teacher(ctx: MergeContext) -> None:
    models = ctx.models(["q0"])
    ctx.flops.total = 0.0
    ctx.training(models, Recipe(epochs=1, batch=10, frames_per_epoch=20)).epoch()
    assert ctx.flops.total == 20 * (1 + 2 + 1) * forward_flops(ctx.queries["q0"])


def test_the_same_seed_gives_the_same_step(ctx: MergeContext) -> None:
    losses = []
    for _ in range(2):
        training = ctx.training(ctx.models(["q0", "q1"]), Recipe(epochs=1, seed=3))
        losses.append(training.epoch())
    assert losses[0] == losses[1]


def test_a_loss_that_is_no_number_is_reported(ctx: MergeContext) -> None:
    models = ctx.models(["q0"])
    with torch.no_grad():
        models["q0"].get_parameter("head.weight").fill_(float("nan"))
    with pytest.raises(Diverged, match="q0"):
        ctx.training(models, Recipe(epochs=1)).epoch()


class _Values(TorchDispatchMode):
    """Counts, of all that is computed within, what reads a value: where a processor would wait for a card."""

    READING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.read.update([name] if name in self.READING else [])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("teaches", [True, False])
def test_a_step_waits_once_for_what_was_computed_however_many_nodes_it_has(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, teaches: bool
) -> None:
    asked: list[int] = []
    own = loop.numbers
    monkeypatch.setattr(loop, "numbers", lambda found: asked.append(len(found)) or own(found))
    models = ctx.models(["q0", "q1"])
    recipe = Recipe(epochs=1, batch=8, node=2, frames_per_epoch=16, features=1.0)
    training = Training(models, ctx.train, recipe, Flops(), ctx.originals if teaches else {})
    with _Values() as values:
        training.epoch()
    assert not values.read and asked == [3, 3], "two steps, each asked for two losses and a norm"


def test_frames_are_bytes_until_a_model_is_fed(ctx: MergeContext) -> None:
    images, _ = ctx.train["q0"].batch([3, 1], torch.Generator().manual_seed(0))
    assert images.dtype == torch.uint8
    fed = ctx.train["q0"].fed(images, torch.device("meta"))
    assert fed.dtype == torch.float32 and fed.device.type == "meta" and fed.shape == images.shape
