"""Training over processes: the same losses, weights and moments as in one, and no byte more than must cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import merger.training.precision as precision_module
from merger.checkpoint import StepCache, snapshots
from merger.core.context import MergeContext
from merger.core.elsewhere import assign
from merger.core.pace import begins, laid_out
from merger.distributed import PeerExit, ProcessGroup
from merger.start.choosing import averaged
from merger.training.data import MicroBatch
from merger.training.loop import Diverged, Training, TrainingSet
from merger.training.precision import Precisions
from merger.training.recipe import Recipe
from models.data import PreparedFrames, load_split
from models.errors import GemelError
from models.sharing.groups import groups
from models.sharing.plan import SharingPlan, tie
from models.workload import Query, load_workload
from tests.exhaustive import every
from tests.merger.crew.hands import Hands, together
from tests.merger.tiny import write_random_weights, write_workload

RECIPE = Recipe(rate=2e-3, epochs=2, batch=8, node=4, frames_per_epoch=20, features=1.0)
ALIKE = 1e-5


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_workload(tmp_path_factory.mktemp("crew"), queries=3, frames=24)
    write_random_weights(path)
    return path


def trained(
    crew: ProcessGroup, path: Path, eased: tuple[str, ...] = (), broken: str = "", full: str = "", bare: bool = False
) -> dict[str, Any]:
    """A joint training of all with all tied, in this process or in those of a crew; what came of it, step by step.

    Memory is not enough for the query that is `full`, from the third step on; with `bare` no query has labels.
    """
    ctx = MergeContext(load_workload(path), crew=crew)
    ctx.precisions = Precisions("fp32", {})
    assign(ctx)
    if bare:
        ctx.train = {q: _without_labels(query) for q, query in ctx.queries.items()}
    plan = SharingPlan.of(groups(ctx.layers))
    models = ctx.models(ctx.queries, averaged(plan, snapshots(ctx.originals)), plan)
    tie(models, plan)
    if broken in models:
        with torch.no_grad():
            models[broken].get_parameter("head.weight").fill_(float("nan"))
    training = ctx.training(models, RECIPE, eased, plan)
    own = training._learn

    def learn(query: str, nodes: Sequence[MicroBatch]) -> Tensor:
        loss = own(query, nodes)
        if query == full and training.step >= 2 and (not training.recipe.recompute or full == "q1"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    training._learn = learn  # type: ignore[method-assign]
    losses: list[float] = []
    training.after_step = lambda: losses.append(training.loss)
    try:
        while training.epochs < RECIPE.epochs:
            training.epoch()
    except Diverged as error:
        return {"diverged": str(error), "flops": ctx.flops.total}
    state = training.state_dict()
    return {
        "losses": losses, "states": ctx.states(models, plan), "moments": state["moments"], "journal": state["models"],
        "flops": ctx.flops.total, "given": crew.given, "steps": crew.steps, "mine": list(models), "step": state["step"],
    }  # fmt: skip


def _without_labels(query: Query) -> TrainingSet:
    return TrainingSet(query, PreparedFrames(query, replace(load_split(query, "train"), labels=None)))


@pytest.mark.parametrize(
    ("processes", "eased"), every([(2, ()), (2, ("q0", "q1")), (4, ())], [(2, ()), (2, ("q0", "q1"))])
)
def test_several_processes_train_as_one_does(untrained: Path, processes: int, eased: tuple[str, ...]) -> None:
    _check_alike(trained(ProcessGroup(), untrained, eased), together(processes, trained, untrained, eased))


@pytest.mark.parametrize("given", [((), "", "q0"), ((), "", "", True)])
def test_so_they_do_when_the_memory_of_one_is_full_and_when_answers_are_kept(
    untrained: Path, given: tuple[Any, ...]
) -> None:
    alone = trained(ProcessGroup(), untrained, *given)
    _check_alike(alone, together(2, trained, untrained, *given))
    plain = trained(ProcessGroup(), untrained)
    assert alone["flops"] != plain["flops"], "a pass more for what is computed again, or fewer for what is kept"


def test_where_nothing_takes_less_all_end_and_one_tells_why(untrained: Path) -> None:
    first, second = Hands(2, trained, untrained, (), "", "q1").answers()
    assert isinstance(first, GemelError) and "the memory: is full in the middle of training" in str(first)
    assert isinstance(second, PeerExit)


def _check_alike(alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    first, *others = found
    assert sorted(query for one in (first, *others) for query in one["mine"]) == ["q0", "q1", "q2"]
    for one in (first, *others):
        assert one["losses"] == pytest.approx(alone["losses"], rel=ALIKE) and one["losses"] == first["losses"]
        assert one["flops"] == alone["flops"] and one["step"] == alone["step"]
        for query, state in alone["states"].items():
            for name, tensor in state.items():
                assert torch.allclose(one["states"][query][name].float(), tensor.float(), rtol=0, atol=ALIKE), name
                assert torch.equal(one["states"][query][name], first["states"][query][name])
    assert first["journal"].keys() == alone["journal"].keys() and first["moments"].keys() == alone["moments"].keys()
    for name, moments in alone["moments"].items():
        for kind, tensor in moments.items():
            assert torch.allclose(first["moments"][name][kind], tensor, rtol=0, atol=ALIKE), (name, kind)


def test_the_bytes_handed_over_are_those_of_the_weights_that_cross(untrained: Path) -> None:
    found = together(2, trained, untrained)
    layers = MergeContext(load_workload(untrained)).layers
    size = {(layer.query, layer.path): layer.bytes for layer in layers}
    for one, other in (found, found[::-1]):
        shared = [
            members for members in SharingPlan.of(groups(layers)).shared
            if all(any(query in side["mine"] for query, _ in members) for side in (one, other))
        ]  # fmt: skip
        assert one["given"] == one["steps"] * sum(size[members[0]] for members in shared) > 0


def test_a_loss_that_is_no_number_ends_the_training_of_all_in_the_same_step(untrained: Path) -> None:
    one, other = together(2, trained, untrained, (), "q1")
    assert one == other and one["diverged"] == "q1"


def settled(crew: ProcessGroup, path: Path, card: bool) -> Any:
    """What is known of precisions after one process was apart, or after each has tried what fits a card."""
    precision_module.measured = lambda model, images: {"fp32": 2.0 + crew.rank, "bf16": 1.0}
    ctx = MergeContext(load_workload(path), crew=crew)
    ctx.precisions = Precisions("auto", {})
    assign(ctx)
    if not card:
        ctx.once(lambda: ctx.settled(["q0", "q1"]))
        return ctx.settled(ctx.queries), ctx.crew.mine(ctx.queries)

    def epoch(training: Training) -> None:
        if crew.rank and not training.recipe.recompute:
            raise torch.OutOfMemoryError

    told: list[dict[str, Any]] = []
    Training.epoch, PreparedFrames.keep_on = epoch, lambda prepared, where: True  # type: ignore[assignment, method-assign]
    ctx.originals = dict(ctx.originals)
    ctx.device, ctx.progress = torch.device("meta"), lambda event, **fields: told.append(fields)
    plan = SharingPlan.of(groups(ctx.layers))
    recipe = laid_out(ctx, begins(plan), RECIPE, StepCache())
    return recipe, [fields["precisions"] for fields in told if "precisions" in fields]


def test_what_one_process_has_found_apart_is_known_to_all_when_they_go_on_together(untrained: Path) -> None:
    (first, own), (second, others) = together(2, settled, untrained, False)
    assert own and others and first == second == dict.fromkeys(("q0", "q1", "q2"), "bf16")


def test_processes_lay_their_steps_out_alike_in_precisions_that_all_know(untrained: Path) -> None:
    first, second = together(2, settled, untrained, True)
    assert first[0] == second[0] == replace(RECIPE, recompute=True)
    assert first[1] == second[1] == [dict.fromkeys(("q0", "q1", "q2"), "bf16")]
