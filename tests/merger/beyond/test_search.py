"""The search past the ceiling: what is kept and what is refused, and the bundle that comes of it."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from merger import merge
from merger.bench.bounds import Bounds
from merger.bench.merged import Merged
from merger.bench.workbench import Workbench
from merger.beyond.candidates import INSIDE, LOW_RANK
from merger.beyond.search import Search, beyond
from merger.beyond.trying import Trying
from merger.journal.checkpoint import Checkpoint
from models.bundle import open_bundle, verify_bundle
from models.errors import InputError
from models.sharing.groups import ceiling_bytes
from models.sharing.layers import layers_of_all, model_bytes
from models.sharing.plan import SharingPlan
from models.workload import Workload
from tests.merger.beyond.tries import OPTIONS, RECIPE, trying
from tests.merger.deep import FACTORY

EASY = replace(OPTIONS, margin=0.0)


def test_a_refused_step_changes_nothing_and_says_who_stood_in_the_way(
    bench: Workbench, merged: Merged, tmp_path: Path
) -> None:
    judged: Counter[str] = Counter()

    def worse_than_it_was_merged(query: str, _model: Any) -> float:
        judged[query] += 1
        return 0.5 if judged[query] > 1 else 1.0

    bench.ratio = worse_than_it_was_merged  # type: ignore[method-assign]
    checkpoint = Checkpoint(tmp_path / "work", {}, False)
    required, bounds = dict.fromkeys(bench.queries, 0.95), Bounds(bench.work)
    after = beyond(bench, merged, replace(RECIPE, epochs=1), required, checkpoint, bounds)
    assert after.plan == merged.plan
    assert all(torch.equal(after.states[q][n], merged.states[q][n]) for q in bench.queries for n in merged.states[q])
    tries = [row for row in checkpoint.log if "accepted" in row]
    assert tries and all(row["in_the_way"] == list(row["ratios"]) and not row["accepted"] for row in tries)
    sizes = [len(row["candidates"]) for row in tries if row["beyond"] == INSIDE and len(row["ratios"]) > 1]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 1
    alone = [row["candidates"][0] for row in tries if row["beyond"] == LOW_RANK and len(row["candidates"]) == 1]
    ranks: dict[str, list[int]] = {}
    for one in alone:
        ranks.setdefault(str(one["layers"]), []).append(one["rank"])
    assert max(map(len, ranks.values())) > 1 and all(found == sorted(set(found)) for found in ranks.values())


def test_a_query_that_was_merged_with_less_than_required_keeps_half_of_the_margin(
    bench: Workbench, merged: Merged, tmp_path: Path
) -> None:
    least = (bench.queries["q1"].accuracy_target + 0.95) / 2
    for reached, afterwards, accepted in ((0.94, least, True), (0.94, least - 0.01, False), (0.6, 0.6, True)):
        ratios = itertools.chain([reached], itertools.repeat(afterwards))
        bench.ratio = lambda query, model, ratios=ratios: next(ratios) if query == "q1" else 1.0
        checkpoint = Checkpoint(tmp_path / f"{afterwards}", {}, False)
        required = dict.fromkeys(bench.queries, 0.95)
        beyond(bench, merged, replace(RECIPE, epochs=1), required, checkpoint, Bounds(bench.work))
        tries = [row for row in checkpoint.log if "accepted" in row and "q1" in row["ratios"]]
        assert tries and any(row["accepted"] for row in tries) == accepted


def test_no_try_begins_out_of_time(bench: Workbench, merged: Merged, tmp_path: Path) -> None:
    found = Search(trying(bench, tmp_path / "work", 0.0, most_work=0.0)).run(INSIDE, merged)
    assert SharingPlan.from_json(found["merged"]["plan"]) == merged.plan
    assert found["rows"][-1]["tries"] == 0


def test_wide_goes_past_the_ceiling_and_the_bundle_says_so(deep: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.gemel"
    report = merge(deep, out, "wide", options=EASY)
    assert report.saved_fraction > 1.2 * report.ceiling_fraction
    assert report.bytes_before == sum(map(model_bytes, deep.queries))
    assert verify_bundle(out, [FACTORY]) == []
    bundle = open_bundle(out, [FACTORY])
    assert any("low_rank" in query.model_args for query in bundle.queries)
    several = [one for one in bundle.manifest.shared if [q for q, _ in one.members].count("q0") > 1]
    weights = [one for one in several if bundle.tensor(one.tensor).ndim == 4]
    assert all(".conv1" in path for one in weights for _, path in one.members)
    rows = [json.loads(line) for line in (tmp_path / "b.gemel.log.jsonl").read_text().splitlines()]
    totals = {row["beyond"]: row for row in rows if "work_spent" in row}
    assert set(totals) == {INSIDE, LOW_RANK}
    assert bool(weights) == (totals[INSIDE]["gained_bytes"] > 0)
    kept = [row for row in rows if row.get("accepted")]
    assert kept and all(ratio >= 0.7 for row in kept for ratio in row["ratios"].values())
    gained = sum(row["gained_bytes"] for row in totals.values())
    layers = ceiling_bytes(layers_of_all(deep.queries))
    assert report.bytes_before - report.bytes_after >= gained + 0.99 * layers


def test_without_merging_each_model_is_compressed_for_itself(deep: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.gemel"
    report = merge(deep, out, "none", options=EASY)
    assert report.saved_fraction > 0 and verify_bundle(out, [FACTORY]) == []
    bundle = open_bundle(out, [FACTORY])
    assert any("low_rank" in query.model_args for query in bundle.queries)
    apart = {name for name in bundle.header.entries if bundle.header.entries[name].dtype == "F32"}
    owners = [{query.id for query in bundle.queries if name in query.places().values()} for name in apart]
    trained = [own for own in owners if len(own) > 1]
    assert not trained, "nothing lies between two models"


def test_a_merge_past_the_ceiling_goes_on_where_it_was_interrupted(
    deep: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = merge(deep, tmp_path / "straight.gemel", "wide", options=EASY)
    take = Trying.take

    def killed(self: Trying, merged: Merged, chunk: Any) -> Any:
        take(self, merged, chunk)
        assert isinstance(self.journal, Checkpoint)
        self.journal.write()
        raise KeyboardInterrupt

    monkeypatch.setattr(Trying, "take", killed)
    with pytest.raises(KeyboardInterrupt):
        merge(deep, tmp_path / "resumed.gemel", "wide", options=EASY)
    monkeypatch.setattr(Trying, "take", take)
    resumed = merge(deep, tmp_path / "resumed.gemel", "wide", resume=True, options=EASY)
    assert (tmp_path / "resumed.gemel").read_bytes() == (tmp_path / "straight.gemel").read_bytes()
    assert resumed.work == straight.work


def test_what_goes_past_the_ceiling_is_asked_for_in_the_right_place(workload: Workload, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--beyond: .*stops at the ceiling"):
        merge(workload, tmp_path / "b.gemel", "gemel", options=OPTIONS)
    workload.queries[0].model_args["low_rank"] = {"head": 2}
    with pytest.raises(InputError, match="low_rank: an original has no factors"):
        merge(workload, tmp_path / "b.gemel", "wide", options=OPTIONS)
