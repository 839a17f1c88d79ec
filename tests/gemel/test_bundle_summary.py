"""`gemel bundle show`: what became of each set of layers, from the log beside the bundle or from the bundle alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gemel.bundle_summary import (
    EQUAL,
    LOG_SUFFIX,
    NO_LOG,
    OTHER_LOG,
    UNREADABLE,
    MergeOutcomes,
    SetRow,
    summarize_bundle,
)
from gemel.cli import main
from gemel.models.bundle import Bundle, BundleQuery, Made, open_bundle, write_bundle
from gemel.models.sharing.layers import SetOutcome
from gemel.models.sharing.plan import SharingPlan, tie
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query

WORKLOAD = """
name: tiny
cameras: {gate: {source: gate.mp4, fps: 5}}
queries:
"""
QUERY = "  - {{id: {id}, camera: gate, task: classification, classes: [x, y], model: resnet18, input_size: 32}}\n"
SHARED = ("layer4.0.conv1", "layer4.1.conv1", "layer4.1.conv2")
WHY = {"after": "joint training", "ratio": 0.9, "required": 0.975}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Three ResNets of which a and b share three layers; c shares nothing."""
    folder = tmp_path_factory.mktemp("shown")
    (folder / "w.yaml").write_text(WORKLOAD + "".join(QUERY.format(id=one) for one in "abc"))
    workload = load_workload(folder / "w.yaml")
    models = {}
    for seed, query in enumerate(workload.queries):
        torch.manual_seed(seed)
        models[query.id] = build_query(query)
    tie(models, SharingPlan(tuple((("a", path), ("b", path)) for path in SHARED)))
    records = [BundleQuery.of(query, precision="bf16" if query.id == "a" else None) for query in workload.queries]
    write_bundle(folder / "b.gemel", models, records, Made("tiny", "top-down", 1))
    return open_bundle(folder / "b.gemel")


def _row(path: str, kept: str, outcome: str, why: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "set": [[query, path] for query in "abc"], "bytes": 100, "outcome": outcome,
        "kept": [[query, path] for query in kept], "in_the_way": why or {},
        "saved_bytes": 100 * max(0, len(kept) - 1), "flops": 3e9, "together": 3,
    }  # fmt: skip


SETS = [
    _row(SHARED[0], "ab", "partly", {"c": WHY}),
    _row(SHARED[1], "ab", "partly", {"c": WHY}),
    _row(SHARED[2], "ab", "partly", {"c": WHY}),
    _row("conv1", "", "refused", {"c": WHY}),
]
LOG = [
    {"training": "joint", "epoch": 1, "ratios": {"a": 1.0}, "met": ["a"], "saved_bytes": 1, "flops": 1e9},
    {"query": "b", "repair": "norms and head", "ratio": 0.95, "required": 0.975, "epochs": 2, "flops": 2e9},
    {"query": "b", "repair": "private layers", "cost_bytes": 40, "ratio": 0.98, "required": 0.975, "flops": 2e9},
    {"query": "c", "repair": "original", "required": 0.975, "flops": 3e9},
    {"query": "a", "bits": "int8", "in_integers": True, "why_bits": "int4 is not proven: needs 20 answers"},
    {"query": "b", "bits": "int4", "in_integers": True, "why_bits": ""},
    *SETS,
]


@pytest.fixture
def write_log(bundle: Bundle):
    """A function that writes rows as the log beside the bundle, for as long as a test takes."""
    path = Path(f"{bundle.path}{LOG_SUFFIX}")

    def write(rows: list[dict[str, Any]]):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    yield write
    path.unlink(missing_ok=True)


def outcomes(*rows: dict[str, Any]) -> MergeOutcomes:
    return MergeOutcomes(tuple(SetRow.model_validate(row) for row in rows))


def test_outcome_table_groups_sets_and_names_the_blocker(bundle: Bundle, write_log):
    write_log(LOG)
    text = MergeOutcomes.of(bundle).to_text()
    lines = [line for line in text.splitlines() if " partly kept " in line or " refused " in line]
    assert len(lines) == 2 and lines[0].split()[0] == "3" and "a, b, without c" in lines[0]
    assert all("c: 90.0 % of 97.5 % after joint training" in line for line in lines)
    assert "300 bytes" in lines[0]
    assert "4 sets of layers could be shared; trying them took 4e+09 FLOPs" in text
    assert "b (0.975 required): norms and head 0.950, private layers 0.980" in text
    assert "c (0.975 required): original" in text
    assert "a has no fewer bits: int4 is not proven: needs 20 answers" in text and "b has no fewer bits" not in text


def test_set_table_has_a_line_for_every_set(bundle: Bundle, write_log):
    write_log(LOG)
    text = MergeOutcomes.of(bundle).to_text(every_set=True)
    assert all(sum(line.startswith(f"{path} ") for line in text.splitlines()) == 1 for path in (*SHARED, "conv1"))


def test_outcome_table_of_many_queries_stays_short(bundle: Bundle, write_log):
    many = [[f"query{at:02d}", "fc"] for at in range(40)]
    write_log([{**SETS[3], "set": many} for _ in range(40)])
    text = MergeOutcomes.of(bundle).to_text()
    assert len(text.splitlines()) < 6 and "query03 and 36 more" in text
    assert max(map(len, text.splitlines())) < 160


