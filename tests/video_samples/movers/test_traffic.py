"""Traffic: no car drives through another or past a red signal, and buses halt at their stop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gemel.video_samples.junction import HALT_X, STOP_E, STOP_W, start_world
from gemel.video_samples.scene import Phase, Signals
from gemel.video_samples.traffic import STEP_S, Flow, Traffic, make_path

ROAD = make_path("road", ("road", "road"), "main", [(-100, 0), (60, 0)], (0, 0), (60, 0))


def one_lane(green) -> Traffic:
    rng = np.random.default_rng(4)
    tracks = itertools.count(1)
    return Traffic([Flow(ROAD, {"car": 0.7, "truck": 0.3}, 4.0)], green, rng, lambda: next(tracks))


def test_vehicles_wait_at_red_and_leave_at_green():
    traffic = one_lane(lambda name, now: now > 40)
    for step in range(400):
        traffic.step(step * STEP_S)
    waiting = list(traffic.movers)
    assert len(waiting) >= 3
    assert all(mover.s + mover.half <= mover.path.stop_m + 0.6 for mover in waiting)
    first = max(waiting, key=lambda mover: mover.s)
    assert first.speed < 0.1
    for step in range(400, 460):
        traffic.step(step * STEP_S)
    assert first.s > first.path.stop_m + 5


def test_vehicles_of_one_lane_never_overlap():
    traffic = one_lane(lambda name, now: now % 20 > 10)
    for step in range(900):
        traffic.step(step * STEP_S)
        lane = sorted(traffic.movers, key=lambda mover: mover.s)
        for behind, ahead in itertools.pairwise(lane):
            assert ahead.s - behind.s > ahead.half + behind.half


@pytest.mark.parametrize("seed", [3, 11])
def test_nobody_enters_the_junction_at_red(seed: int):
    world = start_world(seed, night=False)
    assert world.signals is not None
    before: dict[int, float] = {}
    for _ in range(400):
        world.step()
        state = world.signals.state("main", world.now)
        for mover in world.traffic.movers:
            front = mover.s + mover.half
            crossed = before.get(mover.track, front) <= mover.path.stop_m < front
            if crossed and mover.path.phase == "main":
                assert state in ("green", "amber"), f"{mover.kind} {mover.track} crossed the line at {state}"
            before[mover.track] = front


def test_a_bus_halts_in_its_bay():
    world = start_world(1, night=False)
    halted = set()
    for _ in range(900):
        world.step()
        for mover in world.traffic.movers:
            if mover.path.name == "W1-bus" and mover.speed < 0.3:
                x, y, _ = mover.path.at(mover.s)
                if abs(x - HALT_X) < 2.5 and y > 15:
                    halted.add(mover.track)
    assert halted


def test_stop_lines_lie_where_the_paths_stop():
    world = start_world(0, night=False)
    for flow in world.traffic.flows:
        if flow.path.entry[0] in "EW":
            x, _, _ = flow.path.at(flow.path.stop_m)
            assert x == pytest.approx(STOP_E if flow.path.entry[0] == "E" else STOP_W, abs=0.3)


def test_signals_pass_through_green_amber_and_red_in_turn():
    signals = Signals([Phase("a", 5.0), Phase("b", 4.0)], 0.0)
    assert [signals.state("a", t) for t in (1.0, 5.5, 7.0, 9.0)] == ["green", "amber", "red", "red"]
    assert [signals.state("b", t) for t in (1.0, 9.0, 12.5, 14.0)] == ["red", "green", "amber", "red"]
    assert not any(signals.green("a", t) and signals.green("b", t) for t in np.arange(0, 30, 0.1))
