"""A stranger's model is read in a child: within limits, without rights, and its answer is believed nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemel.models.bundle.confined_bundle import verify_confined
from gemel.models.bundle.format import encode_header, place
from gemel.models.errors import InputError
from gemel.models.files import confined
from gemel.models.files.confined import ChildAnswer, Limits, describe_confinement, run_confined
from gemel.models.files.landlock import landlock_version
from gemel.models.files.weights import load_matching
from gemel.models.graph import load_graph
from gemel.models.graph.onnx_reader import read_graph
from gemel.models.notes import collect_notes
from tests.models.graph.onnx_files import write_classifier

LIMITS = Limits(cpu_s=20, wall_s=100, memory_bytes=2**29, answer_bytes=2**20)
RESULT = "__import__('gemel.models.files.confined_server', fromlist=['x']).ConfinedResult"
needs_landlock = pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
needs_network_rules = pytest.mark.skipif(landlock_version() < 4, reason="this kernel's Landlock has no network rules")
needs_scopes = pytest.mark.skipif(landlock_version() < 6, reason="this kernel's Landlock has no scopes")


def evaluate(path: Path, text: str, limits: Limits = LIMITS, beside: bool = False) -> ChildAnswer:
    """Evaluate an expression in a child that reads `path`, and return it as JSON has it."""
    return run_confined("builtins:eval", [f"{RESULT}({text}, {{}})"], path, beside, limits)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file in a folder of its own, beside another folder with a secret."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "data").write_text("beside")
    (tmp_path / "secret").write_text("secret")
    path = tmp_path / "models" / "model"
    path.write_text("model")
    return path


# What it may


@needs_landlock
def test_child_reads_its_file_alone_or_its_folder(model: Path) -> None:
    assert evaluate(model, f"open({str(model)!r}).read()").value == "model"
    beside = str(model.parent / "data")
    assert evaluate(model, f"open({beside!r}).read()", beside=True).value == "beside"
    with pytest.raises(InputError, match="PermissionError"):
        evaluate(model, f"open({beside!r}).read()")
    for path in (model.parent.parent / "secret", "/etc/passwd", f"/proc/{os.getpid()}/environ"):
        with pytest.raises(InputError, match="PermissionError"):
            evaluate(model, f"open({str(path)!r}).read()", beside=True)
    with pytest.raises(InputError, match="PermissionError"):
        evaluate(model, "__import__('os').listdir('/')", beside=True)


@needs_landlock
def test_child_follows_the_link_that_is_the_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    assert evaluate(tmp_path / "link", f"open({str(tmp_path / 'link')!r}).read()").value == "model"


@needs_landlock
def test_child_of_a_model_in_a_home_reads_no_hidden_file_or_folder(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = model.parent
    monkeypatch.setenv("HOME", str(home))
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id").write_text("key")
    (home / ".netrc").write_text("password")
    assert evaluate(model, f"open({str(home / 'data')!r}).read()", beside=True).value == "beside"
    for name in (".ssh/id", ".netrc"):
        with pytest.raises(InputError, match="PermissionError"):
            evaluate(model, f"open({str(home / name)!r}).read()", beside=True)


@needs_landlock
def test_child_writes_nothing(model: Path) -> None:
    for call in ("open({!r}, 'w')", "__import__('os').unlink({!r})", "__import__('os').mkdir({!r} + 'x')"):
        with pytest.raises(InputError, match="PermissionError"):
            evaluate(model, call.format(str(model)), beside=True)
    assert model.read_text() == "model"


@needs_network_rules
def test_child_opens_no_connection(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with pytest.raises(InputError, match="PermissionError"):
            evaluate(model, f"__import__('socket').socket().connect({address!r})")


@needs_scopes
def test_child_signals_no_other_process(model: Path) -> None:
    with pytest.raises(InputError, match="PermissionError"):
        evaluate(model, f"__import__('os').kill({os.getpid()}, 0)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root is not held to a limit of processes")
def test_child_starts_no_process(model: Path) -> None:
    with pytest.raises(InputError, match="BlockingIOError"):
        evaluate(model, "__import__('os').fork()")


def test_child_has_no_open_files_and_no_secrets(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    confined._stop_server()
    monkeypatch.setenv("GEMEL_TOKEN", "secret")
    monkeypatch.setenv("PYTHONUTF8", "1")
    with open(model) as _:
        opened = "[n for n in range(3, 256) if __import__('os').path.exists(f'/dev/fd/{n}')]"
        names = "sorted(__import__('os').environ)"
        value = evaluate(model, f"[{names}, {opened}]").value
    assert "GEMEL_TOKEN" not in value[0] and "PYTHONUTF8" in value[0]
    assert len(value[1]) <= 1  # its answer


# Limits

LOOP = "all(True for _ in iter(int, 1))"
ENDS: dict[str, tuple[str, dict[str, int], str]] = {
    "processor time": (LOOP, {"cpu_s": 1}, "took more than 1 s of processor time"),
    "time": ("__import__('time').sleep(100)", {"wall_s": 1}, "took more than 1 s to read"),
    "memory": ("len(bytearray(2**30))", {}, "takes more than 512.0 MiB of memory"),
    "memory of torch": ("len(__import__('torch').ones(2**28))", {}, "takes more than 512.0 MiB of memory"),
    "answer": ("'x' * 2**21", {}, "holds more than 1.0 MiB once it is read"),
    "crash": ("__import__('ctypes').string_at(0)", {}, "its reader crashed (SIGSEGV)"),
    "kill": ("__import__('os').kill(__import__('os').getpid(), 9)", {}, "its reader was killed"),
    "exit": ("__import__('os')._exit(3)", {}, "its reader failed"),
    "no answer": ("__import__('os')._exit(0)", {}, "gave no answer that can be read"),
    "error": ("1 / 0", {}, "cannot be read: ZeroDivisionError"),
}


@pytest.mark.parametrize("case", ENDS)
def test_child_that_does_not_answer_gives_one_line(model: Path, case: str) -> None:
    text, limits, problem = ENDS[case]
    with pytest.raises(InputError, match=re.escape(problem)) as caught:
        evaluate(model, text, Limits(**{**vars(LIMITS), **limits}))
    assert str(caught.value).startswith(f"{model}: ") and "\n" not in str(caught.value)


def test_limits_grow_with_the_model() -> None:
    small, large = Limits.of_size(2**20), Limits.of_size(2**28)
    assert small.cpu_s < large.cpu_s and small.wall_s < large.wall_s and small.answer_bytes < large.answer_bytes
    assert Limits.of_size(2**60).memory_bytes <= confined._machine_bytes()


def test_run_confined_starts_its_server_again_after_it_was_killed(model: Path) -> None:
    assert evaluate(model, "1").value == 1
    assert confined._server is not None
    process = confined._server[1]
    process.kill()
    process.wait()
    assert evaluate(model, "2").value == 2


# Answers


def test_answer_brings_values_tensors_notes_and_refusals(model: Path) -> None:
    notes_of = "__import__('gemel.models.notes', fromlist=['x']).add_note"
    tensors = "{'t': torch.arange(6.0).view(2, 3), 'e': torch.empty(0, 3)}"
    value = f"[{notes_of}({str(model)!r}, 'was read'), {{'a': [1, 'x']}}]"
    with collect_notes() as notes:
        text = f"(lambda torch: {RESULT}({value}, {tensors}))(__import__('torch'))"
        answer = run_confined("builtins:eval", [text], model, limits=LIMITS)
    assert answer.value == [None, {"a": [1, "x"]}] and notes == [f"{model}: was read"]
    assert torch.equal(answer.tensors["t"], torch.arange(6.0).view(2, 3)) and answer.tensors["e"].shape == (0, 3)
    answer.tensors["t"].add_(1)  # its memory is this process's own
    refusal = "__import__('gemel.models.errors', fromlist=['x']).InputError"
    with pytest.raises(InputError) as caught:
        evaluate(model, f"(_ for _ in ()).throw({refusal}({str(model)!r}, 'is bad', 'mend it', 'weights (a)'))")
    assert str(caught.value) == f"{model}: weights (a): is bad; mend it"


def container(text: bytes, tensors: dict[str, bytes]) -> bytes:
    """An answer as a child that was taken over may write it."""
    contents = {"answer": text, **tensors}
    entries = place((name, "U8", (len(data),)) for name, data in contents.items())
    parts = [bytes(entry.nbytes) if entry.is_pad else contents[entry.name] for entry in entries]
    return encode_header(entries, {}) + b"".join(parts)


ANSWERS: dict[str, bytes] = {
    "nothing": b"",
    "noise": bytes(range(256)) * 8,
    "a pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R." + bytes(512),
    "no answer in it": encode_header([], {}),
    "no JSON": container(b"{", {}),
    "no mapping": container(b"[]", {}),
    "no notes": container(b"{}", {}),
    "notes that are none": container(b'{"notes": 1, "value": 1}', {}),
    "no value": container(b'{"notes": []}', {}),
    "half a refusal": container(b'{"notes": [], "refusal": ["a"]}', {}),
    "a number twice": container(b'{"notes": [], "notes": []}', {}),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answer_of_a_child_that_was_taken_over_is_refused(model: Path, case: str) -> None:
    with confined._memory_file() as file:
        file.write(ANSWERS[case])
        file.flush()
        with pytest.raises(InputError, match="gave no answer that can be read"):
            confined._read_answer(model, file, LIMITS)


def test_note_and_refusal_of_a_child_forge_no_line(model: Path) -> None:
    outcome = {"notes": ["a\n/etc/passwd: sound"], "refusal": ["a\nb", "c\nd", "e\x1b[2J", ""]}
    with confined._memory_file() as file, collect_notes() as notes:
        file.write(container(json.dumps(outcome).encode(), {}))
        file.flush()
        with pytest.raises(InputError) as caught:
            confined._read_answer(model, file, LIMITS)
    assert str(caught.value).isprintable() and notes == ["a\\n/etc/passwd: sound"]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory that can be sealed")
def test_answer_that_somebody_could_still_change_is_refused(model: Path) -> None:
    import mmap

    with confined._memory_file() as file:
        file.write(container(b'{"notes": [], "value": 1}', {}))
        file.flush()
        writable = mmap.mmap(file.fileno(), 0)
        with pytest.raises(InputError, match="gave no answer that can be read"):
            confined._read_answer(model, file, LIMITS)
        writable.close()
        assert confined._read_answer(model, file, LIMITS).value == 1


# The front doors


@pytest.fixture
def unreadable_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that fail in this process; a child has its own."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("read in this process")

    for name in ("graph.onnx_reader.read_graph", "graph.onnx_reader.read_onnx", "files.checkpoint.read_checkpoint",
                 "files.foreign_checkpoint.read_checkpoint", "files.checkpoint._unpickle",
                 "bundle.verify.verify_bundle", "bundle.confined_bundle.verify_bundle"):  # fmt: skip
        monkeypatch.setattr(f"gemel.models.{name}", fail)


def test_load_graph_reads_onnx_in_a_child(tmp_path: Path, unreadable_here: None) -> None:
    graph = load_graph(write_classifier(tmp_path / "a.onnx"))
    assert graph.state and graph.input.shape[1] == 3


def test_load_graph_answers_as_read_graph_does(tmp_path: Path) -> None:
    path = write_classifier(tmp_path / "a.onnx", norm=True)
    here, there = read_graph(path), load_graph(path)
    for name in ("document", "input", "outputs", "metadata", "cut", "file_input", "led"):
        assert getattr(here, name) == getattr(there, name)
    assert here.state.keys() == there.state.keys()
    assert all(torch.equal(tensor, there.state[name]) for name, tensor in here.state.items())


def test_load_graph_reads_pt2_in_a_child(tmp_path: Path, unreadable_here: None) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    torch.export.save(torch.export.export(network.eval(), (torch.zeros(1, 3, 8, 8),)), tmp_path / "a.pt2")
    assert load_graph(tmp_path / "a.pt2").outputs[0].shape[1:] == (2,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_load_matching_reads_a_checkpoint_in_a_child(tmp_path: Path, unreadable_here: None, is_zip: bool) -> None:
    network, other = nn.Linear(3, 2), nn.Linear(3, 2)
    state = {"model": network.state_dict(), "optimizer": {"state": {0: {"exp_avg": torch.zeros(2, 3)}}}}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    assert load_matching(other, tmp_path / "a.pt") == ("weight", "bias")
    assert torch.equal(network.weight, other.weight)


def test_verify_confined_verifies_in_a_child(tmp_path: Path, unreadable_here: None) -> None:
    (tmp_path / "a.safetensors").write_bytes(BytesIO(b"{}").getvalue() * 100)
    problems, unchecked = verify_confined(tmp_path / "a.safetensors")
    assert len(problems) == 1 and not unchecked
    with pytest.raises(InputError, match="No such file"):
        verify_confined(tmp_path / "none.safetensors")


def test_describe_confinement_says_what_this_system_has() -> None:
    said = describe_confinement()
    assert ("Landlock (version" in said) == bool(landlock_version()) and signal.SIGXCPU
