"""Checkpoints as training scripts write them: read without running code, and the state dict in them is found."""

from __future__ import annotations

import argparse
import enum
import pickle
import pickletools
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from gemel.models.errors import InputError
from gemel.models.files.checkpoint import TensorRecord, read_checkpoint
from gemel.models.files.weights import load_matching, load_weights
from gemel.models.notes import collect_notes
from tests.models.small import Small, equal_states, query_of


class Phase(enum.Enum):
    """A class that the reader does not import."""

    WARMUP = "warm-up"


class Callback:
    """An object whose attributes hold weights, as callbacks of trainers do."""

    def __init__(self, ema: dict[str, Tensor]) -> None:
        self.decay, self.ema_weights = 0.999, ema


torch.manual_seed(0)
NET, OTHER = Small(), Small()
STATE, RAW = NET.state_dict(), OTHER.state_dict()


def add_prefix(prefix: str, state: dict[str, Tensor] = STATE) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def optimizer_state() -> dict[str, Any]:
    net = deepcopy(OTHER)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.zeros(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


AVERAGE = AveragedModel(NET).state_dict()
META = {"mmengine_version": "0.10.4", "experiment": Phase.WARMUP}
BESIDE: dict[str, Any] = {
    "args": argparse.Namespace(lr=0.1, output=Path("runs/3")),
    "best": np.float64(0.93),
    "history": np.linspace(0, 1, 5),
    "rng": torch.get_rng_state(),
    "counts": defaultdict(list, {"a": [1]}),
    "phase": Phase.WARMUP,
    "seen": {1, 2},
    "optimizer": optimizer_state(),
    "scheduler": {"lr_lambdas": [None], "_last_lr": [0.1]},
}
PLAIN: dict[str, tuple[Any, str]] = {
    "state dict": (STATE, ""),
    "parameters": (dict(NET.named_parameters()) | dict(NET.named_buffers()), ""),
    "a number beside": ({**STATE, "epoch": 3}, ""),
    "objects beside": ({"model": STATE, **BESIDE}, ""),
    "pytorch/examples": ({"epoch": 3, "arch": "small", "state_dict": add_prefix("module."), "best_acc1": np.float32(9)},
                         "the prefix module. was removed from 9 tensors"),
    "key of one's own": ({"weights_at_best": {"net": OrderedDict(STATE)}, **BESIDE}, ""),
    "whole module": (NET, ""),
    "whole module beside": ({"model": nn.DataParallel(NET), **BESIDE},
                            "the prefix module. was removed from 9 tensors"),
    "lightning": ({"state_dict": {**add_prefix("model."), "criterion.weight": torch.ones(2)}, "hyper": BESIDE},
                  "the prefix model. was removed from 9 tensors; left out: criterion.weight"),
    "lightning of a compiled teacher": (
        {"state_dict": {**add_prefix("net._orig_mod."), "teacher.fc.weight": torch.ones(8, 8)}},
        "the prefix net. was removed from 9 tensors; left out: teacher.fc.weight"),
    "counters of thop": ({**STATE, "fc.total_ops": torch.zeros(1), "total_params": torch.zeros(1)},
                         "left out: fc.total_ops, total_params"),
    "float16": (deepcopy(NET).half().state_dict(), "8 tensors converted from float16 to float32"),
}  # fmt: skip
EMA = "EMA weights taken (under '{}'); 9 tensors"
ALONE = "to use others, save them alone in a file"
RIVAL = f"; '{{}}' would fit as well; {ALONE}"
AVERAGES: dict[str, tuple[Any, str]] = {
    "timm": ({"state_dict": RAW, "state_dict_ema": STATE, **BESIDE},
             EMA.format("state_dict_ema") + RIVAL.format("state_dict")),
    "torchvision": ({"model": RAW, "model_ema": AVERAGE, **BESIDE},
                    EMA.format("model_ema.module.*") + f"; 'model' would fit as well; left out: n_averaged; {ALONE}"),
    "AveragedModel": (AVERAGE, EMA.format("module.*") + f"; left out: n_averaged; {ALONE}"),
    "BasicSR": ({"params": RAW, "params_ema": STATE}, EMA.format("params_ema") + RIVAL.format("params")),
    "ultralytics": ({"model": OTHER, "ema": NET, "updates": 9}, EMA.format("ema") + RIVAL.format("model")),
    "attribute of a module": (
        {"state_dict": {**add_prefix("model.", RAW), **add_prefix("ema_model.", dict(AVERAGE))}},
        EMA.format("state_dict.ema_model.module.*") + "; 'state_dict.model.*' would fit as well"),
    "callback": ({"state_dict": RAW, "callbacks": {"EMA": Callback(STATE)}},
                 EMA.format("callbacks.EMA.ema_weights") + RIVAL.format("state_dict")),
    "mmengine": ({"meta": META, "state_dict": STATE,
                  "ema_state_dict": {"steps": torch.tensor(3), **add_prefix("module.", RAW)}},
                 EMA.format("state_dict") + RIVAL.format("ema_state_dict.module.*")),
    "WeightAveraging": ({"state_dict": add_prefix("net."), "current_model_state": add_prefix("net.", RAW),
                         "averaging_state": {"n_averaged": torch.tensor(2)}},
                        EMA.format("state_dict.net.*") + RIVAL.format("current_model_state.net.*")),
}  # fmt: skip


def load_noted(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The state that a query of these weights gets, and the notes without the file's name."""
    fresh = Small()
    with collect_notes() as notes:
        load_weights(query_of(path), fresh)
    assert all(note.startswith(f"{path}: weights (gate): ") for note in notes)
    return fresh.state_dict(), [note.removeprefix(f"{path}: weights (gate): ") for note in notes]


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("case", [*PLAIN, *AVERAGES])
def test_load_weights_finds_the_state_dict_of_a_checkpoint(tmp_path, case, zipped):
    content, note = {**PLAIN, **AVERAGES}[case]
    torch.save(content, tmp_path / "w.ckpt", _use_new_zipfile_serialization=zipped)
    loaded, notes = load_noted(tmp_path / "w.ckpt")
    wanted = {name: one.half().float() for name, one in STATE.items()} if case == "float16" else STATE
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
    assert len(notes) == bool(note) and "".join(notes).startswith(note)


@pytest.mark.parametrize("name", ["w.pth.tar", "pytorch_model.bin", "W.PTH", "w.safetensors", "last", "w.weights"])
def test_load_weights_tells_the_format_by_the_first_bytes(tmp_path, name):
    torch.save({"net": STATE, "acc": 93.1}, tmp_path / name)
    assert equal_states(load_noted(tmp_path / name)[0], STATE)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_load_weights_reads_every_protocol_of_pickle(tmp_path, protocol):
    torch.save({"model": STATE, **BESIDE}, tmp_path / "w.pt", pickle_protocol=protocol)
    assert equal_states(load_noted(tmp_path / "w.pt")[0], STATE)


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        ({"best": RAW, "last": STATE}, "'best', 'last'"),
        ({"state_dict": {**add_prefix("student.", RAW), **add_prefix("teacher_net.")}},
         "'state_dict.student.*', 'state_dict.teacher_net.*'"),
        ({"state_dict": RAW, "ema_0.99": STATE, "ema_0.999": Small().state_dict()}, "'ema_0.99', 'ema_0.999'"),
    ],
    ids=["keys", "prefixes", "averages"],
)  # fmt: skip
def test_load_weights_refuses_to_choose_among_equals(tmp_path, content, labels):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(InputError, match="holds 2 state dicts that fit alike") as caught:
        load_weights(query_of(tmp_path / "w.pt"), Small())
    assert labels in str(caught.value) and "alone" in caught.value.hint


