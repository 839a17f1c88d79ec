"""Networks of steps: copied, pickled and exported as other modules are, each value dropped after its last use."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import onnxruntime
import pytest
import torch

from gemel.models.graph import build_graph, load_graph
from gemel.models.graph.steps import StepNetwork
from tests.models.graph.onnx_files import SIDE, write_classifier


@pytest.fixture
def network(tmp_path: Path) -> StepNetwork:
    graph = load_graph(write_classifier(tmp_path / "a.onnx", norm=True))
    built = build_graph(graph.document)
    built.load_state_dict(graph.state)
    return built


@pytest.fixture
def frames() -> torch.Tensor:
    return torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_copies_answer_alike_and_learn_apart(network, frames, again):
    other = again(network)
    assert torch.equal(other(frames)[0], network(frames)[0])
    with torch.no_grad():
        other.get_parameter("fc.bias").add_(1)
    assert not torch.equal(other(frames)[0], network(frames)[0])


def test_a_module_that_is_replaced_is_the_one_that_runs(network, frames):
    network.fc = torch.nn.Linear(8, 5)
    assert network(frames)[0].shape == (2, 5)


def test_exported_network_answers_alike(network, frames, tmp_path):
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(network.eval(), (frames,), dynamic_shapes=({0: batch},))
    with torch.no_grad():
        wanted = network(frames[:1])[0]
    torch.testing.assert_close(program.module()(frames[:1])[0], wanted)
    torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "b.onnx")  # type: ignore[union-attr]
    session = onnxruntime.InferenceSession(str(tmp_path / "b.onnx"))
    (found,) = session.run(None, {session.get_inputs()[0].name: frames[:1].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-5, rtol=1e-4)


def test_values_are_dropped_after_their_last_use(network):
    steps = network.list_steps()
    dropped = [number for step in steps for number in step.unused]
    assert len(dropped) == len(set(dropped)) == len(steps), "all but the output, the picture among them"
    for place, step in enumerate(steps):
        later = {number for other in steps[place + 1 :] for number in other.sources}
        assert not later.intersection(step.unused)
