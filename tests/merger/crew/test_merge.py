"""Whole merges by several processes: the same as by one, killed and gone on with by another number of them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import merger.checkpoint as checkpoint_module
import merger.methods.early as early_module
import merger.methods.top_down as wide_module
from merger import Resources, merge
from merger.checkpoint import snapshots
from merger.core.context import MergeContext
from merger.distributed import PeerError, ProcessGroup
from merger.start.choosing import Start, donated
from models.bundle import open_bundle
from models.workload import Workload, load_workload
from tests.exhaustive import every
from tests.merger.crew.hands import Hands, together
from tests.merger.options import QUICK
from tests.merger.surely import must_train


def merged(
    crew: ProcessGroup,
    workload: Path,
    out: Path,
    resume: bool = False,
    dies: tuple[int, int] = (-1, 0),
    far: bool = False,
) -> Any:
    """Merge as one of a crew; who is told to kills itself at the so-manieth chance to store.

    Nothing holds before it has trained. Where it begins `far` off the heaviest sets train first.
    """
    must_train(pytest.MonkeyPatch())
    wide_module.choose_start = partial(_start_of_q0, far)
    if far:
        early_module.EARLY = 1 / 8
    checkpoint_module.INTERVAL_S, checkpoint_module.WRITING_SHARE = 0.0, float("inf")
    rank, chances = dies
    if crew.rank == rank:
        _kill_at(chances)
    events: list[str] = []
    tested: list[str] = []
    own = MergeContext.evidence
    MergeContext.evidence = lambda ctx, query, model: tested.append(query) or own(ctx, query, model)  # type: ignore
    options = replace(QUICK, resources=Resources(1, None, crew))
    report = merge(
        load_workload(workload), out, resume=resume, options=options, progress=lambda event, **_: events.append(event)
    )
    return {"report": report.to_json(), "events": events, "tested": tested, "given": crew.given, "steps": crew.steps}


def _start_of_q0(far: bool, ctx: Any, plan: Any, journal: Any, apart: Any = None, *_: Any) -> Start:
    """A better one would need no training."""
    states = donated(plan, apart or snapshots(ctx.originals), "q0")
    return Start(states, dict.fromkeys(plan.queries(), 0.0), states, far)


def _kill_at(chances: int) -> None:
    write, written = checkpoint_module.Checkpoint.write, 0

    def dying(self: Any) -> None:
        nonlocal written
        written += 1
        if written == chances:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self)

    checkpoint_module.Checkpoint.write = dying


@pytest.mark.parametrize("far", [False, True])
def test_two_processes_merge_as_one_does_and_note_what_they_sent(workload: Workload, tmp_path: Path, far: bool) -> None:
    together(1, merged, workload.path, tmp_path / "one.gemel", False, (-1, 0), far)
    first, second = together(2, merged, workload.path, tmp_path / "two.gemel", False, (-1, 0), far)
    one, two = open_bundle(tmp_path / "one.gemel"), open_bundle(tmp_path / "two.gemel")
    assert second["events"] == [] and "crew" in first["events"] and "sums" in first["events"]
    assert two.manifest.bytes == one.manifest.bytes
    assert first["tested"] and second["tested"] and sorted(first["tested"] + second["tested"]) == ["q0", "q1", "q2"]
    log = (tmp_path / "two.gemel.log.jsonl").read_text()
    assert f'"steps": {first["steps"]}' in log and f'"given_bytes": {first["given"]}' in log and first["given"] > 0
    assert ('"sprint": 0' in log) == far


@pytest.mark.parametrize(("dies", "afterwards"), every([((1, 12), 1), ((0, 20), 2)], [((1, 12), 1)]))
def test_a_killed_process_ends_the_others_and_another_number_goes_on(
    workload: Workload, tmp_path: Path, dies: tuple[int, int], afterwards: int
) -> None:
    out = tmp_path / "two.gemel"
    answers = Hands(2, merged, workload.path, out, False, dies).answers()
    assert isinstance(answers[dies[0]], EOFError)
    left = answers[1 - dies[0]]
    assert isinstance(left, PeerError) and "another process of this merge has ended; start again with --resume" in str(
        left
    )
    assert (tmp_path / "two.gemel.work").is_dir() and not out.exists()
    found = together(afterwards, merged, workload.path, out, True)
    whole = together(1, merged, workload.path, tmp_path / "one.gemel")
    assert found[0]["report"]["bytes_after"] == whole[0]["report"]["bytes_after"]
    assert 0 < found[0]["steps"] < 200 or afterwards == 1
    assert not (tmp_path / "two.gemel.work").exists()
