"""Virtual nodes and batches: what a step is made of, whatever came before it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from merger.core.context import MergeContext
from merger.training.data import Batches, MicroBatch, RandomStream
from merger.training.loop import Training, TrainingSet
from merger.training.recipe import Flops, Recipe
from models.errors import InputError
from models.workload import Workload, load_workload
from tests.merger.tiny import write_random_weights, write_workload

CPU = torch.device("cpu")


def test_a_stream_goes_on_where_it_stood_and_the_global_one_as_if_nothing_had_happened() -> None:
    torch.manual_seed(7)
    own = torch.rand(4).tolist()
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    stream = RandomStream(7, CPU)
    with stream.drawn():
        first = torch.rand(2).tolist()
    middle = torch.rand(1).tolist()
    with stream.drawn():
        second = torch.rand(2).tolist()
    assert [*first, *second] == own and [*middle, *torch.rand(2).tolist()] == expected


@pytest.fixture(scope="module")
def ctx(tmp_path_factory: pytest.TempPathFactory) -> MergeContext:
    folder = tmp_path_factory.mktemp("nodes")
    path = write_workload(folder, queries=2, frames=64)
    write_random_weights(path)
    return MergeContext(load_workload(path))


def test_a_step_does_not_depend_on_what_was_drawn_before_it(ctx: MergeContext) -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models = {"q0": nn.Sequential(ctx.models(["q0"])["q0"], nn.Dropout())}
        recipe = Recipe(epochs=1, batch=8, node=4, frames_per_epoch=16)
        Training(models, ctx.train, recipe, Flops(), precisions={"q0": "fp32"}).epoch()
        found.append(models["q0"].state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_batch_of_one_node_is_what_it_was_without_nodes(ctx: MergeContext) -> None:
    found = []
    for node in (8, 16):
        models = ctx.models(["q0"])
        recipe = Recipe(epochs=1, batch=8, node=node, frames_per_epoch=16)
        ctx.training(models, recipe).epoch()
        found.append(models["q0"].state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("frames", "batch", "sizes"), [(40, 32, [16, 16]), (20, 32, [16]), (10, 32, [10]), (40, 8, [8])]
)
def test_batches_are_made_of_whole_nodes(frames: int, batch: int, sizes: list[int]) -> None:
    assert [len(node.images) for node in Batches({"q": _Frames(frames)}, batch, 16, 3, 0).prepare(0)["q"]] == sizes


def test_every_frame_comes_once_before_any_comes_again() -> None:
    batches = Batches({"q": _Frames(10)}, 4, 16, 10, 0)
    seen = [index for step in range(5) for index in batches.frames("q", step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10] != seen[10:]


def test_a_query_with_a_share_takes_part_in_so_many_steps_at_even_distances() -> None:
    sets = {"a": _Frames(40), "b": _Frames(8), "c": _Frames(8)}
    batches = Batches(sets, 4, 4, 24, 0, {"b": Fraction(1, 3), "c": Fraction(1, 3)})
    taking = [set(batches.prepare(step)) for step in range(24)]
    assert all("a" in step for step in taking)
    for query in ("b", "c"):
        steps = [step for step, found in enumerate(taking) if query in found]
        assert len(steps) == 8 and {after - before for before, after in pairwise(steps)} == {3}
        seen = [index for step in steps for index in batches.frames(query, step)]
        assert sorted(seen[:8]) == sorted(seen[8:16]) == list(range(8)), "no frame is left out"
    assert not any({"b", "c"} <= step for step in taking), "they need not all come at once"


def test_who_is_eased_gives_half_of_an_epoch_and_no_frame_twice() -> None:
    lengths = {"many": 100, "some": 20, "few": 5}
    recipe = Recipe(frames_per_epoch=64)
    assert recipe.contributions(lengths) == dict.fromkeys(lengths, 64)
    assert recipe.contributions({"few": 5}) == {"few": 5}
    assert recipe.contributions(lengths, {"many", "few"}) == {"many": 32, "some": 64, "few": 5}


@pytest.mark.parametrize(("few", "frames"), [(False, 32), (True, 8)])
def test_who_is_eased_takes_part_in_fewer_steps(ctx: MergeContext, few: bool, frames: int) -> None:
    sets = {"q0": ctx.train["q0"], "q1": _Few(ctx.train["q1"]) if few else ctx.train["q1"]}
    recipe = Recipe(epochs=2, batch=8, node=8, frames_per_epoch=64)
    training = Training(ctx.models(sets), sets, recipe, Flops(), eased={"q1"})  # type: ignore[arg-type]
    seen: Counter[str] = Counter()
    own = training._learn

    def counted(query: str, nodes: Sequence[MicroBatch]) -> Tensor:
        seen[query] += sum(len(node.images) for node in nodes)
        return own(query, nodes)

    training._learn = counted  # type: ignore[method-assign]
    losses = [training.epoch(), training.epoch()]
    assert seen == {"q0": 128, "q1": 2 * frames} and training._summed == 8 + frames / 8
    assert all(0 < loss < 10 for loss in losses)


def test_who_is_no_longer_eased_takes_part_in_all_steps_again_and_a_resumed_training_knows(ctx: MergeContext) -> None:
    sets = {query: ctx.train[query] for query in ("q0", "q1")}
    recipe = Recipe(epochs=3, batch=8, node=8, frames_per_epoch=64)

    def begun(eased: set[str]) -> Training:
        return Training(ctx.models(sets), sets, recipe, Flops(), eased=eased)

    def taken(training: Training) -> list[int]:
        taking: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            own = training._learn
            patch.setattr(training, "_learn", lambda query, nodes: taking.append(query) or own(query, nodes))
            training.epoch()
        return [taking.count(query) for query in sets]

    training = begun({"q1"})
    assert taken(training) == [8, 4]
    training.ease([])
    assert taken(training) == [8, 8]
    training.ease(["q0"])
    again = begun({"q1"})
    again.load_state_dict(copy.deepcopy(training.state_dict()))
    assert again.eased == ["q0"] and taken(again) == taken(training) == [4, 8]
    mine, other = training.models["q0"].state_dict(), again.models["q0"].state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())


def test_batches_depend_on_the_step_alone_and_not_on_what_was_asked_before() -> None:
    forwards, direct = Batches({"q": _Frames(10)}, 4, 2, 6, 3), Batches({"q": _Frames(10)}, 4, 2, 6, 3)
    for step in range(5):
        last = forwards.at(step)
    assert all(torch.equal(a.images, b.images) and a.seed == b.seed for a, b in zip(last["q"], direct.at(4)["q"]))
    other = Batches({"q": _Frames(10)}, 4, 2, 6, 4).at(4)
    assert not all(torch.equal(a.images, b.images) for a, b in zip(last["q"], other["q"]))


def test_an_image_that_cannot_be_read_is_reported_by_the_step_that_needs_it(tmp_path: Path) -> None:
    class Broken(_Frames):
        def batch(self, indices, generator):
            raise InputError(tmp_path / "a.png", "is not an image that decodes")

    with pytest.raises(InputError, match=r"a\.png"):
        Batches({"q": Broken(4)}, 4, 4, 2, 0).at(0)


def test_a_batch_that_nodes_do_not_fill_is_refused() -> None:
    with pytest.raises(InputError, match="batch: 24 makes no sense; give at most 16, or a multiple"):
        Recipe(batch=24)


def test_a_training_goes_on_where_another_stood(workload: Workload) -> None:
    ctx = MergeContext(workload)
    recipe = Recipe(epochs=2, frames_per_epoch=32, features=0.5)
    whole, first, second = (ctx.models(["q0", "q1"]) for _ in range(3))
    losses = [ctx.training(whole, recipe)]
    losses = [losses[0].epoch(), losses[0].epoch()]
    begun = ctx.training(first, recipe)

    def stop() -> None:
        if begun.step == 3:
            raise KeyboardInterrupt

    begun.after_step = stop
    with pytest.raises(KeyboardInterrupt):
        while True:
            begun.epoch()
    again = ctx.training(second, recipe)
    again.load_state_dict(begun.state_dict())
    assert again.epochs == 1 and again.epoch() == losses[1]
    for query, model in whole.items():
        other = second[query].state_dict()
        assert all(torch.equal(tensor, other[name]) for name, tensor in model.state_dict().items())


class _Few:
    """The first eight frames of a training set."""

    def __init__(self, whole: TrainingSet) -> None:
        self.query, self.task, self.batch, self.fed = whole.query, whole.task, whole.batch, whole.fed

    def __len__(self) -> int:
        return 8


class _Frames:
    """A source whose frames show their index and a random number."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: list[int], generator: torch.Generator) -> tuple[Tensor, list | None]:
        return torch.tensor(indices)[:, None] + torch.rand(len(indices), 1, generator=generator) / 2, None


def test_frames_are_pinned_for_a_card_that_is_trained_on_and_no_context_is_opened_otherwise(monkeypatch) -> None:
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda images: pinned.append(len(images)) or images)
    batches = Batches({"q": _Frames(8)}, 4, 4, 2, 0)
    batches.prepare(0)
    assert not pinned, "there is a card, and another device was asked for"
    batches.pins = True
    batches.prepare(0)
    assert pinned == [4]
