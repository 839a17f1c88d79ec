"""The training loop: shared parameters, FLOPs, micro-batches, memory, precision, teacher cache, divergence, resume."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gemel.merger.checkpoint import snapshots
from gemel.merger.context import MergeContext
from gemel.merger.objectives.classes import ClassificationObjective
from gemel.merger.training import step_config
from gemel.merger.training.distillation import feature_loss, record_inputs, watched_layers
from gemel.merger.training.loop import Diverged, Training
from gemel.merger.training.recipe import OPTIMIZER, Flops, Recipe, forward_flops
from gemel.merger.training.step_config import (
    MemoryPlan,
    StepConfig,
    activation_checkpointing,
    check_precision,
    choose_precision,
)
from gemel.models.batchnorm import batchnorms_of
from gemel.models.errors import InputError
from gemel.models.notes import collect_notes
from gemel.models.sharing.groups import groups
from gemel.models.sharing.plan import SharingPlan, tie

RECIPE = Recipe(rate=2e-3, epochs=2, batch=8, micro_batch=4, frames_per_epoch=32, features=1.0)


@pytest.fixture
def plan(ctx: MergeContext) -> SharingPlan:
    """Every group shared."""
    return SharingPlan.of(groups(ctx.layers))


def train(ctx: MergeContext, queries: list[str], recipe: Recipe = RECIPE) -> dict[str, dict[str, Tensor]]:
    """The states after a joint training of these models, nothing shared."""
    models = ctx.models(queries)
    training = ctx.training(models, recipe)
    while training.epochs < recipe.epochs:
        training.epoch()
    return snapshots(models)


def assert_equal(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> None:
    assert all(torch.equal(tensor, other[query][name]) for query, own in one.items() for name, tensor in own.items())


def test_optimiser_holds_a_shared_parameter_once(ctx: MergeContext, plan: SharingPlan) -> None:
    models = ctx.models(ctx.queries)
    apart = sum(len(list(model.parameters())) for model in models.values())
    tie(models, plan)
    training = ctx.training(models, Recipe())
    listed = [id(p) for parameters in training.optimiser.param_groups for p in parameters["params"]]
    assert len(listed) == len(set(listed)) == apart - sum(len(members) - 1 for members in plan.shared)


def test_private_weights_learn_at_a_fraction_of_the_rate(ctx: MergeContext, plan: SharingPlan) -> None:
    together, alone = ctx.tie_models(plan, ["q0", "q2"]), ctx.models(["q0"])
    for models in (together, alone):
        start = {name: p.detach().clone() for name, p in models["q0"].named_parameters()}
        ctx.training(models, Recipe(rate=1e-3, epochs=1, private=0.0, weight_decay=0.0)).epoch()
        moved = {name: not torch.equal(start[name], p) for name, p in models["q0"].named_parameters()}
        assert moved["body.0.weight"] and moved["body.1.weight"] and moved["head.bias"]
        assert moved["head.weight"] == (models is alone)


def test_dropout_is_off_with_a_teacher_only(ctx: MergeContext) -> None:
    model = ctx.models(["q0"])["q0"]
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)  # type: ignore[arg-type]
    for teachers, off in (({"q0": ctx.originals["q0"]}, True), ({}, False)):
        Training({"q0": model}, ctx.train, Recipe(epochs=1, frames_per_epoch=16), Flops(), teachers).epoch()
        assert model.training and model.head[0].training != off


def test_batchnorm_momentum_falls_with_the_rate_under_a_teacher(ctx: MergeContext) -> None:
    model, seen = ctx.models(["q0"])["q0"], list[float]()
    norm = batchnorms_of(model)[0]
    usual = norm.momentum or 0.0
    model.register_forward_pre_hook(lambda *_: seen.append(norm.momentum))  # type: ignore[arg-type]
    training = ctx.training({"q0": model}, replace(RECIPE, frames_per_epoch=160))
    training.epoch()
    training.epoch()
    assert norm.momentum == usual == max(seen) and seen[-1] == pytest.approx(OPTIMIZER.min_momentum_fraction * usual)


def test_flops_count_forward_backward_and_teacher(ctx: MergeContext) -> None:
    training = ctx.training(ctx.models(["q0"]), Recipe(epochs=1, batch=10, frames_per_epoch=20))
    ctx.flops.total = 0.0
    training.epoch()
    assert ctx.flops.total == 20 * (1 + 2 + 1) * forward_flops(ctx.queries["q0"])


@pytest.mark.parametrize("what", ["weights", "gradient"])
def test_training_that_diverges_names_the_query(ctx: MergeContext, what: str) -> None:
    models = ctx.models(["q0"])
    weight = models["q0"].get_parameter("head.weight")
    if what == "weights":
        torch.nn.init.constant_(weight, float("nan"))
    else:
        weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(Diverged, match="q0"):
        ctx.training(models, Recipe(epochs=1)).epoch()


class CountReads(TorchDispatchMode):
    """Counts the operations that read a value: there the host waits for a GPU."""

    READING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self.READING
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("taught", [True, False])
def test_step_reads_no_value_from_the_device(ctx: MergeContext, taught: bool) -> None:
    training = Training(ctx.models(["q0", "q1"]), ctx.train, RECIPE, Flops(), ctx.originals if taught else {})
    training.epoch()
    with CountReads() as reads:
        training._compute_gradients()
        training.optimiser.step()
    assert reads.count == 0


def test_training_resumes_in_the_middle_of_an_epoch(ctx: MergeContext, plan: SharingPlan) -> None:
    whole, states = ctx.tie_models(plan, ["q0", "q2"]), list[dict[str, Any]]()
    training = ctx.training(whole, RECIPE)

    def keep() -> None:
        if training.step == 3:
            states.append(deepcopy(training.state_dict()))

    training.after_step = keep
    losses = [training.epoch() for _ in range(RECIPE.epochs)]
    again = ctx.tie_models(plan, ["q0", "q2"])
    resumed = ctx.training(again, RECIPE)
    resumed.load_state_dict(states[0])
    assert [resumed.epoch() for _ in range(RECIPE.epochs)] == losses
    assert_equal(snapshots(whole), snapshots(again))


@pytest.mark.parametrize("full", [1, 2, 3])
def test_step_out_of_memory_is_repeated_with_less(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    """The second step fails this often; the result is that of the smaller configuration from there on."""
    loss, calls = ClassificationObjective.distill, [0, 0]

    def fail(*arguments: Any) -> Tensor:
        calls[0] += 1
        if calls[0] > 3 and calls[1] < full:
            calls[1] += 1
            raise torch.OutOfMemoryError("full")
        return loss(*arguments)

    monkeypatch.setattr(ClassificationObjective, "distill", fail)
    known: dict[str, Any] = {}
    assert ctx.references["q0"].score > 0  # evaluated before FLOPs are compared
    ctx.memory = MemoryPlan(known)
    before = ctx.flops.total
    with collect_notes() as notes:
        states = train(ctx, ["q0"])
    flops, expected = (
        ctx.flops.total - before,
        [StepConfig(4, False), StepConfig(4, False, True), StepConfig(2, False, True)],
    )
    assert len(notes) == full and all(note.startswith("memory: it is full with micro-batches of") for note in notes)
    assert StepConfig(**known) == expected[full - 1]
    if full == 1:  # only where frames are kept changed
        ctx.memory, before = MemoryPlan(), ctx.flops.total
        assert_equal(states, train(ctx, ["q0"]))
        assert ctx.flops.total - before == flops


def test_memory_that_is_full_with_the_least_is_one_line(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(ClassificationObjective, "distill", fail)
    with pytest.raises(InputError, match=r"memory: is full in the middle of training, with micro-batches of 1"):
        train(ctx, ["q0"])
    with pytest.raises(RuntimeError, match="other"):
        monkeypatch.setattr(ClassificationObjective, "distill", lambda *_: (_ for _ in ()).throw(RuntimeError("other")))
        train(ctx, ["q0"])


def test_step_config_divides_the_batch() -> None:
    assert StepConfig(8).apply(Recipe(batch=12)).micro_batch == 6
    assert StepConfig(8).apply(Recipe(batch=16, micro_batch=4)).micro_batch == 4
    assert str(StepConfig(4, False, True)) == "micro-batches of 4, frames in host memory, checkpointing"


class Branches(nn.Module):
    """A block that starts in place, nested blocks, dropout, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)),
                nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.5)),
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        x, found = self.stem(x), []
        for block in self.blocks:
            x = x + block(x.clone())
            found.append(x)
        return found


