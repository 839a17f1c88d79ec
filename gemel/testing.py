"""Checks for classes of your own, as scikit-learn's `check_estimator`: each goes through all that a kind promises.

A check returns nothing, or raises AssertionError with the promise that is broken. The registered ones are tested with
the same functions. They need nothing of pytest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from gemel.edge_runtime.engines.base import FrameEngine
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store
from gemel.edge_runtime.scheduler.costs import Costs, QueryCost
from gemel.edge_runtime.scheduler.types import CLOCK_SLACK_S, Decision, Plan, Policy, QuerySpec, SchedulerState
from gemel.edge_runtime.sinks.base import BoxState, ResultMessage, Sink, SinkConfig
from gemel.models.bundle import Bundle
from gemel.models.decoders.decoder import DECODERS, Decoder
from gemel.models.predictions import Task
from gemel.models.preprocess import Size

TOLERANCE = 1e-5
KIB = 1024


def check_decoder(decoder: Decoder, outputs: Sequence[np.ndarray], size: Size) -> None:
    """What a decoder that was fitted to a network promises, on outputs (N, ...) f32 of it for inputs of `size` (H, W).

    It is registered, gives for arrays what it gives for tensors (boxes (N, A, 4) and scores (N, A, C) in f32), for some
    rows what it gives for all, and no score above its row's bound.
    """
    import torch

    name = type(decoder).name
    assert name in DECODERS and DECODERS[name] is type(decoder), f"{name} is no entry point of gemel.decoders"
    assert decoder.width >= 1 and all(0 <= place < len(outputs) for place in decoder.places), f"{name}: width, places"
    whole = [part.numpy() for part in decoder.decode([torch.from_numpy(output) for output in outputs], size)]
    frames, count = outputs[0].shape[0], whole[0].shape[1]
    shapes = [part.shape for part in whole[:2]]
    assert shapes == [(frames, count, 4), (frames, count, decoder.width)], f"{name}: boxes and scores are {shapes}"
    for rows in (slice(None), np.arange(1, count, 3)):
        for array, tensor in zip(decoder.decode(list(outputs), size, rows), whole, strict=True):
            assert isinstance(array, np.ndarray) and array.dtype == np.float32, f"{name}: arrays give {type(array)}"
            np.testing.assert_allclose(array, tensor[:, rows], atol=TOLERANCE, err_msg=f"{name}, rows {rows}")
    bounds = decoder.bounds(list(outputs))
    if bounds is not None:
        assert (bounds[..., None] >= whole[1] - TOLERANCE).all(), f"{name}: a score is above its row's bound"


def check_engine(engine: FrameEngine, bundle: Bundle, frames: Sequence[np.ndarray]) -> None:
    """What an unbound engine of one query of a bundle promises, on RGB frames u8 (H, W, 3).

    Its weights and workspace are counted; it answers each frame once and leaves frames as they are; it answers alike
    frame by frame, a second time, and after it was bound anew; and as the model that the bundle builds with torch.
    """
    name = engine.name
    assert engine.weights and all(nbytes > 0 for nbytes in engine.weights.values()), f"{name}: weights are not counted"
    assert type(engine).missing("cpu") is None, f"{name} cannot run here: {type(engine).missing('cpu')}"
    engine.prepare()
    assert 0 <= engine.workspace_of(1) <= engine.workspace_of(2), f"{name}: workspace falls with the batch"
    copies, answers = [frame.copy() for frame in frames], []
    for _ in range(2):
        _bind(engine, bundle)
        answers += [engine.run(frames), engine.run(frames), [engine.run([frame])[0] for frame in frames]]
        engine.unbind()
    assert all(np.array_equal(*pair) for pair in zip(frames, copies, strict=True)), f"{name} changes its frames"
    model: Any = bundle.build(engine.query.id)
    expected = [one.to_record() for one in model.predict(list(frames))]
    for run in answers:
        _assert_close([one.to_record() for one in run], expected, f"{name} does not answer as the bundle's model")


def _bind(engine: FrameEngine, bundle: Bundle) -> None:
    """Bind it to all tensors of the bundle; engines of mapped files have their own."""
    if engine.in_pages:
        engine.bind(lambda name: None)
        return
    store = Store.of_bundle(bundle)
    arena, names = Arena(store, max(extent.end for extent in store.extents.values())), tuple(engine.weights)
    arena.change((), names)
    arena.bind(engine, names)


def _assert_close(value: Any, expected: Any, promise: str) -> None:
    """Whether two JSON values are equal but for rounding of numbers."""
    if isinstance(expected, dict):
        assert value.keys() == expected.keys(), promise
        for key in expected:
            _assert_close(value[key], expected[key], f"{promise}: {key}")
    elif isinstance(expected, list):
        assert len(value) == len(expected), promise
        for pair in zip(value, expected, strict=True):
            _assert_close(*pair, promise)
    elif isinstance(expected, float):
        assert abs(value - expected) <= 1e-3 * max(1.0, abs(expected)), f"{promise}: {value}, not {expected}"
    else:
        assert value == expected, f"{promise}: {value}, not {expected}"


def check_policy(policy: Policy, rounds: int = 200, seed: int = 0) -> None:
    """What a policy promises, in so many random situations of up to five queries, each followed for four decisions."""
    random = Random(seed)
    for _ in range(rounds):
        costs = policy.view(_draw_costs(random))
        budget_bytes = random.randint(0, costs.resident_bytes(list(costs.tensor_bytes)) + 16 * KIB)
        specs = {query: QuerySpec(random.choice([1.0, 10.0, 30.0])) for query in costs.queries}
        plan = policy.plan(costs, specs, budget_bytes)
        resident = frozenset(random.sample(sorted(costs.tensor_bytes), random.randint(0, len(costs.tensor_bytes))))
        policy_state = None
        for step in range(4):
            now = 1.0 + step / 20
            waiting = {
                query: tuple(sorted({now - random.choice([0.0, 0.01, 0.05, 0.1]) for _ in range(random.randint(1, 4))}))
                for query in costs.queries if random.random() < 0.6
            }  # fmt: skip
            state = SchedulerState(now, waiting, resident, costs.resident_bytes(resident), policy_state)
            decision = check_decision(policy, state, costs, plan)
            resident = (resident - set(decision.evict)) | set(decision.load)
            policy_state = decision.policy_state


def check_decision(policy: Policy, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
    """What each decision keeps to, which is returned: frames that wait, the budget, deadlines, and the same again."""
    name, decision = policy.name, policy.decide(state, costs, plan)
    dropped = [(query, captured_at) for query, captured_at, _ in decision.drop]
    assert len(set(dropped)) == len(dropped), f"{name} drops a frame twice"
    assert all(at in state.waiting.get(query, ()) for query, at in dropped), f"{name} drops a frame that does not wait"
    if decision.query is None:
        assert not (decision.load or decision.evict or decision.count), f"{name} moves tensors for no query"
    else:
        cost, held = costs.queries[decision.query], frozenset(state.resident)
        after = (held - set(decision.evict)) | set(decision.load)
        loaded = set(decision.load)
        assert len(loaded) == len(decision.load) and loaded == cost.needed - held, f"{name} loads not what is missing"
        assert set(decision.evict) <= held - cost.needed, f"{name} evicts what is not there, or what it needs"
        used = costs.resident_bytes(after) + cost.workspace_of(max(1, decision.count))
        assert used <= plan.budget_bytes, f"{name} takes {used} bytes of {plan.budget_bytes}"
        rest = [at for at in state.waiting.get(decision.query, ()) if (decision.query, at) not in dropped]
        finished = state.now + costs.load_s(costs.moved_bytes(decision.load))
        if decision.count:
            finished += cost.run_of(decision.count)
            assert len(rest) >= decision.count, f"{name} runs frames that do not wait"
            late = [at for at in rest[: decision.count] if finished > at + cost.sla_s + CLOCK_SLACK_S]
            assert not late, f"{name} starts a frame that is certain to be late"
    again = policy.decide(state, costs, plan)
    parts = ("query", "count", "evict", "load", "drop")
    assert all(getattr(again, part) == getattr(decision, part) for part in parts), f"{name} is not a pure function"
    return decision


def _draw_costs(random: Random) -> Costs:
    """Two to five queries over at most ten tensors, so that sharing, swapping and misses all happen."""
    tensors = {f"t{index}": random.randint(1, 40 * KIB) for index in range(random.randint(1, 10))}
    queries = {
        f"q{index}": QueryCost(
            tuple(random.sample(sorted(tensors), random.randint(1, len(tensors)))), random.randint(1, 40) / 1000,
            random.randint(0, 8 * KIB), random.choice([0.02, 0.05, 0.1, 0.3]),
        )
        for index in range(random.randint(2, 5))
    }  # fmt: skip
    return Costs(queries, tensors, random.choice([1e6, 1e7]), random.choice([0.0, 0.001]))


def check_sink(config: SinkConfig) -> None:
    """What a kind of sink promises, by its config, whose destination has to take results now.

    The config is frozen and refuses unknown keys; a sink opens, takes batches of results without changing them, a
    state and heartbeats, closes twice, opens again; `check_reachable` finds it.
    """
    kind = config.kind
    assert config.model_config.get("frozen") and config.model_config.get("extra") == "forbid", f"{kind}: keys"
    config.check()
    reason = config.check_reachable()
    assert reason is None, f"{kind} is not reachable: {reason}"
    sink = config.build()
    assert isinstance(sink, Sink) and sink.batch >= 1, f"{kind}: build gives no Sink"
    images = np.zeros((8, 8, 3), np.uint8) if config.wants_images else None
    messages = [ResultMessage(_result_record(frame), images) for frame in range(2 * sink.batch + 1)]
    before = [json.dumps(message.record) for message in messages]
    for _ in range(2):
        sink.open()
        sink.report_state(BoxState({"gate": True}, {"cars": "gate"}))
        sink.heartbeat()
        for first in range(0, len(messages), sink.batch):
            sink.write(messages[first : first + sink.batch])
        sink.close()
        sink.close()
    assert [json.dumps(message.record) for message in messages] == before, (
        f"{kind} changes results that all sinks share"
    )


def _result_record(frame: int) -> dict[str, Any]:
    """A result as a box makes it."""
    return {
        "run": "0" * 12, "query": "cars", "camera": "gate", "frame": frame, "captured_at": 1.0, "finished_at": 1.1,
        "age_ms": 100.0, "late": False, "bundle": "0" * 12, "label": "car", "score": 0.5,
    }  # fmt: skip


def check_task(
    task: Task, outputs: Any, labels: Sequence[Any], classes: Sequence[str], sizes: Sequence[tuple[int, int]],
    reader: Any = None,
) -> None:  # fmt: skip
    """What a task promises, on a network's outputs for frames of these `sizes` (width, height) and their labels.

    There is a prediction a frame, which can be moved and is JSON; counts are additive over frames; the metric is within
    0 and 1, 1 for answers against themselves, and takes frames without an answer.
    """
    name = task.name
    predictions = task.predictions(reader, outputs, sizes, classes)
    assert len(predictions) == len(sizes) == len(labels), f"{name}: {len(predictions)} predictions of {len(sizes)}"
    for one, size in zip(predictions, sizes, strict=True):
        json.dumps(one.in_frame(1, 2, (size[0] + 1, size[1] + 2)).to_record(), allow_nan=False)
    threshold = task.choose_threshold(predictions, labels) if task.has_threshold else 0.0
    counts = task.tallies(predictions, labels, classes, threshold)
    assert len(counts) == len(labels), f"{name}.tallies has {len(counts)} rows for {len(labels)} frames"
    assert 0 <= task.metric_of(counts.sum(axis=0)) <= 1, f"{name}: its metric leaves 0..1"
    own = [task.labels_of(one, threshold, label) for one, label in zip(predictions, labels, strict=True)]
    agreement = task.metric_of(task.tallies(predictions, own, classes, threshold).sum(axis=0))
    assert agreement > 1 - TOLERANCE, f"{name}: answers agree with themselves by {agreement}"
    none = task.tallies([None] * len(labels), labels, classes, threshold)
    assert none.shape[1:] == counts.shape[1:], f"{name}.tallies takes no frame without an answer"
    assert 0 <= task.chance(classes) < 1 and task.is_competent(1.0, classes), f"{name}: chance, is_competent"
    assert all(isinstance(task.answers(label, classes), tuple) for label in labels), f"{name}.answers gives no tuple"


def check_method(name: str, workload: str | Path, out: str | Path) -> None:
    """What a registered method promises, by a merge of a small workload with weights into `out`.

    The bundle is sound and holds every query with all its tensors, no bytes appear, and queries that are called
    unchanged keep every bit of their originals.
    """
    from gemel.merger import METHODS, MergeOptions, Recipe, merge
    from gemel.models.bundle import open_bundle, verify_bundle
    from gemel.models.files.weights import load_weights
    from gemel.models.sharing.similarity import equal_states
    from gemel.models.workload import load_workload
    from gemel.models.zoo import build_query

    assert name in METHODS, f"{name} is no entry point of gemel.methods"
    known = load_workload(workload)
    quick = MergeOptions(recipe=Recipe(epochs=1, frames_per_epoch=16), accept_unproven=True, weights="fp32")
    report = merge(known, out, name, options=quick)
    factories = [query.model for query in known.queries]
    assert [row.id for row in report.queries] == [query.id for query in known.queries], f"{name} loses queries"
    assert report.bytes_after <= report.bytes_before, f"{name} adds {report.bytes_after - report.bytes_before} bytes"
    assert not (problems := verify_bundle(out, factories, known.path.parent)), f"{name}: {problems}"
    bundle = open_bundle(out, factories, known.path.parent)
    for row in report.queries:
        shipped = bundle.query(row.id)
        assert set(shipped.tensors.values()) <= set(bundle.header.entries), f"{name}: {row.id} lacks tensors"
        if row.state == "unchanged" and shipped.substitution is None:
            query = known.query(row.id)
            original = load_weights(query, build_query(query)).state_dict()
            same = equal_states(bundle.build(row.id).state_dict(), original)
            assert same, f"{name} changes {row.id}, which it calls unchanged"
