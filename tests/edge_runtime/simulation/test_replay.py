"""A recorded run, replayed, decides the same; what is no record is refused."""

from __future__ import annotations

import json

import pytest
import torch

from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.scheduler.costs import Costs, QueryCost, tensor_groups
from gemel.edge_runtime.simulation.replay import replay
from gemel.edge_runtime.simulation.trace import read_trace, trace_costs
from gemel.models.errors import InputError
from tests.edge_runtime.tiny import tiny_bundle, write_clip, write_config, write_folder


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("box")
    tiny_bundle(folder / "tiny.safetensors")
    write_clip(folder / "left.mp4", 24)
    write_folder(folder / "right", 20)
    return folder


def record(box, policy: str, trace: str):
    """A real run with room for one query at a time, and what it summed up."""
    least = run(write_config(box, policy=policy), check=True)["least_budget_bytes"]
    sinks = [{"kind": "jsonl", "path": f"{policy}.jsonl"}]
    return run(write_config(box, policy=policy, trace=trace, budget=least, sinks=sinks))


@pytest.mark.parametrize("policy", ["adaptive", "gemel", "time-sharing"])
def test_replay_real_run_makes_the_same_decisions(box, policy):
    summary = record(box, policy, f"{policy}.trace")
    found = replay(box / f"{policy}.trace")
    assert found.decisions >= 20 and found.agreement >= 0.99, found.first_difference
    for account in summary["ledger"]:
        query = account["query"]
        assert found.received[query] == account["received"]
        assert found.processed[query] == account["processed"]
    assert 0 <= found.error <= 1 and set(found.predicted) == set(found.processed)


def test_replay_changed_decisions_are_noticed(box):
    record(box, "adaptive", "true.trace")
    lines = (box / "true.trace").read_text().splitlines()
    changed = []
    for line in map(json.loads, lines):
        if line.get("query") == "gate":
            line["query"] = "road"
        changed.append(json.dumps(line))
    (box / "false.trace").write_text("\n".join(changed))
    found = replay(box / "false.trace")
    assert found.agreement < 0.9 and found.first_difference is not None and "road" in found.first_difference


def test_trace_costs_are_over_numbered_groups(box):
    record(box, "adaptive", "costs.trace")
    head, _ = read_trace(box / "costs.trace")
    costs, bundle = trace_costs(head), tiny_bundle(box / "again.safetensors")
    queries = {query.id: QueryCost(bundle.names_in_order(query.id), 0.0, 0, 1.0) for query in bundle.queries}
    sizes = {name: bundle.nbytes(name) for cost in queries.values() for name in cost.tensors}
    pieces = tensor_groups(Costs(queries, sizes, 1.0)).costs
    names = sorted(pieces.tensor_bytes)
    assert [costs.tensor_bytes[f"{number:06}"] for number in range(len(names))] == [
        pieces.tensor_bytes[name] for name in names
    ]
    for query, cost in pieces.queries.items():
        assert list(costs.queries[query].tensors) == [f"{names.index(name):06}" for name in cost.tensors]
    assert all(cost.run_s > 0 for cost in costs.queries.values())


@pytest.mark.parametrize(("text", "fault"), [("", "is no trace"), ("{}", "is no trace"), ("nonsense\n{}", "line 1")])
def test_replay_no_trace_is_refused(tmp_path, text, fault):
    path = tmp_path / "some.trace"
    path.write_text(text)
    with pytest.raises(InputError, match=fault):
        replay(path)
    with pytest.raises(InputError, match="cannot be read"):
        replay(tmp_path / "absent.trace")


@pytest.mark.parametrize("line", [
    {"frame": ["nowhere", 0.0, 0.0]},
    {"query": "nowhere", "count": 1},
    {"load": [9999]},
    {"resident": [[9999], []]},
    {"query": "gate", "count": 1000, "run_s": 0.1},
])  # fmt: skip
def test_replay_contradicting_line_is_named(box, line):
    record(box, "gemel", "right.trace")
    lines = (box / "right.trace").read_text().splitlines()
    place = max(index for index, text in enumerate(lines) if '"query":"' in text)
    lines[place] = json.dumps(line if "frame" in line else {**json.loads(lines[place]), **line})
    (box / "wrong.trace").write_text("\n".join(lines) + "\n")
    if "load" in line:
        assert replay(box / "wrong.trace").agreement < 1
    else:
        with pytest.raises(InputError, match=rf"wrong\.trace: line {place + 1}: contradicts the lines before it"):
            replay(box / "wrong.trace")


def test_replay_torn_last_line_is_left_out(box):
    record(box, "gemel", "whole.trace")
    text = (box / "whole.trace").read_text()
    (box / "torn.trace").write_text(text + '{"frame": ["ga')
    assert replay(box / "torn.trace") == replay(box / "whole.trace")