def test_checkpointing_gives_the_same_gradients_and_keeps_less() -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model, kept = Branches(), list[int]()
        images = torch.rand(4, 3, 16, 16)

        def pack(tensor: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(tensor.nbytes)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, activation_checkpointing(model, enabled):
            outputs = model(images)
        torch.stack([one.square().mean() for one in outputs]).sum().backward()
        grads = [p.grad for p in model.parameters()]
        results.append((grads, dict(model.named_buffers()), sum(kept)))
        assert all("forward" not in module.__dict__ for module in model.modules())
    (grads, buffers, plain), (again, updated, less) = results
    assert less < plain
    assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))  # type: ignore[arg-type]
    assert all(torch.equal(buffer, updated[name]) for name, buffer in buffers.items())


def test_precision_bf16_trains_and_others_are_refused(ctx: MergeContext) -> None:
    ctx.memory = MemoryPlan(precision="bf16")
    training = ctx.training(ctx.models(["q0"]), Recipe(epochs=1, frames_per_epoch=16))
    assert training.epoch() > 0 and all(p.dtype == torch.float32 for p in training.models["q0"].parameters())
    with pytest.raises(InputError, match="'tf32' is unknown; choose one of: auto, fp32, bf16"):
        check_precision("tf32")


@pytest.mark.parametrize(("groups", "has_bf16", "chosen"), [(1, True, "bf16"), (8, True, "fp32"), (1, False, "fp32")])
def test_auto_precision_is_bf16_where_a_cpu_is_faster_in_it(groups, has_bf16, chosen, monkeypatch) -> None:
    monkeypatch.setattr(step_config, "has_bf16_units", lambda: has_bf16)
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=groups), nn.Linear(8, 2))
    assert choose_precision("auto", model) == chosen
    assert choose_precision("auto", nn.Linear(8, 2)) == choose_precision("fp32", model) == "fp32"


