"""The engine torch: weights only while it is bound, and outputs equal to the unswapped model's under any swapping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from edge_runtime.engines.registry import make_engine
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.store import Store, channels_last_layouts
from edge_runtime.policies import policy_named
from edge_runtime.scheduler import QuerySpec, SchedulerState
from edge_runtime.scheduler.costs import Costs, QueryCost
from models.bundle import BundleQuery, Made, open_bundle, write_bundle
from models.predictions import DetectionPrediction
from models.preprocess import Preprocess
from models.tasks import task_of
from models.zoo import build
from tests.edge_runtime.tiny import picture, tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.safetensors")


def reference(bundle, query_id: str, frame: np.ndarray) -> torch.Tensor:
    """What the model built whole from the bundle returns."""
    query = bundle.query(query_id)
    if query.roi is not None:
        x0, y0, x1, y1 = map(int, query.roi)
        frame = frame[y0:y1, x0:x1]
    batch = query.preprocess.normalise(torch.stack([query.preprocess.resize(frame)]))
    with torch.inference_mode():
        return bundle.build(query_id)(batch)


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
        assert torch.equal(engines[name].outputs([picture(seed)]), reference(bundle, name, picture(seed)))
        assert arena.residency.resident_bytes + queries[name].workspace_bytes <= budget
        policy_state = decision.policy_state
    assert arena.bytes_moved == moved


def test_shared_tensor_changed_in_place_changes_both_queries(bundle):
    engines = {name: TorchEngine(bundle, name) for name in ("gate", "yard")}
    names = dict.fromkeys(name for query in engines for name in bundle.names_in_order(query))
    shared = set(bundle.names_in_order("gate")) & set(bundle.names_in_order("yard"))
    weight = max(shared, key=bundle.nbytes)
    arena = Arena(Store.of_bundle(bundle), 2**20)
    arena.change((), tuple(names))
    before = {}
    for query, engine in engines.items():
        engine.bind(arena.tensor)
        before[query] = engine.outputs([picture(5)]).clone()
    arena.tensor(weight).mul_(1.5)
    assert all(not torch.equal(engine.outputs([picture(5)]), before[query]) for query, engine in engines.items())


def test_run_several_frames_gives_one_prediction_each(bundle):
    engine = TorchEngine(bundle, "gate")
    arena = Arena(Store.of_bundle(bundle), 2**20)
    arena.change((), bundle.names_in_order("gate"))
    engine.bind(arena.tensor)
    answers = engine.run([picture(1), picture(2, width=80, height=60)])
    assert len(answers) == 2
    for answer in answers:
        assert not isinstance(answer, DetectionPrediction)
        assert answer.label in ("a", "b", "c") and abs(sum(answer.probabilities) - 1) < 1e-5


def test_run_frame_outside_the_roi_is_refused(bundle):
    with pytest.raises(ValueError, match="outside a frame of 3x3"):
        TorchEngine(bundle, "yard").outputs([np.zeros((3, 3, 3), np.uint8)])


def test_detector_boxes_are_in_pixels_of_the_whole_frame(tmp_path):
    torch.manual_seed(0)
    keys = {
        "task": "detection",
        "classes": ("car", "bus"),
        "model": "ssdlite320_mobilenet_v2",
        "model_args": {},
        "input_size": 96,
        "preprocess": Preprocess(96),
        "fps": None,
        "sla_ms": 100.0,
        "accuracy_target": 0.9,
    }
    model = build("ssdlite320_mobilenet_v2", ("car", "bus"), {}, 96, "detection").eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.normal_(module.bias)
    queries = [
        BundleQuery(id="plain", camera="c", **keys),
        BundleQuery(id="cropped", camera="c", roi=(30, 20, 90, 80), min_score=0.4, **keys),
    ]
    write_bundle(
        tmp_path / "d.safetensors",
        {"plain": model, "cropped": model},
        queries,
        Made("w", "none", 0),
    )
    bundle = open_bundle(tmp_path / "d.safetensors")
    arena = Arena(Store.of_bundle(bundle), 64 * 2**20)
    arena.change((), bundle.names_in_order("plain"))
    frame = picture(3, width=120, height=100)
    plain, cropped = (TorchEngine(bundle, query) for query in ("plain", "cropped"))
    for engine in (plain, cropped):
        engine.bind(arena.tensor)
    whole = bundle.build("plain")
    with torch.inference_mode():
        outputs = whole(Preprocess(96).normalise(torch.stack([Preprocess(96).resize(frame)])))
        assert plain.run([frame]) == task_of("detection").predictions(whole, outputs, [(120, 100)], ("car", "bus"))
        crop = whole(Preprocess(96).normalise(torch.stack([Preprocess(96).resize(frame[20:80, 30:90])])))
        expected = task_of("detection").predictions(whole, crop, [(60, 60)], ("car", "bus"), 0.4)[0]
    answer = cropped.run([frame])[0]
    assert isinstance(answer, DetectionPrediction) and isinstance(expected, DetectionPrediction) and answer.boxes
    assert min(answer.scores) >= 0.4 and (answer.classes, answer.scores) == (expected.classes, expected.scores)
    assert answer.boxes == tuple((x0 + 30, y0 + 20, x1 + 30, y1 + 20) for x0, y0, x1, y1 in expected.boxes)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_is_close_and_keeps_no_weight_copy(bundle, precision):
    arena = Arena(Store.of_bundle(bundle), 2**20)
    arena.change((), bundle.names_in_order("gate"))
    engine = make_engine("torch", bundle, "gate", precision=precision)
    engine.bind(arena.tensor)
    wanted, lower = reference(bundle, "gate", picture(1)), engine.outputs([picture(1)]).float()
    assert not torch.equal(lower, wanted) and (lower - wanted).abs().max() < 0.02 * wanted.abs().max()
    weight = arena.tensor(bundle.query("gate").tensors["3.weight"])
    weight.mul_(1.5)
    assert not torch.equal(engine.outputs([picture(1)]).float(), lower)
    answer = engine.run([picture(1)])[0]
    assert not isinstance(answer, DetectionPrediction) and answer.label in ("a", "b", "c")
