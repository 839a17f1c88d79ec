"""Modelled devices: what their costs are made from, and that they say so."""

from __future__ import annotations

import pytest

from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler.costs import memory_settings
from gemel.edge_runtime.simulation.device_profiles import PROFILES, costs_for
from gemel.edge_runtime.simulation.simulator import simulate
from gemel.models.export.cost import flops
from tests.edge_runtime.tiny import SIZE, tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.safetensors")


def test_profiles_name_their_sources():
    assert {"orin-nano-8gb", "t4"} <= set(PROFILES)
    for name, profile in PROFILES.items():
        assert profile.name == name and profile.modelled and len(profile.sources) >= 3
    orin = PROFILES["orin-nano-8gb"]
    assert orin.memory_bytes == 8 * 2**30 and orin.flops_per_s == 0.64e12
    assert orin.copy_bytes_per_s == pytest.approx(2.758e9)


def test_costs_for_bundle_counts_bytes_and_operations(bundle):
    profile = PROFILES["orin-nano-8gb"]
    costs = costs_for(profile, bundle)
    assert costs.moved_bytes(costs.queries["gate"].tensors) == sum(map(bundle.nbytes, bundle.names_in_order("gate")))
    shared = costs.queries["gate"].needed & costs.queries["yard"].needed
    assert shared and not costs.queries["gate"].needed & costs.queries["road"].needed
    model = bundle.build("gate").to("meta")
    assert costs.queries["gate"].run_s == flops(model, SIZE) / profile.flops_per_s + 9 * profile.launch_s
    assert all(cost.workspace_bytes > 3 * SIZE * SIZE * 4 and cost.sla_s == 20.0 for cost in costs.queries.values())


def test_costs_for_bundle_can_be_simulated(bundle):
    costs = costs_for(PROFILES["jetson-nano"], bundle)
    arrivals = {query: [i / 10 for i in range(10)] for query in costs.queries}
    settings = memory_settings(costs)
    least, most = (simulate(costs, arrivals, settings[name], POLICIES["gemel"]) for name in ("min", "all"))
    assert most.bytes_moved == costs.moved_bytes(costs.tensor_bytes) < least.bytes_moved
    assert most.swaps == 2 < least.swaps  # gate and yard are loaded for one pass


def test_costs_for_batches_share_the_calls(bundle):
    profile = PROFILES["xavier-nx"]
    cost = costs_for(profile, bundle).queries["gate"]
    operations = flops(bundle.build("gate").to("meta"), SIZE)
    assert [batch.count for batch in cost.larger] == [2, 4, 8]
    assert cost.run_of(8) == pytest.approx(8 * operations / profile.flops_per_s + 9 * profile.launch_s)
    assert cost.workspace_of(4) == 4 * cost.workspace_bytes
