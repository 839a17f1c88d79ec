"""A box whose queries run in one pass: results, ledger, trace, damaged tensors, bad frames, reloads."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from gemel.edge_runtime.frames.queues import Frame
from gemel.edge_runtime.life.daemon import prepare
from gemel.edge_runtime.life.runtime import Runtime
from gemel.edge_runtime.scheduler.costs import BATCHES, BatchCost, CostEstimates
from gemel.edge_runtime.simulation.profile_io import (
    JointProfile,
    MeasuredProfile,
    QueryProfile,
    describe_machine,
    write_profile,
)
from gemel.edge_runtime.simulation.replay import replay
from gemel.edge_runtime.sinks.worker import SinkManager
from gemel.models.bundle import Made, open_bundle, write_bundle
from gemel.models.preprocess import Preprocess
from gemel.models.sharing.passes import joint_queries
from tests.edge_runtime.tiny import FACTORY, picture, query, trained_looking, write_box, write_config

PAIR = ("gate", "yard")


@pytest.fixture(autouse=True)
def _keep_joint_costs(monkeypatch):
    """Networks this small take longer in a pass, whatever their profile says; the schedule must not learn that."""
    monkeypatch.setattr(CostEstimates, "record_joint", lambda *_: None)


def write_costs(folder) -> None:
    """A profile in which a pass for several queries takes microseconds."""
    bundle = open_bundle(folder / "tiny.safetensors", [FACTORY])
    batches = tuple(BatchCost(count, 1e-6 * (1 + count), 20_000 * count) for count in BATCHES)
    queries = {one.id: QueryProfile(0.0, batches) for one in bundle.queries}
    joint = tuple(JointProfile(own, batches) for own in joint_queries(bundle.queries, bundle.nbytes))
    machine = describe_machine("cpu")
    write_profile(bundle.path, MeasuredProfile(bundle.digest, machine, "cpu", "torch", 1e9, 0.0, queries, joint))


def start_box(folder, **keys) -> Runtime:
    write_costs(folder)
    box, _ = prepare(write_config(folder, **keys))
    runtime = Runtime(box, SinkManager(()), None, None)
    runtime.active.executor.warm_up(box.costed.loaded.blank_frames())
    return runtime


def put(runtime: Runtime, names=PAIR, image=None) -> None:
    for name in names:
        now = time.monotonic()
        runtime.mailboxes.put(name, Frame(0, now, now, picture(1) if image is None else image))


def count_settled(runtime: Runtime) -> dict[str, tuple[int, int]]:
    return {row["query"]: (row["processed"], row["failed"]) for row in runtime.ledger.to_json()}


@pytest.fixture
def folder(tmp_path):
    """`gate` and `yard` tie their second convolution, which is most of their bytes."""
    return write_box(tmp_path)


@pytest.mark.parametrize("policy", ["gemel", "adaptive"])
def test_box_runs_queries_that_wait_in_one_pass(folder, policy):
    runtime = start_box(folder, policy=policy, trace="trace.jsonl")
    executor = runtime.active.executor
    assert executor.costs.joint[0].queries == PAIR
    for _ in range(3):
        put(runtime)
        assert executor.step()
    assert (executor.joint.runs, executor.joint.queries, executor.joint.frames) == (3, 6, 6)
    assert count_settled(runtime) == {"gate": (3, 0), "yard": (3, 0), "road": (0, 0)}
    assert runtime.trace is not None
    runtime.trace.close()
    found = replay(folder / "trace.jsonl")
    assert found.agreement == 1.0 and found.processed == {"gate": 3, "yard": 3, "road": 0}


def test_policy_without_sharing_runs_queries_one_by_one(folder):
    runtime = start_box(folder, policy="time-sharing")
    put(runtime)
    assert runtime.active.executor.step() and runtime.active.executor.joint.runs == 0


def test_bad_frame_in_a_pass_fails_its_query_alone(folder):
    runtime = start_box(folder)
    put(runtime, ["gate"])
    put(runtime, ["yard"], np.zeros((1, 1, 3), np.uint8))
    assert runtime.active.executor.step()
    assert count_settled(runtime)["gate"] == (1, 0) and count_settled(runtime)["yard"] == (0, 1)
    assert runtime.ledger.balanced


def test_query_with_damaged_tensor_leaves_the_pass_to_the_others(folder):
    path = folder / "tiny.safetensors"
    models = {name: trained_looking(seed) for seed, name in enumerate(("gate", "yard", "door"), 1)}
    with torch.no_grad():
        for name in ("yard", "door"):
            models[name].get_parameter("3.weight").copy_(models["gate"].get_parameter("3.weight"))
    write_bundle(path, models, [query(name, "left") for name in models], Made("tiny", "wide", 0), overwrite=True)
    bundle = open_bundle(path, [FACTORY])
    entry = bundle.header.entries[bundle.query("yard").tensors["0.weight"]]
    with path.open("r+b") as file:
        file.seek(bundle.header.data_start + entry.begin)
        file.write(b"\xff" * 8)
    runtime = start_box(folder)
    put(runtime, models)
    while runtime.active.executor.step():
        pass
    assert count_settled(runtime) == {"gate": (1, 0), "yard": (0, 1), "door": (1, 0)}
    assert runtime.active.executor.joint.frames == 2


@pytest.mark.parametrize("keys", [{"preprocess": Preprocess((16, 16), "letterbox")}, {"classes": ("a", "b", "c", "d")}])
def test_queries_that_are_fed_differently_have_no_common_pass(folder, keys):
    models = {"gate": trained_looking(1), "yard": trained_looking(2, len(keys.get("classes", "abc")))}
    with torch.no_grad():
        models["yard"].get_parameter("3.weight").copy_(models["gate"].get_parameter("3.weight"))
    queries = [query("gate", "left"), query("yard", "left", **keys)]
    write_bundle(folder / "tiny.safetensors", models, queries, Made("tiny", "wide", 0), overwrite=True)
    runtime = start_box(folder)
    put(runtime)
    while runtime.active.executor.step():
        pass
    other_heads = "classes" in keys
    assert runtime.active.executor.joint.runs == int(other_heads), "heads of other widths are private"
    assert count_settled(runtime) == {"gate": (1, 0), "yard": (1, 0)}


def test_pass_too_large_for_the_budget_takes_fewer_frames(folder):
    roomy = start_box(folder).active.executor
    costs = roomy.device.costs
    needed = costs.resident_bytes(costs.queries["gate"].needed | costs.queries["yard"].needed)
    runtime = start_box(folder, budget=needed + costs.joint[0].cost.workspace_of(2), policy="adaptive")
    for _ in range(3):
        put(runtime)
    while runtime.active.executor.step():
        pass
    device = runtime.active.executor.device
    assert count_settled(runtime)["gate"] == count_settled(runtime)["yard"] == (3, 0)
    assert device.max_used_bytes <= device.budget_bytes


def test_reload_that_ties_nothing_ends_the_pass(folder):
    runtime = start_box(folder)
    put(runtime)
    assert runtime.active.executor.step() and runtime.active.executor.joint.runs == 1
    models = {name: trained_looking(seed) for seed, name in enumerate(("gate", "yard"), 11)}
    queries = [query("gate", "left"), query("yard", "right", roi=(4, 2, 40, 30))]
    write_bundle(folder / "tiny.safetensors", models, queries, Made("tiny", "wide", 0), overwrite=True)
    write_costs(folder)
    box, _ = prepare(write_config(folder))
    runtime.activate(runtime.prepare(box))
    executor = runtime.active.executor
    while executor.warm_up_step():
        pass
    put(runtime)
    while executor.step():
        pass
    assert executor.costs.joint == () and executor.joint.runs == 1
    assert count_settled(runtime)["gate"] == count_settled(runtime)["yard"] == (2, 0)
    for camera in runtime.active.cameras:
        camera.stop()
