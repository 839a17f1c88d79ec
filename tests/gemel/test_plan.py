from __future__ import annotations

import json

import pytest

from gemel.cli import main
from gemel.on_paper import costs_apart, costs_shared, profile_named
from models.groups import ceiling_bytes
from models.layers import layers_of_all
from models.workload import load_workload

WORKLOAD = """
name: three
cameras: {gate: {source: gate.mp4, fps: 5}}
queries:
  - {id: a, camera: gate, task: classification, classes: [x, y], model: resnet18, input_size: 64, sla_ms: 300}
  - {id: b, camera: gate, task: classification, classes: [x, y, z], model: resnet18, input_size: 64, sla_ms: 300}
  - {id: c, camera: gate, task: classification, classes: [x, y], model: resnet34, input_size: 64, sla_ms: 300, fps: 2}
"""


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "workload.yaml"
    path.write_text(WORKLOAD)
    return path


def answer(capsys, *words) -> dict:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_says_what_fits_what_swaps_and_at_what_rate(workload, capsys):
    plenty = answer(capsys, "plan", workload, "--memory", "1GiB")
    assert plenty["fits"] and plenty["bytes_moved_per_s"] < 5e6
    assert [query["id"] for query in plenty["queries"]] == ["a", "b", "c"]
    for query in plenty["queries"]:
        assert query["resident"] and query["fps"] == pytest.approx(query["asked_fps"], rel=0.02)
        assert query["drop_fraction"] < 0.02 and 0 < query["age_p95_ms"] <= 300
    scarce = answer(capsys, "plan", workload, "--memory", "min", "--device", "jetson-nano")
    assert not scarce["fits"] and scarce["resident_bytes"] <= scarce["memory_bytes"]
    assert not all(query["resident"] for query in scarce["queries"])
    assert sum(query["fps"] for query in scarce["queries"]) < 12


def test_shared_weights_make_more_fit_and_the_named_settings_stay_those_of_the_originals(workload, capsys):
    apart = answer(capsys, "plan", workload, "--memory", "50%")
    shared = answer(capsys, "plan", workload, "--memory", "50%", "--shared")
    assert apart["memory_bytes"] == shared["memory_bytes"]
    assert not apart["fits"] and shared["fits"]


def test_costs_shared_save_exactly_the_ceiling(workload):
    queries, profile = load_workload(workload).queries, profile_named("xavier-nx")
    apart, shared = costs_apart(profile, queries), costs_shared(profile, queries)
    saved = sum(apart.tensor_bytes.values()) - sum(shared.tensor_bytes.values())
    assert saved == ceiling_bytes(layers_of_all(queries)) > 0
    assert {query: cost.run_s for query, cost in apart.queries.items()} == {
        query: cost.run_s for query, cost in shared.queries.items()}


def test_a_plan_for_people_is_a_table(workload, capsys):
    assert main(["plan", str(workload), "--memory", "min", "--policy", "gemel"]) == 0
    said = capsys.readouterr().out
    assert "policy gemel" in said and "modelled" in said and "swaps" in said


@pytest.mark.parametrize(("words", "fault"), [
    (["--memory", "lots"], "is not a size"),
    (["--device", "toaster"], "no profile 'toaster'"),
    (["--policy", "first"], "no policy 'first'"),
    (["--device", "measured"], "only bundles are measured"),
])  # fmt: skip
def test_a_bad_word_is_one_line_and_exit_code_2(workload, capsys, words, fault):
    assert main(["plan", str(workload), *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.strip().splitlines()) == 1 and fault in said.err
