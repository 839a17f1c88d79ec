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
from models.notes import collect_notes
from models.weights import fingerprint, load_matching, load_weights, save_weights
from models.workload import Query
from tests.models.queries import make_query


class Small(nn.Module):
    """A backbone of two layers and a head."""

    def __init__(self, classes: int = 2, width: int = 4) -> None:
        super().__init__()
        features = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width))
        self.backbone = nn.Sequential(OrderedDict(features=features))
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.backbone(x).mean((2, 3)))


STATE = Small().state_dict()


def query_of(weights: Path | None) -> Query:
    return make_query(model="small", weights=weights, classes=("car", "none"))


def test_save_weights_writes_a_plain_safetensors_file(tmp_path):
    column = torch.arange(6.0).reshape(2, 3)[:, 1]
    state = {**STATE, "half": torch.randn(3).half(), "flags": torch.tensor([True, False, True]), "column": column,
             "the same": column}  # fmt: skip
    save_weights(tmp_path / "w.safetensors", state)
    read = load_file(tmp_path / "w.safetensors")
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "model.", "net.module."])
def test_load_weights_removes_the_prefix_of_a_wrapper(tmp_path, prefix):
    trained, fresh = Small(), Small()
    torch.save({f"{prefix}{name}": tensor for name, tensor in trained.state_dict().items()}, tmp_path / "w.pt")
    load_weights(query_of(tmp_path / "w.pt"), fresh)
    loaded = fresh.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in trained.state_dict().items())
    assert load_matching(Small(), tmp_path / "w.pt") == tuple(STATE)


def save(change: dict[str, Tensor | int], without: str = "") -> Callable[[Path], object]:
    """Write the state, changed, as a .pt file."""
    return lambda path: torch.save({key: value for key, value in {**STATE, **change}.items() if key != without}, path)


def save_truncated(path: Path) -> None:
    torch.save(STATE, path)
    path.write_bytes(path.read_bytes()[:1500])


BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "unknown suffix": ("w.npz", lambda p: p.touch(), "'.npz' files are not read; give one of .safetensors"),
    "no file": ("w.pt", lambda p: None, "does not exist; give the path of a weights file"),
    "a program": (
        "w.pt",
        lambda p: torch.jit.save(torch.jit.trace(Small().eval(), torch.zeros(1, 3, 16, 16)), p),
        "is a TorchScript program, not a plain state dict; save model.state_dict() alone",
    ),
    "a number inside": ("w.pt", save({"epoch": 3}), "is not a plain state dict: 'epoch' is a int"),
    "nothing inside": ("w.pt", lambda p: torch.save({}, p), "holds no tensors"),
    "truncated": ("w.pt", save_truncated, "is truncated or no PyTorch file; copy or save it again"),
    "far too large": (
        "w.pt",
        lambda p: (p.touch(), p.open("r+b").truncate(2**30)),
        "holds 1.0 GiB, far more than the model takes",
    ),
    "tensor missing": (
        "w.pt",
        save({}, without="fc.bias"),
        "lacks 1 of the 9 tensors of small: fc.bias (2,); give weights of this architecture",
    ),
    "tensor too many": (
        "w.pt",
        save({"fc.scale": torch.zeros(2)}),
        "has 1 that small does not know: fc.scale (2,); give",
    ),
    "another width": (
        "w.pt",
        lambda p: torch.save(Small(width=5).state_dict(), p),
        "7 of 9 tensors have another shape in small: backbone.features.0.weight is (5, 3, 3, 3) and should be "
        "(4, 3, 3, 3), backbone.features.0.bias is (5,) and should be (4,) and 5 more; give weights of this",
    ),
    "another head": (
        "w.pt",
        lambda p: torch.save(Small(classes=5).state_dict(), p),
        "only the head does not fit the class list (2 in the query): fc.weight is (5, 4) and should be (2, 4)",
    ),
    "NaN": ("w.pt", save({"fc.weight": torch.full((2, 4), torch.nan)}), "fc.weight holds NaN or infinite values"),
}