def test_load_weights_names_an_average_that_lacks_tensors(tmp_path):
    torch.save({"state_dict": STATE, "ema": dict(OTHER.named_parameters())}, tmp_path / "w.pt")
    loaded, notes = load_noted(tmp_path / "w.pt")
    assert equal_states(loaded, STATE)
    assert notes == ["weights under 'state_dict' taken; 9 tensors; the average under 'ema' does not fit in full"]


def test_load_matching_takes_the_average_and_notes_the_head(tmp_path):
    wide = Small(classes=7)
    torch.save({"model": RAW, "model_ema": AveragedModel(wide).state_dict()}, tmp_path / "w.pth")
    with collect_notes() as notes:
        loaded = load_matching(model := Small(classes=5), tmp_path / "w.pth")
    assert torch.equal(
        model.state_dict()["backbone.features.0.weight"], wide.state_dict()["backbone.features.0.weight"]
    )
    assert not any(name.startswith("fc") for name in loaded)
    (note,) = notes
    assert "EMA weights taken (under 'model_ema.module.*')" in note
    assert "2 of the model are made new (fc.weight, fc.bias)" in note


def test_load_weights_names_a_pickle_that_torch_did_not_write(tmp_path):
    (tmp_path / "w.pkl").write_bytes(pickle.dumps(STATE))
    with pytest.raises(InputError, match="is a pickle that torch.save did not write; save"):  # noqa: RUF043
        load_weights(query_of(tmp_path / "w.pkl"), Small())


