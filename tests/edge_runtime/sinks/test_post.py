"""The sinks of a post change: one that stays keeps what waits for it, one that goes delivers what it has."""

from __future__ import annotations

import json
from pathlib import Path

from edge_runtime.sinks.jsonl import JsonLinesConfig
from edge_runtime.sinks.worker import SinkManager
from tests.edge_runtime.sinks.messages import parcel


def frames(path: Path) -> list[int]:
    return [json.loads(line)["frame"] for line in path.read_text().splitlines()]


def test_sinks_come_and_go_and_each_result_goes_to_whoever_is_there(tmp_path):
    stays, goes, comes = (JsonLinesConfig(tmp_path / name) for name in ("stays", "goes", "comes"))
    post = SinkManager([stays, goes])
    post.start()
    post.offer(parcel(0))
    rounds = post.prepare([comes, stays])
    post.take(rounds)
    post.offer(parcel(1))
    assert post.settle(rounds, 30.0) == []
    post.offer(parcel(2))
    assert post.close(30.0) == []
    assert [frames(tmp_path / name) for name in ("stays", "goes", "comes")] == [[0, 1, 2], [0], [1, 2]]
    assert [row["delivered"] for row in post.to_json()] == [2, 3]
    assert post.past_json() == [{"name": goes.name, "delivered": 1, "undelivered": {}}]


def test_a_sink_that_changes_writes_its_file_to_the_end_before_the_next_begins(tmp_path):
    path = tmp_path / "r"
    post = SinkManager([JsonLinesConfig(path)])
    for number in range(50):
        post.offer(parcel(number))
    post.start()
    for size in (10**6, 10**7, 10**8):
        rounds = post.prepare([JsonLinesConfig(path, size)])
        post.take(rounds)
        post.offer(parcel(size))
        assert post.settle(rounds, 30.0) == []
    assert post.close(30.0) == []
    assert frames(path) == [*range(50), 10**6, 10**7, 10**8] and post.past_json()[0]["delivered"] == 52


def test_of_two_sinks_alike_both_stay(tmp_path):
    one = JsonLinesConfig(tmp_path / "r")
    post = SinkManager([one, one])
    rounds = post.prepare([one, one, one])
    assert len(set(rounds.couriers)) == 3 and len(rounds.fresh) == 1 and not rounds.gone
    assert len(post.prepare([one]).gone) == 1


def test_a_sink_that_never_began_gives_up_what_waits(tmp_path):
    post = SinkManager([])
    rounds = post.prepare([JsonLinesConfig(tmp_path / "r")])
    post.take(rounds)
    post.offer(parcel(0))
    assert post.close(30.0) == [] and post.to_json()[0]["undelivered"] == {"stopped": 1}