@pytest.mark.parametrize("case", BAD)
def test_load_weights_refuses_bad_files_and_leaves_the_model_unchanged(tmp_path, case):
    name, make, problem = BAD[case]
    make(tmp_path / name)
    model = Small()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load_weights(query_of(tmp_path / name), model)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / name}: weights (gate): {problem}") and "\n" not in line
    assert caught.value.hint
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_load_weights_without_weights_names_the_query():
    with pytest.raises(InputError, match="has no weights file"):
        load_weights(query_of(None), Small())


@pytest.mark.parametrize("classes", [("none", "car"), ("car", "bus")], ids=["another order", "another name"])
def test_load_weights_refuses_weights_of_other_classes(tmp_path, classes):
    path = tmp_path / "w.safetensors"
    save_weights(path, STATE, classes=classes)
    with pytest.raises(InputError) as caught:
        load_weights(query_of(path), Small())
    line = str(caught.value)
    assert line.startswith(f"{path}: weights (gate): was trained for the classes [")
    assert "['car', 'none']; list in `classes` those of the weights" in line and "\n" not in line
    save_weights(path, STATE, classes=("car", "none"))
    load_weights(query_of(path), Small())


def test_load_matching_loads_tensors_of_equal_name_and_shape(tmp_path):
    path = tmp_path / "backbone.safetensors"
    source = {
        "features.0.weight": torch.ones(4, 3, 3, 3),
        "features.0.bias": torch.ones(9),
        "features.1.weight": torch.full((4,), 2.0),
        "classifier.weight": torch.ones(1000, 4),
    }
    save_weights(path, source)
    model = Small()
    assert load_matching(model, path) == ("backbone.features.0.weight", "backbone.features.1.weight")
    assert torch.equal(model.get_parameter("backbone.features.0.weight"), source["features.0.weight"])
    assert torch.equal(model.get_parameter("backbone.features.1.weight"), source["features.1.weight"])
    save_weights(path, {"classifier.weight": source["classifier.weight"]})
    with pytest.raises(InputError, match="none of its 1 tensors fits Small by name and shape"):
        load_matching(model, path)


INIT = {
    "another head": (lambda: {**STATE, "fc.weight": torch.ones(9, 4), "fc.bias": torch.ones(9)},
                     "7 tensors taken as `init`, 2 left out (fc.bias, fc.weight), "
                     "2 of the model are made new (fc.weight, fc.bias)"),
    "a backbone": (lambda: {name: STATE[name] for name in STATE if not name.startswith("fc.")},
                   "7 tensors taken as `init`, 2 of the model are made new (fc.weight, fc.bias)"),
    "a layer more": (lambda: {**STATE, "neck.weight": torch.ones(3)},
                     "9 tensors taken as `init`, 1 left out (neck.weight)"),
    "no counters": (lambda: {name: STATE[name] for name in STATE if "num_batches" not in name}, None),
    "all": (lambda: STATE, None),
}  # fmt: skip


@pytest.mark.parametrize("case", INIT)
def test_load_matching_notes_the_tensors_that_do_not_fit(tmp_path, case):
    make, expected = INIT[case]
    save_weights(tmp_path / "w.safetensors", make())
    with collect_notes() as notes:
        load_matching(Small(), tmp_path / "w.safetensors")
    hint = "expected for a head of other classes; else give weights of this model"
    assert notes == ([] if expected is None else [f"{tmp_path / 'w.safetensors'}: {expected}; {hint}"])


def test_fingerprint_follows_the_content_of_the_file(tmp_path):
    path = tmp_path / "w.safetensors"
    assert fingerprint(None) == fingerprint(path) == b""
    save_weights(path, STATE)
    first = fingerprint(path)
    save_weights(path, Small().state_dict())
    assert fingerprint(path) != first
