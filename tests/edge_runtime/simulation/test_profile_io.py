"""Profiles measured on a machine: written, read again, and refused where they belong to another."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from gemel.edge_runtime.life.box import load_box
from gemel.edge_runtime.life.config import load_config
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.policies.adaptive import AdaptivePolicy
from gemel.edge_runtime.scheduler.costs import BatchCost
from gemel.edge_runtime.simulation.profile_io import (
    MeasuredProfile,
    QueryProfile,
    describe_machine,
    machine_mismatch,
    measured_costs,
    monotone_batches,
    profile_path,
    read_profile,
    read_staleness,
    write_profile,
)
from gemel.edge_runtime.simulation.replay import replay
from gemel.models.errors import InputError
from gemel.models.notes import collect_notes
from tests.edge_runtime.tiny import tiny_bundle, write_clip, write_config, write_folder


@pytest.fixture
def bundle(tmp_path):
    return tiny_bundle(tmp_path / "tiny.safetensors")


def profile_of(bundle) -> MeasuredProfile:
    batches = (BatchCost(1, 0.01, 1000), BatchCost(2, 0.012, 2000), BatchCost(4, 0.02, 4000), BatchCost(8, 0.03, 8000))
    return MeasuredProfile(
        bundle.digest,
        describe_machine("cpu"),
        "cpu",
        "torch",
        3e9,
        1e-4,
        {query.id: QueryProfile(0.002, batches) for query in bundle.queries},
    )


def test_read_profile_written_profile_gives_equal_costs(bundle):
    path = write_profile(bundle.path, profile_of(bundle))
    assert path == profile_path(bundle.path) and path.name == "tiny.safetensors.profile.json"
    found = read_profile(bundle)
    assert found == profile_of(bundle) and machine_mismatch(found, "cpu") is None
    costs = measured_costs(bundle, found)
    assert costs.queries["gate"].run_of(4) == 0.02 and costs.queries["gate"].workspace_of(8) == 8000
    assert (costs.copy_bytes_per_s, costs.load_latency_s, costs.queries["gate"].sla_s) == (3e9, 1e-4, 20.0)


def test_profile_other_machine_names_the_differences(bundle):
    other = replace(profile_of(bundle), machine={**describe_machine("cpu"), "name": "toaster"}, device="cuda")
    said = machine_mismatch(other, "cpu")
    assert said is not None and "device cuda, here cpu" in said and "'toaster'" in said


def test_read_profile_missing_torn_or_foreign_is_refused(bundle):
    with pytest.raises(InputError, match=r"never measured; run `gemel profile BUNDLE` here"):
        read_profile(bundle)
    path = profile_path(bundle.path)
    for text in ("nonsense", '{"profile": 9}', '{"profile": 1}', "[]"):
        path.write_text(text)
        with pytest.raises(InputError, match="run `gemel profile BUNDLE` here"):
            read_profile(bundle)
    write_profile(bundle.path, replace(profile_of(bundle), digest="0" * 64))
    with pytest.raises(InputError, match="another bundle"):
        read_profile(bundle)


def test_monotone_batches_noisy_costs_ascend(bundle):
    noisy = [BatchCost(2, 0.009, 10), BatchCost(1, 0.01, 20), BatchCost(4, 0.02, 15)]
    assert monotone_batches(noisy) == (BatchCost(1, 0.01, 20), BatchCost(2, 0.01, 20), BatchCost(4, 0.02, 20))


def test_load_box_profile_of_another_machine_logs_one_line(bundle, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "gemel.run")
    write_clip(tmp_path / "left.mp4", 4)
    write_folder(tmp_path / "right", 4)
    assert run(write_config(tmp_path), check=True)["ok"] and caplog.text.count("never measured") == 1
    caplog.clear()
    write_profile(bundle.path, replace(profile_of(bundle), machine={"name": "toaster"}))
    with collect_notes() as notes:
        assert run(write_config(tmp_path), check=True)["ok"]
    (note,) = notes
    assert note.startswith(
        f"{profile_path(bundle.path)}: left out: measured on another machine or engine (name 'toaster'"
    )
    caplog.clear()
    write_profile(bundle.path, replace(profile_of(bundle), engine="onnx"))
    with collect_notes() as notes:
        assert run(write_config(tmp_path), check=True)["ok"]
    assert "(engine onnx, here torch); run `gemel profile BUNDLE` here" in notes[0] and len(notes) == 1
    caplog.clear()
    write_profile(bundle.path, profile_of(bundle))
    run(write_config(tmp_path, trace="here.trace"))
    assert not caplog.records
    head = json.loads((tmp_path / "here.trace").read_text().splitlines()[0])
    gate = head["queries"]["gate"]
    assert gate["workspace_bytes"] == 1000
    assert gate["larger"][0]["run_s"] == pytest.approx(1.2 * gate["run_s"]), "the measured curve, at today's speed"


def test_load_box_notes_a_camera_slower_than_its_query(bundle, tmp_path):
    write_clip(tmp_path / "left.mp4", 4)
    write_folder(tmp_path / "right", 4)
    slow = {"left": {"source": "left.mp4", "fps": 2}, "right": {"source": "right", "fps": 12}}
    with collect_notes() as notes:
        load_box(load_config(write_config(tmp_path, cameras=slow)))
    text = "query road is to have 6 frames a second, its camera gives 2; raise `fps` of camera left"
    assert notes == [f"{tmp_path / 'box.yaml'}: {text}"]


def with_curves(bundle) -> MeasuredProfile:
    profile = profile_of(bundle)
    return replace(
        profile, queries={query: replace(one, staleness=(1.0, 0.7)) for query, one in profile.queries.items()}
    )


def test_read_staleness_invalid_curves_are_refused(bundle):
    write_profile(bundle.path, with_curves(bundle))
    assert read_staleness(bundle) == dict.fromkeys(("gate", "yard", "road"), (1.0, 0.7))
    path = profile_path(bundle.path)
    for curve in ([1.5], [-0.1], [0.5] * 65, "high", [None]):
        document = json.loads(path.read_text())
        document["queries"]["gate"]["staleness"] = curve
        path.write_text(json.dumps(document))
        with pytest.raises(InputError, match="staleness"):
            read_profile(bundle)
        write_profile(bundle.path, with_curves(bundle))
    document["queries"]["gate"]["staleness"] = [0.9, 0.5, 0.6]
    path.write_text(json.dumps(document))
    assert read_staleness(bundle)["gate"] == (0.9, 0.5, 0.5), "an answer never gets better with age"


@pytest.mark.parametrize(
    ("objective", "curves", "aims"),
    [("accuracy", True, (1.0, 0.7)), (None, True, (1.0, 0.7)), ("frames", True, ()), (None, False, ())],
)
def test_load_box_with_curves_aims_at_accuracy_by_default(bundle, tmp_path, objective, curves, aims):
    write_clip(tmp_path / "left.mp4", 4)
    write_folder(tmp_path / "right", 4)
    write_profile(bundle.path, with_curves(bundle) if curves else profile_of(bundle))
    options = {} if objective is None else {"objective": objective}
    box = load_box(load_config(write_config(tmp_path, **options)))
    assert {spec.staleness for spec in box.specs().values()} == {aims}


def test_load_box_accuracy_without_curves_is_refused(bundle, tmp_path):
    write_clip(tmp_path / "left.mp4", 4)
    write_folder(tmp_path / "right", 4)
    write_profile(bundle.path, profile_of(bundle))
    with pytest.raises(InputError, match=r"never measured; run `gemel profile BUNDLE --workload WORKLOAD`"):
        load_box(load_config(write_config(tmp_path, objective="accuracy")))


def test_replay_accuracy_objective_agrees(bundle, tmp_path, monkeypatch):
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 12)
    write_profile(bundle.path, with_curves(bundle))
    run(write_config(tmp_path, objective="accuracy", trace="aimed.trace"))
    head = json.loads((tmp_path / "aimed.trace").read_text().splitlines()[0])
    assert head["demands"]["gate"]["staleness"] == [1.0, 0.7]
    aims, plan = [], AdaptivePolicy.plan

    def record_specs(self, costs, specs, budget_bytes):
        aims.append({spec.staleness for spec in specs.values()})
        return plan(self, costs, specs, budget_bytes)

    monkeypatch.setattr(AdaptivePolicy, "plan", record_specs)
    found = replay(tmp_path / "aimed.trace")
    assert aims and all(one == {(1.0, 0.7)} for one in aims)
    assert found.decisions >= 10 and found.agreement >= 0.99, found.first_difference
