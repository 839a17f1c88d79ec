"""The sinks of a post change: one that stays keeps what waits for it, one that goes delivers what it has."""

from __future__ import annotations

import json
from pathlib import Path

from edge_runtime.sinks.jsonl import JsonLinesConfig
from edge_runtime.sinks.worker import SinkManager
from tests.edge_runtime.sinks.messages import parcel


def frames(path: Path) -> list[int]:
    return [json.loads(line)["frame"] for line in path.read_text().splitlines()]


def test_manager_change_adds_and_removes_sinks(tmp_path):
    stays, goes, comes = (JsonLinesConfig(tmp_path / name) for name in ("stays", "goes", "comes"))
    post = SinkManager([stays, goes])
    post.start()
    post.offer(parcel(0))
    rounds = post.prepare([comes, stays])
    post.apply(rounds)
    post.offer(parcel(1))
    assert post.settle(rounds, 30.0) == []
    post.offer(parcel(2))
    assert post.close(30.0) == []
    assert [frames(tmp_path / name) for name in ("stays", "goes", "comes")] == [[0, 1, 2], [0], [1, 2]]
    assert [row["delivered"] for row in post.to_json()] == [2, 3]
    assert post.past_json() == [{"name": goes.name, "delivered": 1, "undelivered": {}}]


def test_manager_change_drains_before_the_next_sink(tmp_path):
    path = tmp_path / "r"
    post = SinkManager([JsonLinesConfig(path)])
    for number in range(50):
        post.offer(parcel(number))
    post.start()
    for size in (10**6, 10**7, 10**8):
        rounds = post.prepare([JsonLinesConfig(path, size)])
        post.apply(rounds)
        post.offer(parcel(size))
        assert post.settle(rounds, 30.0) == []
    assert post.close(30.0) == []
    assert frames(path) == [*range(50), 10**6, 10**7, 10**8] and post.past_json()[0]["delivered"] == 52
