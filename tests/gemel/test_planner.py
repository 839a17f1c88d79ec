"""`gemel plan` of workloads and bundles."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gemel.analytic_costs import ceiling_costs, find_profile, original_costs
from gemel.bundle_summary import MergeOutcomes, byte_counts
from gemel.cli import main
from gemel.conditions import DEFAULT_DEVICE, Conditions
from gemel.edge_runtime.engines.prepare import prepare_bundle
from gemel.edge_runtime.engines.prepared import page_segments
from gemel.edge_runtime.memory.usage import planned_base_bytes
from gemel.edge_runtime.simulation.device_profiles import PROFILES
from gemel.evaluation import check_original_bytes
from gemel.models.bundle import Made, open_bundle, write_bundle
from gemel.models.bundle.manifest import Substitution
from gemel.models.errors import InputError
from gemel.models.sharing.groups import ceiling_bytes
from gemel.models.sharing.layers import layers_of_all
from gemel.models.workload import load_workload
from gemel.planner import DeviceComparison, plan_box
from gemel.stream_eval import load_cost_model
from gemel.text import size
from tests.edge_runtime import tiny
from tests.edge_runtime.tiny import FACTORY, tiny_bundle

BASE = planned_base_bytes(1)
"""Of a box with one camera."""
SMALL = BASE + 60_000_000
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


def test_plan_memory_decides_residency_and_rate(workload, capsys):
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


def test_plan_shared_fits_in_memory_named_by_originals(workload, capsys):
    apart = answer(capsys, "plan", workload, "--memory", "50%")
    shared = answer(capsys, "plan", workload, "--memory", "50%", "--shared")
    assert apart["memory_bytes"] == shared["memory_bytes"]
    assert not apart["fits"] and shared["fits"]


def test_ceiling_costs_save_exactly_the_bound(workload):
    queries, profile = load_workload(workload).queries, find_profile("xavier-nx")
    apart, shared = original_costs(profile, queries), ceiling_costs(profile, queries)
    saved = sum(apart.tensor_bytes.values()) - sum(shared.tensor_bytes.values())
    assert saved == ceiling_bytes(layers_of_all(queries)) > 0
    assert {query: cost.run_s for query, cost in apart.queries.items()} == {
        query: cost.run_s for query, cost in shared.queries.items()
    }


def test_plan_limits_are_memory_device_or_sla(workload, capsys):
    scarce = answer(capsys, "plan", workload, "--memory", "min", "--device", "jetson-nano")
    for query in scarce["queries"]:
        enough = query["fps_if_all_fits"] >= 0.98 * query["asked_fps"]
        assert ("device" in query["limited_by"]) != enough
        assert ("memory" in query["limited_by"]) == (query["fps"] < 0.98 * query["asked_fps"]) or not enough
    assert scarce["in_time_fraction"] < scarce["in_time_fraction_if_all_fits"] <= 1
    assert 0 < scarce["asked_load"] < 1
    plenty = answer(capsys, "plan", workload, "--memory", "1GiB")
    assert all(query["limited_by"] == [] for query in plenty["queries"])
    workload.write_text(WORKLOAD.replace("sla_ms: 300", "sla_ms: 5"))
    hasty = answer(capsys, "plan", workload, "--memory", "1GiB", "--device", "jetson-nano")
    assert all(query["limited_by"] == ["slower than its SLA"] for query in hasty["queries"])
    assert hasty["in_time_fraction"] == 0 and hasty["bytes_moved_per_s"] == 0
    assert main(["simulate", str(workload), "--device", "jetson-nano", "--duration", "2"]) == 0
    assert f"one run of a takes {hasty['queries'][0]['run_ms']:.0f} ms, its SLA is 5 ms" in capsys.readouterr().out


def test_plan_unfit_query_is_named_with_its_bytes(workload, capsys):
    small = answer(capsys, "plan", workload, "--memory", SMALL)
    assert [query["limited_by"] for query in small["queries"]][2] == ["does not fit"]
    needed = small["queries"][2]["alone_bytes"]
    assert needed > 60e6 > small["queries"][0]["alone_bytes"]
    for command in ("plan", "simulate"):
        assert main([command, str(workload), "--memory", str(SMALL)]) == 0
        said = capsys.readouterr().out
        assert f"c needs {size(needed)} alone: none of its frames run in {size(60e6)}" in said
        assert f"needs {size(BASE + needed)} in all" in said and "weights (c alone)" in said
    exact = answer(capsys, "plan", workload, "--memory", BASE + needed)
    assert exact["queries"][2]["fps"] > 0
    dropped = answer(capsys, "simulate", workload, "--memory", SMALL)["queries"]
    assert dropped[2]["dropped_by"] == {"memory": dropped[2]["received"]} and not dropped[0]["dropped_by"]


def test_plan_overflow_copies_bytes_in_every_run(workload, capsys):
    words = ("plan", workload, "--memory", SMALL)
    before = answer(capsys, *words)["queries"]
    assert all(query["overflow_bytes"] == 0 and query["overflow_fps"] is None for query in before)
    found = answer(capsys, *words, "--overflow")
    *others, c = found["queries"]
    assert not found["fits"] and not c["resident"] and c["fps"] > 0 and c["limited_by"] != ["does not fit"]
    assert all(query["overflow_bytes"] == 0 for query in others)
    # What does not stay beside the scratch of the largest layer is copied.
    assert c["alone_bytes"] - 60e6 < c["overflow_bytes"] < c["alone_bytes"] - 60e6 + 2 * 512 * 512 * 9 * 4
    copied_s = c["overflow_bytes"] / PROFILES["orin-nano-8gb"].copy_bytes_per_s
    assert c["run_ms"] == pytest.approx(before[2]["run_ms"] + 1000 * copied_s)
    assert c["overflow_fps"] == pytest.approx(1000 / c["run_ms"])
    assert main([*map(str, words)]) == 0
    assert f"with --overflow it runs and copies {size(c['overflow_bytes'])} in every run" in capsys.readouterr().out
    assert main([*map(str, words), "--overflow"]) == 0
    said = capsys.readouterr().out
    assert f"c overflows: copies {size(c['overflow_bytes'])} in every run, at most" in said
    assert f"overflow of {size(c['overflow_bytes'])}" in said.splitlines()[4]
    played = answer(capsys, "simulate", *words[1:], "--overflow")["queries"][2]
    assert played["processed"] > 0 and played["overflow_bytes"] == c["overflow_bytes"]
    none = answer(capsys, *words[:3], BASE + 5_000_000, "--overflow")["queries"]
    assert all(query["limited_by"] == ["does not fit"] for query in none)


def test_plan_min_memory_ignores_batchnorm_counters(tmp_path):
    models = {name: tiny.trained_looking(1) for name in ("gate", "yard")}
    for model in models.values():
        model[1].num_batches_tracked.fill_(2)  # type: ignore[union-attr,operator]
    queries = [tiny.query("gate", "left"), tiny.query("yard", "right")]
    write_bundle(tmp_path / "box.safetensors", models, queries, Made("tiny", "none", 0))
    plan = plan_box(tmp_path / "box.safetensors", Conditions("min", factories=(FACTORY,)))
    assert [query["drop_fraction"] for query in plan.queries] == [0, 0]
    costs = load_cost_model(DEFAULT_DEVICE, open_bundle(tmp_path / "box.safetensors", [FACTORY])).costs
    assert costs["originals"].alone_bytes("gate") == costs["merged"].alone_bytes("gate")


def test_plan_all_bytes_is_the_smallest_memory_that_fits(workload, capsys):
    needed = answer(capsys, "plan", workload, "--memory", "min")["all_bytes"]
    assert answer(capsys, "plan", workload, "--memory", str(needed))["fits"]
    assert not answer(capsys, "plan", workload, "--memory", str(needed - 1))["fits"]


def test_plan_process_alone_is_more_than_the_memory(workload, capsys):
    for command in ("plan", "simulate"):
        assert main([command, str(workload), "--memory", "60MB"]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and f"the process alone takes {size(BASE)}" in said[0]
    found = answer(capsys, "plan", workload, "--memory", "1GiB")
    assert found["base_bytes"] == BASE and found["budget_bytes"] == 2**30 - BASE and found["memory_bytes"] == 2**30


def test_plan_takes_the_ranges_of_pages_of_a_prepared_bundle(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle = tiny_bundle(tmp_path / "tiny.gemel", documents=True)
    words = ("plan", bundle.path, "--factory", FACTORY, "--memory", "all")
    by_tensors = answer(capsys, *words)
    prepared = prepare_bundle(bundle)
    by_pages = answer(capsys, *words)
    extents, _ = page_segments(prepared.index)
    workspace = by_tensors["all_bytes"] - by_tensors["base_bytes"] - all_weights(bundle)
    assert by_pages["all_bytes"] == by_pages["base_bytes"] + workspace + sum(one.nbytes for one in extents.values())


def test_originals_have_the_bytes_that_the_bundle_says(tmp_path):
    models = {name: tiny.trained_looking(1) for name in ("gate", "yard")}
    replaced = replace(tiny.query("yard", "right"), substitution=Substitution("gate", FACTORY, 5_000_000))
    write_bundle(tmp_path / "box.gemel", models, [tiny.query("gate", "left"), replaced], Made("tiny", "none", 0))
    bundle = open_bundle(tmp_path / "box.gemel", [FACTORY])
    counts = byte_counts(bundle, MergeOutcomes(()))
    before = {row["query"]: row["before"] for row in counts["queries"]}
    costs = load_cost_model(DEFAULT_DEVICE, bundle).costs["originals"]
    for query, cost in costs.queries.items():
        counters = 8 * (len(bundle.query(query).tensors) - len(cost.tensors))
        assert before[query] - counters <= costs.moved_bytes(cost.tensors) <= before[query]
    assert counts["before"] == sum(before.values()) and before["yard"] == 5_000_000
    simulated = plan_box(bundle.path, Conditions("all", factories=(FACTORY,))).plan_input
    assert simulated.budget_bytes > 5_000_000 > simulated.all_bytes - simulated.base_bytes
    wrong = replace(costs, tensor_bytes={**costs.tensor_bytes, "yard/original": 6_000_000})
    with pytest.raises(InputError, match="the original of yard has"):
        check_original_bytes(bundle, wrong)


def all_weights(bundle) -> int:
    costs = load_cost_model(DEFAULT_DEVICE, bundle).costs["merged"]
    return costs.resident_bytes(costs.tensor_bytes.keys())


def test_plan_all_devices_are_compared(workload, capsys):
    found = answer(capsys, "plan", workload, "--memory", "6GiB", "--device", "all")["devices"]
    assert [plan["device"] for plan in found] == list(PROFILES)
    load = {plan["device"]: plan["asked_load"] for plan in found}
    assert load["jetson-nano"] > load["orin-nano-8gb"] > load["agx-orin"]
    one = plan_box(workload, Conditions("6GiB", "jetson-nano"))
    lines = DeviceComparison((one, replace(one, fits=False))).to_text().splitlines()
    assert lines[0].startswith("device") and lines[2] == lines[3] and lines[2].startswith("jetson-nano")
    assert "3 of 3" in lines[2]
    assert "Jetson Nano 4 GB has only 4.0 GiB" in one.to_text()


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_user_model_is_imported_only_if_allowed(tmp_path, capsys, command):
    path = tmp_path / "tiny.safetensors"
    tiny_bundle(path)
    words = [command, str(path), "--memory", "all"]
    assert main(words) == 2
    assert f"give --factory {FACTORY} if you trust it" in capsys.readouterr().err
    assert [row["id"] for row in answer(capsys, *words, "--factory", FACTORY)["queries"]] == ["gate", "yard", "road"]


def test_user_model_may_be_in_the_current_folder(tmp_path, monkeypatch):
    source = Path(tiny.__file__).read_text().replace("tests.edge_runtime.tiny:net", "own_net_of_mine:net")
    (tmp_path / "own_net_of_mine.py").write_text(source)
    monkeypatch.setattr(tiny, "FACTORY", "own_net_of_mine:net")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny, "open_bundle", lambda path, factories: path)
    tiny_bundle(tmp_path / "own.safetensors")
    for words in (["bundle", "show"], ["plan"], ["simulate"]):
        main([*words, "own.safetensors"])
        assert "own_net_of_mine" not in sys.modules
    try:
        assert main(["plan", "own.safetensors", "--memory", "all", "--factory", "own_net_of_mine:net"]) == 0
    finally:
        sys.modules.pop("own_net_of_mine", None)


def test_plan_text_is_a_table(workload, capsys):
    assert main(["plan", str(workload), "--memory", "min", "--policy", "gemel"]) == 0
    said = capsys.readouterr().out
    assert "policy gemel" in said and "modelled" in said and "swaps" in said


@pytest.mark.parametrize(("words", "fault"), [
    (["--memory", "7%"], "'7%' is not a size; write min, 50%, 75%, all or a size such as 512MiB"),
    (["--device", "toaster"], "no profile 'toaster'"),
    (["--policy", "first"], "no policy 'first'"),
    (["--device", "measured"], "only bundles have measured costs"),
])  # fmt: skip
def test_plan_bad_option_is_one_line(workload, capsys, words, fault):
    assert main(["plan", str(workload), *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.strip().splitlines()) == 1 and fault in said.err


PLAN_ALONE = """
import sys
from gemel.cli import main
assert main(["plan", sys.argv[1], "--memory", "all", "--json"]) == 0
assert "torch" not in sys.modules, "a plan of a bundle counts its documents"
"""


def test_a_plan_of_a_bundle_imports_no_torch_and_runs_no_code_of_others(tmp_path, repository):
    tiny_bundle(tmp_path / "tiny.gemel", documents=True)  # of a factory that is not allowed
    words = [sys.executable, "-c", PLAN_ALONE, str(tmp_path / "tiny.gemel")]
    result = subprocess.run(words, cwd=repository, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