@pytest.mark.parametrize("option", [{"rate": 0.0}, {"distill": 2.0}, {"batch": 24}, {"private": -1.0}, {"norms": 0.0}])
def test_recipe_with_a_bad_option_is_refused(option: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"options: {next(iter(option))}: .* makes no sense"):
        Recipe(**option)  # type: ignore[arg-type]


def test_feature_loss_is_zero_for_the_original_and_skips_other_shapes(ctx: MergeContext) -> None:
    query, model = ctx.queries["q0"], ctx.originals["q0"]
    paths = watched_layers(query, model)
    with record_inputs(model, paths) as seen:
        model(ctx.train["q0"].frames([0, 1]))
    assert paths == ["head"] and float(feature_loss(seen, seen)) == 0
    assert float(feature_loss([seen[0] + 1], seen)) > 0
    assert float(feature_loss([seen[0][:1]], seen)) == 0


def _without_labels(ctx: MergeContext) -> None:
    for data in ctx.train.values():
        data.prepared.split = replace(data.prepared.split, labels=None)
        data.__dict__.pop("targets", None)  # cached


def test_classified_frames_without_labels_stay_as_they_are(ctx: MergeContext) -> None:
    _without_labels(ctx)
    images, targets = ctx.train["q0"].batch([0, 1], torch.Generator().manual_seed(0))
    assert targets is None and torch.equal(images, ctx.train["q0"].prepared.batch([0, 1]))


def test_epoch_of_a_short_split_repeats_it() -> None:
    assert Recipe().contribution([40, 71]) == 256 and Recipe().contribution([1000]) == 512
    assert Recipe(frames_per_epoch=64).contribution([40]) == 64
