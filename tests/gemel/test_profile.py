from __future__ import annotations

import json

import pytest
import torch

from edge_runtime.measured import foreign, read_profile
from gemel.cli import main
from gemel.profiling import profile_bundle
from models.errors import InputError
from tests.edge_runtime.tiny import FACTORY, tiny_bundle


@pytest.fixture
def bundle(tmp_path):
    torch.set_num_threads(1)
    return tiny_bundle(tmp_path / "tiny.safetensors")


def test_every_query_is_measured_in_batches_and_kept_beside_the_bundle(bundle, capsys):
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
    assert foreign(kept, "cpu") is None and kept.queries["gate"].batches[0].run_s == pytest.approx(
        found["queries"][0]["batches"][0]["run_ms"] / 1000)


def test_what_was_measured_can_be_simulated(tmp_path, capsys):
    from edge_runtime.measured import measured_costs
    from edge_runtime.pieces import condensed
    from edge_runtime.policies import policy_named
    from edge_runtime.simulator import simulate

    torch.set_num_threads(1)
    bundle = tiny_bundle(tmp_path / "tiny.safetensors")
    profiled = profile_bundle(bundle.path, "cpu", [FACTORY], rounds=2, engine="torch")
    costs = condensed(measured_costs(bundle, profiled.profile))
    frames = {query: [i / 5 for i in range(20)] for query in costs.queries}
    result = simulate(costs, frames, 64 * 2**20, policy_named("ours"))
    assert all(row["processed"] == 20 for row in result.per_query())


def test_a_bundle_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError):
        profile_bundle(tmp_path / "absent.safetensors")
