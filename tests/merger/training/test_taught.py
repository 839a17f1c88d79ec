"""What originals answered to frames that come as they are is kept: nothing changes but what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import merger.training.teacher_cache as taught
from merger.core.context import MergeContext
from merger.core.snapshot import training_flops
from merger.training.distillation import record_inputs, watched_layers
from merger.training.loop import Training, TrainingSet
from merger.training.recipe import Recipe
from merger.training.teacher_cache import TeacherCache, expected_teacher_passes, split_capacity, teacher_output_bytes
from models.data import PreparedFrames, load_split
from models.workload import load_workload
from models.zoo import build_query
from tests.merger.tiny import write_random_weights, write_workload

FRAMES = 20
RECIPE = Recipe(rate=2e-3, epochs=3, batch=8, node=4, frames_per_epoch=16, features=1.0)
PASSES = Recipe().passes(taught=False)


@pytest.fixture(scope="module")
def ctx(tmp_path_factory: pytest.TempPathFactory) -> MergeContext:
    """Two queries, of which the second has no labels."""
    path = write_workload(tmp_path_factory.mktemp("taught"), queries=2, frames=FRAMES)
    write_random_weights(path)
    ctx = MergeContext(load_workload(path))
    query = ctx.queries["q1"]
    bare = PreparedFrames(query, replace(load_split(query, "train"), labels=None))
    ctx.train = {"q0": ctx.train["q0"], "q1": TrainingSet(query, bare)}
    return ctx


@contextmanager
def _counted(ctx: MergeContext) -> Iterator[Counter[str]]:
    """How many frames each original answers within."""
    seen: Counter[str] = Counter()

    def note(query: str, _: Any, given: tuple[Tensor, ...]) -> None:
        seen[query] += len(given[0])

    hooks = [ctx.originals[query].register_forward_pre_hook(partial(note, query)) for query in ctx.queries]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _trained(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, room: int) -> dict[str, Any]:
    """What a training comes to when the answers to so many frames have room."""
    need = ctx.train["q1"].answer_bytes(features=True)
    assert need is not None
    monkeypatch.setattr(taught, "KEPT_BYTES", room * need)
    models, before = ctx.models(["q0", "q1"]), ctx.flops.total
    with _counted(ctx) as seen:
        training = ctx.training(models, RECIPE)
        losses = [training.epoch() for _ in range(RECIPE.epochs)]
    states = {f"{q}/{name}": t for q, model in models.items() for name, t in model.state_dict().items()}
    return {"losses": losses, "states": states, "seen": dict(seen), "flops": ctx.flops.total - before}


@pytest.mark.parametrize(("room", "passes"), [(0, 48), (FRAMES, FRAMES), (12, None)])
def test_only_the_first_visit_to_a_frame_without_labels_costs_its_original(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, room: int, passes: int | None
) -> None:
    plain, kept = _trained(ctx, monkeypatch, 0), _trained(ctx, monkeypatch, room)
    assert kept["losses"] == plain["losses"]
    same = torch.equal if passes is not None else torch.allclose  # a pass of a part of a batch may be summed otherwise
    assert all(same(kept["states"][name], tensor) for name, tensor in plain["states"].items())
    visits = RECIPE.epochs * RECIPE.frames_per_epoch
    assert plain["seen"] == {"q0": visits, "q1": visits} and kept["seen"]["q0"] == visits, "labelled frames differ"
    assert kept["seen"]["q1"] == passes or (passes is None and FRAMES < kept["seen"]["q1"] < visits)
    flops = {query: ctx.flops.of(ctx.queries[query]) for query in ctx.queries}
    assert kept["flops"] == sum(flops[query] * (PASSES * visits + kept["seen"][query]) for query in flops)
    evaluated = sum(flops[query] * len(ctx.val[query]) for query in flops)
    planned = training_flops(ctx, ["q0", "q1"], RECIPE) - evaluated
    off = flops["q1"] * RECIPE.batch if passes is None else 0
    assert abs(planned - kept["flops"]) <= off, "and so it is planned"


def test_a_resumed_training_counts_no_frame_twice(ctx: MergeContext) -> None:
    whole, halves = ctx.models(["q1"]), ctx.models(["q1"])
    before = ctx.flops.total
    training = ctx.training(whole, RECIPE)
    for _ in range(RECIPE.epochs):
        training.epoch()
    flops, before = ctx.flops.total - before, ctx.flops.total
    first = ctx.training(halves, RECIPE)
    first.epoch()
    again = ctx.training(ctx.models(["q1"]), RECIPE)
    again.load_state_dict(first.state_dict())
    with _counted(ctx) as seen:
        for _ in range(RECIPE.epochs - 1):
            again.epoch()
    assert ctx.flops.total - before == flops and seen["q1"] == FRAMES, "what is not at hand is found again"
    for name, tensor in whole["q1"].state_dict().items():
        assert torch.equal(again.models["q1"].state_dict()[name], tensor)


def _shown(frames: list[int]) -> Tensor:
    """Frames (N, 2, 3, 4) that tell which they are, channels last."""
    found = torch.arange(24.0).view(1, 2, 3, 4) + 100 * torch.tensor(frames).view(-1, 1, 1, 1)
    return found.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("room", [1, 3, 9])
def test_answers_come_in_order_and_laid_out_as_they_were_computed(room: int) -> None:
    answers, computed = TeacherCache(room), list[int]()

    def compute(images: Tensor) -> Any:
        computed.extend(images[:, 0, 0, 0].div(100).long().tolist())
        return images * 2, [images[:, 1]]

    for frames in ([4, 2], [2, 7, 4], [7, 7, 5], [5, 2, 4, 7], [2, 5]):
        passes, images = answers.count(frames), _shown(frames)
        before = len(computed)
        outputs, (features,) = answers.of(frames, images, compute)
        assert torch.equal(outputs, images * 2) and torch.equal(features, images[:, 1])
        assert outputs.is_contiguous(memory_format=torch.channels_last)
        assert len(computed) - before == passes, "each is computed once in a node"
    counts = Counter(computed)
    assert all(counts[frame] == 1 for frame in answers.known) and len(answers.known) == min(room, 4)


def test_what_was_counted_in_vain_is_counted_again() -> None:
    answers = TeacherCache(3)
    assert answers.count([1, 2]) == 2 and answers.count([2, 3, 4]) == 2 and list(answers.known) == [1, 2, 3]
    answers.uncount(2)
    assert answers.count([3]) == 1 and answers.count([3]) == 0


def test_memory_goes_first_to_those_that_need_little() -> None:
    frames, needs = {"small": 10, "large": 100, "huge": 100}, {"small": 1, "large": 10, "huge": 50}
    assert split_capacity(frames, needs, 10_000) == {"small": 10, "large": 100, "huge": 100}
    assert split_capacity(frames, needs, 3_000) == {"small": 10, "large": 100, "huge": 39}
    assert split_capacity(frames, needs, 300) == {"small": 10, "large": 14, "huge": 3}
    assert split_capacity(frames, needs, 0) == dict.fromkeys(frames, 0)
    assert [expected_teacher_passes(visits, 20, 20) for visits in (12, 20, 50)] == [12, 20, 20]
    assert expected_teacher_passes(60, 20, 5) == 50 and expected_teacher_passes(60, 20, 0) == 60


def test_what_an_answer_needs_is_found_without_computing_it(ctx: MergeContext) -> None:
    detector = replace(ctx.queries["q0"], task="detection", model="fastestdet", model_args={}, input_size=96)
    for query in (ctx.queries["q0"], detector):
        model = build_query(query).eval()
        with torch.no_grad(), record_inputs(model, watched_layers(query, model)) as seen:
            outputs = model(torch.zeros(3, 3, query.input_size, query.input_size))
        for features in (False, True):
            leaves = tree_leaves((outputs, seen if features else []))
            assert teacher_output_bytes(query, features) == sum(leaf.nbytes for leaf in leaves) // 3


def test_nothing_is_kept_where_nobody_teaches_or_all_have_labels(ctx: MergeContext) -> None:
    assert not ctx.training(ctx.models(["q0"]), RECIPE)._answers
    labelled = {"q0": ctx.train["q0"]}
    assert not Training(ctx.models(["q0"]), labelled, RECIPE, ctx.flops)._answers


def test_an_answer_without_a_row_for_each_frame_is_not_kept(monkeypatch: pytest.MonkeyPatch, ctx: MergeContext) -> None:
    class Whole(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    monkeypatch.setattr(taught, "build_query", lambda query, device: Whole())
    assert teacher_output_bytes(ctx.queries["q0"], features=False) is None
