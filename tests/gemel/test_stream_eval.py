"""Streaming accuracy: the newest result at each moment; staleness: the accuracy of old results."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemel.cli import main
from gemel.edge_runtime.simulation.simulator import FrameOutcome
from gemel.models.predictions import ClassPrediction
from gemel.models.tasks import task_of
from gemel.stream_eval import (
    Footage,
    Stream,
    build_stream,
    build_streams,
    duration_s,
    frame_pairs,
    latest_results,
    sampled_positions,
    staleness_curve,
)
from tests.edge_runtime.tiny import FACTORY, tiny_bundle

CLASSES = ("free", "taken")
TASK = task_of("classification")


def stream(at_s, plays=None, delivered=None):
    plays = plays or (0,) * len(at_s)
    return Stream(tuple(at_s), tuple(range(len(at_s))), tuple(plays), tuple(delivered or range(len(at_s))))


FOUR = stream([0, 1, 2, 3])
TWO_UNITS = stream([0, 1, 2, 3], plays=(0, 0, 1, 1))


@pytest.mark.parametrize(("played", "finished", "latest"), [
    (FOUR, [], [None, None, None, None]),
    (FOUR, [(0, 1.5)], [None, None, 0, 0]),
    (FOUR, [(0, 1.0)], [None, 0, 0, 0]),
    (FOUR, [(0, 2.5), (3, 9.0)], [None, None, None, 0]),
    (FOUR, [(0, 0.5), (1, None), (2, 2.5)], [None, 0, 0, 2]),
    (FOUR, [(1, 2.5), (0, 2.6)], [None, None, None, 1]),
    (TWO_UNITS, [(1, 1.5), (2, 2.5)], [None, None, None, 2]),
    (TWO_UNITS, [(1, 2.5)], [None, None, None, None]),
    (stream([0, 1, 2, 3], delivered=(0, 2)), [(0, 0.5), (1, 2.5)], [None, 0, 0, 2]),
], ids=[
    "none", "late", "exactly at the moment", "very late", "dropped between", "out of order", "of the unit before",
    "of the unit before only", "indices of delivered frames",
])  # fmt: skip
def test_latest_results_are_the_newest_finished(played, finished, latest):
    outcomes = [FrameOutcome("q", index, 0.0, finished_at=at) for index, at in finished]
    assert latest_results(played, outcomes) == latest


def test_sampled_positions_keep_the_rate_without_drift():
    times = [frame / 25 for frame in range(250)]
    assert len(sampled_positions(times, 10)) == 100
    assert sampled_positions(times, None) == list(range(250))
    assert sampled_positions([0.0, 1.0, 2.0], 30) == [0, 1, 2]
    assert sampled_positions([5.0, 5.04, 5.08, 5.12, 5.2], 10) == [0, 3, 4]


def test_stream_plays_every_unit_in_order_of_time():
    footage = Footage(("a", "a", "b", "b"), (1.0, 0.0, 10.0, 11.0), None)
    laid = build_stream(footage, random.Random(0), until_s=0)
    assert duration_s(footage) == 4.0
    assert sorted(laid.frames) == [0, 1, 2, 3]
    assert laid.frames.index(1) + 1 == laid.frames.index(0)
    assert all(b - a == pytest.approx(1.0) for a, b in pairwise(laid.at_s))
    assert 0 <= laid.at_s[0] <= 1.0


def test_short_streams_repeat_until_the_longest_ends():
    footage = {
        "long": Footage(("a",) * 50, tuple(map(float, range(50))), 1),
        "short": Footage(("b",) * 5, (0, 1, 2, 3, 4), 1),
    }
    streams = build_streams(footage, seed=1)
    assert len(streams["long"].at_s) == 50
    assert len(streams["short"].at_s) in (50, 55)
    assert len(set(streams["short"].plays)) >= 10


def test_streams_are_determined_by_their_seed():
    footage = {"q": Footage(tuple("abcdef"), (0.0,) * 6, 2.0)}
    assert build_streams(footage, 3) == build_streams(footage, 3)
    assert build_streams(footage, 3) != build_streams(footage, 4)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), min_size=1, max_size=25, unique=True),
    st.integers(0, 5),
)
def test_stream_plays_every_frame_and_time_is_monotonic(frames, seed):
    footage = Footage(tuple(unit for unit, _ in frames), tuple(time / 10 for _, time in frames), 4.0)
    laid = build_streams({"q": footage}, seed)["q"]
    assert set(laid.frames) == set(range(len(frames)))
    assert list(laid.at_s) == sorted(laid.at_s)
    assert set(laid.delivered) <= set(range(len(laid.at_s)))
    instant = [FrameOutcome("q", index, at, finished_at=at) for index, at in enumerate(laid.arrivals())]
    for moment, frame in enumerate(latest_results(laid, instant)):
        assert frame is not None, "an instant device always has a result"
        assert footage.units[frame] == footage.units[laid.frames[moment]]


def predict_labels(labels: str) -> list[ClassPrediction]:
    return [ClassPrediction(label, 1.0, (1.0, 0.0)) for label in class_names(labels)]


def class_names(labels: str) -> list[str]:
    return [CLASSES[int(label)] for label in labels]


def test_frame_pairs_stay_within_a_clip_at_the_query_rate():
    footage = Footage(("a", "a", "a", "b", "b"), (0.0, 0.1, 0.2, 0.0, 0.2), 5.0)
    assert frame_pairs(footage, 0) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert frame_pairs(footage, 1) == [(0, 2), (3, 4)], "a frame at 5 a second is 0.2 s"
    assert frame_pairs(footage, 2) == []


def test_staleness_of_changing_labels_falls_with_age():
    labels = "00110011"
    footage = Footage(tuple("a" * 8), tuple(index / 5 for index in range(8)), 5.0)
    curve = staleness_curve(TASK, footage, predict_labels(labels), class_names(labels), CLASSES, 0.0)
    assert curve[0] == 1.0 and curve[1] == pytest.approx(4 / 7, abs=0.05) and curve[2] == 0
    assert list(curve) == sorted(curve, reverse=True) and len(curve) == 7, "no two frames are eight apart"


def test_staleness_of_constant_labels_does_not_fall():
    footage = Footage(tuple("a" * 4), (0.0, 0.2, 0.4, 0.6), 5.0)
    assert (
        staleness_curve(TASK, footage, predict_labels("0101")[:1] * 4, class_names("0000"), CLASSES, 0.0) == (1.0,) * 4
    )


def test_profile_with_a_workload_holds_staleness_curves(tiny, tmp_path, capsys):
    torch.set_num_threads(1)
    bundle = tmp_path / "tiny.safetensors"
    bundle.write_bytes((tiny / "tiny.safetensors").read_bytes())
    options = ("--workload", str(tiny / "workload.yaml"), "--device", "cpu", "--engine", "torch", "--json")
    assert main(["profile", str(bundle), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    curves = {query["id"]: query["staleness"] for query in found["queries"]}
    assert any(len(curve) > 1 for curve in curves.values()), "val clips have frames one after the other"
    for curve in curves.values():
        assert curve == sorted(curve, reverse=True) and all(0 <= accuracy <= 1 for accuracy in curve)


def test_profile_with_another_workload_writes_nothing(tiny, tmp_path, capsys):
    bundle = tiny_bundle(tmp_path / "other.safetensors")
    options = ("--factory", FACTORY, "--device", "cpu", "--engine", "torch")
    assert main(["profile", str(bundle.path), "--workload", str(tiny / "workload.yaml"), *options]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not Path(f"{bundle.path}.profile.json").exists()
