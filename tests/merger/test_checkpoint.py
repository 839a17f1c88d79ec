"""A merge that was killed resumes from its checkpoint to the same bundle."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import pytest
import torch

from gemel.merger import merge
from gemel.merger.checkpoint import STATE, Checkpoint, Step, StepCache, storable
from gemel.merger.training.recipe import Flops
from gemel.models.bundle import open_bundle
from gemel.models.errors import InputError
from gemel.models.workload import Workload
from tests.merger.guarantees import must_train
from tests.merger.kills import Killed, kill_after
from tests.merger.options import QUICK
from tests.parameters import one_in


def _content(path: Path) -> str:
    """All that a bundle says and holds: the names of its tensors are the hashes of their bytes."""
    return open_bundle(path).manifest.to_json()


def _log(path: Path) -> str:
    return path.with_name(f"{path.name}.log.jsonl").read_text()


@pytest.mark.exhaustive
def test_sigkill_at_random_moments_gives_the_same_bundle(workload: Workload, tmp_path: Path) -> None:
    straight = merge(workload, tmp_path / "straight.safetensors", "gemel", options=QUICK)
    draw, kills = random.Random("kills"), 3
    out, codes = tmp_path / "killed.safetensors", []
    for kill in range(kills + 1):
        how = ("after", f"{draw.uniform(0.2, 2):.2f}") if kill % 2 else ("write", str(draw.randint(2, 12)))
        command = [str(workload.path), str(out), "gemel", *(how if kill < kills else ("never", "0"))]
        codes.append(_run(command))
        if not codes[-1]:
            break
    assert codes[0] == -9 and codes[-1] == 0
    assert _content(out) == _content(Path(straight.bundle))
    assert list(tmp_path.glob("*.work")) == []


def _run(arguments: list[str]) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "tests.merger.merge_process", *arguments]
    done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode


@pytest.mark.parametrize(
    ("method", "share"),
    [("top-down", 0.3), *one_in(2, [
        ("top-down", 0.6), ("top-down", 0.8), ("joint", 0.7), ("gemel", 0.4),
    ])],
)  # fmt: skip
def test_resumed_merge_repeats_no_finished_step(
    workload: Workload,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every_chance: None,
    method: str,
    share: float,
) -> None:
    must_train(monkeypatch)
    options = replace(QUICK, recipe=replace(QUICK.recipe, epochs=2, frames_per_epoch=32), margin=0.9)
    with monkeypatch.context() as patch:
        writes = kill_after(patch, -1)
        straight = merge(workload, tmp_path / "straight.safetensors", method, options=options)
    out, moment = tmp_path / "killed.safetensors", max(1, round(share * writes[0]))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, moment)
        merge(workload, out, method, options=options)
    with monkeypatch.context() as patch:
        rest = kill_after(patch, -1)
        resumed = merge(workload, out, method, resume=True, options=options)
    assert _content(out) == _content(Path(straight.bundle))
    assert resumed.flops == straight.flops and _log(out) == _log(Path(straight.bundle))
    assert rest[0] <= writes[0] - moment


def test_resume_after_the_bundle_was_written_succeeds(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "b.safetensors"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Checkpoint, "remove", lambda self: (_ for _ in ()).throw(Killed()))
        merge(workload, out, "gemel", options=QUICK)
    before, log = _content(out), _log(out)
    merge(workload, out, "gemel", resume=True, options=QUICK)
    assert _content(out) == before and _log(out) == log


@pytest.mark.parametrize("method", ["top-down"])
def test_resume_after_the_method_keeps_its_log(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    options = replace(QUICK, recipe=replace(QUICK.recipe, epochs=1, frames_per_epoch=16), margin=1.0)
    straight = merge(workload, tmp_path / "straight.safetensors", method, options=options)
    out = tmp_path / "b.safetensors"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(sys.modules["gemel.merger.merge"], "_measure", lambda *_: (_ for _ in ()).throw(Killed()))
        merge(workload, out, method, options=options)
    merge(workload, out, method, resume=True, options=options)
    assert _log(out) == _log(Path(straight.bundle)) and '"set"' in _log(out)


def test_full_disk_is_one_line_and_keeps_the_last_file(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_chance: None
) -> None:
    save, out, writes = torch.save, tmp_path / "b.safetensors", []

    def full_disk(content, file) -> None:
        writes.append(None)
        if len(writes) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, file)

    with monkeypatch.context() as patch, pytest.raises(InputError) as refused:
        patch.setattr(torch, "save", full_disk)
        merge(workload, out, "gemel", options=QUICK)
    assert "No space left on device; free some space on this disk and go on with --resume" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert {path.name for path in Path(f"{out}.work").iterdir()} == {STATE}
    assert merge(workload, out, "gemel", resume=True, options=QUICK).saved_fraction > 0


@pytest.mark.parametrize("damage", [b"", b"no checkpoint", None], ids=["empty", "text", "cut"])
def test_damaged_checkpoint_is_refused(tmp_path: Path, damage: bytes | None) -> None:
    folder = tmp_path / "flops"
    checkpoint = Checkpoint(folder, {"seed": 0}, resume=False)
    checkpoint.save()
    path = folder / STATE
    path.write_bytes(path.read_bytes()[:500] if damage is None else damage)
    with pytest.raises(InputError, match=r"state\.pt: is no checkpoint: .*; remove the folder and start again"):
        Checkpoint(folder, {"seed": 0}, resume=True)


@storable
class Outcome(str, Enum):
    """An enum in a checkpoint."""

    KEPT = "kept"


@storable
@dataclass(frozen=True)
class Found:
    """A dataclass in a checkpoint."""

    outcome: Outcome
    tensor: torch.Tensor
    members: tuple[tuple[str, str], ...] = ()


def test_steps_rows_states_and_flops_are_restored(tmp_path: Path) -> None:
    class Meter:
        total = 0.0

    def compute() -> Found:
        meter.total += 7
        checkpoint.add_row({"row": 1})
        return found

    found, meter = Found(Outcome.KEPT, torch.ones(2), (("a", "b"),)), Meter()
    checkpoint = Checkpoint(tmp_path / "work", {}, resume=False)
    checkpoint.meter = meter
    checkpoint.step(Step.METHOD, compute, "a")
    checkpoint.state("loop")["history"] = [1.0]
    checkpoint.save()
    again = Checkpoint(tmp_path / "work", {}, resume=True)
    again.meter = Meter()
    second = again.step(Step.METHOD, lambda: pytest.fail("done already"), "a")
    assert (
        second.outcome is Outcome.KEPT and second.members == found.members and torch.equal(second.tensor, found.tensor)
    )
    assert again.meter.total == 7 and again.state("loop") == {"history": [1.0]} and again.log == [{"row": 1}]


def test_finished_step_drops_what_was_kept_within_it() -> None:
    checkpoint = StepCache()

    def outer() -> int:
        checkpoint.state("loop")["x"] = 1
        return checkpoint.step("inner", lambda: 2)

    assert checkpoint.step("outer", outer) == 2
    assert list(checkpoint._state.done) == ["outer"] and checkpoint._state.loops == {}
    checkpoint.discard("outer")
    assert checkpoint.step("outer", lambda: 3) == 3


def test_checkpoint_of_another_identity_or_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Checkpoint(tmp_path / "work", {"seed": 0, "options": {"a": 1}}, resume=False).save()
    with pytest.raises(InputError, match="holds an interrupted merge; give --resume"):
        Checkpoint(tmp_path / "work", {}, resume=False)
    with pytest.raises(InputError, match=r"belongs to another merge \(seed, options differ\)"):
        Checkpoint(tmp_path / "work", {"seed": 1, "options": {"a": 2}}, resume=True)
    monkeypatch.setattr("gemel.merger.checkpoint.FORMAT", 1)
    with pytest.raises(InputError, match="written by another version"):
        Checkpoint(tmp_path / "work", {"seed": 0, "options": {"a": 1}}, resume=True)


def test_remove_leaves_files_of_others(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "work", {}, resume=False)
    checkpoint.save()
    (tmp_path / "work" / "mine").write_text("x")
    checkpoint.remove()
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mine"]


def test_finished_step_that_is_asked_again_takes_back_no_flops() -> None:
    cache = StepCache()
    cache.meter = Flops()
    for total in (5, 9):
        cache.step(Step.NETWORK, partial(cache.meter.add_flops, total - cache.meter.total), str(total))
    cache.step(Step.NETWORK, pytest.fail, "5")
    assert cache.meter.total == 9
