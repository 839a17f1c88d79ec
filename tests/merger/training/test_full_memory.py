"""A step for which memory is not enough is taken again, laid out for less, as if it had not been begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from merger import merge
from merger.core.context import MergeContext
from merger.training.data import MicroBatch
from merger.training.loop import Training
from merger.training.recipe import Recipe
from merger.training.step_config import MemoryPlan, StepConfig, layouts
from models.device import is_out_of_memory, retry_with_smaller_batch
from models.errors import InputError
from models.evaluation import predict
from models.workload import Workload, load_workload
from tests.exhaustive import every
from tests.merger.options import QUICK
from tests.merger.tiny import write_random_weights, write_workload

RECIPE = Recipe(rate=2e-3, epochs=2, batch=8, node=8, frames_per_epoch=16, features=1.0)


@pytest.fixture(scope="module")
def ctx(tmp_path_factory: pytest.TempPathFactory) -> MergeContext:
    path = write_workload(tmp_path_factory.mktemp("full"), queries=2, frames=24)
    write_random_weights(path)
    return MergeContext(load_workload(path))


class _Card:
    """In place of a card: a step that is laid out for more than it has room for raises, after half of it was done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fits: Callable[[Training], bool]) -> None:
        self.refused: list[tuple[int, int, bool]] = []
        own = Training._learn

        def learn(training: Training, query: str, nodes: Sequence[MicroBatch]) -> Tensor:
            loss = own(training, query, nodes)
            if query == max(training.models) and not fits(training):
                self.refused.append((training.step, training.recipe.node, training.recipe.recompute))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss

        monkeypatch.setattr(Training, "_learn", learn)


def _all_of(training: Training) -> dict[str, Tensor]:
    """Weights, running statistics and moments."""
    state = training.state_dict()
    found = {f"{query}/{name}": t for query, model in state["models"].items() for name, t in model.items()}
    return {**found, **{f"{name}/{kind}": t for name, two in state["moments"].items() for kind, t in two.items()}}


def _begun(ctx: MergeContext, recipe: Recipe = RECIPE) -> Training:
    ctx.fitting, ctx.flops.total = MemoryPlan(progress=ctx.progress), 0
    return ctx.training(ctx.models(["q0", "q1"]), recipe)


def _trained(training: Training) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    training.after_step = lambda: losses.append(training.loss)
    while training.epochs < training.recipe.epochs:
        training.epoch()
    return losses, _all_of(training)


