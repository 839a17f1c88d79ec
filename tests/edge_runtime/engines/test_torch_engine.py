"""The engine torch: weights only while it is bound, and outputs equal to the unswapped model's under any swapping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemel.edge_runtime.engines.layouts import unshared_store
from gemel.edge_runtime.engines.torch_engine import TorchEngine, awaited_tensors, start_as_arriving
from gemel.edge_runtime.life.device import Device
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store, channels_last_layouts
from gemel.edge_runtime.policies import policy_named
from gemel.edge_runtime.scheduler import QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import Costs, QueryCost, unshared_costs
from gemel.models.detector import read_outputs
from gemel.models.predictions import ClassPrediction, DetectionPrediction
from gemel.models.tasks import task_of
from gemel.models.tensors import normalise_frames
from tests.edge_runtime.engines.sample_bundles import (
    ATTENDING,
    CLASSES,
    bind,
    build_model,
    make_query,
    reference,
    write_and_open,
)
from tests.edge_runtime.memory.slow_transfer import SlowTransfer
from tests.edge_runtime.tiny import picture, tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.safetensors")


def test_torch_engine_unbound_holds_no_weights(bundle):
    engine = TorchEngine(bundle, "gate")
    assert all(tensor.is_meta for tensor in (*engine.model.parameters(), *engine.model.buffers()))
    with pytest.raises((NotImplementedError, RuntimeError)):
        engine.outputs([picture(1)])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.sampled_from(["gate", "yard", "road"]), min_size=1, max_size=12),
    room=st.integers(0, 20_000),
    arranged=st.booleans(),
)
def test_torch_engine_under_any_swapping_is_bit_equal(bundle, turns, room, arranged):
    engines = {query.id: TorchEngine(bundle, query.id) for query in bundle.queries}
    queries = {
        name: QueryCost(bundle.names_in_order(name), 0.0, engine.workspace_bytes, 1.0)
        for name, engine in engines.items()
    }
    costs = Costs(queries, {name: bundle.nbytes(name) for cost in queries.values() for name in cost.tensors}, 1e9)
    budget = max(costs.alone_bytes(name) for name in engines) + room
    store = Store.of_bundle(bundle)
    arena = Arena(
        store,
        budget - min(cost.workspace_bytes for cost in queries.values()),
        layouts=channels_last_layouts(store.kinds) if arranged else (),
    )
    policy, policy_state, moved = policy_named("gemel"), None, 0
    plan = policy.plan(costs, dict.fromkeys(engines, QuerySpec(10.0)), budget)
    for seed, name in enumerate(turns):
        resident = arena.residency.resident
        held = arena.residency.resident_bytes
        decision = policy.decide(SchedulerState(0.0, {name: (0.0,)}, resident, held, policy_state), costs, plan)
        moved += costs.moved_bytes(queries[name].needed - resident)
        arena.change(decision.evict, decision.load)
        engines[name].bind(arena.tensor)
        assert torch.equal(engines[name].outputs([picture(seed)]), reference(bundle, name, seed))
        assert arena.residency.resident_bytes + queries[name].workspace_bytes <= budget
        policy_state = decision.policy_state
    assert arena.bytes_moved == moved


def test_shared_tensor_changed_in_place_changes_both_queries(bundle):
    engines = [TorchEngine(bundle, name) for name in ("gate", "yard")]
    arena = bind(engines[1], bundle, bind(engines[0], bundle))
    shared = set(bundle.names_in_order("gate")) & set(bundle.names_in_order("yard"))
    before = [engine.outputs([picture(5)]).clone() for engine in engines]
    arena.tensor(max(shared, key=bundle.nbytes)).mul_(1.5)
    assert all(not torch.equal(engine.outputs([picture(5)]), old) for engine, old in zip(engines, before, strict=True))


def test_run_several_frames_gives_one_prediction_each(bundle):
    engine = TorchEngine(bundle, "gate")
    bind(engine, bundle)
    answers = engine.run([picture(1), picture(2, width=80, height=60)])
    assert len(answers) == 2
    for answer in answers:
        assert isinstance(answer, ClassPrediction)
        assert answer.label in ("a", "b", "c") and abs(sum(answer.probabilities) - 1) < 1e-5


def test_run_frame_outside_the_roi_is_refused(bundle):
    with pytest.raises(ValueError, match="outside a frame of 3x3"):
        TorchEngine(bundle, "yard").outputs([np.zeros((3, 3, 3), np.uint8)])


def test_detector_boxes_are_in_pixels_of_the_whole_frame(tmp_path):
    name = "ssdlite320_mobilenet_v2"
    model = build_model(name, 96)
    queries = [
        make_query("plain", name, 96),
        make_query("cropped", name, 96, roi=(30, 20, 90, 80), min_score=0.4),
    ]
    bundle = write_and_open(tmp_path / "d.safetensors", {"plain": model, "cropped": model}, queries)
    frame = picture(3, width=120, height=100)
    plain, cropped = (TorchEngine(bundle, query) for query in ("plain", "cropped"))
    bind(cropped, bundle, bind(plain, bundle))

    def predict(frame: np.ndarray, least: float = 0.0) -> DetectionPrediction:
        whole, preprocess = bundle.build("plain"), bundle.query("plain").preprocess
        with torch.inference_mode():
            outputs = whole(normalise_frames(preprocess, torch.from_numpy(preprocess.resize_frame(frame)[None])))
            size = (frame.shape[1], frame.shape[0])
            (found,) = read_outputs(task_of("detection"), whole, outputs, [size], CLASSES, least)
        assert isinstance(found, DetectionPrediction)
        return found

    assert plain.run([frame]) == [predict(frame)]
    answer, expected = cropped.run([frame])[0], predict(frame[20:80, 30:90], 0.4)
    assert isinstance(answer, DetectionPrediction) and answer.boxes and min(answer.scores) >= 0.4
    assert (answer.classes, answer.scores) == (expected.classes, expected.scores)
    assert answer.boxes == tuple((x0 + 30, y0 + 20, x1 + 30, y1 + 20) for x0, y0, x1, y1 in expected.boxes)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_is_close_and_keeps_no_weight_copy(bundle, precision):
    engine = TorchEngine(bundle, "gate", precision=precision)
    arena = bind(engine, bundle)
    wanted, lower = reference(bundle, "gate", 1), engine.outputs([picture(1)]).float()
    assert not torch.equal(lower, wanted) and (lower - wanted).abs().max() < 0.02 * wanted.abs().max()
    weight = arena.tensor(bundle.query("gate").tensors["3.weight"])
    weight.mul_(1.5)
    assert not torch.equal(engine.outputs([picture(1)]).float(), lower)
    answer = engine.run([picture(1)])[0]
    assert isinstance(answer, ClassPrediction) and answer.label in ("a", "b", "c")


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "swin_t", ATTENDING])
def test_early_start_layers_wait_for_their_tensors(name):
    """Tensors hold nan until they are waited for: one read too early shows in the outputs."""
    size = 16 if name == ATTENDING else 64
    model, batch = build_model(name, size), torch.rand(1, 3, size, size)
    state = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    tensors = model.state_dict(keep_vars=True)
    with torch.inference_mode():
        expected = model(batch)
        for tensor in tensors.values():
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)

        def arrive(names) -> None:
            for path in names:
                tensors[path].data.copy_(state[path])

        with start_as_arriving(awaited_tensors(model, {path: path for path in state}), arrive):
            assert torch.equal(model(batch), expected)


def test_early_start_hooks_are_removed_after_the_run(bundle):
    engine, waited = TorchEngine(bundle, "yard"), list[set[str]]()
    engine.bind(bundle.tensor, lambda names: waited.append(set(names)))
    arriving = engine.outputs([picture(1)])
    assert len(waited) == 5, "two convolutions, two norms, a linear layer"
    state = bundle.query("yard").tensors
    assert waited[2] == {state["3.weight"], state["3.bias"]} and set().union(*waited) == set(state.values())
    engine.bind(bundle.tensor)
    assert torch.equal(engine.outputs([picture(1)]), arriving) and len(waited) == 5
    engine.unbind()
    assert all(tensor.is_meta for tensor in (*engine.model.parameters(), *engine.model.buffers()))


@pytest.mark.parametrize("arranged", [False, True])
def test_early_start_with_the_arena_finds_tensors_as_they_arrive(bundle, arranged):
    store, names = Store.of_bundle(bundle), bundle.names_in_order("yard")
    arena = Arena(
        store, 2**20, transfer=SlowTransfer(store, 2**20),
        layouts=channels_last_layouts(store.kinds) if arranged else (),
    )  # fmt: skip
    engine = TorchEngine(bundle, "yard")
    arena.start(names)
    arena.bind(engine, names)
    assert arena.arriving(names)
    assert torch.equal(engine.outputs([picture(1)]), reference(bundle, "yard", 1))
    arena.finish()
    assert all(torch.equal(arena.tensor(name), bundle.tensor(name)) for name in names)


def test_device_without_sharing_runs_queries_on_copies_of_their_own(bundle):
    engines = {query.id: TorchEngine(bundle, query.id) for query in bundle.queries}
    queries = {name: QueryCost(bundle.names_in_order(name), 0.0, 0, 1.0) for name in engines}
    sizes = {name: bundle.nbytes(name) for cost in queries.values() for name in cost.tensors}
    costs = unshared_costs(Costs(queries, sizes, 1e9))
    store = unshared_store(Store.of_bundle(bundle), costs)
    device = Device(Arena(store, 2**20, transfer=SlowTransfer(store, 2**20)), engines, costs, 2**20)
    for name in ("gate", "yard", "gate"):
        device.load(((name, 1),), (), changes=True, early=True)
        device.run(name, [picture(1)])
        assert torch.equal(engines[name].outputs([picture(1)]), reference(bundle, name, 1))
    weights = {engines[name].model.get_parameter("3.weight").data_ptr() for name in ("gate", "yard")}
    assert len(weights) == 2, "the shared convolution is there twice"
    assert device.arena.bytes_moved == sum(map(bundle.nbytes, (*queries["gate"].tensors, *queries["yard"].tensors)))
