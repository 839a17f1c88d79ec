"""`gemel profile`: measured costs of every query, kept beside the bundle."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from gemel import profiler
from gemel.cli import main
from gemel.conditions import DEFAULT_DEVICE, Conditions
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.memory import arena as streams
from gemel.edge_runtime.simulation.device_profiles import PROFILES, costs_for
from gemel.edge_runtime.simulation.profile_io import machine_mismatch, read_profile, write_profile
from gemel.models import zoo
from gemel.models.bundle import Made, open_bundle, write_bundle
from gemel.models.quantization import choices, pack
from gemel.planner import load_plan_input
from gemel.profiler import profile_bundle
from tests.edge_runtime import tiny
from tests.edge_runtime.tiny import FACTORY, tiny_bundle


@pytest.fixture(scope="module")
def profile_folder(tmp_path_factory):
    """A bundle with its profile beside it, measured once."""
    torch.set_num_threads(1)
    bundle = tiny_bundle(tmp_path_factory.mktemp("measured") / "tiny.safetensors")
    profile_bundle(bundle.path, "cpu", [FACTORY], rounds=1, engine="torch")
    return bundle.path.parent


@pytest.fixture
def profiled_bundle(profile_folder, tmp_path):
    """A copy of the measured bundle and its profile."""
    return open_bundle(
        shutil.copytree(profile_folder, tmp_path / "profiled_bundle") / "tiny.safetensors", factories=(FACTORY,)
    )


@pytest.fixture
def bundle(tmp_path):
    torch.set_num_threads(1)
    return tiny_bundle(tmp_path / "tiny.safetensors")


def test_profile_measures_batches_and_writes_the_file(bundle, capsys):
    options = ("--factory", FACTORY, "--device", "cpu", "--engine", "torch", "--json")
    assert main(["profile", str(bundle.path), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["profile"] == f"{bundle.path}.profile.json" and found["copy_gb_s"] > 0
    assert [query["id"] for query in found["queries"]] == ["gate", "yard", "road"]
    for query in found["queries"]:
        assert [batch["count"] for batch in query["batches"]] == [1, 2, 4, 8] and query["load_ms"] > 0
        runs = [batch["run_ms"] for batch in query["batches"]]
        assert runs[0] > 0 and runs == sorted(runs)
        assert query["batches"][3]["workspace_bytes"] > query["batches"][0]["workspace_bytes"]
    kept = read_profile(bundle)
    assert machine_mismatch(kept, "cpu") is None and kept.queries["gate"].batches[0].run_s == pytest.approx(
        found["queries"][0]["batches"][0]["run_ms"] / 1000
    )


def test_profile_runs_networks_that_differ_in_weights_alone_once(bundle, monkeypatch):
    ran, measure = list[str](), profiler._batches
    monkeypatch.setattr(
        profiler, "_batches", lambda engine, *more: ran.append(engine.query.id) or measure(engine, *more)
    )
    queries = profile_bundle(bundle.path, "cpu", [FACTORY], rounds=1, engine="torch").profile.queries
    assert ran == ["gate"] and queries["gate"].batches == queries["yard"].batches == queries["road"].batches
    assert all(query.load_s > 0 for query in queries.values())


def test_profile_forecasts_by_what_a_run_of_each_kind_takes(bundle, monkeypatch):
    """Two kinds of networks, the second three times as slow: a quarter is done after the first."""
    parts, names = list[float](), {"gate": "gate", "yard": "yard", "road": "gate"}
    monkeypatch.setattr("gemel.models.stages.INTERVAL_S", 0.0)
    monkeypatch.setattr(profiler, "_first_alike", lambda engine, _: names[engine.query.id])
    monkeypatch.setattr(profiler, "_run_seconds", lambda _, engine: {"gate": 1.0, "yard": 3.0}[engine.query.id])
    monkeypatch.setattr(profiler, "_joint_passes", lambda *_: [])

    def progress(event, **fields):
        if event == "part":
            parts.append(fields["done"])

    profile_bundle(bundle.path, "cpu", [FACTORY], rounds=1, engine="torch", progress=progress)
    assert parts == [0.25, 1.0]


def test_profile_runs_on_the_compute_stream(bundle, monkeypatch):
    happened: list[str] = []

    @contextmanager
    def computing(device):
        happened.append(f"on {device}")
        yield
        happened.append("off")

    plain = TorchEngine.run
    monkeypatch.setattr(streams, "on_compute_stream", computing)
    monkeypatch.setattr(TorchEngine, "run", lambda *given: happened.append("run") or plain(*given))
    profile_bundle(bundle.path, "cpu", [FACTORY], rounds=1, engine="torch")
    assert happened[0] == "on cpu" and happened[-1] == "off" and set(happened[1:-1]) == {"run"}


def test_profile_costs_can_be_simulated(profiled_bundle):
    from gemel.edge_runtime.policies import policy_named
    from gemel.edge_runtime.scheduler.costs import coalesce_tensors
    from gemel.edge_runtime.simulation.profile_io import measured_costs
    from gemel.edge_runtime.simulation.simulator import simulate

    costs = coalesce_tensors(measured_costs(profiled_bundle, read_profile(profiled_bundle)))
    frames = {query: [i / 5 for i in range(20)] for query in costs.queries}
    result = simulate(costs, frames, 64 * 2**20, policy_named("adaptive"))
    assert all(row["processed"] == 20 for row in result.per_query())


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_plan_notes_costs_of_another_machine_and_default_rates(profiled_bundle, capsys, command):
    profile, path = read_profile(profiled_bundle), profiled_bundle.path
    words = (command, str(path), "--factory", FACTORY, "--memory", "159MiB", "--json")
    assert main(words) == 0
    (rates,) = json.loads(capsys.readouterr().out)["notes"]
    assert rates.startswith(f"{path}: queries without `fps` are planned at 10 frames a second: gate, yard; set")
    write_profile(path, replace(profile, device="cuda", machine={**profile.machine, "name": "a Jetson"}))
    assert main(words) == 0
    note, _ = json.loads(capsys.readouterr().out)["notes"]
    start = f"{path}.profile.json: its costs, measured on another machine (device cuda"
    assert note.startswith(start) and "a Jetson" in note and note.endswith("run `gemel profile BUNDLE` here")
    assert main([*words, "--device", "jetson-nano"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [rates]


def test_profile_workspace_has_the_scratch_of_packed_weights(tmp_path):
    torch.set_num_threads(1)
    sizes = {}
    for weights in ("fp32", "int8"):
        model = zoo.build("resnet18", ("a", "b"), {}, 32).eval()
        kinds = {
            key: choices(key, tensor.shape, weights) for key, tensor in model.state_dict().items() if weights != "fp32"
        }
        stored = {key: pack(model.state_dict()[key], own[0]) for key, own in kinds.items() if own}
        query = tiny.query(
            "one",
            "left",
            classes=("a", "b"),
            model="resnet18",
            input_size=32,
            preprocess=zoo.zoo_preprocess("resnet18", 32),
        )
        path = tmp_path / f"{weights}.safetensors"
        write_bundle(path, {"one": model}, [query], Made("packed", "none", 0), packed={"one": stored})
        bundle = open_bundle(path)
        modelled = costs_for(PROFILES["jetson-nano"], bundle).queries["one"]
        profiled_bundle = profile_bundle(path, "cpu", rounds=1, engine="torch").profile.queries["one"].batches
        sizes[weights] = [
            modelled.workspace_bytes,
            modelled.workspace_of(8) - modelled.workspace_bytes,
            profiled_bundle[0].workspace_bytes,
        ]
    largest = 512 * 512 * 9 * 4
    assert [found[0] for found in (sizes["fp32"], sizes["int8"])] == [sizes["fp32"][0], sizes["fp32"][0] + largest]
    assert sizes["fp32"][1] == sizes["int8"][1], "scratch does not grow with the batch"
    assert sizes["int8"][2] >= sizes["int8"][0]
    settings = [
        load_plan_input(tmp_path / f"{weights}.safetensors", Conditions("min", "jetson-nano")).budget_bytes
        for weights in sizes
    ]
    assert settings[0] == settings[1], "memory settings are those of the originals"


def test_plan_input_device_is_measured_where_profiled(bundle, profiled_bundle):
    own = (FACTORY,)
    assert load_plan_input(bundle.path, Conditions("all", factories=own)).device == DEFAULT_DEVICE
    found = load_plan_input(profiled_bundle.path, Conditions("all", factories=own))
    assert found.device == "measured" and not found.modelled and "(cpu)" in found.describe()
    assert load_plan_input(profiled_bundle.path, Conditions("all", "t4", factories=own)).device == "t4"


def test_plan_takes_the_ranges_of_pages_that_were_profiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle = tiny_bundle(tmp_path / "mapped.gemel", documents=True)
    found = profile_bundle(bundle.path, "cpu", [FACTORY], rounds=1).profile
    assert {one.engine for one in found.queries.values()} == {"onnx"} and read_profile(bundle) == found
    assert found.copy_bytes_per_s > 0 and all(one.load_s > 0 for one in found.queries.values())
    assert set(found.queries["gate"].pages) & set(found.queries["yard"].pages), "a shared range counts once"
    assert all(nbytes % 4096 == 0 for nbytes in found.pages.values())
    assert main(["plan", str(bundle.path), "--factory", FACTORY, "--memory", "512MiB", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    workspace = max(one.batches[0].workspace_bytes for one in found.queries.values())
    assert planned["all_bytes"] - planned["base_bytes"] == sum(found.pages.values()) + workspace