def test_outcomes_without_a_log_come_from_the_manifest(bundle: Bundle):
    found = MergeOutcomes.of(bundle)
    assert found.note == NO_LOG and NO_LOG in found.to_text()
    assert sorted(row.set[0][1] for row in found.sets) == sorted(SHARED)
    assert {row.outcome for row in found.sets} == {SetOutcome.KEPT}
    (row,) = (row for row in found.sets if row.set == [("a", SHARED[2]), ("b", SHARED[2])])
    assert row.saved_bytes == row.bytes == 512 * 512 * 9 * 4


@pytest.mark.parametrize(
    "rows",
    [
        [_row("layer1.0.conv1", "ab", "kept")],
        [_row(SHARED[0], "abc", "kept")],
        [_row("nowhere", "ab", "kept")],
        [{**SETS[0], "kept": [["x", SHARED[0]], ["y", SHARED[0]]]}],
    ],
    ids=["other layers", "other members", "unknown layer", "unknown queries"],
)
def test_outcomes_ignore_the_log_of_another_merge(bundle: Bundle, write_log, rows: list[dict[str, Any]]):
    write_log(rows)
    assert MergeOutcomes.of(bundle).note == OTHER_LOG and len(MergeOutcomes.of(bundle).sets) == len(SHARED)


@pytest.mark.parametrize("text", ["half a r", '{"set": 1}\n', "[1]\n", "\xff\n"], ids=["cut", "keys", "list", "bytes"])
def test_outcomes_ignore_a_damaged_log(bundle: Bundle, write_log, text: str):
    write_log([])
    Path(f"{bundle.path}{LOG_SUFFIX}").write_bytes(text.encode("latin-1"))
    assert MergeOutcomes.of(bundle).note.startswith(UNREADABLE)


def test_bundle_show_prints_sets_and_precision(bundle: Bundle, write_log, capsys):
    write_log(LOG)
    assert main(["bundle", "show", str(bundle.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sets"] == SETS and found["source"] == "log" and len(found["repairs"]) == 3
    assert [query["precision"] for query in found["queries"]] == ["bf16", None, None]
    assert main(["bundle", "show", str(bundle.path), "--sets"]) == 0
    text = capsys.readouterr().out
    assert SHARED[1] in text and "trained in" in text and "bf16" in text
    assert summarize_bundle(bundle).to_text(every_set=True) == text.rstrip("\n")


def test_outcomes_of_equal_originals_say_so(bundle: Bundle, write_log):
    write_log([])
    found = MergeOutcomes.of(bundle)
    assert found.note == EQUAL and len(found.sets) == len(SHARED) and EQUAL in found.to_text()


def test_untried_set_is_not_called_refused():
    never = _row("layer1", "", "untried", {"b": {"after": "nothing", "ratio": None, "required": 0.9}})
    text = outcomes(never).to_text()
    assert "untried (time)" in text and "refused" not in text


def test_a_query_that_was_not_refused_is_not_blamed():
    why = {"after": "weights in int8", "ratio": 1.074, "required": 0.975}
    text = outcomes(_row("layer1", "ab", "partly", {"c": why})).to_text()
    assert "c: keeps its own after weights in int8" in text and "107.4 %" not in text


def test_why_nothing_names_the_last_blocker():
    refused = [
        _row("layer1", "", "refused", {"b": WHY, "c": {**WHY, "ratio": 0.5}}),
        _row("layer2", "", "refused", {"b": WHY}),
    ]
    line = outcomes(*refused).why_nothing()
    assert line.startswith("nothing is shared, every model is its original: ") and "\n" not in line
    assert "c: 50.0 % of 97.5 % after joint training" in line and line.count("b: 90.0 %") <= 2
    assert MergeOutcomes(()).why_nothing().endswith("no two models have a layer in common that saves enough")
    assert outcomes(*refused, _row("layer3", "ab", "kept")).why_nothing() == ""
    assert "gate, yard cannot be proven with what there is here" in MergeOutcomes(()).why_nothing(["gate", "yard"])


def test_outcomes_of_a_merge_with_prices_show_its_cost(bundle: Bundle, write_log):
    cost = {
        "seconds": 3000.0, "flops": 2e15, "currency": "usd", "money": 1.4, "money_per_gib": 2.5, "told_seconds": 2800.0,
        "told_money": 1.3,
    }  # fmt: skip
    write_log([*LOG, {"cost": cost}])
    found = MergeOutcomes.of(bundle)
    assert found.to_json()["cost"] == cost
    text = found.to_text()
    assert "the merge took 50 min 00 s, 2e+15 FLOPs, 1.40 usd (2.50 usd for each GiB saved)" in text
    assert "told before: 1.30 usd, 46 min 40 s" in text
    write_log(LOG)
    assert MergeOutcomes.of(bundle).to_json()["cost"] is None
    write_log([*LOG, {"cost": {**cost, "money": "much"}}])
    assert "the log beside the bundle is malformed" in MergeOutcomes.of(bundle).note
