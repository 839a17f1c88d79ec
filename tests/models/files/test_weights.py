"""Weights files: what loads, and one line for everything that does not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gemel.models.errors import InputError
from gemel.models.files.weights import fingerprint, load_matching, load_weights, save_weights
from gemel.models.notes import collect_notes
from gemel.models.workload import load_workload
from gemel.models.zoo.user_models import check_name
from tests.models.small import Small, equal_states, query_of

STATE = Small().state_dict()


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


def test_load_weights_of_fsdp_removes_its_parts_anywhere_in_names(tmp_path):
    trained, fresh = Small().state_dict(), Small()
    wrapped = {f"_fsdp_wrapped_module.{name.replace('.', '._checkpoint_wrapped_module.', 1)}": tensor
               for name, tensor in trained.items()}  # fmt: skip
    torch.save(wrapped, tmp_path / "w.pt")
    load_weights(query_of(tmp_path / "w.pt"), fresh)
    assert all(torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in trained.items())


def test_load_weights_of_a_part_compiled_by_itself_removes_its_prefix(tmp_path):
    trained, fresh = Small().state_dict(), Small()
    torch.save({name.replace(".", "._orig_mod.", 1): tensor for name, tensor in trained.items()}, tmp_path / "w.pt")
    load_weights(query_of(tmp_path / "w.pt"), fresh)
    assert all(torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in trained.items())


def test_load_weights_says_how_to_save_weights_that_fsdp_holds_in_one_piece(tmp_path):
    torch.save({"_fsdp_wrapped_module._flat_param": torch.zeros(99)}, tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"FSDP's weights in one piece .*; save it with StateDictType.FULL_STATE_DICT"):
        load_weights(query_of(tmp_path / "w.pt"), Small())


def load_noted(path: Path, module: nn.Module, model: str = "small") -> tuple[dict[str, Tensor], list[str]]:
    with collect_notes() as notes:
        load_weights(replace(query_of(path), model=model), module)
    return module.state_dict(), [note.partition("weights (gate): ")[2] for note in notes]


class Wrapped(nn.Module):
    """A network in a wrapper with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Small()
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


def test_load_weights_puts_the_prefix_of_a_wrapping_model_before_names(tmp_path):
    trained = Wrapped().state_dict()
    torch.save({name.removeprefix("net."): tensor for name, tensor in trained.items()}, tmp_path / "w.pt")
    loaded, (note,) = load_noted(tmp_path / "w.pt", Wrapped())
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in trained.items())
    assert note == f"the prefix net. of the model's names was put before {len(STATE)} tensors"


@pytest.mark.parametrize("prefix", ["module.", "model.state."])
def test_load_weights_removes_one_prefix_and_puts_another(tmp_path, prefix):
    trained = Wrapped().net.state_dict()
    torch.save({f"{prefix}{name}": tensor for name, tensor in trained.items()}, tmp_path / "w.pt")
    wrapped = nn.ModuleDict({"net": Small()})
    wrapped.forward = wrapped["net"].forward
    loaded, (note,) = load_noted(tmp_path / "w.pt", wrapped)
    assert all(torch.equal(tensor, loaded[f"net.{name}"]) for name, tensor in trained.items())
    assert "the prefix" in note and f"net. of the model's names was put before {len(STATE)} tensors" in note


def test_load_weights_removes_a_prefix_that_only_some_names_have(tmp_path):
    names = {name: name if name.startswith("fc") else f"net.{name}" for name in STATE}
    torch.save({names[name]: tensor for name, tensor in STATE.items()}, tmp_path / "w.pt")
    loaded, (note,) = load_noted(tmp_path / "w.pt", Small())
    assert equal_states(loaded, STATE)
    assert note == f"the prefix net. was removed from {len(STATE) - 2} tensors"


