"""Weights files: what loads, and one line for everything that does not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models.errors import InputError
from models.weights import load_matching, load_weights, save_weights
from models.workload import Query


class Small(nn.Module):
    """A backbone of two layers and a head."""

    def __init__(self, classes: int = 2, width: int = 4) -> None:
        super().__init__()
        features = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width))
        self.backbone = nn.Sequential(OrderedDict(features=features))
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.backbone(x).mean((2, 3)))


def query(weights: Path | None, classes: tuple[str, ...] = ("car", "none")) -> Query:
    """A query with this weights file."""
    return Query(
        id="gate", camera="bridge", task="classification", classes=classes, model="small", model_args={},
        input_size=16, weights=weights, init=None, fps=None, sla_ms=100.0, roi=None, min_score=0.0, priority=1,
        data=None, accuracy_target=0.95,
    )  # fmt: skip


def test_a_saved_file_is_a_plain_safetensors_file(tmp_path):
    state = {**Small().state_dict(), "half": torch.randn(3).half(), "odd": torch.tensor([True, False, True])}
    save_weights(tmp_path / "w.safetensors", state)
    read = load_file(tmp_path / "w.safetensors")
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("wrapped", ["_orig_mod.", "module._orig_mod.", "model.", "net.module."])
def test_what_a_model_was_wrapped_in_when_it_was_saved_is_taken_off(tmp_path, wrapped):
    trained, fresh = Small(), Small()
    torch.save({f"{wrapped}{name}": tensor for name, tensor in trained.state_dict().items()}, tmp_path / "w.pt")
    load_weights(query(tmp_path / "w.pt"), fresh)
    assert_equal(fresh, trained)
    assert load_matching(Small(), tmp_path / "w.pt") == tuple(STATE)


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in state.items() if key != name}


def with_nan(state: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    spoiled = state["fc.weight"].clone()
    spoiled[0, 0] = value
    return {**state, "fc.weight": spoiled}


STATE = Small().state_dict()
BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "unknown suffix": ("w.npz", lambda p: p.touch(), "'.npz' files are not read; give one of .safetensors"),
    "a program": (
        "w.pt",
        lambda p: torch.jit.save(torch.jit.trace(Small().eval(), torch.zeros(1, 3, 16, 16)), p),
        "is a TorchScript program, not a plain state dict; save model.state_dict() alone",
    ),
    "a number inside": ("w.pt", lambda p: torch.save({"epoch": 3}, p), "'epoch' is a int"),
    "nothing inside": ("w.pt", lambda p: torch.save({}, p), "holds no tensors"),
    "truncated": ("w.pt", lambda p: truncate(p, 1500), "is truncated or no PyTorch file; copy or save it again"),
    "tensor missing": (
        "w.pt",
        lambda p: torch.save(without(STATE, "fc.bias"), p),
        "lacks 1 of the 9 tensors of small: fc.bias (2,); give weights of this architecture",
    ),
    "tensor too many": (
        "w.pt",
        lambda p: torch.save({**STATE, "fc.scale": torch.zeros(2)}, p),
        "has 1 that small does not know: fc.scale (2,); give",
    ),
    "another width": (
        "w.pt",
        lambda p: torch.save(Small(width=5).state_dict(), p),
        "7 of 9 tensors have another shape in small: backbone.features.0.weight is (5, 3, 3, 3) and should be "
        "(4, 3, 3, 3), backbone.features.0.bias is (5,) and should be (4,) and 5 more; give weights of this",
    ),
    "NaN": ("w.pt", lambda p: torch.save(with_nan(STATE, float("nan")), p), "fc.weight holds NaN or infinite values"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_give_one_line_and_leave_the_model_unchanged(tmp_path, case):
    name, make, fault = BAD[case]
    make(tmp_path / name)
    model = Small()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load_weights(query(tmp_path / name), model)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / name}: weights (gate): ")
    assert fault in line
    assert "\n" not in line
    assert caught.value.hint
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_starting_weights_fit_by_name_and_shape(tmp_path):
    source = {
        "features.0.weight": torch.ones(4, 3, 3, 3),
        "features.0.bias": torch.ones(9),
        "features.1.weight": torch.full((4,), 2.0),
        "classifier.weight": torch.ones(1000, 4),
    }
    save_weights(tmp_path / "backbone.safetensors", source)
    model = Small()
    loaded = load_matching(model, tmp_path / "backbone.safetensors")
    assert loaded == ("backbone.features.0.weight", "backbone.features.1.weight")
    assert torch.equal(model.get_parameter("backbone.features.0.weight"), source["features.0.weight"])
    assert torch.equal(model.get_parameter("backbone.features.1.weight"), source["features.1.weight"])


def store(path: Path, state: dict[str, Tensor]) -> None:
    """Write in the format of the suffix."""
    if path.suffix == ".safetensors":
        save_weights(path, state)
    else:
        torch.save(state, path)


def truncate(path: Path, length: int) -> None:
    """A file cut short."""
    store(path, STATE)
    content = path.read_bytes()
    assert len(content) > length
    path.write_bytes(content[:length])


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    """Same names, same bits."""
    other = right.state_dict()
    assert left.state_dict().keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in left.state_dict().items())


@pytest.mark.parametrize("classes", [("none", "car"), ("car", "bus")], ids=["another order", "another name"])
def test_weights_that_name_other_classes_are_refused(tmp_path, classes):
    asked, model = query(tmp_path / "w.safetensors", ("car", "none")), Small()
    save_weights(tmp_path / "w.safetensors", model.state_dict(), classes=classes)
    with pytest.raises(InputError) as caught:
        load_weights(asked, Small())
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'w.safetensors'}: weights (gate): was trained for the classes [")
    assert "['car', 'none']; list in `classes` those of the weights" in line and "\n" not in line
    save_weights(tmp_path / "w.safetensors", model.state_dict(), classes=("car", "none"))
    load_weights(asked, Small())