@pytest.mark.parametrize("value", [torch.zeros(2, 4).to_sparse(), torch.zeros(2, 4, device="meta"),
                                   torch.quantize_per_tensor(torch.zeros(2, 4), 1.0, 0, torch.qint8),
                                   torch.zeros(2, 4, dtype=torch.complex64).conj(),
                                   torch.zeros(2, 4).to(torch.float8_e4m3fn)],
                         ids=["sparse", "meta", "quantised", "conjugate", "float8"])  # fmt: skip
def test_load_weights_refuses_tensors_that_are_not_plain(tmp_path, value):
    torch.save({**STATE, "fc.weight": value}, tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"fc\.weight is no plain tensor but"):
        load_weights(query_of(tmp_path / "w.pt"), Small())


@given(st.integers(0, 3), st.lists(st.integers(1, 4), max_size=3), st.booleans())
def test_read_checkpoint_restores_views(tmp_path_factory, start, shape, turned):
    path = tmp_path_factory.mktemp("views") / "w.pt"
    whole = torch.arange(200.0)
    view = whole[start:][: int(np.prod(shape))].view(shape)
    view = view.T if turned and view.ndim == 2 else view
    torch.save({"view": view, "whole": whole}, path)
    with path.open("rb") as file:
        content = read_checkpoint(file, path, "weights", 2**20)
        read = {name: record.read() for name, record in content.items() if isinstance(record, TensorRecord)}
    assert torch.equal(read["view"], view) and read["view"].data_ptr() == read["whole"].data_ptr() + 4 * start


@given(st.data())
def test_read_checkpoint_refuses_any_damage_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "w.pt"
    torch.save({"model": STATE, **BESIDE}, path, _use_new_zipfile_serialization=False)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        load_weights(query_of(path), Small())
    except InputError as error:
        assert "\n" not in str(error)