@pytest.mark.parametrize(("raw", "wrapper"), [("model.", "model_ema."), ("", "model_ema."), ("net.", "ema.")])
def test_load_weights_takes_the_average_of_lit_ema(tmp_path, raw, wrapper):
    trained = Small()
    averages = {name: torch.randn_like(tensor) for name, tensor in trained.named_parameters()}
    content = {f"{raw}{name}": tensor for name, tensor in trained.state_dict().items()}
    content |= {wrapper + name.replace(".", ""): tensor for name, tensor in averages.items()}
    content |= {f"{wrapper}decay": torch.tensor(0.99), f"{wrapper}num_updates": torch.tensor(7)}
    torch.save({"state_dict": content, "epoch": 3}, tmp_path / "last.ckpt")
    loaded, (note,) = load_noted(tmp_path / "last.ckpt", Small())
    assert equal_states(loaded, {**trained.state_dict(), **averages})
    assert note.startswith(f"EMA weights taken (under 'state_dict.{wrapper}*')")


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


NAMED = {
    "class_to_idx": {"class_to_idx": {"none": 0, "car": 1}},
    "indices": {"names": {0: "none", 1: "car"}},
    "list": {"classes": ["none", "car"]},
    "case": {"class_names": ["None", "CAR"]},
    "mmengine": {"meta": {"dataset_meta": {"CLASSES": ("none", "car")}}},
    "arguments": {"args": argparse.Namespace(names=["none", "car"])},
    "background": {"labels": ["__background__", "none", "car"]},
    "more": {"classes": ["bike", "car", "none"]},
}
"""Forms in which checkpoints name their classes, in another order than the query."""


@pytest.mark.parametrize("form", NAMED)
def test_load_weights_refuses_a_checkpoint_whose_classes_have_another_order(tmp_path, form):
    torch.save({"state_dict": STATE, "epoch": 9, **NAMED[form]}, tmp_path / "w.pth")
    query = replace(query_of(tmp_path / "w.pth"), classes=("car", "none"))
    with pytest.raises(InputError, match=r"was trained for the classes .* in this order .*the query asks for"):
        load_weights(query, Small())


def test_load_weights_refuses_weights_beside_a_config_with_another_order(tmp_path):
    save_weights(tmp_path / "model.safetensors", STATE)
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "none", "1": "car"}}))
    query = replace(query_of(tmp_path / "model.safetensors"), classes=("car", "none"))
    with pytest.raises(InputError, match=r"in this order \(`config.json: id2label`\)"):
        load_weights(query, Small())


@pytest.mark.parametrize(("name", "text"), [
    ("classes.txt", "none\ncar\n"), ("labels.txt", "none\ncar\n"), ("labels.json", '["none", "car"]'),
    ("class_indices.json", '{"0": "none", "1": "car"}'), ("class_to_idx.json", '{"car": 1, "none": 0}'),
])  # fmt: skip
def test_load_weights_refuses_weights_beside_a_list_in_another_order(tmp_path, name, text):
    save_weights(tmp_path / "model.safetensors", STATE)
    (tmp_path / name).write_text(text)
    query = replace(query_of(tmp_path / "model.safetensors"), classes=("car", "none"))
    with pytest.raises(InputError, match=rf"in this order \(`{name}`\)"):
        load_weights(query, Small())


@pytest.mark.parametrize("names", [["auto", "leer"], ["LABEL_0", "LABEL_1"], ["car", "none"]])
def test_load_weights_notes_classes_of_other_names_alone(tmp_path, names):
    torch.save({"state_dict": STATE, "classes": names}, tmp_path / "w.pth")
    with collect_notes() as notes:
        load_weights(replace(query_of(tmp_path / "w.pth"), classes=("car", "none")), Small())
    assert any("its classes (`classes`) are auto, leer" in note for note in notes) == (names[0] == "auto")


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


EXPORTS = {
    "net.onnx": "is an ONNX file, which holds its network too; give it as `model` instead",
    "net.XML": "is an OpenVINO model, which is not read; give the PyTorch weights",
    "net.bin": "is of an OpenVINO model, which is not read; give the PyTorch weights",
    "net.engine": "is a TensorRT engine, which is not read; give the PyTorch weights",
    "net.pth": "is a Git LFS pointer, not the file itself; run git lfs pull",
}


