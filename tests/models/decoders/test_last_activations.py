"""What outputs of graphs passed last, and their last layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gemel.models.decoders.graph_model import last_layers
from gemel.models.decoders.last_activations import Activation, find_activations
from gemel.models.graph import build_graph, load_graph


class BoxesAndKind(nn.Module):
    """Distances as the mean of a distribution, an objectness, classes after a SiLU, and a softmax of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(3, 8, 3, stride=4, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.sides = nn.Conv2d(8, 16, 1)
        self.mean = nn.Conv2d(4, 1, 1, bias=False)
        self.scores = nn.Conv2d(8, 5, 1)
        self.kind = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.trunk(x).relu())
        x = x * x.sigmoid()
        sides = self.sides(x).reshape(-1, 4, 4, 64).softmax(dim=1)
        boxes = self.mean(sides).reshape(-1, 4, 64) * 4
        scores = self.scores(x).flatten(2).sigmoid()
        rows = torch.cat([boxes, scores], dim=1).transpose(1, 2)
        return rows, self.kind(x.mean(dim=(2, 3))).softmax(dim=1)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory):
    path: Path = tmp_path_factory.mktemp("graph") / "answers.onnx"
    torch.onnx.export(BoxesAndKind().eval(), (torch.zeros(1, 3, 32, 32),), str(path), dynamo=False, opset_version=17)
    return load_graph(path)


def test_activations_are_found_element_by_element(graph):
    network = build_graph(graph.document)
    network.load_state_dict(graph.state)
    network.train()
    rows, kind = find_activations(network, (32, 32))
    assert rows.shape == (1, 64, 9)
    assert (rows[..., :4] == Activation.NONE).all() and (rows[..., 4:] == Activation.SIGMOID).all()
    assert (kind == Activation.SOFTMAX).all()
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, graph.state[name]), name


def test_the_last_layers_leave_out_the_mean_of_a_distribution(graph):
    network = build_graph(graph.document, "meta")
    assert last_layers(network) == ("sides", "scores", "kind")