def program(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


HOSTILE: dict[str, bytes] = {
    "keys of nested tuples": program(b"}", b")", *[b"2\x86"] * 60, b"K\1s"),
    "a module's name of nested tuples": b"\x80\x04" + b")" + b"2\x86" * 60 + b"2\x93.",
    "numbers that collide": program(
        b"}(", *[b"\x8a\x0a%sK\1" % (n * (2**61 - 1)).to_bytes(10, "little") for n in range(1, 50_000)], b"u"),
    "a memo of 2^32": program(b"Nr\xff\xff\xff\xff"),
    "more instructions than any": program(b"]" * 2**22),
    "a text of 2^40": program(b"\x8d" + (2**40).to_bytes(8, "little")),
    "an address in the registry": program(b"\x84\xff\xff\xff\x7f)R"),
    "a call of a call": program(b"cbuiltins\neval\n)R(U\1atR"),
}  # fmt: skip


def write_legacy(path: Path, content: bytes) -> Path:
    """A file of the older format whose pickle is this one, without storages."""
    head = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    path.write_bytes(head + content + pickle.dumps([], 2))
    return path


def test_load_weights_follows_every_instruction_without_a_call(tmp_path):
    parts = [
        b"(K\1", b"1", b"(0", b"K\1", b"20", b"0",  # a mark and what follows it, a copy, a value: removed
        b"(cos\nsystem\nU\2lsoq\1", b"(U\2lsios\nsystem\n0", b"(U\2lsios\nsystem\n0",  # objects by class
        b"cos\nsystem\n)}\x92", b"}(U\1aK\1u\x85b0",  # by keywords, and their attributes
        b"(lK\1a0", b"(dU\1aK\1s0", b"\x8f(K\1\x900", b"(K\1\x910", b"(K\1t0", b"(Nt0", b"h\0010",
        b"0",
    ]  # fmt: skip
    content = b"\x80\x04" + b"".join(parts) + b"}."
    with pytest.raises(InputError, match="holds no tensors"):
        load_weights(query_of(write_legacy(tmp_path / "w.pt", content)), Small())


@pytest.mark.parametrize("case", HOSTILE)
def test_load_weights_refuses_hostile_pickles_at_once(tmp_path, case):
    with pytest.raises(InputError):
        load_weights(query_of(write_legacy(tmp_path / "w.pt", HOSTILE[case])), Small())


def test_load_weights_bounds_the_time_for_many_mappings(tmp_path):
    content = {f"step {step}": {"fc.bias": STATE["fc.bias"], "step": {}} for step in range(20_000)}
    torch.save({"net": STATE, **content}, tmp_path / "w.pt")
    start = time.process_time()
    assert equal_states(load_noted(tmp_path / "w.pt")[0], STATE)
    assert time.process_time() - start < 10


def save_with(folder: Path, change: Callable[[bytes], bytes]) -> Path:
    """A zip checkpoint whose pickle is changed."""
    import zipfile

    torch.save(STATE, folder / "old.pt")
    with zipfile.ZipFile(folder / "old.pt") as old, zipfile.ZipFile(folder / "w.pt", "w") as new:
        for part in old.namelist():
            new.writestr(part, change(old.read(part)) if part.endswith("data.pkl") else old.read(part))
    return folder / "w.pt"


OLD = b"\x80\2ccollections\nOrderedDict\n(]((U\1aK\1le}U\1btR."


def test_load_weights_refuses_zips_that_hold_no_checkpoint(tmp_path):
    large = save_with(tmp_path, lambda data: data + bytes(2**26))
    with pytest.raises(InputError, match=r"holds more than 64\.0 MiB besides tensors"):
        load_weights(query_of(large), Small())
    with pytest.raises(InputError, match="holds no tensors"):
        load_weights(query_of(save_with(tmp_path, lambda data: OLD)), Small())
    np.savez(tmp_path / "w.npz", a=np.zeros(3))
    with pytest.raises(InputError, match="is a zip archive that holds no PyTorch checkpoint"):
        load_weights(query_of(tmp_path / "w.npz"), Small())


def test_load_weights_leaves_out_empty_tensors(tmp_path):
    torch.save({**STATE, "unused": torch.empty(0)}, tmp_path / "w.pt")
    assert load_noted(tmp_path / "w.pt")[1] == ["left out: unused"]


def test_load_weights_refuses_a_tensor_beyond_its_storage(tmp_path):
    def enlarge(data: bytes) -> bytes:
        sizes = [place for code, value, place in pickletools.genops(data) if code.name == "BININT1" and value == 4]
        return data[: sizes[0] or 0] + b"K\xff" + data[(sizes[0] or 0) + 2 :]

    with pytest.raises(InputError, match="is truncated or no PyTorch file"):
        load_weights(query_of(save_with(tmp_path, enlarge)), Small())
