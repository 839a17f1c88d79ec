"""OUT.work: what a merge did not make is neither written to nor removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from merger.journal.checkpoint import MARK, SAID, STATE, Checkpoint
from models.errors import InputError
from tests.hostile.harness import refused, snapshot

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
    said = "was not made by a merge; move it away, or choose another path for the bundle"
    line = refused(["merge", workload, "-o", tmp_path / "out", *resume], tmp_path)
    assert line == f"gemel: {tmp_path / 'out.work'}: {said}"


def test_a_folder_that_somebody_made_meanwhile_is_not_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "out.work"
    checkpoint = Checkpoint(folder, {}, resume=False)
    _of_files(folder)
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="was not made by a merge"):
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


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", [], {}, {"format": 4}, {"format": [4]}, "text", 3, {"format": 4, "identity": 3}, "fifo", "link"],
    ids=str,
)
def test_a_state_that_is_none_is_one_line(tmp_path: Path, content) -> None:
    folder = tmp_path / "out.work"
    Checkpoint(folder, {}, resume=False).write()
    path = folder / STATE
    if content in ("fifo", "link"):
        path.unlink()
        os.mkfifo(path) if content == "fifo" else path.symlink_to("/dev/zero")
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(InputError) as refused:
        Checkpoint(folder, {}, resume=True)
    assert str(refused.value).startswith(f"{path}: is no checkpoint: ") and str(refused.value).isprintable()
