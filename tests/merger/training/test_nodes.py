"""Virtual nodes: how many run at once changes neither the step nor the order."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from merger.bench.workbench import Workbench
from merger.training.batches import Batches, Node
from merger.training.loop import Recipe, Training, TrainingSet, Work
from merger.training.nodes import Streams, apart, seed_of, split
from models.errors import InputError
from models.frames.data import load_split
from models.frames.prepared import Prepared
from models.workload import Workload, load_workload
from models.zoo import build
from tests.merger.tiny import write_random_weights, write_workload

CPU = torch.device("cpu")


class Drawing(nn.Module):
    """Everything that depends on the batch: norms, dropout in place, stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5, inplace=True)
        self.depth = StochasticDepth(0.5, "row")
        self.inner = nn.BatchNorm1d(8, momentum=None)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, S, S) -> (N, 2)."""
        x = self.relu(self.norm(self.conv(x)))
        return self.head(self.inner(x.mean((2, 3)) + self.depth(self.drop(x).mean((2, 3)))))


def _through(at_once: int, nodes: int = 4) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, images = Drawing().train(), torch.randn(nodes * 6, 3, 8, 8)
    outputs = []
    for start in range(0, nodes, at_once):
        streams = Streams([seed_of(node) for node in range(start, start + at_once)], CPU)
        with apart(model, streams):
            outputs.append(model(images[start * 6 : (start + at_once) * 6]))
    return torch.cat(outputs), model.state_dict()


@pytest.mark.parametrize("at_once", [2, 4])
def test_norms_and_random_draws_stay_within_a_node(at_once: int) -> None:
    (alone, alone_state), (together, together_state) = _through(1), _through(at_once)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    for name, tensor in alone_state.items():
        torch.testing.assert_close(together_state[name], tensor, rtol=0, atol=1e-5)


def test_without_nodes_the_whole_batch_would_mix() -> None:
    torch.manual_seed(0)
    model, images = nn.BatchNorm2d(3).train(), torch.randn(8, 3, 4, 4) * torch.arange(1, 9).view(8, 1, 1, 1)
    mixed = model(images)
    with apart(model, Streams([0, 1], CPU)):
        parted = model(images)
    assert not torch.allclose(mixed, parted, atol=0.1)
    assert "forward" not in model.__dict__


def test_the_global_stream_goes_on_as_if_nothing_had_happened() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = nn.Dropout()
    with apart(model, Streams([1, 2], CPU)):
        model(torch.ones(4, 2))
    assert torch.equal(torch.rand(3), expected)


def test_outputs_of_any_shape_are_parted_node_by_node() -> None:
    outputs = {"a": torch.arange(6), "b": [torch.arange(12).view(6, 2)]}
    first, second, third = split(outputs, 3)
    assert first["a"].tolist() == [0, 1] and third["b"][0].tolist() == [[8, 9], [10, 11]]
    assert split(outputs, 1)[0] is outputs and second["a"].tolist() == [2, 3]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    folder = tmp_path_factory.mktemp("nodes")
    path = write_workload(folder, queries=2, frames=64)
    write_random_weights(path)
    return Workbench(load_workload(path))


@pytest.mark.parametrize("at_once", [2, 8])
@pytest.mark.parametrize("features", [0.0, 1.0])
def test_the_device_may_run_any_number_of_nodes_at_once(bench: Workbench, at_once: int, features: float) -> None:
    states = []
    for count in (1, at_once):
        recipe = Recipe(epochs=1, batch=32, node=4, frames_per_epoch=32, features=features)
        models = bench.models(bench.queries)
        fp32 = dict.fromkeys(models, "fp32")
        training = Training(models, bench.train, recipe, bench.work, bench.originals, fp32, nodes_at_once=count)
        training.epoch()
        assert training.step == 1
        states.append({query: model.state_dict() for query, model in models.items()})
    for query in bench.queries:
        for name, tensor in states[0][query].items():
            torch.testing.assert_close(states[1][query][name], tensor, rtol=0, atol=1e-5)
        assert not torch.equal(states[0][query]["head.weight"], bench.originals[query].get_parameter("head.weight"))


@pytest.mark.slow
def test_a_network_of_the_zoo_takes_the_same_step_too(bench: Workbench) -> None:
    query = replace(bench.queries["q0"], model="resnet18", model_args={}, input_size=64)
    data = TrainingSet(query, Prepared(query, load_split(query, "train")))
    torch.manual_seed(0)
    original, start = (build(query.model, query.classes, {}, 64, query.task) for _ in range(2))
    states = []
    for count in (1, 4):
        model = build(query.model, query.classes, {}, 64, query.task)
        model.load_state_dict(start.state_dict())
        recipe = Recipe(epochs=1, batch=32, node=8, frames_per_epoch=32, features=0.5)
        teachers = {"q0": original.eval().requires_grad_(False)}
        Training({"q0": model}, {"q0": data}, recipe, Work(), teachers, {"q0": "fp32"}, nodes_at_once=count).epoch()
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=1e-5)
    assert float((states[0]["conv1.weight"] - start.state_dict()["conv1.weight"]).abs().max()) > 1e-4


def test_a_batch_of_one_node_is_what_it_was_without_nodes(bench: Workbench) -> None:
    found = []
    for node in (8, 16):
        models = bench.models(["q0"])
        recipe = Recipe(epochs=1, batch=8, node=node, frames_per_epoch=16)
        bench.training(models, recipe).epoch()
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
def test_who_is_eased_takes_part_in_fewer_steps(bench: Workbench, few: bool, frames: int) -> None:
    sets = {"q0": bench.train["q0"], "q1": _Few(bench.train["q1"]) if few else bench.train["q1"]}
    recipe = Recipe(epochs=2, batch=8, node=8, frames_per_epoch=64)
    training = Training(bench.models(sets), sets, recipe, Work(), eased={"q1"})  # type: ignore[arg-type]
    seen: Counter[str] = Counter()
    own = training._learn

    def counted(query: str, nodes: Sequence[Node]) -> float:
        seen[query] += sum(len(node.images) for node in nodes)
        return own(query, nodes)

    training._learn = counted  # type: ignore[method-assign]
    losses = [training.epoch(), training.epoch()]
    assert seen == {"q0": 128, "q1": 2 * frames} and training._summed == 8 + frames / 8
    assert all(0 < loss < 10 for loss in losses)


def test_who_is_no_longer_eased_takes_part_in_all_steps_again_and_a_resumed_training_knows(bench: Workbench) -> None:
    sets = {query: bench.train[query] for query in ("q0", "q1")}
    recipe = Recipe(epochs=3, batch=8, node=8, frames_per_epoch=64)

    def begun(eased: set[str]) -> Training:
        return Training(bench.models(sets), sets, recipe, Work(), eased=eased)

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
    bench = Workbench(workload)
    recipe = Recipe(epochs=2, frames_per_epoch=32, features=0.5)
    whole, first, second = (bench.models(["q0", "q1"]) for _ in range(3))
    losses = [bench.training(whole, recipe)]
    losses = [losses[0].epoch(), losses[0].epoch()]
    begun = bench.training(first, recipe)

    def stop() -> None:
        if begun.step == 3:
            raise KeyboardInterrupt

    begun.after_step = stop
    with pytest.raises(KeyboardInterrupt):
        while True:
            begun.epoch()
    again = bench.training(second, recipe)
    again.load_state_dict(begun.state_dict())
    assert again.epochs == 1 and again.epoch() == losses[1]
    for query, model in whole.items():
        other = second[query].state_dict()
        assert all(torch.equal(tensor, other[name]) for name, tensor in model.state_dict().items())


class _Few:
    """The first eight frames of a training set."""

    def __init__(self, whole: TrainingSet) -> None:
        self.query, self.task, self.batch = whole.query, whole.task, whole.batch

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
