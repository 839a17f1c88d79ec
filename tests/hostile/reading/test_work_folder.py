"""OUT.work: what a merge did not make is neither written to nor removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.checkpoint import FORMAT, LENGTH, MARK, SAID, STATE, Checkpoint, save_sealed
from models.errors import InputError
from tests.hostile.harness import refused, snapshot
from tests.hostile.reading.test_json import FILES, make_special

WORKLOAD = """
name: one
cameras: {gate: {source: gate.mp4, fps: 5}}
queries:
  - {id: a, camera: gate, task: classification, classes: [x, y], model: cifar_resnet20, input_size: 32}
"""


def _of_files(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")


def _with_another_state(folder: Path) -> None:
    folder.mkdir()
    (folder / STATE).write_bytes(b"mine")


def _with_another_mark(folder: Path) -> None:
    _of_files(folder)
    (folder / MARK).write_bytes(b"mine")


def _with_a_long_mark(folder: Path) -> None:
    _of_files(folder)
    (folder / MARK).write_bytes(SAID + b"more")


def _with_a_linked_mark(folder: Path) -> None:
    _of_files(folder)
    (folder.parent / "mark").write_bytes(SAID)
    (folder / MARK).symlink_to(folder.parent / "mark")


def _behind_a_link(folder: Path) -> None:
    Checkpoint(folder.with_name("theirs"), {}, resume=False).write()
    folder.symlink_to(folder.with_name("theirs"))


def _file(folder: Path) -> None:
    folder.write_bytes(b"mine")


@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["merge", "resume"])
@pytest.mark.parametrize(
    "make",
    [Path.mkdir, _of_files, _with_another_state, _with_another_mark, _with_a_long_mark, _with_a_linked_mark,
     _behind_a_link, _file],
)  # fmt: skip
def test_a_folder_that_no_merge_made_is_refused_and_stays(tmp_path: Path, make, resume: list[str]) -> None:
    workload = tmp_path / "w.yaml"
    workload.write_text(WORKLOAD)
    make(tmp_path / "out.work")
    said = "was not made by gemel; move it away, or choose another path"
    line = refused(["merge", workload, "-o", tmp_path / "out", *resume], tmp_path)
    assert line == f"gemel: {tmp_path / 'out.work'}: {said}"


def test_a_folder_that_somebody_made_meanwhile_is_not_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "out.work"
    checkpoint = Checkpoint(folder, {}, resume=False)
    _of_files(folder)
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="was not made by gemel"):
        checkpoint.write()
    checkpoint.remove()
    assert snapshot(tmp_path) == before


def test_files_that_somebody_put_into_a_merges_folder_stay(tmp_path: Path) -> None:
    folder = tmp_path / "out.work"
    checkpoint = Checkpoint(folder, {}, resume=False)
    checkpoint.write()
    (folder / f".{STATE}.0.tmp").write_bytes(b"torn")
    (folder / "notes.txt").write_text("mine")
    checkpoint.remove()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_merges_folder_goes_when_it_is_done(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "out.work", {}, resume=False)
    checkpoint.write()
    assert {path.name for path in (tmp_path / "out.work").iterdir()} == {MARK, STATE}
    checkpoint.remove()
    assert list(tmp_path.iterdir()) == []


ACCEPTED = {"members": [["a", "conv1"]], "weights": {"a": torch.ones(2)}}
CONTENT: dict[str, Any] = {
    "format": FORMAT, "identity": {}, "rounds": 0, "seconds": 0.0, "work": 0.0, "rate": None, "log": [],
    "accepted": ACCEPTED, "journal": {"done": {"a": (ACCEPTED, 0.0)}, "parts": {}, "trainings": {}, "meter": 0.0},
}  # fmt: skip
OF_TORCH: dict[str, Any] = {
    "nothing": None, "a text": "text", "a list": [], "a number": 3, "no keys": {}, "another format": {"format": 4},
    "a tensor": torch.ones(2), "a meta tensor": {**CONTENT, "accepted": torch.ones(2, device="meta")},
    "a sparse tensor": {**CONTENT, "accepted": torch.ones(2).to_sparse()},
    **{f"a wrong {key}": {**CONTENT, key: ["x"]} for key in CONTENT},
    "a wrong journal, deep": {**CONTENT, "journal": {**CONTENT["journal"], "done": {"a": 3}}},
    "all as it should be, but not by a merge": CONTENT,
}  # fmt: skip
OF_BYTES = {"empty": b"", "garbage": b"garbage" * 100, "a pickle that runs": b"cos\nsystem\n(S'touch ran'\ntR."}
SEALED: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:500],
    "cut by a byte": lambda data: data[:-1],
    "a byte more": lambda data: data + b"x",
    "a byte flipped": lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    "a seal of other bytes": lambda data: b"x" + data,
    "a seal alone": lambda data: data[-LENGTH:],
    "a seal of nobody": lambda data: data[:-64] + b"x" * 64,
    "a seal of no UTF-8": lambda data: data[:-64] + b"\xff" * 64,
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A workload, and the folder of its interrupted merge."""
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    Checkpoint(tmp_path / "out.work", {}, resume=False).write()
    return tmp_path / "out.work"


def _refused(work: Path) -> str:
    said = refused(["merge", "w.yaml", "-o", "out", "--resume"], work.parent, f"out.work/{STATE}: is no checkpoint: ")
    assert said.endswith("; remove the folder and start again")
    return said


@pytest.mark.parametrize("content", [*OF_TORCH, *OF_BYTES])
def test_a_state_that_no_merge_wrote_is_one_line(work: Path, content: str) -> None:
    if content in OF_BYTES:
        (work / STATE).write_bytes(OF_BYTES[content])
    else:
        torch.save(OF_TORCH[content], work / STATE)
    _refused(work)


@pytest.mark.parametrize("change", SEALED.values(), ids=SEALED)
def test_a_state_that_was_changed_is_one_line(work: Path, change: Callable[[bytes], bytes]) -> None:
    (work / STATE).write_bytes(change((work / STATE).read_bytes()))
    _refused(work)


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind != "missing"])
def test_a_state_that_is_no_file_of_bearable_size_is_one_line(work: Path, kind: str) -> None:
    (work / STATE).unlink()
    make_special(work / STATE, kind)
    _refused(work)


def test_a_state_of_another_merge_is_told(work: Path) -> None:
    refused(["merge", "w.yaml", "-o", "out", "--resume"], work.parent, "belongs to another merge (workload, method, ")


def test_a_state_that_is_sealed_but_of_another_version_is_told(work: Path) -> None:
    with (work / STATE).open("wb") as file:
        save_sealed({**CONTENT, "format": FORMAT + 1}, file)
    assert f"format {FORMAT + 1}" in _refused(work)