def test_a_step_that_was_begun_in_vain_leaves_no_trace(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(ctx, "progress", lambda event, **fields: told.append(fields["text"]))
    losses, expected = _trained(_begun(ctx))
    flops = ctx.flops.total
    torch.manual_seed(5)
    card = _Card(monkeypatch, lambda training: training.step < 2 or training.recipe.recompute)
    found, states = _trained(_begun(ctx))
    assert card.refused == [(2, 8, False)] and found == losses and torch.initial_seed() == 5
    assert states.keys() == expected.keys()
    assert all(torch.equal(states[name], tensor) for name, tensor in expected.items())
    later = 2 * RECIPE.batch * sum(ctx.flops.of(query) for query in ctx.queries.values())
    assert ctx.flops.total == flops + later, "two steps are taken with one pass more, and none is counted twice"
    (line,) = told
    assert line.startswith("memory is full with 8 frames at once") and "taken again" in line
    assert ctx.training(ctx.models(["q0"]), RECIPE).recipe == replace(RECIPE, recompute=True), "for all that comes"


def test_smaller_nodes_come_last_and_a_resumed_training_goes_on_with_them(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        card = _Card(patch, lambda training: training.step < 2 or training.recipe.node == 2)
        _, found = _trained(_begun(ctx))
    assert card.refused == [(2, 8, False), (2, 8, True), (2, 4, True)]
    before = _begun(ctx)
    before.epoch()
    state = before.state_dict()
    assert state["layout"] == [8, False]
    after = _begun(ctx)
    after.load_state_dict({**state, "layout": [2, True]})
    assert after.recipe == replace(RECIPE, node=2, recompute=True)
    _, expected = _trained(after)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_where_nothing_takes_less_one_line_says_so_and_all_is_as_before_the_step(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _begun(ctx)
    expected.epoch()
    _Card(monkeypatch, lambda training: training.step < 2)
    training = _begun(ctx)
    training.epoch()
    with pytest.raises(
        InputError, match=r"the memory: is full in the middle of training, with 1 frames at once.*resume"
    ):
        training.epoch()
    found, before = _all_of(training), _all_of(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items()) and training.step == 2
    assert all(p.grad is None for model in training.models.values() for p in model.parameters())


def test_moments_for_which_there_is_no_room_leave_no_step_half_taken(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, expected = _trained(_begun(ctx))
    training = _begun(ctx)
    own, left = training._make_moments, [torch.OutOfMemoryError()]

    def make() -> None:
        if left:
            raise left.pop()
        own()

    monkeypatch.setattr(training, "_make_moments", make)
    found, states = _trained(training)
    assert found == losses and all(torch.equal(states[name], tensor) for name, tensor in expected.items())


def test_moments_are_those_that_the_optimiser_would_make(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = _trained(_begun(ctx))
    monkeypatch.setattr(Training, "_make_moments", lambda training: None)
    _, found = _trained(_begun(ctx))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_another_error_is_no_want_of_memory(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    training = _begun(ctx)
    for error in (RuntimeError("a fault"), torch.OutOfMemoryError("without a fitting")):
        monkeypatch.setattr(training, "_learn_all", lambda error=error: (_ for _ in ()).throw(error))
        with pytest.raises(type(error), match=str(error)):
            training.epoch()
        training.fitting = None


def test_what_was_found_to_fit_is_known_after_an_interruption() -> None:
    known: dict[str, Any] = {}
    fitting = MemoryPlan(known)
    assert fitting.recipe(RECIPE) == RECIPE
    fitting.take(StepConfig(8, True, False))
    assert [str(fitting.next(RECIPE)) for _ in range(3)] == [str(one) for one in layouts(RECIPE)[1:4]]
    assert MemoryPlan(known).recipe(RECIPE) == replace(RECIPE, node=4, recompute=True)
    assert (
        MemoryPlan(known).recipe(Recipe(batch=12)).node == 4
        and StepConfig(8, False, False).recipe(Recipe(batch=12)).node == 6
    )
    other = MemoryPlan({"node": 16, "on_card": False, "recompute": False})
    other.agree([fitting.to_plain(), {}, other.to_plain()])
    assert other.layout == fitting.layout, "all do as the one that has least room"


@pytest.mark.parametrize("method", every(["joint", "gemel"], ["joint"]))
def test_a_merge_of_any_method_goes_on_with_less_and_another_one_from_where_it_ended(
    workload: Workload, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    out, told = tmp_path_factory.mktemp("out") / "b.safetensors", list[str]()
    options = replace(QUICK, recipe=replace(QUICK.recipe, epochs=2, frames_per_epoch=32))

    def tell(event: str, **fields: Any) -> None:
        told.extend([fields["text"]] if "memory" in str(fields.get("text")) else [])

    monkeypatch.setattr("merger.checkpoint.INTERVAL_S", 0.0)
    monkeypatch.setattr("merger.checkpoint.WRITING_SHARE", 1e9)
    with monkeypatch.context() as patch:
        _Card(patch, lambda training: training.step < 1 and training.recipe.recompute)
        with pytest.raises(InputError, match="is full in the middle of training"):
            merge(workload, out, method, options=options, progress=tell)
    assert told and not out.exists()
    told.clear()
    steps: list[int] = []

    def knows(training: Training) -> bool:
        return training.recipe.recompute and training.fitting is not None and training.fitting.layout is not None

    with monkeypatch.context() as patch:
        card = _Card(patch, lambda training: steps.append(training.step) is None and knows(training))
        report = merge(workload, out, method, resume=True, options=options, progress=tell)
    assert out.exists() and report.method == method and steps[0] == 1, "the step before is not taken again"
    assert not card.refused and not told, "what was found to fit is known"


def test_a_prediction_and_a_calibration_go_on_in_smaller_batches(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, model, sizes, told = ctx.queries["q0"], ctx.models(["q0"])["q0"], list[int](), list[int]()
    expected = predict(model, query, ctx.val["q0"])

    def refuse(_: Any, given: tuple[Tensor, ...]) -> None:
        sizes.append(len(given[0]))
        if len(given[0]) > 5:
            raise MemoryError

    model.register_forward_pre_hook(refuse)
    assert predict(model, query, ctx.val["q0"], progress=told.append) == expected
    assert sizes == [12, 6, 3, 3, 3, 3] and told == [3, 3, 3, 3]
    before, sizes[:] = ctx.flops.total, []
    assert ctx.calibrate("q0", model, frames=16)
    assert sizes == [16, 8, 4, 4, 4, 4] and ctx.flops.total - before == 16 * ctx.flops.of(query)


def test_nothing_is_halved_below_the_least(ctx: MergeContext) -> None:
    tried: list[int] = []

    def attempt(size: int) -> None:
        tried.append(size)
        raise MemoryError

    with pytest.raises(MemoryError):
        retry_with_smaller_batch(32, attempt, least=6)
    assert tried == [32, 16, 8, 6]
    with pytest.raises(ValueError, match="another"):
        retry_with_smaller_batch(32, lambda size: (_ for _ in ()).throw(ValueError("another")))


def test_a_fault_that_no_memory_would_mend_is_none_of_it() -> None:
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    assert not is_out_of_memory(RuntimeError("sizes differ")) and not is_out_of_memory(InputError("a", "b"))
