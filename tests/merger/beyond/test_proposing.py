"""What is proposed past the ceiling, and that its judging goes on where it was interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from merger.bench.merged import Merged
from merger.bench.workbench import Workbench
from merger.beyond.candidates import LOW_RANK, Candidate
from merger.beyond.proposing import judged, proposed
from merger.beyond.risk import with_risk
from merger.journal.checkpoint import Checkpoint


def test_a_ladder_begins_where_the_risk_can_be_borne_and_larger_ranks_are_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def judge(candidate: Candidate) -> Candidate:
        seen.append(candidate.rank)
        return replace(candidate, risk=1 / candidate.rank)

    monkeypatch.setattr("merger.beyond.proposing.MAX_RISK", 1 / 8)
    ladder = [Candidate(LOW_RANK, (("q0", "wide"),), rank=rank) for rank in (4, 8, 16)]
    found = [(one["rank"], one["risk"]) for one in judged(ladder, judge)]
    assert found == [(8, 1 / 8), (16, 1 / 8)] and seen == [4, 8]
    assert [one["rank"] for one in judged(ladder[:1], judge)] == [4], "the last is kept in any case"


def test_the_judging_of_candidates_goes_on_where_it_was_interrupted(
    bench: Workbench, merged: Merged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []
    judged: list[Candidate] = []

    def noted(*given: Any, **keys: Any) -> Candidate:
        judged.append(given[2])
        if len(judged) == killed_at:
            raise KeyboardInterrupt
        return with_risk(*given, **keys)

    monkeypatch.setattr("merger.beyond.proposing.with_risk", noted)
    killed_at, bench.progress = 0, lambda event, **fields: shown.append({"event": event, **fields})
    straight = proposed(bench, merged, Checkpoint(tmp_path / "straight", {}, False))
    assert shown[-1]["event"] == "candidates" and shown[-1]["judged"] == shown[-1]["of"] > 1

    whole, killed_at = len(judged), len(judged) + 4
    checkpoint = Checkpoint(tmp_path / "work", {}, False)
    with pytest.raises(KeyboardInterrupt):
        proposed(bench, merged, checkpoint)
    checkpoint.write()
    before, killed_at = len(judged), 0
    assert proposed(bench, merged, Checkpoint(tmp_path / "work", {}, resume=True)) == straight
    assert len(judged) - before < whole