@pytest.mark.parametrize("name", EXPORTS)
def test_load_weights_says_what_to_give_instead_of_an_exported_model(tmp_path, name):
    (tmp_path / "net.xml").write_text("<?xml version='1.0'?>")
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\n" if name == "net.pth" else bytes(99))
    with pytest.raises(InputError) as caught:
        load_weights(query_of(tmp_path / name), Small())
    assert str(caught.value).startswith(f"{tmp_path / name}: weights (gate): {EXPORTS[name]}")


@pytest.mark.parametrize("name", ["nets/yolo.engine", "IR.xml"])
def test_check_name_says_what_to_give_instead_of_an_exported_model(name):
    with pytest.raises(InputError, match="which is not read; export it as"):
        check_name(name, "detection", "w.yaml")


def test_workload_with_an_engine_and_no_task_says_that_engines_are_not_read(tmp_path):
    query = {"id": "gate", "camera": "c", "model": "gate.engine", "data": "gate.mp4"}
    (tmp_path / "w.yaml").write_text(json.dumps({"cameras": {"c": {"source": "gate.mp4"}}, "queries": [query]}))
    with pytest.raises(InputError, match=r"model \(gate\): 'gate.engine' is a TensorRT engine, which is not read"):
        load_workload(tmp_path / "w.yaml")


def write_shards(folder: Path, suffix: str, **changes: str) -> Path:
    """The tensors of STATE in two shards with an index, as transformers' save_pretrained writes them."""
    stem = {".safetensors": "model", ".bin": "pytorch_model"}[suffix]
    weight_map = {name: f"{stem}-{place % 2 + 1:05}-of-00002{suffix}" for place, name in enumerate(STATE)}
    for shard in set(weight_map.values()):
        part = {name: STATE[name] for name in STATE if weight_map[name] == shard}
        torch.save(part, folder / shard) if suffix == ".bin" else save_weights(folder / shard, part)
    index = folder / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": {**weight_map, **changes}}))
    return index


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_load_weights_reads_shards_by_their_index_or_folder(tmp_path, suffix):
    index = write_shards(tmp_path, suffix)
    for path in (index, tmp_path):
        with collect_notes() as notes:
            assert equal_states(load_weights(query_of(path), Small()).state_dict(), STATE)
        assert not notes
    before = fingerprint(tmp_path)
    write_shards(tmp_path, suffix)
    assert fingerprint(tmp_path) == fingerprint(index) == before
    torch.save({}, index.with_name(json.loads(index.read_text())["weight_map"]["fc.bias"]))
    assert fingerprint(index) != before
    with pytest.raises(InputError, match="lacks"):
        load_weights(query_of(index), Small())


@pytest.mark.parametrize(
    ("shard", "problem"),
    [("../other.safetensors", "names the shard"), ("/etc/passwd", "names the shard"), ("", "names the shard"),
     ("gone.safetensors", "cannot be read: No such file"), ("model.safetensors.index.json", "names the shard")],
)  # fmt: skip
def test_load_weights_refuses_shards_that_are_not_beside_the_index(tmp_path, shard, problem):
    save_weights(tmp_path / "other.safetensors", STATE)
    (tmp_path / "sub").mkdir()
    with pytest.raises(InputError, match=problem):
        load_weights(query_of(write_shards(tmp_path / "sub", ".safetensors", **{"fc.bias": shard})), Small())


def test_load_weights_of_a_folder_takes_safetensors_first_and_notes_it(tmp_path):
    with pytest.raises(InputError, match="is a folder without weights"):
        load_weights(query_of(tmp_path), Small())
    save_weights(tmp_path / "model.safetensors", STATE)
    torch.save(Small().state_dict(), tmp_path / "pytorch_model.bin")
    with collect_notes() as notes:
        assert equal_states(load_weights(query_of(tmp_path), Small()).state_dict(), STATE)
    (note,) = notes
    assert note.endswith("model.safetensors taken; pytorch_model.bin left out; to use another, give its path")


def test_fingerprint_follows_the_content_of_the_file(tmp_path):
    path = tmp_path / "w.safetensors"
    assert fingerprint(None) == fingerprint(path) == b""
    save_weights(path, STATE)
    first = fingerprint(path)
    save_weights(path, Small().state_dict())
    assert fingerprint(path) != first
