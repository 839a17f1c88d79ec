"""`make gpu`, rehearsed on the processor: every stage runs through, and the command goes on where it was left."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import gpu
from benchmarks.gpu.found import Found
from benchmarks.machine import machine
from tests.parameters import every

REHEARSED = ["--device", "cpu", "--small"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


REHEARSED_HERE = [name for name in gpu.STAGES if name != "environment"]
"""All but what is tried below as a process."""


@pytest.mark.parametrize("stage", every(REHEARSED_HERE, few=("transfer", "faults")))
def test_a_stage_is_rehearsed_on_the_processor(stage: str) -> None:
    found = gpu.carry_out(stage, "cpu", small=True)
    assert found["passed"], found["missed"]
    assert found["found"] or found["left_out"]


def test_a_stage_is_a_process_its_line_is_kept_and_it_is_not_run_again(tmp_path: Path, capsys, monkeypatch) -> None:
    done = tmp_path / "done.jsonl"
    asked = [*REHEARSED, "--only", "environment", "--done", str(done)]
    assert gpu.main(asked) == 0
    (line,) = [json.loads(text) for text in done.read_text().splitlines()]
    assert line["passed"] and line["stage"] == "environment" and line["found"]["copy_within_gb_s"] > 0
    assert json.loads(capsys.readouterr().out) == line
    monkeypatch.setattr(subprocess, "run", None)
    assert gpu.main(asked) == 0 and len(done.read_text().splitlines()) == 1


def test_a_stage_that_hangs_or_breaks_is_told_and_is_still_to_do(tmp_path: Path, capsys, monkeypatch) -> None:
    done = tmp_path / "done.jsonl"
    done.write_text('{"stage": "swap", "device": "cpu", "size": "small", "passed": true}\n{"stage": "mov')
    ran: list[str] = []

    def run(command: list[str], timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        name = command[command.index("--stage") + 1]
        ran.append(name)
        if name == "transfer":
            raise subprocess.TimeoutExpired(command, timeout, stderr=b'chatter\nfound: {"first": 1}\nfound: {"sec')
        if name == "forms":
            return subprocess.CompletedProcess(command, 0, 'chatter\n{"passed": false, "missed": ["x"]}\n', "")
        return subprocess.CompletedProcess(command, 1, "", 'found: {"ms": 2}\nRuntimeError: no\nkernel image\n')

    monkeypatch.setattr(subprocess, "run", run)
    asked = [*REHEARSED, "--only", "swap", "transfer", "speed", "forms", "--done", str(done)]
    assert gpu.main(asked) == 1
    told = capsys.readouterr()
    lines = {line["stage"]: line for line in map(json.loads, told.out.splitlines())}
    assert ran == ["transfer", "speed", "forms"] and not any(line["passed"] for line in lines.values())
    assert "not done after" in lines["transfer"]["fault"] and "kernel image" in lines["speed"]["fault"]
    assert lines["transfer"]["found"] == {"first": 1} and lines["speed"]["found"] == {"ms": 2}
    assert "to do: transfer speed forms" in told.err
    assert gpu.passed_stages(done, "cpu", "small") == {"swap"} and gpu.passed_stages(done, "cuda", "small") == set()
    assert len(done.read_text().splitlines()) == 5, "what was cut short stays a line of its own"
    assert gpu.main([*asked, "--minutes", "0"]) == 1 and len(ran) == 3


def test_how_a_card_computes_is_recorded_with_what_was_measured_on_it(monkeypatch) -> None:
    assert not {"tf32", "deterministic"} & machine().keys()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    found = machine()
    assert (found["device"], found["deterministic"]) == ("a card", False) and found["tf32"] == [False, True]


def test_times_are_judged_on_a_card_alone_and_what_is_no_number_holds_nowhere() -> None:
    rehearsed, judged = Found(timed=False), Found(timed=True)
    for found in (rehearsed, judged):
        found.takes_at_most("slow", 2.0, 1.0)
        found.at_most("apart", float("nan"), 1e-4)
        found.holds("equal", True)
    assert [len(rehearsed.missed), len(judged.missed)] == [1, 2] and rehearsed.figures["slow"] == 2.0
