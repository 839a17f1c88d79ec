"""The gate: no layer reads a tensor that is still on its way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edge_runtime.engines.torch_engine import TorchEngine, awaited_tensors, start_as_arriving
from models.zoo import build
from tests.edge_runtime.tiny import picture, tiny_bundle


def names_of(model: nn.Module) -> dict[str, str]:
    return {path: path for path in model.state_dict()}


class Attention(nn.Module):
    """Attention reads its output layer's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 8, 16, stride=16)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.cut(images).flatten(2).transpose(1, 2)
        return self.head(self.attend(tokens, tokens, tokens, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vgg11", "swin_t", "attention"])
def test_early_start_layers_wait_for_their_tensors(name):
    """Tensors hold nan until they are waited for: one read too early shows in the outputs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = (Attention() if name == "attention" else build(name, ("a", "b"), {}, 64)).eval()
    batch = torch.rand(1, 3, 64, 64)
    state = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    tensors = model.state_dict(keep_vars=True)
    with torch.inference_mode():
        expected = model(batch)
        for tensor in tensors.values():
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)

        def arrive(names) -> None:
            for path in names:
                tensors[path].data.copy_(state[path])

        with start_as_arriving(awaited_tensors(model, names_of(model)), arrive):
            assert torch.equal(model(batch), expected)


def test_early_start_hooks_are_removed_after_the_run(tmp_path):
    torch.set_num_threads(1)
    bundle = tiny_bundle(tmp_path / "tiny.safetensors")
    engine = TorchEngine(bundle, "yard")
    waited: list[set[str]] = []
    engine.bind(bundle.tensor, lambda names: waited.append(set(names)))
    arriving = engine.outputs([picture(1)])
    assert len(waited) == 5, "two convolutions, two norms, a linear layer"
    state = bundle.query("yard").tensors
    assert waited[2] == {state["3.weight"], state["3.bias"]}
    assert set().union(*waited) == set(state.values())
    engine.bind(bundle.tensor)
    assert torch.equal(engine.outputs([picture(1)]), arriving) and len(waited) == 5
    engine.unbind()
    assert all(tensor.is_meta for tensor in (*engine.model.parameters(), *engine.model.buffers()))
